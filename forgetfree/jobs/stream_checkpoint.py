"""What a unit has learned of its stream, kept task by task in a folder of its checkpoints: no finished task is learned again.

learned-K/                what the strategy keeps after K tasks, by its `save`: of the newest K alone
learned-K/measured.json   what was measured, and the SHA-256 of each file beside it
answers-K.safetensors     the answers that are new after K tasks, and what was measured beside them
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forgetfree.checkpoint import Checkpoint
from forgetfree.errors import ForgetfreeError, RunError
from forgetfree.files import new_directory, write_json
from forgetfree.jobs.checkpoints import tasks_learned
from forgetfree.jobs.stream_loading import Row
from forgetfree.jobs.unit import described_files
from forgetfree.json_file import parse_json, read_json, sign
from forgetfree.results.answers import Answers
from forgetfree.tensor_file import TensorFile

if TYPE_CHECKING:
    from forgetfree.continual.evaluation import StreamAnswers
    from forgetfree.continual.strategy import ContinualStrategy

_FILE, _MEASURED = TensorFile(RunError, "", "forgetfree.answers"), "measured.json"


@dataclass
class LearnedStream:
    """What a strategy made of a stream so far.

    Attributes:
        strategy: after the last task.
        rows: its answers before training, and after each task.
        broken: see `StreamAnswers`.
        kept_bytes: after each task.
        seconds: that each task took to learn.
    """

    strategy: ContinualStrategy
    rows: list[Row]
    broken: list[str]
    kept_bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class StreamCheckpoint:
    """Keeps what a strategy has learned, if it is `resumable`, and what it notes for the end.

    Args:
        checkpoint: that of the unit.
        name: of the strategy.
        learned: what is kept; the strategy is new, and has no row.
        answers: that bring the rows up to date.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, learned: LearnedStream, answers: StreamAnswers) -> None:
        self._phases, self._learned, self._answers = checkpoint, learned, answers
        kept = checkpoint.directory if learned.strategy.resumable else None
        self._directory = kept and kept / name
        self._sampled: Row = {}

    def restore(self) -> int:
        """Bring all to where it was kept, and return the number of tasks that are learned.

        That may be one more than there are rows after the first: it is to be answered.
        """
        if self._directory is None:
            return 0
        try:
            return self._restore(self._directory)
        except (ForgetfreeError, LookupError, TypeError, ValueError):  # damaged: all tasks are learned again
            shutil.rmtree(self._directory, ignore_errors=True)
            return 0

    def _restore(self, directory: Path) -> int:
        learned, strategy = self._learned, self._learned.strategy
        done = tasks_learned(directory)
        rows, sampled, about = list[Row](), Row(), dict[str, Any]()
        while (path := directory / f"answers-{len(rows)}.safetensors").exists():
            header, tensors = _FILE.read(path)
            tasks = {task.name: task for task in strategy.stream.tasks}
            new, about = {"answers": Row(), "samples": Row()}, parse_json(header["about"])
            if about["tasks"] != len(rows):
                raise RunError(f"{path} has the answers after {about['tasks']} tasks.")
            for kind, task, number in about["held"]:
                arrays = {
                    name.removeprefix(f"{number}/"): tensor.numpy()
                    for name, tensor in tensors.items()
                    if name.startswith(f"{number}/")
                }
                new[kind][task] = tasks[task].kind.kept_answers(tasks[task].definition, arrays)
            rows.append((rows[-1] if rows else {}) | new["answers"])
            sampled |= new["samples"]
        if done not in (len(rows) - 1, len(rows)) or not rows:
            raise RunError(f"{directory} has answers after {len(rows) - 1} tasks, and {done} are learned.")
        if done:
            folder = directory / f"learned-{done}"
            measured = read_json(folder / _MEASURED, RunError, "", signed=True)
            if measured["files"] != {name: each for name, each in described_files(folder).items() if name != _MEASURED}:
                raise RunError(f"{folder} has changed since it was written.")
            strategy.load(folder)
            strategy.seconds |= about["phases"] | measured["phases"]
            learned.seconds += measured["seconds"]
            strategy.updates.update(measured["updates"])
        learned.rows += rows
        learned.kept_bytes += about["kept_bytes"]
        learned.broken += about["broken"]
        self._sampled = dict(sampled)
        experiences = strategy.stream.benchmark.train_stream[: len(rows) - 1]
        self._answers.resume([strategy.stream.task_of(each) for each in experiences], rows[-1], sampled)
        return done

    def learn(self, done: int) -> None:
        """Keep what the strategy has learned from so many tasks."""
        if self._directory is None:
            return
        with new_directory(self._directory / f"learned-{done}") as directory:
            strategy = self._learned.strategy
            strategy.save(directory)
            measured = {
                "seconds": self._learned.seconds,
                "phases": strategy.seconds,
                "updates": strategy.updates,
            }
            write_json(directory / _MEASURED, sign(measured | {"files": described_files(directory)}))
        shutil.rmtree(self._directory / f"learned-{done - 1}", ignore_errors=True)
        self._phases.forget()

    def answer(self, *numbers: int) -> None:
        """Keep the rows of these numbers, the newest last; the one before training is 0."""
        if self._directory is None:
            return
        for number in numbers:
            self._answer(number, self._directory / f"answers-{number}.safetensors")

    def _answer(self, number: int, path: Path) -> None:
        rows, sampled, learned = self._learned.rows, self._answers.sampled, self._learned
        new_answers = _new("answers", rows[number], rows[number - 1] if number else {})
        new_answers += _new("samples", sampled, self._sampled)
        self._sampled = dict(sampled)
        about = {
            "tasks": number,
            "held": [[kind, task, number] for number, (kind, task, _) in enumerate(new_answers)],
            "kept_bytes": learned.kept_bytes,
            "broken": learned.broken,
            "phases": learned.strategy.seconds,
        }
        tensors = {  # copies, for several answers may hold the labels of the rows themselves
            f"{number}/{name}": torch.tensor(array, device="cpu")
            for number, (_, _, answers) in enumerate(new_answers)
            for name, array in answers.tensors().items()
        }
        _FILE.write(path, tensors, {"about": json.dumps(about)})


def _new(kind: str, now: Mapping[str, Answers], before: Mapping[str, Answers]) -> list[tuple[str, str, Answers]]:
    return [(kind, task, answers) for task, answers in now.items() if before.get(task) is not answers]
