"""The configuration of a run, checked as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from forgetfree import recipes, registry
from forgetfree.display import first_twice
from forgetfree.errors import Faults, ForgetfreeError, OptionError, UnknownNameError, UsageError
from forgetfree.jobs.config import CommonOptions, JobConfig, check_or_fewer, key_of
from forgetfree.options import build, option
from forgetfree.registry import DEFAULT_STRATEGIES
from forgetfree.tasks import OF_ALL_LABELS, Decoding, Scenario

if TYPE_CHECKING:
    from forgetfree.continual.strategy import ContinualStrategy


#: What `RunOptions` call a field of `Decoding`, where it has another name.
_NAMES_OF_DECODING = {"temperature": "sampling_temperature", "seed": "sampling_seed"}


@dataclass(frozen=True, kw_only=True)
class RunOptions(CommonOptions):
    """What ``--set`` reaches of a run, beside the strategies' own options."""

    scenario: Scenario = option(
        "task",
        "what is known at inference: the task; or not, with the labels of all tasks told apart (class), or the same "
        "labels in all tasks (domain)",
    )
    upper_triangle: bool | None = option(
        None,
        "evaluate tasks before they are learned, too, which fwt needs; none: unless their readouts are drawn at random, whose "
        "answers say nothing before they are trained (linear, mean)",
    )
    floors: Literal["constant", "words", "probe"] = option(
        "probe",
        "what scores are compared with: constant: one answer to all rows; words: a bag of words, too (a second a task or "
        "so); probe: and linear probes on the pre-trained model, at its readout and at the mean of tokens (one pass over "
        "training and test rows, for each seed)",
    )
    temperature_scaling: bool = option(
        True,
        "at the end, fit a temperature a task to as many validation rows as test rows (at least 64, at most 512, as far "
        "as there are so many), and tell the ECE with it",
    )
    readout_again: bool = option(
        False,
        "at the end, also train each task's linear readout again on the model as it is then, and tell its score: how much of "
        "forgetting is the readout's (one pass over training and test rows, for each strategy and seed)",
    )

    num_beams: int = option(
        1, "where texts are the answers, they are searched with so many beams; 1: greedily", at_least=1
    )
    sampling_temperature: float = option(
        0.0,
        "where texts are the answers, each token is drawn at this temperature; 0: the likeliest, always",
        at_least=0,
    )
    top_p: float = option(
        1.0, "tokens are drawn among the likeliest, which make up this probability", above=0, at_most=1
    )

    sampling_seed: int | None = option(
        None, "of the tokens that are drawn; none: the seed of the run; each prompt draws on its own", at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        faults = self.decoding.faults(lambda name: _NAMES_OF_DECODING.get(name, name))
        if self.sampling_seed is not None and not self.sampling_temperature:
            faults.append(
                f"sampling_seed must be none where texts are not drawn, got {self.sampling_seed}: give sampling_temperature, "
                "too, or leave it out"
            )
        if faults:
            raise OptionError(f"{'; '.join(faults)}.", faults)

    @property
    def decoding(self) -> Decoding:
        """How texts are written; where no seed of what is drawn is given, `seeded` puts that of the run in."""
        return Decoding(self.num_beams, self.sampling_temperature, self.top_p, self.sampling_seed or 0)


@dataclass(frozen=True, kw_only=True)
class RunConfig(JobConfig):
    """A run as it was asked for. Checked as a whole by `checked`, all faults together."""

    command: ClassVar[str] = "run"

    stream: str = option("", "a registered stream, or task names joined by commas", completion="streams")
    shots: int | None = option(None, "training rows per label (default: all)", at_least=1, group="How to learn")
    sparsity: float | None = option(
        None, "share of the parameters that a region may have", group="How to learn", placeholder="F"
    )

    strategies: tuple[str, ...] = option(
        DEFAULT_STRATEGIES,
        "name of 'forgetfree list strategies', or [NAME=]MODULE:CLASS of your own; may be given several times; all: every one "
        "of ours",
        flag="strategy",
        placeholder="NAME",
        completion="strategies",
    )

    fine_tuned: str | None = option(
        None,
        "a model fine-tuned from --model on the one task, in Hugging Face layout; none is trained then",
        placeholder="DIR",
    )
    held_aside: str | None = option(
        None,
        "texts that no task trains, to tell their loss before and after the stream: a file with a text a line or a column "
        "text, or a task, of --data or in a folder (causal language models)",
        placeholder="TEXTS|TASK",
    )

    def __post_init__(self) -> None:
        if isinstance(self.strategies, tuple):  # else a fault, which `faults` tells
            object.__setattr__(self, "strategies", strategies_of(self.strategies))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tasks, as the stream has them."""
        return registry.streams().get(self.stream) or tuple(filter(None, map(str.strip, self.stream.split(","))))

    @property
    def strategy_names(self) -> tuple[str, ...]:
        """Return what tables, options and folders call the strategies."""
        return tuple(map(registry.strategy_name, self.strategies))

    def recipe(self, strategy: str | None = None) -> dict[str, Any]:
        """Return the model's recipe, for the options that are not set otherwise; nothing where ``optimizer`` is set.

        Args:
            strategy: whose; settings for others do not count. Default: for all.
        """
        return recipes.recipe_of(self.model, {**self.settings, **self.flags()}, self.strategy_names, strategy)

    def checked(self, classes: Mapping[str, Any] = MappingProxyType({})) -> CheckedRun:
        """Return the strategies' classes and options.

        Args:
            classes: those that are not registered, by their names.

        Raises:
            UsageError: naming every fault.
        """
        faults = self.faults()
        attempt = faults.attempt
        if again := first_twice(name.casefold() for name in self.strategy_names):
            same = [each for each in self.strategies if registry.strategy_name(each).casefold() == again]
            faults.add(f"--strategy {' and '.join(same)} have one name. Give one another: NAME=MODULE:CLASS.")
        named = zip(self.strategy_names, self.strategies, strict=True)
        resolved = {name: classes.get(name) or attempt(registry.strategy, each) for name, each in named}
        classes = {name: cls for name, cls in resolved.items() if cls is not None}
        known = {name: set(cls.Options.__dataclass_fields__) for name, cls in classes.items()}
        own = set(RunOptions.__dataclass_fields__)
        if len(classes) == len(resolved):  # else the options of one are unknown
            for key in self.settings:
                attempt(_check_setting, key, own, known)
        if self.sparsity is not None and not any("sparsity" in names for names in known.values()):
            faults.add("--sparsity is given, but none of the strategies has it. Leave it out.")
        if self.fine_tuned is not None:
            self._check_fine_tuned(faults)
        if self.held_aside in self.names:
            faults.add(f"--held-aside {self.held_aside} is a task of the stream, which trains its texts. Give others.")
        options = self._options(classes, faults)
        run_options = attempt(self.set_of, RunOptions)
        if run_options is not None:
            attempt(check_or_fewer, run_options, self.shots)
        unfit = [name for each in self.metrics if (name := each.rpartition("=")[2]) not in OF_ALL_LABELS]
        if unfit and run_options is not None and run_options.scenario == "class":
            faults.add(
                f"scenario=class tells the labels of all tasks apart, which {' and '.join(OF_ALL_LABELS)} score, and --metric "
                f"names {', '.join(unfit)}. Name one of these, or leave it out."
            )
        finding = {name: str(getattr(each, "task_inference", "last")) for name, each in options.items()}
        finding = {name: choice for name, choice in finding.items() if choice != "last"}
        if finding and run_options is not None and run_options.scenario == "task":
            faults.add(
                f"task_inference={min(finding.values())} is for streams that withhold the task, and {', '.join(finding)} would "
                "be told it. Set scenario=class or scenario=domain, too."
            )
        faults.report()
        return CheckedRun(classes, options, run_options)

    def _check_fine_tuned(self, faults: Faults) -> None:
        """Add what does not go with a model that is fine-tuned already."""
        from forgetfree.training.training_options import TrainingOptions

        if not Path(str(self.fine_tuned)).is_dir():
            faults.add(f"--fine-tuned {self.fine_tuned!r} is no directory. Give one that save_pretrained wrote.")
        if len(self.names) > 1 or not {*self.strategy_names} <= {*recipes.GRAFT}:
            faults.add(
                f"--fine-tuned is a model of one task, for {' and '.join(recipes.GRAFT)}, got {self.stream} and "
                f"{', '.join(self.strategy_names)}. Leave it out, or the others."
            )
        # Steps and batch size say how many rows fine-tuning read, and so how many mask steps are the default.
        still_read = {"steps", "batch_size", "precision", "answer_precision", "evaluation_batch_size", "deterministic"}
        for key in (TrainingOptions.__dataclass_fields__.keys() - still_read) & self.settings.keys():
            faults.add(f"--set {key} has no effect with --fine-tuned: nothing is trained. Leave it out.")
        for key, usual in (("cache", None), ("dtype", "float32"), ("scenario", "task")):
            if self.settings.get(key, usual) not in (usual, str(usual)):
                faults.add(f"{key}={self.settings[key]} does not go with --fine-tuned. Leave it out.")

    def _options(self, classes: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
        """Return the options of each strategy; a fault that several of them have is added once."""
        options, wrong = dict[str, Any](), dict[str, list[str]]()
        for name, cls in classes.items():
            try:
                options[name] = build(cls.Options, self._values_for(name, set(cls.Options.__dataclass_fields__)), name)
            except OptionError as error:
                whole = str(error).removeprefix(f"Options of {name}: ").removesuffix(".")
                for part in error.parts or (whole,):
                    wrong.setdefault(part, []).append(name)
        for part, names in wrong.items():
            name = part.partition(" ")[0]
            if not (
                name in self.flags() and any(fault.startswith(f"--{name} must ") for fault in faults)
            ):  # it is told
                faults.add(f"Options of {', '.join(names)}: {part}.")
        return options

    def _values_for(self, strategy: str, known: set[str]) -> dict[str, Any]:
        """Return the options of one strategy, weakest first: recipe, flags, ``--set key``, ``--set strategy.key``."""
        scoped = {k.removeprefix(f"{strategy}."): v for k, v in self.settings.items() if k.startswith(f"{strategy}.")}
        merged = {**self.recipe(strategy), **self.flags(), **self.settings, **scoped}
        return {key: value for key, value in merged.items() if key in known}


@dataclass(frozen=True)
class CheckedRun:
    """Strategy classes and options by name, and the run's own."""

    classes: Mapping[str, type[ContinualStrategy]]
    options: Mapping[str, Any]
    run: RunOptions


def stream_of(tasks: Iterable[str]) -> str:
    """Return tasks as one text; a comma after a name that is a registered stream's, too, says that it is the task's."""
    stream = ",".join(map(str, tasks))
    return f"{stream}," if stream in registry.streams() else stream


def strategies_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, with every strategy of ours in the place of ``all``."""
    return tuple(name for each in names for name in (registry.STRATEGIES if each == "all" else [each]))


def left_behind(section: Mapping[str, Any], strategies: Sequence[str]) -> dict[str, str]:
    """Return what a file of options says that only its own strategies have, and none of those asked for in their place.

    Args:
        section: the options by their names on the command line, of which ``strategy`` may be missing.
        strategies: those asked for.

    Returns:
        By name, as it is typed: ``{"sparsity": "--sparsity", "ewc.ewc_lambda": "--set ewc.ewc_lambda"}``; nothing where a
        strategy is not known, which the job tells.
    """
    try:
        had, now = (_names_of(each) for each in (section.get("strategy") or DEFAULT_STRATEGIES, strategies))
    except ForgetfreeError:
        return {}
    left = {key: f"--set {key}" for key in section.get("set", {}) if key in had - now}
    if section.get("sparsity") and "sparsity" in had - now:
        left["sparsity"] = "--sparsity"
    return left


def without_others(section: Mapping[str, Any], strategies: Sequence[str]) -> dict[str, Any]:
    """Return the options of a file without those that `left_behind` names."""
    left = left_behind(section, strategies)
    kept = {key: value for key, value in section.items() if key not in left}
    return kept | {"set": {key: value for key, value in section.get("set", {}).items() if key not in left}}


def _names_of(strategies: Sequence[str]) -> set[str]:
    """Return the names of all options of strategies, with their prefix and without."""
    classes = {registry.strategy_name(each): registry.strategy(each) for each in strategies_of(strategies)}
    names = {name: set(cls.Options.__dataclass_fields__) for name, cls in classes.items()}
    scoped = {f"{name}.{key}" for name, keys in names.items() for key in keys}
    return scoped.union(*names.values())


def _check_setting(key: str, own: set[str], fields: Mapping[str, set[str]]) -> None:
    """Raise ``UsageError`` unless some strategy (or the run itself) has the option."""
    strategy, _, name = key.rpartition(".")
    if strategy and strategy not in fields:
        if strategy in registry.strategies():
            raise UsageError(
                f"{strategy} is not among the strategies of this run: {', '.join(fields)}. Add --strategy {strategy}."
            )
        raise UnknownNameError("strategy in --set", strategy, fields)
    known = fields[strategy] if strategy else own.union(*fields.values())
    if name not in known:
        if key in {key_of(each) for each in fields_of(RunConfig)} - {"stream", "set"}:
            raise UsageError(f"{key!r} is no option of a strategy. Give it as --{key.replace('_', '-')}.")
        options = {each: set(registry.strategy(each).Options.__dataclass_fields__) for each in registry.STRATEGIES}
        owners = [each for each, names in options.items() if key in names]
        if owners:
            raise UsageError(
                f"{key!r} is no option of {', '.join(fields)}. Strategies that have it: {', '.join(owners)}. Add one by "
                f"--strategy, or leave --set {key} out."
            )
        others = set() if strategy else {each.name for each in fields_of(RunConfig)}.union(*options.values())
        raise UnknownNameError("option", key, known, others=others)
