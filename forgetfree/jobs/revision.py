"""A run based on a finished one: with further tasks, or without one of its tasks.

The new directory starts like a run of the new stream that was stopped where the two streams diverge, and is resumed there.
The part that is carried over is the same bit for bit, and later tasks are trained as in any run of the new stream, so the
results equal a run of the new stream from the start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from forgetfree import registry
from forgetfree.data.columns import labels_of_tasks, mapped_label, names_for, names_of_tasks, written_label
from forgetfree.data.sources import tasks_of_files
from forgetfree.display import nfc
from forgetfree.errors import ModelError, RunError, TaskError, UsageError, nearest
from forgetfree.files import link_or_copy, make_directory, write_atomically
from forgetfree.jobs.checkpoints import LearnedStream
from forgetfree.jobs.config import RunConfig, prepared, stream_of
from forgetfree.jobs.continuation import changed_inputs, told_circumstances
from forgetfree.jobs.option_file import for_strategies, read_options
from forgetfree.jobs.run_directory import Json, Unit
from forgetfree.json_file import parse_json
from forgetfree.ledger.ledger import Ledger
from forgetfree.models.loading import usual_max_length
from forgetfree.models.state import ModelState
from forgetfree.results.run_folder import HISTORY, LEDGER, PREDICTIONS, SCORES_FILE, Score, load_run, read_scores
from forgetfree.tasks import TaskDefinition
from forgetfree.tensor_file import TensorFile

if TYPE_CHECKING:
    from forgetfree.continual.strategy import ContinualStrategy

_REMEDY = "Restore it from a copy, or run the stream again."


def revise(run: Path, tasks: Sequence[str], without: str | None, out: Path, options: Mapping[str, Any]) -> Revision:
    """Return a run that learns further tasks on top of a finished one, or that run as if it had never learned one task.

    Args:
        run: the directory of the finished run; it does not change.
        tasks: the tasks to learn after its own.
        without: the task to remove; ``None``: no task.
        out: the new directory.
        options: options in place of the run's own, by their names in a file: ``data``, the place of the further tasks, or
            the new place of the others; ``model``, if it has moved; ``strategy`` and ``seed``; and options for reading rows,
            which hold for the further tasks unless they name a task.

    Raises:
        UsageError: ``tasks`` and ``without`` are both given, or neither.
        TaskError: the run has learned one of ``tasks`` already, or it did not learn ``without``, or learned nothing else.
        RunError: a unit to carry over is not finished, or its files are damaged.
    """
    without = None if without is None else nfc(without)
    if without is not None and tasks:
        raise UsageError(
            f"--without {without} removes a task, but {', '.join(tasks)} would be added. Do one after the other."
        )
    if without is None and not tasks:
        raise UsageError(f"No task to learn on top of {run} was given. Name one, or give its file with --data.")
    finished = FinishedRun(run)
    if known := [task for task in tasks if task in finished.tasks]:
        raise TaskError(
            f"{run} has already learned {known[0]!r}. To learn new data for it, give the task another name, such as "
            f"{known[0]}-2, by renaming the file or folder."
        )
    if without is not None and without not in finished.tasks:
        raise TaskError(
            f"{run} did not learn a task {without!r}.{nearest(without, finished.tasks)} It learned: "
            f"{', '.join(finished.tasks)}."
        )
    _check_name_of_file(options.get("data"), tasks, finished)
    if not (stream := [*(name for name in finished.tasks if name != without), *tasks]):
        raise TaskError(f"{run} learned only {without!r}. Delete the directory instead.")
    given = {key: names_of_tasks(options[key], tasks) for key in _OF_ROWS if options.get(key) and tasks}
    known = [*finished.tasks, *tasks]
    given |= {"map_label": labels_of_tasks(options["map_label"], tasks, known)} if options.get("map_label") else {}
    config = prepared(finished.config_of(stream, out, {**options, **given}))
    finished.check_units(config.units)
    return Revision(finished, tuple(stream), config)


def _check_name_of_file(data: Any, tasks: Sequence[str], finished: FinishedRun) -> None:
    """Raise ``TaskError`` if one new file and one new task have different names: beside other data, a file names its task."""
    held = [name for name in tasks_of_files(_listed(data)) if name not in finished.tasks]
    if len(held) == len(tasks) == 1 and held[0] != tasks[0]:
        raise TaskError(
            f"A file that is added to the tasks of {finished.directory} is a task with the file's name: expected "
            f"{tasks[0]!r}, got {held[0]!r}. Name the task {held[0]}, or rename the file to {tasks[0]}."
        )


#: Options for reading the rows of tasks: the values for further tasks are added to the run's own.
_OF_ROWS = ("text_column", "label_column", "kind", "metric")


class FinishedRun:
    """A finished run; `check_units` checks the units that are carried over."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config, self.section = load_run(directory), read_options(directory)
        self.tasks = [str(each["name"]) for each in self.config["tasks"]]
        self.units = {folder: Unit(key, directory / folder) for folder, key in self.config["units"].items()}

    def check_units(self, folders: Collection[str]) -> None:
        """Raise ``RunError`` if a unit in one of these folders is not finished."""
        for folder, unit in self.units.items():
            if folder in folders and not unit.is_done():
                raise RunError(
                    f"{unit.directory} is not finished, or its files have changed. Finish it with --resume first, or "
                    "choose finished strategies and seeds with --strategy and --seed."
                )

    def config_of(self, tasks: Sequence[str], out: Path, options: Mapping[str, Any]) -> RunConfig:
        """Return the configuration of a run of these tasks, with ``options`` in place of this run's own."""
        section = for_strategies(self.section, options.get("strategy", ())) | dict(options)
        # If both have a task, the new rows are used.
        section["data"] = [*dict.fromkeys([*_listed(options.get("data")), *_listed(self.section["data"])])]
        section |= {key: [*self.section[key], *options[key]] for key in _OF_ROWS if options.get(key)}
        mapped = {label for name in tasks for label in self.config["data"].get(name, {}).get("mapped", ())}
        kept = [each for each in self.section["map_label"] if written_label(mapped_label(each, self.tasks)) in mapped]
        section["map_label"] = [*kept, *options.get("map_label", ())]
        definitions = {each["name"]: TaskDefinition.of_fields(each) for each in self.config["tasks"]}
        left = [definitions[name] for name in tasks if name in definitions]
        section["readout"] = self.config["model"]["readout"]  # for fewer tasks, auto may choose another
        if usual_max_length(left) != usual_max_length(definitions.values()):  # the default may differ, too
            section["set"] = {"max_length": self.config["model"]["max_length"]} | section["set"]
        section |= {key: names_for(section[key], tasks) for key in _OF_ROWS if key in section}
        return RunConfig.of(section | {"stream": stream_of(tasks), "out": str(out), "fine_tuned": None})


