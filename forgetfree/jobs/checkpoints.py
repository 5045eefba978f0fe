"""Where a unit stands, in ``.checkpoint`` in its folder, which goes when the unit has ended.

circumstances.json    threads, versions and device it is computed with: under others the unit starts again
PHASE.safetensors     where a phase of training stands: a file for each phase since the last task that was learned
STRATEGY/             what is learned of the stream, task by task, so that no finished task is learned again:
  learned-K/          what the strategy keeps after K tasks, by its `save`: of the newest K alone
  learned-K/measured.safetensors  what was measured, and the SHA-256 of each file beside it
  answers-K.safetensors           the answers that are new after K tasks, and what was measured beside them

A phase is known by the digest of all that it starts from. So none goes on from another's state, and one that ended is passed
over: its last state is kept, too.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forgetfree.checkpoint import Checkpoint, Resumable
from forgetfree.errors import ForgetfreeError, RunError
from forgetfree.files import new_directory, write_json
from forgetfree.json_file import parse_json, read_json
from forgetfree.results.answers import Answers
from forgetfree.results.unit_folder import described_files
from forgetfree.tensor_file import TensorFile, checksum

if TYPE_CHECKING:
    from forgetfree.continual.strategy import ContinualStrategy, StreamAnswers

#: The answers on every task's test rows.
Row = dict[str, Answers]

#: The folder.
CHECKPOINT = ".checkpoint"
_CIRCUMSTANCES = "circumstances.json"
_FILE = TensorFile(RunError, "", "forgetfree.checkpoint")
_ANSWERS, _MEASURED = TensorFile(RunError, "", "forgetfree.answers"), "measured.safetensors"
#: Seconds between two writes of a phase, at least.
INTERVAL = 60.0
#: The share of the time that writing may take.
SHARE = 0.02
#: Bytes a second that a file is taken to be written at, before one was; and the seconds that any takes.
_SPEED, _LEAST = 2e8, 0.02


class FileCheckpoint(Checkpoint):
    """Keeps where each phase of a unit stands.

    Args:
        directory: of the unit.
        circumstances: what the bits depend on beside the unit itself.

    Attributes:
        directory: of the checkpoints.
        goes_on: whether there were checkpoints of the same circumstances.
    """

    def __init__(self, directory: Path, circumstances: Mapping[str, Any]) -> None:
        self.directory: Path = directory / CHECKPOINT
        self.goes_on = _read(self.directory) == json.loads(json.dumps(circumstances))
        self._circumstances = circumstances
        self._path: Path | None = None  # of the phase that is under way
        self._begun, self._begin = set[Path](), 0.0  # those begun here, and when that was
        self._written, self._seconds = time.monotonic(), 0.0

    def start(self) -> None:
        """Make the folder; an empty one, unless the unit goes on."""
        if not self.goes_on:
            shutil.rmtree(self.directory, ignore_errors=True)
            write_json(self.directory / _CIRCUMSTANCES, self._circumstances)

    def begin(self, steps: int, state: Resumable, *about: Any) -> int:
        """Bring the phase to where it was kept."""
        try:  # without the generators: what they are started from stands in ``about``
            text, tensors = pack([steps, state.state_dict() | {"generators": None}, about])
        except TypeError:  # an optimiser with a state of another kind: nothing is kept
            self._path = None
            return 0
        self._path = self.directory / f"{checksum(tensors, {'state': text})[:24]}.safetensors"
        self._seconds = max(_LEAST, sum(tensor.nbytes for tensor in tensors.values()) / _SPEED)
        step, self._begin = 0, self.clock()
        try:
            header, tensors = _FILE.read(self._path)
            done, kept, seconds = unpack(header["state"], tensors)
        except (RunError, ValueError):  # none, or damaged: the phase starts again
            pass
        else:
            step = int(done)
            state.load_state_dict(kept)
            self.earlier += 0.0 if self._path in self._begun else seconds
        self._begun.add(self._path)
        return step

    def after(self, step: int, steps: int, state: Resumable) -> None:
        """Write the state, if a minute has passed or the phase is done, and writing takes at most its share of the time."""
        if self._path is None:
            return
        since, least = time.monotonic() - self._written, INTERVAL if step < steps else 0.0
        if since >= max(least, self._seconds / SHARE):
            begin = time.monotonic()
            text, tensors = pack([step, state.state_dict(), self.clock() - self._begin])
            _FILE.write(self._path, tensors, {"state": text})
            self._written = time.monotonic()
            self._seconds = max(_LEAST, self._written - begin)

    def forget(self) -> None:
        """Remove the states of all phases."""
        for path in self.directory.glob("*.safetensors"):
            path.unlink()

    def end(self) -> None:
        """Remove the folder: the unit has ended."""
        remove_checkpoint(self.directory.parent)


def remove_checkpoint(directory: Path) -> None:
    """Remove a unit's checkpoints from its folder."""
    shutil.rmtree(directory / CHECKPOINT, ignore_errors=True)


def _read(directory: Path) -> Any:
    try:
        return read_json(directory / _CIRCUMSTANCES, RunError, "")
    except RunError:
        return None


# -- A stream --------------------------------------------------------------------------------------------


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
        done = max((int(path.name.removeprefix("learned-")) for path in directory.glob("learned-*")), default=0)
        rows, sampled, about = list[Row](), Row(), dict[str, Any]()
        while (path := directory / f"answers-{len(rows)}.safetensors").exists():
            header, tensors = _ANSWERS.read(path)
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
            measured = parse_json(_ANSWERS.read(folder / _MEASURED)[0]["about"])
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
                "files": described_files(directory),
            }
            _ANSWERS.write(directory / _MEASURED, {}, {"about": json.dumps(measured)})
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
        _ANSWERS.write(path, tensors, {"about": json.dumps(about)})


def _new(kind: str, now: Mapping[str, Answers], before: Mapping[str, Answers]) -> list[tuple[str, str, Answers]]:
    return [(kind, task, answers) for task, answers in now.items() if before.get(task) is not answers]


# -- A state as tensors and one text ---------------------------------------------------------------------


def pack(state: Any) -> tuple[str, dict[str, Tensor]]:
    """Return a state as JSON, in which tensors stand as their numbers, and those tensors.

    Raises:
        TypeError: it holds something else than tensors, numbers, texts and ``None`` in dictionaries, lists and tuples.
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
    """Return the state that `pack` was given."""

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
