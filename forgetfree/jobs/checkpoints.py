"""The checkpoint of a unit: its folder ``.checkpoint`` with the states of phases and learned tasks, removed when the unit ends.

Until its task is learned, each phase of training has a file, named by a digest of everything that the phase starts from. No
phase is therefore resumed from the state of another one, and a phase that has ended is skipped: its last state is kept, too.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forgetfree.checkpoint import Checkpoint, Resumable
from forgetfree.errors import ForgetfreeError, RunError
from forgetfree.files import new_directory, write_json
from forgetfree.jobs.run_directory import Unit
from forgetfree.json_file import read_json
from forgetfree.results.run_folder import (
    CHECKPOINT,
    SCORES_FILE,
    Score,
    described_files,
    write_scores,
)
from forgetfree.tensor_file import TensorFile, checksum
from forgetfree.training.monitor import Monitor

if TYPE_CHECKING:
    from forgetfree.continual.strategy import ContinualStrategy
    from forgetfree.results.answers import Answers
    from forgetfree.training.encoded_task import EncodedTask

Json = dict[str, Any]
_CIRCUMSTANCES = "circumstances.json"
_FILE = TensorFile(RunError, "", "forgetfree.checkpoint")
#: Minimum number of seconds between two writes of a phase.
INTERVAL = 60.0
#: Largest share of the time that writing may take.
SHARE = 0.02
#: Assumed speed of the first write in bytes per second, and minimum number of seconds of a write.
_SPEED, _LEAST = 2e8, 0.02


class FileCheckpoint(Checkpoint):
    """Stores the state of each phase of a unit.

    Args:
        directory: the folder of the unit.
        circumstances: versions and machine, which decide the bits of the results.

    Attributes:
        directory: the folder of the checkpoint.
        goes_on: whether there is a checkpoint made under the same circumstances.
    """

    def __init__(self, directory: Path, circumstances: Mapping[str, Any]) -> None:
        self.directory: Path = directory / CHECKPOINT
        try:
            before: Any = read_json(self.directory / _CIRCUMSTANCES, RunError, "")
        except RunError:
            before = None
        self.goes_on = before == json.loads(json.dumps(circumstances))
        self._circumstances = circumstances
        self._path: Path | None = None  # file of the current phase
        self._begun, self._begin = set[Path](), 0.0  # phases begun by this process; start of the current one
        self._written, self._seconds = time.monotonic(), 0.0

    def start(self) -> None:
        """Empty the folder and write the circumstances, unless the unit goes on from its checkpoint."""
        if not self.goes_on:
            shutil.rmtree(self.directory, ignore_errors=True)
            write_json(self.directory / _CIRCUMSTANCES, self._circumstances)

    def begin(self, steps: int, state: Resumable, *about: Any) -> int:
        """Load the last state of the phase, if there is one, and return its step."""
        try:  # without the generators: ``about`` has their seed
            text, tensors = pack([steps, state.state_dict() | {"generators": None}, about])
        except TypeError:  # an optimiser whose state `pack` refuses: nothing is stored
            self._path = None
            return 0
        self._path = self.directory / f"{checksum(tensors, {'state': text})[:24]}.safetensors"
        self._seconds = max(_LEAST, sum(tensor.nbytes for tensor in tensors.values()) / _SPEED)
        step, self._begin = 0, self.clock()
        try:
            done, kept, seconds = _read(self._path)
        except (RunError, ValueError):  # no file, or a damaged one: the phase starts again
            pass
        else:
            step = int(done)
            state.load_state_dict(kept)
            self.earlier += 0.0 if self._path in self._begun else seconds
        self._begun.add(self._path)
        return step

    def after(self, step: int, steps: int, state: Resumable) -> None:
        """Write the state once a minute and when the phase is done, unless writing would exceed its share of the time."""
        if self._path is None:
            return
        since, least = time.monotonic() - self._written, INTERVAL if step < steps else 0.0
        if since >= max(least, self._seconds / SHARE):
            begin = time.monotonic()
            _write(self._path, [step, state.state_dict(), self.clock() - self._begin])
            self._written = time.monotonic()
            self._seconds = max(_LEAST, self._written - begin)

    def forget(self) -> None:
        """Remove the states of all phases."""
        for path in self.directory.glob("*.safetensors"):
            path.unlink()

    def end(self) -> None:
        """Remove the folder: the unit has ended."""
        shutil.rmtree(self.directory, ignore_errors=True)


# -- A state as tensors and one text ---------------------------------------------------------------------


def pack(state: Any) -> tuple[str, dict[str, Tensor]]:
    """Return a state as JSON, which refers to tensors by number, and these tensors.

    Raises:
        TypeError: it holds anything but tensors, numbers, texts and ``None`` in dictionaries, lists and tuples.
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = str(len(tensors))
            tensors[name] = value.detach().cpu()
            return {"tensor": name}
        if isinstance(value, Mapping):
            return {"dict": [[plain(key), plain(each)] for key, each in value.items()]}
        if isinstance(value, tuple):
            return {"tuple": [plain(each) for each in value]}
        return [plain(each) for each in value] if isinstance(value, list) else value

    return json.dumps(plain(state)), tensors


