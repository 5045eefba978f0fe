"""The requested configuration of a run, frozen and checked once as a whole; and `Execution`, how the run is executed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, ValidationError, field_validator, model_validator

from forgetfree import recipes, registry
from forgetfree.data.columns import ReadOptions
from forgetfree.data.sources import check_form, default_data, no_stream, tasks_of_files
from forgetfree.display import brief, first_twice, nfc
from forgetfree.errors import Faults, ForgetfreeError, OptionError, UnknownNameError, UsageError
from forgetfree.files import free_directory
from forgetfree.options import (
    Options,
    Place,
    build,
    by_name,
    name_of_function,
    option,
    read_value,
    sentences,
)
from forgetfree.recipes import ModelDtype
from forgetfree.registry import DEFAULT_STRATEGIES
from forgetfree.results.run_folder import load_run, portable, with_places
from forgetfree.tasks import OF_ALL_LABELS, EvaluatedOn, Scenario
from forgetfree.training.training_options import LocalizationOptions

Seed = Annotated[int, Field(ge=0, lt=2**63)]
Readout = Literal["auto", "prompt", "linear", "mean", "causal", "generate"]
#: Options that may be given with ``--on``: places of rows and model, strategies and seeds, and options for reading rows.
BESIDE_ON = (
    *("data", "model", "strategy", "seed"),
    *("text_column", "label_column", "kind", "metric", "map_label", "skip_bad_rows"),
)


class RunOptions(Options):
    """Options of a run that ``--set`` accepts, besides the strategies' own."""

    test_limit: int | None = option(None, "maximum number of test examples per task", at_least=1, group="How to run")
    evaluate_on: EvaluatedOn = option(
        "test", "split to score; validation: every other validation example, to choose options without the test split"
    )
    cache: Place | None = option(
        None,
        "directory that shares fine-tuned models between runs; none: inside OUT",
        group="How to run",
        placeholder="DIR",
    )
    threads: int | None = option(None, "number of CPU threads; none: PyTorch's default", at_least=1, group="How to run")
    max_length: int | None = option(
        None,
        "maximum number of tokens per example; the longest text is truncated; none: 128, or 1,024 for generation, "
        "at most the model's own limit",
        at_least=8,
    )
    graftable: str | None = option(
        None, "regular expression for names of tensors; only matching tensors may be grafted and trained"
    )
    dtype: ModelDtype = option(
        "float32",
        "dtype of the model's weights; bfloat16 halves their memory, while regions are still trained in float32",
    )

    scenario: Scenario = option(
        "task",
        "whether the task is known at inference; task: yes; class: no, and the labels of all tasks are distinct; "
        "domain: no, and all tasks share the same labels",
    )
    upper_triangle: bool | None = option(
        None,
        "also evaluate tasks before they are learned (zero-shot); none: only with "
        "readouts that predict better than chance before training (not linear or mean)",
    )
    floors: Literal["constant", "words", "probe"] = option(
        "probe",
        "baselines that scores are compared with; constant: the best constant prediction; words: also a bag of "
        "words (about a second per task); probe: also linear probes on the pre-trained model, at its readout and at "
        "the mean of the tokens (one pass over training and test examples per seed)",
    )

    @model_validator(mode="after")
    def _check_graftable(self) -> Self:
        try:
            re.compile(self.graftable or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise OptionError(
                f"graftable must be a regular expression, got {brief(self.graftable)}: {error}."
            ) from error
        return self


#: The types of ``--set`` options that also have a flag; in a file, they may also be given outside the table ``set``.
FLAGGED: Mapping[str, Any] = {
    name: each.annotation
    for cls in (LocalizationOptions, RunOptions)
    for name, each in cls.model_fields.items()
    if each.metadata[-1].parse is None
}


def flag_of(key: str) -> str:
    """Return the command line's name for an option of ``--set``.

    >>> flag_of("learning_rate"), flag_of("lora.rank")
    ('--learning-rate', '--set lora.rank')
    """
    return f"--{key.replace('_', '-')}" if key in FLAGGED else f"--set {key}"


@dataclass(frozen=True)
class InMemory:
    """Objects given instead of names. config.json lists them, but cannot restore them.

    Attributes:
        strategies: classes by their names in the configuration.
        data: rows in a form that `load_tasks` accepts; none: the configuration names the data.
        model: a model, which is copied, see `load_stream`; none: the configuration names the model.
        tokenizer: the tokenizer of the model.
    """

    strategies: Mapping[str, Any] = field(default_factory=dict)
    data: Any = None
    model: Any = None
    tokenizer: Any = None


#: No objects: the configuration names everything.
NO_OBJECTS = InMemory()


#: `option` in the group of model, data and strategies.
subject = partial(option, group="What to learn")


class RunConfig(Options):
    """The requested configuration of a run. Flags, files of options and ``run`` in config.json use the names of its fields.

    `of` makes it from the options as typed; `check` reports all its faults together.
    """

    model: str = subject("minilm", "minilm (default), a directory, or a hub name", placeholder="NAME|DIR")
    data: str | tuple[str, ...] = option(default_data, "where the data is: hub, demo, a directory, or files")
    text_column: tuple[str, ...] = subject(
        (),
        "column with the texts, or TASK=COLUMN for one task; for pairs, give it twice (default: recognised by "
        "common names)",
        placeholder="NAME",
    )
    label_column: tuple[str, ...] = subject(
        (),
        "column with the labels, or TASK=COLUMN for one task (default: label, or recognised by common names)",
        placeholder="NAME",
    )
    kind: tuple[str, ...] = subject(
        (),
        "kind of task, such as generation, or TASK=KIND for one task (default: inferred from its columns)",
        placeholder="KIND",
    )
    map_label: tuple[str, ...] = subject(
        (),
        "rename the label OLD to NEW, or TASK:OLD=NEW for one task; without NEW, drop its rows; can be repeated",
        placeholder="OLD=NEW",
    )
    skip_bad_rows: bool = subject(
        False, "skip rows that cannot be used, and report how many; otherwise they are an error"
    )
    metric: tuple[str, ...] = subject(
        (),
        "metric, or TASK=NAME for one task (default: accuracy; f1 for tagging; rouge_l for generation; see "
        "docs/data.md)",
        placeholder="NAME",
    )
    readout: Readout = subject(
        "auto",
        "how the model makes predictions; mean: a linear layer on the mean of all tokens; generate: it "
        "generates text (default: auto)",
        placeholder=None,
    )
    seed: tuple[Seed, ...] = option(
        (0,), "random seed for sampling and training; can be repeated (default: 0)", group="How to learn"
    )
    set: Mapping[str, Any] = option(dict, "any other option")
    device: str = option(
        "auto",
        "device for training: auto (default), cpu, cuda, cuda:1, mps, …; cuda:*: one unit per GPU",
        group="How to run",
        placeholder="NAME",
    )
    stream: str = option("", "a registered stream, or task names joined by commas")
    shots: int | None = option(
        None, "number of training examples per label (default: all)", at_least=1, group="How to learn"
    )
    strategy: tuple[str, ...] = subject(
        DEFAULT_STRATEGIES,
        "name from 'forgetfree list strategies', or your own [NAME=]MODULE:CLASS; can be repeated; all: every "
        f"strategy of forgetfree (default: {', '.join(DEFAULT_STRATEGIES)})",
        placeholder="NAME",
    )
    fine_tuned: Place | None = subject(
        None,
        "model in the Hugging Face layout, already fine-tuned from --model on the task; skips fine-tuning",
        placeholder="DIR",
    )
    held_out: str | None = subject(
        None,
        "held-out texts, whose loss is measured before and after the stream (causal language models): a file with "
        "one text per line or a column text, a task of --data, or a folder with a task",
        placeholder="TEXTS|TASK",
    )
    out: Place = option("", "output directory (default: a new one in runs/)", group="How to run", placeholder="DIR")
    objects: Any = option(NO_OBJECTS, "objects given instead of names, which flags and files cannot express")
    #: The error about wrong values, which are replaced by the defaults; `check` reports it with all other faults.
    _refused: ValidationError | None = PrivateAttr(None)

    @classmethod
    def _made(cls, values: Mapping[str, Any], handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            wrong = {each["loc"][0] for each in error.errors()}
            config = handler({key: value for key, value in values.items() if key not in wrong})
            config._refused = error
            return config

    def wrong_values(self, show: Callable[[str], str] = str) -> list[str]:
        """Return a phrase for each wrong value; ``show`` formats the name of the option in it."""
        return sentences(type(self), self._refused, show) if self._refused else []

    @field_validator("strategy")
    @classmethod
    def _all_strategies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(chain.from_iterable(registry.STRATEGIES if each == "all" else [each] for each in value))

    @field_validator("data")
    @classmethod
    def _one_place(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return value[0] if isinstance(value, tuple) and len(value) == 1 else value

    @field_validator("set")
    @classmethod
    def _read_flagged(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**value, **{key: read_value(value[key], FLAGGED[key]) for key in FLAGGED if key in value}}

    @classmethod
    def of(cls, *layers: Mapping[str, Any], objects: InMemory = NO_OBJECTS) -> Self:
        """Return the configuration from options by name; later layers win, and options that are not fields go into ``set``.

        Raises:
            UsageError: an option is given both inside and outside ``set``.
        """
        values, settings = dict[str, Any](), dict[str, Any]()
        for layer in layers:
            table = layer.get("set", {})
            own = {key: value for key, value in layer.items() if key not in OF_RUN}
            for key in own.keys() & table.keys():
                raise UsageError(f"{flag_of(key)} and --set {key}={table[key]} are both given. Leave one of them out.")
            values |= {key: value for key, value in layer.items() if key in OF_RUN}
            settings |= {**table, **own}
        settings = {key: by_name(value) for key, value in settings.items()}
        return cls(**{**values, "set": settings, "objects": objects})

    def completed(self, prefix: str = "") -> Self:
        """Return it with a stream and an output directory; defaults: the tasks of its files, and a free directory.

        Raises:
            UsageError: neither the stream nor the files name a task.
        """
        check_form(self.rows)
        stream = self.stream or stream_of(self.objects.data or tasks_of_files(self.data))
        if not stream:
            raise no_stream(self.rows)
        return self.model_copy(update={"stream": stream, "out": self.out or free_directory(f"{prefix}{stream}")})

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tasks in the order of the stream."""
        return registry.streams().get(self.stream) or tuple(filter(None, map(str.strip, nfc(self.stream).split(","))))

    def check_one_task(self) -> None:
        """Raise ``UsageError`` if there are several tasks; a graft has one."""
        if len(self.names) > 1:
            raise UsageError(f"Expected one task, got the {len(self.names)} of {self.stream!r}. Give one of them.")

    @property
    def strategy_names(self) -> tuple[str, ...]:
        """Return the names of the strategies in tables, options and folders."""
        return tuple(map(registry.strategy_name, self.strategy))

    @property
    def units(self) -> dict[str, dict[str, Any]]:
        """Return all pairs of strategy and seed, seed by seed, by the names of their folders."""
        pairs = ((name, seed) for seed in self.seed for name in self.strategy_names)
        return {f"{name}/seed-{seed}": {"strategy": name, "seed": seed} for name, seed in pairs}

    @property
    def read_options(self) -> ReadOptions:
        """Return the options for reading rows."""
        names = (self.metric, self.kind, self.map_label)
        return ReadOptions.of(self.text_column, self.label_column, self.skip_bad_rows, *names)

    @property
    def rows(self) -> Any:
        """Return the rows in memory, or else the places of the data."""
        return self.data if self.objects.data is None else self.objects.data

    @property
    def network(self) -> Any:
        """Return the model in memory, or else its name."""
        return self.model if self.objects.model is None else self.objects.model

    @property
    def unnamed(self) -> list[str]:
        """List the objects in memory that no file can name, for config.json."""
        functions = {key: name_of_function(value) for key, value in self.set.items() if callable(value)}
        return [
            *(f"the strategy {name} (a class)" for name in self.objects.strategies),
            *(f"{key}={name} (a function)" for key, name in functions.items()),
            *["data in memory"] * (self.objects.data is not None),
            *[f"a {type(self.objects.model).__name__} in memory"] * (self.objects.model is not None),
        ]

    def recipe(self, strategy: str | None = None) -> dict[str, Any]:
        """Return the model's recipe without the options that ``set`` overrides, see `recipes.recipe_of`.

        Args:
            strategy: the strategy that it is for; settings for others are ignored. Default: all.
        """
        return recipes.recipe_of(self.model, self.set, self.strategy_names, strategy)

    def section(self) -> dict[str, Any]:
        """Return the configuration as stored in a file in ``out``, which ``--config`` can read back."""
        section = {key: getattr(self, key) for key in OF_RUN if key != "out"}
        section = with_places(section, Path(self.out), portable)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in section.items()}

    # -- Options of strategies, and faults -------------------------------------------------------------------

    @property
    def classes(self) -> dict[str, Any]:
        """The strategies by name."""
        named = zip(self.strategy_names, self.strategy, strict=True)
        return {name: self.objects.strategies.get(name) or registry.strategy(each) for name, each in named}

    @property
    def options(self) -> dict[str, Any]:
        """The options of each strategy, by its name."""
        faults = Faults()
        options = self._options(self.classes, faults)
        faults.report()
        return options

    @property
    def common(self) -> RunOptions:
        """The run's own options from ``set``."""
        given = {key: value for key, value in self.set.items() if key in RunOptions.model_fields}
        return build(RunOptions, given, "the run")

    def check(self) -> Self:
        """Return it, if it has no fault.

        Raises:
            UsageError: lists every fault.
        """
        self.faults().report()
        return self

    def faults(self) -> Faults:
        """Return all faults that can be found without reading a file."""
        faults = self._faults_of_each()
        attempt = faults.attempt
        if again := first_twice(name.casefold() for name in self.strategy_names):
            same = [each for each in self.strategy if registry.strategy_name(each).casefold() == again]
            faults.add(f"--strategy {' and '.join(same)} have the same name. Rename one of them: NAME=MODULE:CLASS.")
        named = zip(self.strategy_names, self.strategy, strict=True)
        resolved = {name: self.objects.strategies.get(name) or attempt(registry.strategy, each) for name, each in named}
        classes = {name: cls for name, cls in resolved.items() if cls is not None}
        known = {name: {*cls.Options.model_fields} for name, cls in classes.items()}
        for key in self.set if len(classes) == len(resolved) else ():  # else the options of a strategy are unknown
            attempt(_check_setting, key, known)
        if self.fine_tuned is not None:
            self._check_fine_tuned(faults)
        if self.held_out in self.names:
            faults.add(
                f"--held-out {self.held_out} is a task of the stream, so its texts are trained on. Give other texts."
            )
        options = self._options(classes, faults)
        common = attempt(lambda: self.common)
        if common is not None:
            _check_together(self, common, options, faults)
        return faults

    def _faults_of_each(self) -> Faults:
        """Return the faults of each option by itself."""
        from forgetfree.device import find_device

        faults = Faults()
        for phrase in self.wrong_values(lambda name: f"--{name.replace('_', '-')}"):
            faults.add(f"{phrase}.")
        faults.attempt(find_device, self.device)
        for name, value in self:
            if not isinstance(value, tuple):
                continue
            key, field = name.replace("_", "-"), type(self).model_fields[name]
            if len({*value}) < len(value):
                faults.add(f"--{key} names the same {key} twice: {', '.join(map(str, value))}. Give each only once.")
            if not value and field.default != ():  # from a file or a call
                faults.add(f"--{key} names no {key}. Give one, or leave it out.")
        for named in self.kind:
            faults.attempt(registry.kind, named.rpartition("=")[2])
        read = self.read_options
        for name, look in product(self.names or ("",), (read.columns, read.kind, read.metric)):
            faults.attempt(look, name)
        faults.attempt(read.check, self.names)
        return faults

    def _check_fine_tuned(self, faults: Faults) -> None:
        """Add a fault for each option that cannot be combined with ``--fine-tuned``."""
        if len(self.names) > 1 or not {*self.strategy_names} <= {*recipes.GRAFT}:
            faults.add(
                f"--fine-tuned is the model of one task and needs {' and '.join(recipes.GRAFT)}, got {self.stream} "
                f"and {', '.join(self.strategy_names)}. Leave --fine-tuned out, or the other names."
            )
        for key, usual in (("cache", None), ("dtype", "float32"), ("scenario", "task")):
            if self.set.get(key, usual) not in (usual, str(usual)):
                faults.add(f"{key}={self.set[key]} cannot be given with --fine-tuned. Leave it out.")

    def _options(self, classes: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
        """Return the options of each strategy; a fault that several strategies share is added once."""
        options, wrong = dict[str, Any](), dict[str, list[str]]()
        for name, cls in classes.items():
            try:
                options[name] = build(cls.Options, self._values_for(name, cls.Options.model_fields), name)
            except OptionError as error:
                whole = str(error).removeprefix(f"Options of {name}: ").removesuffix(".")
                for part in error.parts or (whole,):
                    wrong.setdefault(part, []).append(name)
        for part, names in wrong.items():
            faults.add(f"Options of {', '.join(names)}: {part}.")
        return options

    def _values_for(self, strategy: str, known: Collection[str]) -> dict[str, Any]:
        """Return the options of one strategy, weakest first: recipe, ``--set key``, ``--set strategy.key``."""
        scoped = {k.removeprefix(f"{strategy}."): v for k, v in self.set.items() if k.startswith(f"{strategy}.")}
        merged = {**self.recipe(strategy), **self.set, **scoped}
        return {key: value for key, value in merged.items() if key in known}


#: The names of a run's options, in the order of declaration.
OF_RUN = tuple(name for name in RunConfig.model_fields if name != "objects")


def _check_together(config: RunConfig, common: RunOptions, options: Mapping[str, Any], faults: Faults) -> None:
    """Add a fault for each wrong combination of options."""
    unfit = [name for each in config.metric if (name := each.rpartition("=")[2]) not in OF_ALL_LABELS]
    if unfit and common.scenario == "class":
        faults.add(
            f"scenario=class predicts among the labels of all tasks, which only {' and '.join(OF_ALL_LABELS)} can "
            f"score, but --metric names {', '.join(unfit)}. Name one of the former, or leave it out."
        )
    finding = {name: str(getattr(each, "task_inference", "last")) for name, each in options.items()}
    finding = {name: choice for name, choice in finding.items() if choice != "last"}
    if finding and common.scenario == "task":
        faults.add(
            f"task_inference={min(finding.values())} is for streams with unknown tasks, but {', '.join(finding)} "
            "would be given the task. Also set scenario=class or scenario=domain."
        )


class Execution(Options):
    """The way in which a job is run; the outcome does not depend on it."""

    resume: bool = option(False, "resume the run in --out; finished work is kept", group="How to run")
    jobs: int | str | None = option(
        None,
        "number of units to run in parallel; auto: one per core, with one thread each; ray (this machine, or "
        "$RAY_ADDRESS) or ray://HOST:PORT: run as Ray tasks",
        group="How to run",
        placeholder="N|auto|ray",
    )
    log: tuple[str, ...] = option(
        (),
        "also log losses, learning rates and scores to tensorboard, wandb, mlflow, trackio or another tracker "
        "supported by accelerate; can be repeated",
        group="How to run",
        placeholder="NAME",
    )
    progress: Any = option(None, "a Progress that is notified about all units; none: silent")
    debug: bool = option(False, "raise an unexpected exception of a unit instead of continuing with the other units")

    @field_validator("jobs", mode="before")
    @classmethod
    def _check_jobs(cls, value: Any) -> Any:
        jobs = int(value) if isinstance(value, str) and value.isdigit() else value
        if isinstance(jobs, str) and jobs != "auto":
            from forgetfree.jobs.cluster import check_cluster

            check_cluster(jobs)
        elif jobs not in (None, "auto") and not (isinstance(jobs, int) and jobs >= 1):
            raise UsageError(f"--jobs must be auto, ray or at least 1, got {jobs}.")
        return jobs

    @property
    def cluster(self) -> str | None:
        """The Ray cluster; ``None`` if units do not run on one."""
        return self.jobs if isinstance(self.jobs, str) and self.jobs != "auto" else None

    @property
    def at_a_time(self) -> int:
        """The requested number of units at a time; 1 if no number is given."""
        return self.jobs if isinstance(self.jobs, int) else 1

    def check_objects(self, objects: Sequence[str]) -> None:
        """Raise ``UsageError`` if other processes would need these objects in memory, which no file can name."""
        if (self.at_a_time > 1 or self.cluster) and objects:
            raise UsageError(
                f"Worker processes load everything by name, but these were given as objects: {', '.join(objects)}. "
                "Leave jobs at 1."
            )


#: A new run in this process, without progress.
USUAL = Execution()


def prepared(config: RunConfig) -> RunConfig:
    """Return the configuration, checked as a whole, with a concrete precision in place of ``auto``.

    Raises:
        UsageError: lists every fault.
    """
    from forgetfree.device import find_device
    from forgetfree.jobs.environment import check_precision

    config = with_precision(config).check()
    check_precision([each.precision for each in config.options.values()], find_device(config.device))
    return config


def with_precision(config: RunConfig) -> RunConfig:
    """Replace precision ``auto`` by the choice in the config.json of ``out``, if there is one, else by the faster precision.

    config.json records the choice, so that all units, and a resumed or repeated run, use the same precision. The
    configuration is checked before anything is measured.
    """
    settings = {**config.recipe(), **config.set}
    keys = [key for key, value in settings.items() if key.endswith("precision") and value == "auto"]
    if not keys:
        return config
    try:
        begun = load_run(Path(config.out))["run"]["set"]
    except ForgetfreeError:  # no run was begun, or the run itself reports the fault
        begun = {}
    taken = {key: begun[key] for key in keys if key in begun}
    if left := [key for key in keys if key not in taken]:
        taken |= dict.fromkeys(left, _measured(config.check()))
    return config.model_copy(update={"set": {**config.set, **taken}})


def _measured(config: RunConfig) -> str:
    """Return the faster precision for the model of a run, on its device and with its threads."""
    from forgetfree.core.precision import faster_precision
    from forgetfree.device import find_device
    from forgetfree.jobs.environment import set_threads, threads_as_before
    from forgetfree.models.loading import load_model

    common = config.common
    given: dict[str, Any] = {"graftable": common.graftable, "dtype": common.dtype}
    with threads_as_before():
        set_threads(common.threads)
        loaded = load_model(config.network, config.readout, tokenizer=config.objects.tokenizer, **given)
        return faster_precision(loaded.model.to(find_device(config.device)))


def stream_of(tasks: Iterable[str]) -> str:
    """Return task names joined by commas; a final comma marks a task that has the name of a registered stream."""
    stream = ",".join(map(str, tasks))
    return f"{stream}," if stream in registry.streams() else stream


def _check_setting(key: str, known_of: Mapping[str, set[str]]) -> None:
    """Raise ``UsageError`` unless some strategy (or the run itself) has the option."""
    strategy, _, name = key.rpartition(".")
    if strategy and strategy not in known_of:
        raise UnknownNameError("strategy in --set", strategy, known_of, "Add others with --strategy.")
    known = known_of[strategy] if strategy else {*RunOptions.model_fields}.union(*known_of.values())
    if name not in known:
        ours = {each: registry.strategy(each).Options.model_fields for each in registry.STRATEGIES}
        if owners := [each for each, options in ours.items() if key in options]:
            raise UsageError(
                f"{key!r} is not an option of {', '.join(known_of)}. Strategies with this option: "
                f"{', '.join(owners)}. Add one with --strategy, or leave {flag_of(key)} out."
            )
        raise UnknownNameError("option", key, known, others={*OF_RUN, *(f"--{each}" for each in OF_RUN)} - {key})