def _listed(data: Any) -> list[str]:
    """Return the places that ``--data`` names; none if it is not given."""
    return [data] if isinstance(data, str) else list(data or ())


@dataclass(frozen=True)
class Revision:
    """The run of a new stream; its units begin with the results of a finished run.

    Attributes:
        base: the finished run.
        tasks: the tasks of the new stream.
        config: the configuration of the new run.
    """

    base: FinishedRun
    tasks: tuple[str, ...]
    config: RunConfig

    def __str__(self) -> str:
        taken = [task for task in self.base.tasks if task not in self.tasks]
        if taken:
            return f"Writing {self.base.directory} without {taken[0]}"
        return f"Learning {', '.join(self.tasks[len(self.base.tasks) :])} on top of {self.base.directory}"

    def trained_again(self) -> str:
        """Return a line with the tasks that each unit trains again without the removed task; empty if no task is removed."""
        if len(self.tasks) >= len(self.base.tasks):
            return ""
        units: dict[str, list[str]] = {}
        for name, seed in product(self.config.classes, self.config.seed):
            prefix = self.carried(name, seed, False)
            if prefix:
                again = ", ".join(self.tasks[len(prefix.tasks) :]) or "nothing"
                units.setdefault(again, []).append(name if len(self.config.seed) == 1 else f"{name}/seed-{seed}")
        told = "; ".join(f"{again} ({', '.join(names)})" for again, names in units.items())
        return f"Trained again: {told}" if told else ""

    def carried(self, strategy: str, seed: int, unlearned: bool) -> StreamPrefix | None:
        """Return the part of a unit that is carried over; ``None`` if the run does not have the unit.

        Args:
            strategy: the name of its strategy.
            seed: its seed.
            unlearned: whether tasks are answered before they are learned.
        """
        unit = self.base.units.get(f"{strategy}/seed-{seed}")
        return StreamPrefix(unit, self.base.tasks, self.tasks, self._form(strategy, unlearned)) if unit else None

    def _form(self, name: str, unlearned: bool) -> Form | None:
        """Return the form in which a unit's folder has its tasks, which only built-in strategies guarantee."""
        from forgetfree.continual.region_strategy import RegionStrategy

        strategy = self.config.classes[name]
        if name not in registry.STRATEGIES or self.config.common.scenario != "task":
            return None
        if issubclass(strategy, RegionStrategy) and strategy.forget_free:  # others may change earlier tasks' entries
            return "ledger"
        # The last state cannot give the answers that earlier states would give to a further task.
        grows = list(self.tasks[: len(self.base.tasks)]) == self.base.tasks
        return "state" if grows and strategy.resumable and not unlearned else None

    def take_models(self) -> None:
        """Take over the fine-tuned models of its tasks: as links if the disk supports them, else as copies."""
        if self.config.common.cache is not None or self.config.common.scenario == "class":
            return  # a cache is shared anyway; with scenario=class, readouts have the labels of all tasks
        new = Path(self.config.out) / "fine-tuned"
        for path in sorted((self.base.directory / "fine-tuned").glob("*.safetensors")):
            try:
                own_tasks = set(ModelState.load(path).readouts)
            except ModelError:  # a damaged model is trained again
                continue
            if own_tasks <= {*self.tasks}:
                make_directory(new)
                link_or_copy(path, new / path.name)  # replaces a copy that an earlier command left incomplete

    def compare(self, config: Json) -> None:
        """Add to the config.json of the new run the versions and the device that changed since the base was made.

        Raises:
            RunError: rows or model differ from the base's.
        """
        before = self.base.config
        shared = {task: rows for task, rows in before["data"].items() if task in self.tasks}
        if changed := changed_inputs(before | {"data": shared}, config):
            raise RunError(
                f"{self.base.directory} was made from other files: {' and '.join(changed)} changed since. Restore "
                "the old files, or run the whole stream again."
            )
        if circumstances := told_circumstances(before, config, self.base.directory):
            config["changed"] = [*before.get("changed", []), *circumstances]


