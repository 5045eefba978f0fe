"""Where answers come from: a file that a strategy saved, and what its run says of it. Read once, before any model is.

A ledger says itself what its answers depend on. For other files that stands under ``bound`` in unit.json, and the labels in
config.json.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.display import brief
from forgetfree.errors import RunError, UsageError
from forgetfree.json_file import check_fields
from forgetfree.recipes import ModelDtype
from forgetfree.registry import WEIGHTS
from forgetfree.results.config_file import check_whole, load_run, located
from forgetfree.results.unit_folder import FEATURES, RECORD, check_own, read_record
from forgetfree.tasks import TaskDefinition, seeded

if TYPE_CHECKING:
    from forgetfree.core.readout_model import Precision
    from forgetfree.ledger.binding import Binding

LEDGER = "ledger.safetensors"
#: The files that answers come from; of one strategy and seed, the first that is there.
FILES = (LEDGER, *WEIGHTS)
_REMEDY = "Put back what it was when the stream was trained."
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file that a strategy saved, and what its run says of it.

    Attributes:
        file: the file; one of another name than `FILES` is a ledger.
        model: name or directory of the base model now.
        run_model: its name in the run, where ``model`` is another's choice; else empty.
        base: what the run's config.json says of the base model; nothing where there is no run.
        graftable: the run's ``--set graftable``.
        dtype: the run's ``--set dtype``.
        tasks: the definitions of the run's tasks, in the order of the stream.
        shared_labels: whether all tasks' labels have one readout (``scenario=class``).
        precision: of forward passes.
        deterministic: whether the run answered each row in a pass of its own.
        stores: directories in which models may lie that the file names.
        task_inference: how the run found out the task of a row; ``last``: it did not.
        lda_layer: the layer that it read for that, see `TaskFeatures`.
    """

    file: Path
    model: str
    run_model: str = ""
    base: Mapping[str, Any] = field(default_factory=dict)
    graftable: str | None = None
    dtype: ModelDtype = "float32"
    tasks: Sequence[TaskDefinition] = ()
    shared_labels: bool = False
    precision: Precision = "fp32"
    deterministic: bool = False
    stores: Sequence[Path] = ()
    task_inference: str = "last"
    lda_layer: int | None = None

    @classmethod
    def of(cls, place: Path, seed: int | None = None, strategy: str | None = None, model: str | None = None) -> Source:
        """Return what answers in a run's directory; or the ledger of this path.

        Args:
            place: what ``forgetfree run --out`` wrote; or a ledger, which needs ``model``.
            seed: the seed; default: the first.
            strategy: the strategy; default: ``grafting-continual``, or else the first with a ledger, or else the first.
            model: the base model, if it has moved.

        Raises:
            RunError: it is no run directory, or holds nothing to answer from, or the file is that of another seed or run.
            UsageError: a ledger is given without its model, or with what is a run's.
        """
        if place.is_file():
            if seed is not None or strategy is not None or model is None:
                raise UsageError(
                    f"{place} is read as a ledger, which is one strategy's, with one seed, and does not name its base model. "
                    "Give --model, and neither --strategy nor --seed; or give the run's directory."
                )
            check_own(place)
            return cls(file=place, model=model)
        config = load_run(place)
        file = saved_file(place, seed, strategy)
        if config["model"]["readout"] == "classifier":
            raise UsageError(
                f"{place} is of a model that was fine-tuned elsewhere, whose own head answers. Write it as an ordinary model: "
                f"forgetfree apply {place} --out DIR."
            )
        settings, options = config["run"]["set"], _options(config, file.parts[-3])
        name = located(config["model"]["name"], place)
        own_seed, given = int(file.parts[-2].removeprefix("seed-")), settings.get("sampling_seed")
        task_inference = "last" if config.get("scenario", "task") == "task" else options.get("task_inference", "last")
        if task_inference == "lda":
            check_own(file.with_name(FEATURES))
        return cls(
            file=file,
            model=model or name,
            run_model="" if model is None else name,
            base=config["model"],
            graftable=settings.get("graftable"),
            dtype="bfloat16" if settings.get("dtype") == "bfloat16" else "float32",
            tasks=[seeded(TaskDefinition.of_fields(task), own_seed, given) for task in config["tasks"]],
            shared_labels=config.get("scenario") == "class",
            precision="bf16" if (options.get("answer_precision") or options.get("precision")) == "bf16" else "fp32",
            deterministic=options.get("deterministic") is True,
            stores=[file.parent, Path(settings.get("cache") or place / "fine-tuned")],
            task_inference=task_inference,
            lda_layer=options.get("lda_layer"),
        )

    @property
    def strategy(self) -> str:
        """The name of the strategy; empty for a ledger without a run."""
        return self.file.parts[-3] if self.base else ""

    @property
    def is_ledger(self) -> bool:
        """Whether the file is a ledger."""
        return self.file.name not in WEIGHTS


