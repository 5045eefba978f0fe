"""What a finished unit of a run hands on to a run of another stream: what the other tasks left, bit for bit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from torch import Tensor

from forgetfree.core.regions import Region
from forgetfree.errors import RunError
from forgetfree.files import make_directory, write_atomically, write_json
from forgetfree.jobs.diagnostics import write_floors
from forgetfree.jobs.ledger_summary import ledger_summary
from forgetfree.jobs.predictions import PREDICTION_FILE
from forgetfree.jobs.stream_checkpoint import LearnedStream
from forgetfree.jobs.stream_loading import Row
from forgetfree.jobs.unit import Json, Unit
from forgetfree.json_file import parse_json, read_json
from forgetfree.ledger import Ledger
from forgetfree.results.answers import json_of
from forgetfree.results.runs import read_floors
from forgetfree.results.scores import SCORES_FILE, Score, read_scores, write_scores
from forgetfree.results.unit_folder import BEFORE, HISTORY, PREDICTIONS, SECONDS_PER_TASK
from forgetfree.serve.source import LEDGER
from forgetfree.training.monitor import PHASES

if TYPE_CHECKING:
    from forgetfree.continual.evaluation import StreamAnswers
    from forgetfree.continual.regions import RegionStrategy
    from forgetfree.continual.strategy import ContinualStrategy

_REMEDY = "Restore it from a copy, or run the stream again."


#: What a unit's folder has of the tasks that were learned: a ledger with each of them, or the state after all of them.
Form = Literal["ledger", "state"]


class StreamPrefix:
    """What is carried over from a unit.

    Args:
        unit: a finished unit.
        learned: the tasks of its stream.
        tasks: those of the other stream: without some of them, or with more at the end.
        form: what the unit's folder has of them; ``None``: nothing that a run could begin with.

    Attributes:
        tasks: those that are carried over, the first of the other stream: they are what they would be there.
        is_complete: whether these are all.
        full_ledger: the ledger of all tasks of the unit's own stream, where there is one.
        ledger: that of the tasks that are carried over, likewise.
    """

    def __init__(self, unit: Unit, learned: Sequence[str], tasks: Sequence[str], form: Form | None) -> None:
        self.unit, self._learned, self._stream = unit, list(learned), list(tasks)
        self._record: Json = unit.record() or {}
        extra = self._record["details"]["extra"]
        same = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(learned, tasks, strict=False))]
        self.full_ledger = full = Ledger.load(unit.directory / LEDGER) if form == "ledger" else None
        if full and all(full.stands_alone(task) for task in learned if task not in tasks):  # they left nothing
            same = [task for task in learned if task in tasks]
        # What else is said of a whole stream is not of another.
        self.tasks = same if full or (form == "state" and not extra) else []
        self.ledger = full and full.of_tasks(self.tasks)
        self.is_complete = bool(full) and self.tasks == self._stream and not extra

    def hand_over(self, strategy: ContinualStrategy, directory: Path) -> None:
        """Hand a new strategy what was found for later tasks and depends on no other task, and a folder the logged steps."""
        localized: dict[str, Region] = {}
        if self.full_ledger and cast("RegionStrategy", strategy).localizes_alone:
            localized = {record.task: record.region for record in self.full_ledger.records}
            cast("RegionStrategy", strategy).known_regions = localized
        if not (directory / HISTORY).stat().st_size:
            write_atomically(directory / HISTORY, self.history(localized))

    def put_into(self, learned: LearnedStream, answers: StreamAnswers, directory: Path, unlearned: bool) -> int:
        """Put in place what is carried over, measure it, and return of how many tasks that is.

        Args:
            learned: a new strategy that has learned nothing.
            answers: that measure it.
            directory: of the unit.
            unlearned: whether tasks are answered before they are learned, too.

        Raises:
            RunError: this machine does not answer as the unit did.
        """
        strategy = learned.strategy
        tasks = strategy.stream.tasks[: len(self.tasks)]
        rows: list[Row] = [{} for _ in tasks]
        new = [task for task in strategy.stream.tasks if task.name not in self._learned]
        if new and unlearned:  # what the others left was not asked about it yet
            for count in range(len(tasks)):
                self._put(strategy, count, directory)
                rows[count] = strategy.evaluate(new)
        self._put(strategy, len(tasks), directory)
        rows.append(answers.begun(tasks))
        for task in tasks:
            now = rows[-1][task.name].tensors()
            if not all(
                np.array_equal(array, self.predictions[f"{task.name}/{name}"].numpy()) for name, array in now.items()
            ):
                raise RunError(
                    f"This machine does not answer {task.name} bit for bit as {self.unit.directory} did, so later "
                    "tasks would not be trained as they were. Use as many threads, the same machine and the same versions."
                )
        learned.kept_bytes = self.kept_bytes(strategy.bytes_kept())
        learned.rows, learned.seconds = rows, self.seconds
        return len(tasks)

    def _put(self, strategy: ContinualStrategy, count: int, directory: Path) -> None:
        """Put a new strategy where the unit's stood after some of the tasks, and what it keeps into a folder."""
        if self.ledger:
            self.ledger.of_tasks(self.tasks[:count]).save(directory / LEDGER)
            strategy.load(directory)
        else:
            strategy.load(self.unit.directory)

    @cached_property
    def scores(self) -> list[Score]:
        """The scores of the tasks of the other stream, before and after those that are carried over."""
        rows = [0, *(row for row, task in enumerate(self._learned, 1) if task in self.tasks)]
        return [
            replace(score, after=rows.index(score.after))
            for score in read_scores(self.unit.directory / SCORES_FILE)
            if score.task in self._stream and score.after in rows
        ]

    def history(self, localized: Collection[str] = ()) -> str:
        """Return the logged steps of the tasks that are carried over, and the search for γ of those that are ``localized``."""
        phases = {(task, "localize") for task in localized if task in self._stream}
        lines = (self.unit.directory / HISTORY).read_text(encoding="utf-8").splitlines(keepends=True)
        steps = ((line, parse_json(line)) for line in lines)
        return "".join(
            line for line, step in steps if step["task"] in self.tasks or (step["task"], step["phase"]) in phases
        )

    @cached_property
    def _answers(self) -> dict[str, Tensor]:
        return replace(PREDICTION_FILE, remedy=_REMEDY).read(self.unit.directory / PREDICTIONS)[1]

    @property
    def predictions(self) -> dict[str, Tensor]:
        """The last answers on the tasks that are carried over, as the file has them."""
        return {name: tensor for name, tensor in self._answers.items() if name.rpartition("/")[0] in self.tasks}

    @property
    def texts_before(self) -> dict[str, Sequence[str]]:
        """What the unit answered before training, by task of the other stream."""
        named = {name.rpartition("/"): tensor for name, tensor in self._answers.items()}
        return {
            task: json_of(tensor.numpy())
            for (task, _, part), tensor in named.items()
            if part == BEFORE and task in self._stream
        }

    def kept_bytes(self, now: int) -> list[int]:
        """Return what was kept after each of the tasks that are carried over.

        Args:
            now: what is kept after all of them, which may count the readouts of further tasks.
        """
        if self.ledger:
            return list(accumulate(self.ledger.sizes))
        kept: list[int] = self._record["details"]["kept_bytes"]
        return [each + now - kept[-1] for each in kept]

    @property
    def seconds(self) -> list[float]:
        """How long each of the tasks that are carried over took."""
        seconds = read_json(self.unit.directory / SECONDS_PER_TASK, RunError, _REMEDY)
        return [each for task, each in zip(self._learned, seconds, strict=True) if task in self.tasks]

    @property
    def updates(self) -> dict[str, int | None]:
        """How many updates each of the tasks that are carried over took."""
        updates = self._record["details"]["by_task"].get("updates", {})
        return {task: updates.get(task) for task in self.tasks}

    def unit_in(self, out: Path) -> Unit:
        """Return the unit in the other run."""
        return Unit(self.unit.key, out / self.unit.directory.relative_to(self.unit.directory.parents[1]))

    def write(self, out: Path, command: str) -> None:
        """Write the unit into another run, of which nothing has to be trained.

        Args:
            out: that run.
            command: what was typed.
        """
        assert self.ledger is not None
        unit = self.unit_in(out)
        directory = unit.directory
        make_directory(directory)
        self.ledger.save(directory / LEDGER)
        write_scores(directory / SCORES_FILE, self.scores)
        write_atomically(directory / HISTORY, self.history())
        PREDICTION_FILE.write(directory / PREDICTIONS, self.predictions)
        write_json(directory / SECONDS_PER_TASK, self.seconds)
        write_floors(directory, _of_tasks(read_floors(self.unit.directory), self.tasks))
        old_details = self._record["details"]
        details = old_details | {
            "by_task": _of_tasks(old_details.get("by_task", {}), self.tasks),
            "ledger": ledger_summary(self.ledger),
            "kept_bytes": self.kept_bytes(self.ledger.size_in_bytes),
            "extra": {},
            **self._bound(old_details),
            **self._held_aside(old_details),
            "seconds": dict.fromkeys(PHASES, 0.0),
        }
        made = {key: self._record[key] for key in ("versions", "machine")} | {"command": command}
        unit.end(made, details)

    def _bound(self, details: Json) -> Json:
        """Return what answers depend on, of the tasks that are carried over."""
        bound = details["bound"]
        return {"bound": bound | {"tasks": {task: bound["tasks"][task] for task in self.tasks}}}

    def _held_aside(self, details: Json) -> Json:
        """Return the losses on texts that no task trains, by the models of the tasks that are carried over."""
        losses = details.get("held_aside", {})
        if "by_task" not in losses:
            return {}
        by_task = [loss for task, loss in zip(self._learned, losses["by_task"], strict=True) if task in self.tasks]
        return {"held_aside": losses | {"by_task": by_task}}


def _of_tasks(numbers: Json, tasks: Sequence[str]) -> Json:
    """Return of each kind of numbers those of some tasks."""
    return {kind: {task: number for task, number in of.items() if task in tasks} for kind, of in numbers.items()}
