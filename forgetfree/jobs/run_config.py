"""A run as it was asked for, checked as a whole."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree import registry
from forgetfree.display import brief
from forgetfree.errors import OptionError, UnknownNameError, UsageError
from forgetfree.options import Options, build, option
from forgetfree.registry import DEFAULT_STRATEGIES
from forgetfree.results.config_file import portable
from forgetfree.tasks import MAX_LENGTH, EvaluatedOn, Scenario

if TYPE_CHECKING:
    from forgetfree.continual.strategy import ContinualStrategy


@dataclass(frozen=True, kw_only=True)
class CommonOptions(Options):
    """What ``--set`` reaches of every command that trains."""

    test_limit: int | None = option(None, "evaluate on at most this many test rows a task", at_least=1)
    evaluate_on: EvaluatedOn = option(
        "test", "validation: score every other validation row instead, to choose options by"
    )
    cache: str | None = option(None, "directory of fine-tuned models to share between runs; none: inside OUT")
    threads: int | None = option(
        None, "CPU threads, at most one a core of the machine; none: as torch chooses", at_least=1
    )
    max_length: int = option(MAX_LENGTH, "tokens a row is read at, at most; the longest text is cut", at_least=8)
    graftable: str | None = option(None, "regular expression over names; only such tensors may be grafted and trained")

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.graftable or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise OptionError(
                f"graftable must be a regular expression, got {brief(self.graftable)}: {error}."
            ) from error
        cores = os.cpu_count() or 1
        if self.threads is not None and self.threads > cores:
            raise OptionError(f"threads must be at most {cores}, the CPU cores of this machine, got {self.threads}.")


@dataclass(frozen=True, kw_only=True)
class RunOptions(CommonOptions):
    """What ``--set`` reaches of a run, beside the strategies' own options."""

    scenario: Scenario = option(
        "task",
        "what is known at inference: the task; or not, with the labels of all tasks told apart (class), or the same "
        "labels in all tasks (domain)",
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run as it was asked for. Checked as a whole by `checked`, all faults together."""

    stream: str
    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    model: str = "minilm"
    data: str = "hub"
    readout: str = "auto"
    shots: int | None = None
    steps: int | None = None
    seeds: tuple[int, ...] = (0,)
    sparsity: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    out: str = ""

    def recipe(self, strategy: str | None = None) -> dict[str, Any]:
        """The model's recipe, for the options that are not set otherwise; none where ``optimizer`` is set.

        Args:
            strategy: whose; settings for others do not count. Default: for all.
        """
        return recipe_of(self.model, self.settings, self.strategies, strategy)

    def checked(self) -> CheckedConfig:
        """The strategies' classes and options.

        Raises:
            UsageError: naming every fault.
        """
        faults = Faults()
        attempt = faults.attempt
        faults.check_distinct("strategy", self.strategies)
        faults.check_common(self.shots, self.steps, self.seeds)
        found = {name: attempt(registry.strategy, name) for name in self.strategies}
        classes = {name: cls for name, cls in found.items() if cls is not None}
        fields = {name: set(cls.Options.__dataclass_fields__) for name, cls in classes.items()}
        own = set(RunOptions.__dataclass_fields__)
        if len(classes) == len(found):  # else the options of one are unknown
            for key in self.settings:
                attempt(_check_setting, key, own, fields)
        for key in self._flags():
            if key in self.settings:
                faults.add(f"--{key} and --set {key}={self.settings[key]} are both given. Leave one of them out.")
        if self.sparsity is not None and not any("sparsity" in names for names in fields.values()):
            faults.add("--sparsity is given, but none of the strategies has it. Leave it out.")
        options = {
            name: attempt(build, cls.Options, self._values_for(name, fields[name]), name)
            for name, cls in classes.items()
        }
        mine = {key: value for key, value in self.settings.items() if key in own}
        run_options = attempt(build, RunOptions, mine, "the run")
        routed = [name for name, each in options.items() if getattr(each, "task_inference", "") == "router"]
        if routed and run_options is not None and run_options.scenario == "task":
            faults.add(
                f"task_inference=router is for streams that withhold the task, and {', '.join(routed)} would be told it. Set "
                "scenario=class or scenario=domain, too."
            )
        faults.report()
        return CheckedConfig(classes, options, run_options)

    def section(self) -> dict[str, Any]:
        """The configuration under the names of the command line, as a file in ``out``: what ``--config`` reads back."""
        return {
            "stream": self.stream,
            "strategy": list(self.strategies),
            "model": portable(self.model, Path(self.out)),
            "data": portable(self.data, Path(self.out)),
            "readout": self.readout,
            "shots": self.shots,
            "steps": self.steps,
            "seed": list(self.seeds),
            "sparsity": self.sparsity,
            "set": dict(self.settings),
            "device": self.device,
        }

    def _values_for(self, strategy: str, known: set[str]) -> dict[str, Any]:
        """Options of one strategy, weakest first: recipe, flags, ``--set key``, ``--set strategy.key``."""
        scoped = {k.removeprefix(f"{strategy}."): v for k, v in self.settings.items() if k.startswith(f"{strategy}.")}
        merged = {**self.recipe(strategy), **self._flags(), **self.settings, **scoped}
        return {key: value for key, value in merged.items() if key in known}

    def _flags(self) -> dict[str, Any]:
        """The options that have a flag of their own, where it is given."""
        flags = {"steps": self.steps, "sparsity": self.sparsity}
        return {key: value for key, value in flags.items() if value is not None}


def _check_setting(key: str, own: set[str], fields: Mapping[str, set[str]]) -> None:
    """Raise ``UnknownNameError`` unless some strategy (or the run itself) has the option."""
    strategy, _, name = key.rpartition(".")
    if strategy and strategy not in fields:
        raise UnknownNameError("strategy in --set", strategy, fields)
    known = fields[strategy] if strategy else own.union(*fields.values())
    if name not in known:
        raise UnknownNameError("option", key, known)


@dataclass(frozen=True)
class CheckedConfig:
    """Strategy classes and options by name, and the run's own."""

    classes: Mapping[str, type[ContinualStrategy]]
    options: Mapping[str, Any]
    run: RunOptions


def recipe_of(
    model: str,
    settings: Iterable[str],
    strategies: Sequence[str] = (),
    strategy: str | None = None,
    graft: bool = False,
) -> dict[str, Any]:
    """A model's recipe, for the options that are not set otherwise; none where ``optimizer`` is set.

    Args:
        model: as ``--model``.
        settings: names of the options that are set.
        strategies: that run.
        strategy: whose; settings for others do not count. Default: for all.
        graft: the recipe for a graft on its own.
    """
    entry = registry.MODELS.get(model)
    set_here = {key.removeprefix(f"{strategy}.") for key in settings}
    if entry is None or "optimizer" in set_here:
        return {}
    recipe = entry.graft_recipe if graft else entry.recipe
    own = {key.removeprefix(f"{strategy}."): value for key, value in recipe.items()}
    return {
        key: value
        for key, value in own.items()
        if not set_here & {key, key.rpartition(".")[2]} and key.rpartition(".")[0] in ("", *strategies)
    }


class Faults:
    """All that is wrong with what was asked for, said at once."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, fault: str) -> None:
        """One more, as a sentence."""
        self._found.append(fault)

    def attempt(self, action: Callable[..., Any], *arguments: Any) -> Any:
        """What ``action`` returns; ``None`` where it finds a fault."""
        try:
            return action(*arguments)
        except UsageError as error:
            self.add(str(error))
            return None

    def check_common(self, shots: int | None, steps: int | None, seeds: Sequence[int]) -> None:
        """Of the flags that every command that trains has."""
        for name, count in (("shots", shots), ("steps", steps)):
            if count is not None and count < 1:
                self.add(f"--{name} must be at least 1, got {count}.")
        if not seeds or min(seeds) < 0:
            self.add(f"--seed must be 0 or more, got {', '.join(map(str, seeds)) or 'none'}.")
        if seeds and max(seeds) >= 2**63:
            self.add(f"--seed must be below 2^63, got {brief(max(seeds))}.")
        self.check_distinct("seed", seeds)

    def check_distinct(self, kind: str, given: Sequence[Any]) -> None:
        """Nothing may be given twice."""
        if len(set(given)) < len(given):
            self.add(f"--{kind} names the same {kind} twice: {', '.join(map(str, given))}. Give each once.")

    def report(self) -> None:
        """Raise ``UsageError`` with every fault, if there is one."""
        if self._found:
            raise UsageError(" ".join(dict.fromkeys(self._found)))