def _options(config: Mapping[str, Any], strategy: str) -> Mapping[str, Any]:
    """Return the options of a strategy, as far as config.json says them."""
    options = config.get("options")
    own = options.get(strategy) if isinstance(options, dict) else None
    return own if isinstance(own, dict) else {}


def saved_file(run: Path, seed: int | None = None, strategy: str | None = None) -> Path:
    """Return the file that answers come from, compared with its unit.json: see `Source.of` for which.

    Args:
        run: the run's directory.
        seed: the seed; default: the first.
        strategy: the strategy.

    Raises:
        RunError: the run holds none, or it is that of another seed or run.
    """
    check_whole(run)
    units = [[folder / name for name in FILES if (folder / name).is_file()] for folder in run.glob("*/seed-*")]
    files = sorted((each[0] for each in units if each), key=_preference)
    for file in files:
        if strategy in (None, file.parts[-3]) and (seed is None or file.parts[-2] == f"seed-{seed}"):
            check_own(file)
            return file
    of_strategy = "" if strategy is None else f" of {strategy}"
    of_seed = "" if seed is None else f" of seed {seed}"
    names = ", ".join(sorted(f"{file.parts[-3]} ({file.parts[-2]})" for file in files))
    remedy = "Give one of these by --strategy and --seed."
    if not files and not all((folder / "unit.json").is_file() for folder in run.glob("*/seed-*")):
        config, out = shlex.quote(str(run / "config.json")), shlex.quote(str(run))
        remedy = f"It was cut short: forgetfree run --config {config} --out {out} --resume goes on."
    elif not files:
        remedy = "Run one of forgetfree's own strategies, or one of yours that keeps its model or a ledger."
    raise RunError(
        f"{run} holds nothing{of_strategy}{of_seed} to answer from. It holds what these kept: {names or 'none'}. {remedy}"
    )


def _preference(file: Path) -> tuple[Any, ...]:
    strategy, seed = file.parts[-3], file.parts[-2].removeprefix("seed-")
    number = int(seed) if seed.isdecimal() else 0
    return strategy != "grafting-continual", file.name != LEDGER, strategy, number, seed


# -- What answers depend on besides the file -------------------------------------------------------------


def run_binding(
    tasks: Iterable[TaskDefinition], binding: Binding, shared_labels: bool, task_inference: str = "last"
) -> Json:
    """Return what answers depend on, as JSON.

    Args:
        tasks: the tasks of the stream, in order.
        binding: of the model.
        shared_labels: whether all tasks' labels have one readout.
        task_inference: how the task of a row is found out; ``last``: it is not. (The layer of ``lda`` is in its own file.)
    """
    return {
        "binding": binding.json,
        "shared_labels": shared_labels,
        "task_inference": task_inference,
        "tasks": {task.name: _reading(task) for task in tasks},
    }


def check_run_binding(source: Source, now: Binding) -> None:
    """Check that what answers now is what answered in the run. A file that was taken out of its run passes.

    Args:
        source: the file that answers, and what config.json says of its run.
        now: of the model.

    Raises:
        RunError: something differs, or unit.json is damaged.
    """
    from forgetfree.ledger.binding import Binding

    path = source.file.with_name(RECORD)
    if not path.exists():
        return
    record = read_record(path.parent)
    try:
        check_fields("", record, {"details": dict})
        check_fields("details", record["details"], {"bound": dict})
        stored = record["details"]["bound"]
        check_fields("details.bound", stored, {"binding": str, "tasks": dict})
        check_fields("details.bound.tasks", stored["tasks"], dict.fromkeys(stored["tasks"], dict))
        then = Binding.of_json(stored["binding"])
    except ValueError as error:
        raise RunError(f"{path}: {error}. Restore it from a copy, or run the stream again.") from error
    if differ := then.differences(now):
        raise RunError(
            f"{source.file} would not answer as it did: {'; '.join(differ)}. Use the model's own config.json and tokenizer, "
            "and the options that the stream was trained with."
        )
    tasks = {task.name: _reading(task) for task in source.tasks}
    _compare(source, "order of tasks", list(stored["tasks"]), list(tasks))
    for name, reading in stored["tasks"].items():
        for key in dict.fromkeys((*reading, *tasks[name])):
            _compare(source, f"{key} of task {name!r}", reading.get(key), tasks[name].get(key))
    _compare(source, "readout of all tasks' labels together", stored.get("shared_labels"), source.shared_labels)
    _compare(source, "task_inference", stored.get("task_inference"), source.task_inference)


def _compare(source: Source, what: str, expected: Any, got: Any) -> None:
    if expected != got:
        raise RunError(
            f"{source.file.with_name(RECORD)} and the run's config.json differ in the {what}: expected {_shown(expected)}, got "
            f"{_shown(got)}. {_REMEDY}"
        )


def _reading(task: TaskDefinition) -> Json:
    """Return the fields of a task as a JSON file gives them back."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in task.fields.items()}


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else brief(value)