# -- The part of a unit that is carried over -------------------------------------------------------------

#: The form in which a unit's folder has its learned tasks: a ledger with each task, or the state after all tasks.
Form = Literal["ledger", "state"]


class StreamPrefix:
    """The part of a finished unit that is carried over.

    Args:
        unit: a finished unit.
        learned: the tasks of its stream.
        tasks: the tasks of the new stream: without some of them, or with more at the end.
        form: the form in which the unit's folder has them; ``None``: none that a run could begin with.

    Attributes:
        tasks: the tasks that are carried over, the first of the new stream, which would learn them identically.
        ledger: the ledger of these tasks, if there is one.
    """

    def __init__(self, unit: Unit, learned: Sequence[str], tasks: Sequence[str], form: Form | None) -> None:
        self.unit, self._learned, self._stream = unit, list(learned), list(tasks)
        self._record: Json = unit.record() or {}
        extra = self._record["details"]["extra"]
        full = Ledger.load(unit.directory / LEDGER) if form == "ledger" else None
        taken = [task for task in learned if task not in tasks]
        starts_warm = self._record["details"]["options"].get("warm_start", False)

        def is_same(task: str) -> bool:
            if full is None:
                return task in tasks
            place = full.position(task)
            # With a warm start, a task depends on all earlier tasks.
            return not any(
                full.stands_on(task, each) or (starts_warm and full.position(each) < place) for each in taken
            )

        others = [task for task in learned if task in tasks] if full else learned
        same = list(takewhile(is_same, others))
        # Extra results describe a whole stream, so they cannot be carried over to another.
        self.tasks = same if full or (form == "state" and not extra) else []
        self.ledger = full and full.of_tasks(self.tasks)

    def put_into(self, learned: LearnedStream, directory: Path, unlearned: bool) -> int:
        """Load the part that is carried over, evaluate it, and return its number of tasks.

        Args:
            learned: the learned part of a new strategy, still empty.
            directory: the folder of the new unit.
            unlearned: whether tasks are answered before they are learned, too.

        Raises:
            RunError: the answers on this machine differ from the unit's.
        """
        strategy = learned.strategy
        tasks = strategy.stream.tasks[: len(self.tasks)]
        learned.scores = [score for score in self.scores if score.after < len(tasks)]
        new = [task for task in strategy.stream.tasks if task.name not in self._learned]
        if new and unlearned:  # earlier states were never evaluated on it
            for count in range(len(tasks)):
                self._put(strategy, count, directory)
                learned.add_scores(count, strategy.evaluate(new))
        self._put(strategy, len(tasks), directory)
        row = learned.answers.begun(tasks)
        for task in tasks:
            if not all(
                np.array_equal(array, self.predictions[f"{task.name}/{name}"].numpy())
                for name, array in row[task.name].tensors().items()
            ):
                raise RunError(
                    f"On this machine, the predictions for {task.name} differ from those of {self.unit.directory}, "
                    "so later tasks would be trained differently. Use the same machine, versions and number of "
                    "threads."
                )
        learned.add_scores(len(tasks), row)
        learned.kept_bytes, learned.seconds = self.kept_bytes(strategy.bytes_kept()), self.seconds
        return len(tasks)

    def _put(self, strategy: ContinualStrategy, count: int, directory: Path) -> None:
        """Bring a new strategy to the unit's state after ``count`` tasks; a ledger is also saved in ``directory``."""
        if self.ledger:
            self.ledger.of_tasks(self.tasks[:count]).save(directory / LEDGER)
            strategy.load(directory)
        else:
            strategy.load(self.unit.directory)

    @cached_property
    def scores(self) -> list[Score]:
        """The scores of tasks of the new stream, before training and after each task that is carried over."""
        rows = [0, *(row for row, task in enumerate(self._learned, 1) if task in self.tasks)]
        return [
            replace(score, after=rows.index(score.after))
            for score in read_scores(self.unit.directory / SCORES_FILE)
            if score.task in self._stream and score.after in rows
        ]

    def hand_over(self, directory: Path) -> None:
        """Write the logged steps of the tasks that are carried over to a new unit's folder."""
        if not (directory / HISTORY).stat().st_size:
            lines = (self.unit.directory / HISTORY).read_text(encoding="utf-8").splitlines(keepends=True)
            own = (line for line in lines if parse_json(line)["task"] in self.tasks)
            write_atomically(directory / HISTORY, "".join(own))

    @cached_property
    def predictions(self) -> dict[str, Tensor]:
        """The last answers on the tasks that are carried over, by their names in the file."""
        _, answers = TensorFile(RunError, _REMEDY).read(self.unit.directory / PREDICTIONS)
        return {name: tensor for name, tensor in answers.items() if name.rpartition("/")[0] in self.tasks}

    def kept_bytes(self, now: int) -> list[int]:
        """Return the bytes kept after each of the tasks that are carried over.

        Args:
            now: the bytes kept after all of them, which may include readouts of further tasks, or data beside a ledger.
        """
        kept: list[int] = list(accumulate(self.ledger.sizes)) if self.ledger else self._record["details"]["kept_bytes"]
        return [each + now - kept[-1] for each in kept]

    @property
    def seconds(self) -> list[float]:
        """The seconds of each task that is carried over."""
        seconds = self._record["details"]["seconds_per_task"]
        return [each for task, each in zip(self._learned, seconds, strict=True) if task in self.tasks]

    @property
    def updates(self) -> dict[str, int | None]:
        """The number of updates of each task that is carried over."""
        updates = self._record["details"]["by_task"].get("updates", {})
        return {task: updates.get(task) for task in self.tasks}