def unpack(text: str, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `pack` converted."""

    def rich(value: Any) -> Any:
        if isinstance(value, list):
            return [rich(each) for each in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            return tensors[content]
        return tuple(map(rich, content)) if kind == "tuple" else {rich(key): rich(each) for key, each in content}

    return rich(json.loads(text))


def _write(path: Path, state: Any) -> None:
    text, tensors = pack(state)
    _FILE.write(path, tensors, {"state": text})


def _read(path: Path) -> Any:
    """Return the state that `_write` wrote; raise ``RunError`` if the file is missing or damaged."""
    header, tensors = _FILE.read(path)
    return unpack(header["state"], tensors)


# -- The learned part of a stream -------------------------------------------------------------------------

_LEARNED, _ANSWERS = "learned.safetensors", "answers.safetensors"


class LearnedStream:
    """The part of a stream that a strategy has learned. If the strategy is `resumable`, it is stored in the unit's checkpoint.

    The checkpoint's folder ``learned-K`` has

    - once K tasks are learned: the files that the strategy saves, and learned.safetensors with times and updates
    - once they are answered: answers.safetensors with the latest answers, all scores so far, and bytes kept

    Args:
        strategy: a strategy that has learned nothing.
        unit: the unit whose scores.csv is written.
        monitor: receives the scores, and has the unit's checkpoint.
        unlearned: whether tasks are also answered before they are learned.

    Attributes:
        answers: the strategy's answers.
        scores: the scores before training and after each task.
        kept_bytes: the bytes kept after each task.
        seconds: the time that each task took to learn.
    """

    def __init__(self, strategy: ContinualStrategy, unit: Unit, monitor: Monitor, *, unlearned: bool) -> None:
        from forgetfree.continual.strategy import StreamAnswers

        self.strategy, self._unit, self._monitor = strategy, unit, monitor
        self.answers = StreamAnswers(strategy, upper_triangle=unlearned)
        self.scores, self.kept_bytes, self.seconds = list[Score](), list[int](), list[float]()
        self._measured: dict[str, tuple[Answers, list[tuple[str, float]]]] = {}  # most answers stay the same objects
        self._directory = monitor.checkpoint().directory if strategy.resumable else None

    def add_scores(self, number: int, row: Mapping[str, Answers]) -> None:
        """Add the scores of the answers after ``number`` tasks (0: before training) to scores.csv."""
        key = self._unit.key["strategy"], self._unit.key["seed"]
        new = [
            Score(*key, task.name, number, metric, float(value), len(task.test))
            for task in self.strategy.stream.tasks
            if task.name in row
            for metric, value in self._scores_of(task, row[task.name])
        ]
        self.scores = sorted([*self.scores, *new], key=lambda score: score.after)
        write_scores(self._unit.directory / SCORES_FILE, self.scores)
        self._monitor.log_scores(new)

    def _scores_of(self, task: EncodedTask, answers: Answers) -> list[tuple[str, float]]:
        if task.name not in self._measured or self._measured[task.name][0] is not answers:
            metric = task.definition.metric
            self._measured[task.name] = answers, [*({metric: answers.score(metric)} | answers.more_scores()).items()]
        return self._measured[task.name][1]

    def keep(self, number: int) -> None:
        """Store the strategy after ``number`` tasks."""
        if self._directory is None:
            return
        strategy = self.strategy
        with new_directory(self._directory / f"learned-{number}") as folder:
            strategy.save(folder)
            about = {"seconds": self.seconds, "updates": strategy.updates, "phases": strategy.seconds}
            _write(folder / _LEARNED, about | {"files": described_files(folder)})
        self._monitor.checkpoint().forget()

    def keep_answers(self, number: int) -> None:
        """Store the answers after ``number`` tasks, and the scores so far."""
        if self._directory is None:
            return
        kept = {
            "answers": _tensors(self.answers.answers),
            "samples": _tensors(self.answers.sampled),
            "scores": list(map(astuple, self.scores)),
            "kept_bytes": self.kept_bytes,
            "broken": self.answers.broken,
            "phases": self.strategy.seconds,
        }
        folder = self._directory / f"learned-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / _ANSWERS, kept)
        shutil.rmtree(self._directory / f"learned-{number - 1}", ignore_errors=True)

    def restore(self) -> tuple[int, int | None]:
        """Load the last stored state, and return how many tasks are learned, and after how many tasks there are answers."""
        if self._directory is None:
            return 0, None
        folders = {int(path.name.removeprefix("learned-")): path for path in self._directory.glob("learned-*")}
        try:
            return self._restore(folders)
        except (ForgetfreeError, LookupError, TypeError, ValueError):  # none or damaged: all tasks are learned again
            for folder in folders.values():
                shutil.rmtree(folder, ignore_errors=True)
            return 0, None

    def _restore(self, folders: Mapping[int, Path]) -> tuple[int, int]:
        strategy, done = self.strategy, max(folders)
        answered = max(number for number, folder in folders.items() if (folder / _ANSWERS).is_file())
        if done not in (answered, answered + 1):
            raise RunError(f"There are predictions after {answered} tasks, but {done} were learned.")
        kept, tasks = _read(folders[answered] / _ANSWERS), {task.name: task for task in strategy.stream.tasks}

        def answers(row: Json) -> dict[str, Answers]:
            arrays = {task: {name: tensor.numpy() for name, tensor in its.items()} for task, its in row.items()}
            return {task: tasks[task].kind.kept_answers(tasks[task].definition, its) for task, its in arrays.items()}

        phases = kept["phases"]
        if done:
            measured, files = _read(folders[done] / _LEARNED), described_files(folders[done])
            if any(files.get(name) != file for name, file in measured["files"].items()):
                raise RunError(f"{folders[done]} has changed since it was written.")
            strategy.load(folders[done])
            strategy.updates.update(measured["updates"])
            self.seconds = measured["seconds"]
            phases = measured["phases"] | phases if done == answered else phases | measured["phases"]
        strategy.seconds |= phases
        self.kept_bytes = kept["kept_bytes"]
        self.answers.broken += kept["broken"]
        self.answers.resume(strategy.stream.tasks[:answered], answers(kept["answers"]), answers(kept["samples"]))
        self.scores = [Score(*each) for each in kept["scores"]]
        write_scores(self._unit.directory / SCORES_FILE, self.scores)
        self._monitor.log_scores([score for score in self.scores if score.after == answered])
        return done, answered


def _tensors(row: Mapping[str, Answers]) -> dict[str, dict[str, Tensor]]:
    """Return copies of the arrays of answers, because several answers may share the labels of their rows."""
    return {
        task: {name: torch.tensor(array, device="cpu") for name, array in answers.tensors().items()}
        for task, answers in row.items()
    }
