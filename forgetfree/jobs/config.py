"""The configuration of a job: the options that run and graft share, checked as a whole.

A job's configuration is a frozen dataclass. The command line makes its flags from the fields, and a file of options has
them under the same names. What a Python program hands over as objects stands beside it, in `InMemory`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from pydantic import Field as Bounds

from forgetfree import registry
from forgetfree.data.columns import ReadOptions
from forgetfree.display import brief
from forgetfree.errors import (
    Faults,
    OptionError,
    ReportError,
    UnknownNameError,
    UsageError,
)
from forgetfree.json_file import read_json
from forgetfree.options import Options, build, faults_in, name_of_function, option
from forgetfree.recipes import ModelDtype, StepsRule
from forgetfree.results.config_file import PLACES, of_each, portable
from forgetfree.tasks import EvaluatedOn

T = TypeVar("T", bound=Options)
Seed = Annotated[int, Bounds(ge=0, lt=2**63)]
Shots = Annotated[int, Bounds(ge=1)]
Sparsity = Annotated[float, Bounds(gt=0, le=1)]
Readout = Literal["auto", "prompt", "linear", "mean", "causal", "generate"]
#: Options of a job that ``--set`` could give, too.
ALSO_SETTINGS = ("steps", "sparsity")
#: What a file of options does not name unless it is given.
_UNLESS_GIVEN = ("text_column", "label_column", "kind", "skip_bad_rows", "metric", "fine_tuned", "held_aside")


@dataclass(frozen=True, kw_only=True)
class CommonOptions(Options):
    """What ``--set`` reaches in every command that trains."""

    test_limit: int | None = option(
        None, "evaluate on at most this many test rows a task", at_least=1, group="How to run"
    )
    evaluate_on: EvaluatedOn = option(
        "test", "validation: score every other validation row instead, to choose options by"
    )
    or_fewer: bool = option(
        False, "where a label has fewer training rows than --shots, take all of them, and do not refuse the task"
    )
    cache: str | None = option(
        None,
        "directory of fine-tuned models to share between runs; none: inside OUT",
        group="How to run",
        placeholder="DIR",
    )
    threads: int | None = option(
        None,
        "CPU threads, at most one a core of the machine; none: as torch chooses",
        at_least=1,
        group="How to run",
    )
    max_length: int | None = option(
        None,
        "tokens a row is read at, at most; the longest text is cut; none: 128, or 1,024 where a task's answers are texts, as "
        "far as the model reads",
        at_least=8,
    )
    graftable: str | None = option(None, "regular expression over names; only such tensors may be grafted and trained")
    dtype: ModelDtype = option(
        "float32",
        "float32, or bfloat16: the model's weights take half the memory, and what trains a region stays in float32",
    )

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


def check_or_fewer(options: CommonOptions, shots: int | None) -> None:
    """Raise ``UsageError`` where ``or_fewer`` has nothing to do."""
    if options.or_fewer and shots is None:
        raise UsageError(
            "or_fewer is set without --shots, and all rows are taken anyway. Give --shots, or leave it out."
        )


@dataclass(frozen=True, kw_only=True)
class SettingFlags:
    """Options of training that ``--set`` reaches, and a flag of their own, too: what its help says."""

    learning_rate: str = option("", "step size of the optimizer", group="How to learn", placeholder="F")
    batch_size: str = option("", "rows per update", group="How to learn")
    precision: str = option(
        "",
        "fp32 (that of the weights, see dtype), bf16, on a GPU fp16, or auto: bf16 where it is faster",
        group="How to learn",
        placeholder="NAME",
    )


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What run and graft are asked for alike. `checked` of a subclass checks it as a whole."""

    #: Names a section of config.json, and the command.
    command: ClassVar[str]

    model: str = option(
        "minilm", "minilm (default), a directory, or a hub name", placeholder="NAME|DIR", completion="models"
    )
    data: str | tuple[str, ...] = option(
        "hub",
        "hub, demo (embedded), a directory or a file of rows; several times: each file is a task (default: $FORGETFREE_DATA, "
        "else hub)",
        placeholder="hub|demo|DIR|FILE",
    )
    text_columns: tuple[str, ...] = option(
        (),
        "column of the texts, or TASK=COLUMN for one task; for pairs, give it twice (default: by common names)",
        flag="text_column",
        placeholder="NAME",
    )
    label_columns: tuple[str, ...] = option(
        (),
        "column of the labels, or TASK=COLUMN for one task (default: label, or by common names)",
        flag="label_column",
        placeholder="NAME",
    )
    kinds: tuple[str, ...] = option(
        (),
        "what a task asks for, such as generation, or TASK=KIND for one task (default: by its columns)",
        flag="kind",
        placeholder="KIND",
    )
    skip_bad_rows: bool = option(False, "leave out rows that cannot be used, and say how many; else they are refused")
    metrics: tuple[str, ...] = option(
        (),
        "what answers are scored by, or TASK=NAME for one task (default: accuracy, of words' tags f1, of free texts rouge_l; "
        "see docs/data.md)",
        flag="metric",
        placeholder="NAME",
    )
    readout: Readout = option(
        "auto",
        "how answers are read; mean: by a linear layer on the mean of all tokens; generate: texts are written (default: auto)",
    )
    steps: int | StepsRule | None = option(
        None,
        "updates per task: a number; auto: by its rows; paper: 16·n·k (default: the model's recipe, else paper)",
        at_least=1,
        group="How to learn",
        placeholder="INT|auto|paper",
    )
    seeds: tuple[Seed, ...] = option(
        (0,),
        "seed of sampling and training, may be given several times (default: 0)",
        flag="seed",
        group="How to learn",
    )
    settings: Mapping[str, Any] = option(
        dict,
        "any option: see 'forgetfree list strategies --verbose'",
        flag="set",
        group="How to learn",
        placeholder="KEY=VALUE",
    )
    device: str = option(
        "auto",
        "where to train: auto (default), cpu, cuda, cuda:1, mps, …; cuda:*: a unit on each GPU",
        group="How to run",
        placeholder="NAME",
    )
    out: str = option("", "directory to write", group="How to run", placeholder="DIR")

    def checked(self, classes: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """Return what follows from it, such as the options of strategies: a job asks for that once, when it is made.

        Args:
            classes: strategies that are not registered, by their names.

        Raises:
            UsageError: naming every fault.
        """
        raise NotImplementedError

    def section(self) -> dict[str, Any]:
        """Return the configuration as a file in ``out`` has it: what ``--config`` reads back."""
        section = {key_of(field): getattr(self, field.name) for field in fields(self) if field.name != "out"}
        section = {key: value for key, value in section.items() if value or key not in _UNLESS_GIVEN}
        for key in PLACES:
            if section.get(key):
                section[key] = of_each(portable, section[key], Path(self.out))
        if len(self.label_columns) == 1:
            (section["label_column"],) = self.label_columns
        return {key: list(value) if isinstance(value, tuple) else value for key, value in section.items()}

    def recipe(self) -> dict[str, Any]:
        """Return the options that the model brings and that are not set otherwise; a job may take none from it."""
        return {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tasks, as far as they are known without data."""
        return ()

    @property
    def read_options(self) -> ReadOptions:
        """Return what is said of how rows are read."""
        return ReadOptions(self.text_columns, self.label_columns, self.skip_bad_rows, self.metrics, self.kinds)

    def flags(self) -> dict[str, Any]:
        """Return the options that a flag of this command gives and that ``--set`` could give, too."""
        given = {name: getattr(self, name, None) for name in ALSO_SETTINGS}
        return {name: value for name, value in given.items() if value is not None}

    def faults(self) -> Faults:
        """Return what is wrong with each option by itself."""
        from forgetfree.device import find_device

        faults, keys = Faults(), keys_of(self)
        for fault in faults_in(self, lambda name: f"--{keys[name].replace('_', '-')}"):
            faults.add(f"{fault}.")
        if isinstance(self.device, str):
            faults.attempt(find_device, self.device)
        for each in fields(self):
            value, key = getattr(self, each.name), key_of(each).replace("_", "-")
            if isinstance(value, tuple) and len(set(value)) < len(value):
                faults.add(f"--{key} names the same {key} twice: {', '.join(map(str, value))}. Give each once.")
            if value == () and each.default != ():  # of a file or a call
                faults.add(f"--{key} names no {key}. Give one, or leave it out.")
        once = replace(self.read_options, texts=tuple(dict.fromkeys(self.text_columns)))
        for named in self.kinds:
            faults.attempt(registry.kind, named.rpartition("=")[2])
        for name in self.names or ("",):
            faults.attempt(once.columns, name)
            faults.attempt(once.kind, name)
            faults.attempt(once.metric, name)
        faults.attempt(self.read_options.check, self.names)
        for key in self.flags():
            if key in self.settings:
                faults.add(f"--{key} and --set {key}={self.settings[key]} are both given. Leave one of them out.")
        if callable(self.settings.get("optimizer")) and not isinstance(self.settings["optimizer"], type):
            for key in ("learning_rate", "readout_learning_rate", "momentum", "weight_decay"):
                if key in self.settings:
                    faults.add(f"optimizer is a function, which sets {key} itself. Leave --set {key} out.")
        return faults

    def set_of(self, options: type[T]) -> T:
        """Return those options of a job itself that ``--set`` gives."""
        given = {key: value for key, value in self.settings.items() if key in options.__dataclass_fields__}
        return build(options, given, f"the {self.command}")


C = TypeVar("C", bound=JobConfig)


def with_precision(config: C, in_memory: InMemory | None = None) -> C:
    """Return the configuration with what a precision ``auto`` means: what it meant when ``out`` was begun, else what is faster.

    config.json names what was taken, so that all units, and whoever goes on with it or repeats it, compute alike.

    Args:
        config: the configuration; where there is something to measure, all of it is checked first.
        in_memory: objects in the place of names.
    """
    settings = {**config.recipe(), **config.settings}
    keys = [key for key, value in settings.items() if key.endswith("precision") and value == "auto"]
    if not keys:
        return config
    begun = _begun_with(config)
    taken = {key: begun[key] for key in keys if key in begun}
    if left := [key for key in keys if key not in taken]:
        taken |= dict.fromkeys(left, _measured(config, in_memory or InMemory()))
    return replace(config, settings={**config.settings, **taken})


def _measured(config: JobConfig, in_memory: InMemory) -> str:
    """Return the faster precision for the model of a job, on its device and with its threads."""
    from forgetfree.core.precision import faster_precision
    from forgetfree.device import find_device
    from forgetfree.jobs.running.environment import set_threads, threads_as_before
    from forgetfree.models.loading import load_model

    config.checked(in_memory.strategies)
    device = find_device(config.device)
    common = config.set_of(CommonOptions)
    given: dict[str, Any] = {"graftable": common.graftable, "dtype": common.dtype}
    with threads_as_before():
        set_threads(common.threads)
        if in_memory.reads_tensors:
            from forgetfree.continual.streams import load_stream

            stream = load_stream(config.names, data=in_memory.data, model=in_memory.model, **given)
            return faster_precision(stream.model.to(device), stream.tasks[0].train)
        loaded = load_model(in_memory.model_or(config.model), config.readout, **given, **in_memory.model_arguments)
        return faster_precision(loaded.model.to(device))


def _begun_with(config: JobConfig) -> Mapping[str, Any]:
    """Return the settings in the config.json of ``out``; nothing where there is none to be read."""
    try:
        settings = read_json(Path(config.out) / "config.json", ReportError, "", signed=True)[config.command]["set"]
    except (ReportError, LookupError, TypeError):
        return {}
    return settings if isinstance(settings, dict) else {}


def key_of(field: Field[Any]) -> str:
    """Return the name of an option in a file; as a flag, it has hyphens."""
    return field.metadata.get("flag") or field.name


def keys_of(config: JobConfig | type[JobConfig]) -> dict[str, str]:
    """Return the names of all options in a file, by the names of their fields."""
    return {field.name: key_of(field) for field in fields(config)}


def section_types(config: type[JobConfig]) -> dict[str, Any]:
    """Return the names in a file of options and the type of each."""
    hints = get_type_hints(config, include_extras=True)
    return {key_of(field): hints[field.name] for field in fields(config) if field.name != "out"}


def check_known(key: str, known: Collection[str]) -> None:
    """Raise ``UnknownNameError`` unless an option is known."""
    if key not in known:
        raise UnknownNameError("option", key, known)


@dataclass(frozen=True)
class InMemory:
    """Objects in the place of names. config.json says what they were, but cannot bring them back.

    Attributes:
        strategies: classes by the names that stand in the configuration.
        data: rows, as `load_tasks` takes them; none: those that the configuration names.
        model: a model, as `load_stream` takes it, which copies it; none: the one that the configuration names.
        tokenizer: of the model; without one, it reads tensors.
        call: what the program called, for config.json; empty: the command line.
    """

    strategies: Mapping[str, Any] = field(default_factory=dict)
    data: Any = None
    model: Any = None
    tokenizer: Any = None
    call: str = ""

    def objects(self, settings: Mapping[str, Any]) -> list[str]:
        """List what cannot be named in a file, for config.json."""
        listed = [f"the strategy {name} (a class)" for name in self.strategies]
        listed += [
            f"{key}={name_of_function(value)} (a function)" for key, value in settings.items() if callable(value)
        ]
        listed += ["data in memory"] * (self.data is not None)
        return listed + [f"a {type(self.model).__name__} in memory"] * (self.model is not None)

    @property
    def reads_tensors(self) -> bool:
        """Say whether the model is any network, for rows of tensors."""
        return self.model is not None and self.tokenizer is None

    def data_or(self, named: Any) -> Any:
        """Return the rows, or else what names them."""
        return named if self.data is None else self.data

    def model_or(self, named: str) -> Any:
        """Return the model, or else its name."""
        return named if self.model is None else self.model

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments of `load_model` that only a model in memory has."""
        return {} if self.tokenizer is None else {"tokenizer": self.tokenizer}
