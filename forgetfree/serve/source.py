"""The source of answers: a strategy's saved file, and the run's settings for it. It is read once, before any model.

A ledger contains the settings that its answers depend on; for other files they are in unit.json, under ``bound``. The run's
config.json has the model's location, how the task of a row is inferred, and whether rows are answered one by one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.errors import RunError, UsageError
from forgetfree.json_file import check_fields
from forgetfree.recipes import ModelDtype
from forgetfree.registry import WEIGHTS
from forgetfree.results.run_folder import FEATURES, LEDGER, RECORD, check_own, load_run, located, read_record
from forgetfree.tasks import TaskDefinition

if TYPE_CHECKING:
    from forgetfree.ledger.binding import Binding

#: The files that answers come from; for each strategy and seed, the first one that exists is used.
FILES = (LEDGER, *WEIGHTS)
_REMEDY = "Use the definition that the stream was trained with."
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A strategy's saved file, and the run's settings for it.

    Attributes:
        file: the file; a file with a name that is not in `FILES` is a ledger.
        model: current name or directory of the base model.
        strategy: the name of the strategy; empty if there is no run.
        graftable: the run's ``--set graftable``.
        dtype: the run's ``--set dtype``.
        deterministic: whether the run answered each row in a pass of its own.
        stores: directories that may contain the models that the file names.
        task_inference: how the run inferred the task of a row; ``last``: it did not.
        tasks: for a file that is no ledger, the definitions of the run's tasks, in the order of the stream.
        binding, fingerprint: likewise, the properties of the model that its answers depend on.
        shared_labels: likewise, whether all tasks' labels have one readout (``scenario=class``).
    """

    file: Path
    model: str
    strategy: str = ""
    graftable: str | None = None
    dtype: ModelDtype = "float32"
    deterministic: bool = False
    stores: Sequence[Path] = ()
    task_inference: str = "last"
    tasks: Sequence[TaskDefinition] = ()
    binding: Binding | None = None
    fingerprint: str = ""
    shared_labels: bool = False

    @classmethod
    def of(cls, place: Path, seed: int | None = None, strategy: str | None = None, model: str | None = None) -> Source:
        """Return the source in a run's directory, or the ledger at a path.

        Args:
            place: the directory of ``forgetfree run --out``; or a ledger, which needs ``model``; or the directory of
                ``forgetfree export`` for a task beside the weights, with a ledger and its model.
            seed: the seed; default: the first.
            strategy: the strategy; default: ``grafting-continual``, or else the first with a ledger, or else the first.
            model: the base model, if it has moved.

        Raises:
            RunError: it is no run directory, or has no saved strategy, or the file belongs to another seed or run.
            UsageError: a ledger is given without its model, or with a seed or strategy.
        """
        if (place / LEDGER).is_file() and (place / "config.json").is_file():
            place, model = place / LEDGER, model or str(place)
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
                f"{place} has a model that was fine-tuned elsewhere and predicts with its own head. Write it as an ordinary "
                f"model: forgetfree apply {place} --out DIR."
            )
        settings, options = config["run"]["set"], _options(config, file.parts[-3])
        task_inference = "last" if config.get("scenario", "task") == "task" else options.get("task_inference", "last")
        if task_inference == "lda":
            check_own(file.with_name(FEATURES))
        return cls(
            file=file,
            model=model or located(config["model"]["name"], place),
            strategy=file.parts[-3],
            graftable=settings.get("graftable"),
            dtype="bfloat16" if settings.get("dtype") == "bfloat16" else "float32",
            deterministic=options.get("evaluation_batch_size") == 1,
            stores=[file.parent, Path(settings.get("cache") or place / "fine-tuned")],
            task_inference=task_inference,
            **({} if file.name == LEDGER else _read_bound(file.parent)),
        )

    @property
    def is_ledger(self) -> bool:
        """Whether the file is a ledger."""
        return self.file.name not in WEIGHTS


def _options(config: Mapping[str, Any], strategy: str) -> Mapping[str, Any]:
    """Return the options of a strategy that config.json lists."""
    options = config.get("options")
    own = options.get(strategy) if isinstance(options, dict) else None
    return own if isinstance(own, dict) else {}


def saved_file(run: Path, seed: int | None = None, strategy: str | None = None) -> Path:
    """Return the file that answers come from, checked against its unit.json; `Source.of` says which file it is.

    Args:
        run: the run's directory.
        seed: the seed; default: the first.
        strategy: the strategy.

    Raises:
        RunError: the run has none, or it belongs to another seed or run.
    """
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
        remedy = f"The run was interrupted: continue it with forgetfree run --config {config} --out {out} --resume."
    elif not files:
        remedy = "Run one of forgetfree's own strategies, or one of yours that keeps its model or a ledger."
    raise RunError(
        f"{run} has no model or ledger{of_strategy}{of_seed} to predict with. It has those of: {names or 'none'}. {remedy}"
    )


def _preference(file: Path) -> tuple[Any, ...]:
    strategy, seed = file.parts[-3], file.parts[-2].removeprefix("seed-")
    number = int(seed) if seed.isdecimal() else 0
    return strategy != "grafting-continual", file.name != LEDGER, strategy, number, seed


# -- The settings that answers of other files depend on --------------------------------------------------


def bound_of(tasks: Iterable[TaskDefinition], binding: Binding, fingerprint: str, shared_labels: bool) -> Json:
    """Return the settings that a unit's answers depend on in addition to its file; unit.json stores them for `Source.of`.

    Args:
        tasks: the tasks of the stream, in order.
        binding: the binding of the model.
        fingerprint: the fingerprint of its weights.
        shared_labels: whether all tasks' labels have one readout.
    """
    return {
        "fingerprint": fingerprint,
        "binding": binding.json,
        "shared_labels": shared_labels,
        "tasks": {task.name: task.fields for task in tasks},
    }


def _read_bound(folder: Path) -> Json:
    """Return the result of `bound_of` from unit.json, with the fields of `Source` as keys.

    Raises:
        RunError: the unit has not ended, or its unit.json is damaged.
    """
    from forgetfree.ledger.binding import Binding

    path = folder / RECORD
    if not path.exists():
        raise RunError(
            f"{folder} has no {RECORD}, which defines its tasks: the run was interrupted. Continue it with --resume."
        )
    record = read_record(folder)
    try:
        check_fields("", record, {"details": dict})
        check_fields("details", record["details"], {"bound": dict})
        bound = record["details"]["bound"]
        expected = {"fingerprint": str, "binding": str, "shared_labels": bool, "tasks": dict}
        check_fields("details.bound", bound, expected)
        tasks = [TaskDefinition.of_fields(fields) for fields in bound["tasks"].values()]
        return {**bound, "binding": Binding.of_json(bound["binding"]), "tasks": tasks}
    except ValueError as error:
        raise RunError(f"{path}: {error}. Restore it from a copy, or run the stream again.") from error
