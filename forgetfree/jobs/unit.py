"""A unit: the smallest piece of a job that is run, kept and resumed by itself. It writes into its own folder alone.

unit.json is written last: the size and SHA-256 of each file beside it, and of the config.json that it was made under.
"""

from __future__ import annotations

import errno
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forgetfree.checkpoint import Checkpoint
from forgetfree.errors import (
    ForgetfreeError,
    LedgerError,
    MetricError,
    RunError,
    TrainingError,
    UsageError,
    first_line,
    out_of_memory,
)
from forgetfree.files import is_full, link_or_copy, new_directory, write_atomically, write_json
from forgetfree.jobs.checkpoints import CHECKPOINT, FileCheckpoint
from forgetfree.json_file import parse_json
from forgetfree.results.unit_folder import (
    HISTORY,
    OUTCOME,
    RECORD,
    SCORES_FILE,
    Score,
    described_files,
    read_record,
    read_scores,
    read_unit_json,
    size_and_sha256,
    write_scores,
)
from forgetfree.tensor_file import TensorFile
from forgetfree.training.monitor import Monitor, Phase

if TYPE_CHECKING:
    from forgetfree.continual.strategy import ContinualStrategy
    from forgetfree.ledger import Ledger
    from forgetfree.results.answers import Answers
    from forgetfree.training.encoded_task import EncodedTask

Json = dict[str, Any]
#: Logged steps of a phase, about.
_LOGGED = 100
#: The answers of a unit on every task's test rows, as the kinds of the tasks keep them.
PREDICTION_FILE = TensorFile(RunError, "Go on with --resume, which makes it again.")
#: Errors that are no fault of the code.
_EXPECTED = (TrainingError, MetricError, LedgerError)


@dataclass(frozen=True)
class Unit:
    """One unit in a job's directory.

    Attributes:
        key: what it is, e.g. ``{"strategy": "fine-tune", "seed": 0}``.
        directory: its folder.
    """

    key: Mapping[str, Any]
    directory: Path

    def __str__(self) -> str:
        return named(self.key, " ")

    def record(self) -> Json | None:
        """Return how it ended; ``None`` where it has not, or what says so is damaged or another unit's."""
        try:
            record = read_record(self.directory)
        except RunError:
            return None
        return record if record["unit"] == self.key else None

    def is_done(self) -> bool:
        """Say whether it ended well, and all its files are as they were then."""
        record = self.record()
        return record is not None and record["status"] == "done" and record["files"] == described_files(self.directory)

    def forget(self) -> None:
        """Mark the unit as not ended, even if its files are damaged."""
        (self.directory / RECORD).unlink(missing_ok=True)

    def begin(self, circumstances: Json) -> FileCheckpoint:
        """Return the checkpoint from which it goes on if the circumstances are those of before; else it has an empty folder."""
        self.directory.mkdir(parents=True, exist_ok=True)
        kept = FileCheckpoint(self.directory, circumstances)
        for path in self.directory.iterdir():
            if not kept.goes_on or path.name not in (CHECKPOINT, HISTORY):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        kept.start()
        return kept

    def end(
        self,
        made: Json,
        details: Json,
        error: str | None = None,
        seconds: float = 0.0,
        floors: Json | None = None,
        config: str = "",
    ) -> None:
        """Write outcome.json and unit.json: the unit has ended, with the files that are in its folder.

        Args:
            made: its versions, machine and command.
            details: what else results.json needs of it.
            error: why it could not go on, if it could not.
            seconds: how long it took.
            floors: of its seed, beside the first strategy.
            config: SHA-256 of the run's config.json; empty: of none.
        """
        status = {"status": "done" if error is None else "failed", "error": error, "seconds": seconds}
        write_json(self.directory / OUTCOME, {**status, **made, "details": details, "floors": floors or {}})
        files = described_files(self.directory)
        write_json(
            self.directory / RECORD,
            {"schema": 1, "unit": self.key, "config": [config] if config else [], "files": files},
        )

    def accept(self, config: str) -> None:
        """Add the SHA-256 of the config.json that the run is about to have to those of the unit, if it has ended."""
        with suppress(RunError):  # it has not
            record = read_unit_json(self.directory)
            write_json(self.directory / RECORD, record | {"config": [*record["config"], config]})


def why_it_failed(fault: Exception, debug: bool) -> str:
    """Return what unit.json says of a fault (a loss that diverges, a mistake in a strategy), after which other units go on.

    Args:
        fault: what was raised.
        debug: let it through, unless it is one of training, metrics or ledgers.

    Raises:
        UsageError, OutOfMemoryError, OSError: what was asked for is wrong, there is no memory, or the disk is full or
            cannot be written: the other units would fail, too.
    """
    if told := out_of_memory(fault):
        raise told from fault
    if is_full(fault) and not isinstance(fault, ForgetfreeError | OSError):  # safetensors has an error of its own
        raise OSError(errno.ENOSPC, first_line(fault)) from fault
    full = isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EROFS, errno.EDQUOT)
    if full or isinstance(fault, UsageError) or (debug and not isinstance(fault, _EXPECTED)):
        raise fault
    if isinstance(fault, ForgetfreeError):
        return " ".join(str(fault).split("\n"))
    return f"It stopped with {type(fault).__name__}: {first_line(fault)}. Run it alone with --debug to see where."


def named(key: Mapping[str, Any], separator: str) -> str:
    """Return a unit's key as a message names it, e.g. ``fine-tune seed 0``."""
    return separator.join(value if isinstance(value, str) else f"{name} {value}" for name, value in key.items())


class History(Monitor):
    """Passes everything on to another monitor, and appends to history.jsonl the losses that do not stand there already.

    Args:
        monitor: hears of everything.
        directory: of the unit.
        checkpoint: of the unit.

    Attributes:
        log: logs losses, rates and scores over the updates of the unit, where that is asked for, see `trackers`.
    """

    log: Callable[[Mapping[str, float], int], object] | None = None

    def __init__(self, monitor: Monitor, directory: Path, checkpoint: Checkpoint) -> None:
        super().__init__(monitor)
        self._rate: Callable[[int], float] = lambda step: math.nan
        self._path, self._checkpoint = directory / HISTORY, checkpoint
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines() if self._path.exists() else []
        met = [line for line in map(_parsed, lines) if line]  # a kill may have cut the last one; what is damaged goes
        write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in met))
        self._met = Counter(map(_timeless, met))
        self._before, self._step = 0, 0  # updates of earlier phases, and of the last one
        for line in met:
            self._count(line["step"])
        self._begin = time.perf_counter() - max((line["seconds"] for line in met), default=0.0)

    @property
    def seconds(self) -> float:
        """The seconds that the unit has taken so far, as far as they were told."""
        return round(time.perf_counter() - self._begin, 3)

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint of the unit."""
        return self._checkpoint

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Log the steps of a phase; an evaluation logs no step."""
        self._rate = lambda step: math.nan  # until it is logged
        with super().phase(task, phase, steps) as pass_on:

            def on_step(step: int, loss: float) -> None:
                pass_on(step, loss)
                self.log_step(task, phase, step, steps, loss, self._rate(step))

            yield on_step

    def log_rate(self, of_step: Callable[[int], float]) -> None:
        """Remember it; pass it on."""
        self._rate = of_step
        super().log_rate(of_step)

    def log_step(self, task: str, phase: Phase, step: int, steps: int, loss: float, rate: float) -> None:
        """Log the step, if it is one of about a hundred; its rate may be NaN."""
        if math.isfinite(loss) and is_logged(step, steps):
            line: Json = {"task": task, "phase": phase, "step": step, "loss": loss, "rate": rate}
            line["seconds"] = self.seconds
            if math.isnan(rate):
                del line["rate"]
            if self._met[_timeless(line)]:  # before the unit was cut short
                self._met[_timeless(line)] -= 1
                return
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._count(step)
            if self.log:
                values = {f"{name}/{phase}": line[name] for name in ("loss", "rate") if name in line}
                self.log(values, self._before + step)

    def _count(self, step: int) -> None:
        """Count the updates up to a step, with which another phase may begin."""
        self._before += self._step if step <= self._step else 0
        self._step = step

    def log_scores(self, scores: Sequence[Score]) -> None:
        """Log scores by task; of a unit that goes on, the last ones are told again."""
        super().log_scores(scores)
        if self.log:
            self.log({f"{score.metric}/{score.task}": score.value for score in scores}, self._before + self._step)


def is_logged(step: int, steps: int) -> bool:
    """Say whether a step of a phase is one of about a hundred: the first, the last, and others between."""
    return step % max(1, steps // _LOGGED) == 0 or step in (1, steps)


def _parsed(line: str) -> Json | None:
    try:
        parsed: Any = parse_json(line)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) and isinstance(parsed.get("seconds"), float) else None


def _timeless(line: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in line.items() if key != "seconds"}, sort_keys=True)


# -- What it has learned so far ---------------------------------------------------------------------------

_NOTE = TensorFile(RunError, "", "forgetfree.answers")
_LEARNED, _ANSWERS = "learned.safetensors", "answers.safetensors"


class LearnedStream:
    """A stream as far as a strategy has learned it. If it is `resumable`, all is kept in the unit's checkpoint.

    In its folder ``learned-K`` stand

    - after K tasks were learned, what the strategy saves, and learned.safetensors: what was measured
    - after they were answered, scores.csv and answers.safetensors: the latest answers, and what was measured

    Args:
        strategy: that has learned nothing.
        unit: whose scores.csv is written.
        monitor: is told of scores, and has the unit's checkpoint.
        unlearned: whether tasks are answered before they are learned, too.

    Attributes:
        answers: of the strategy.
        scores: before training and after each task.
        kept_bytes: after each task.
        seconds: that each task took to learn.
    """

    def __init__(self, strategy: ContinualStrategy, unit: Unit, monitor: Monitor, *, unlearned: bool) -> None:
        from forgetfree.continual.strategy import StreamAnswers

        self.strategy, self._unit, self._monitor = strategy, unit, monitor
        self.answers = StreamAnswers(strategy, upper_triangle=unlearned)
        self.scores, self.kept_bytes, self.seconds = list[Score](), list[int](), list[float]()
        self._measured: dict[str, tuple[Answers, list[tuple[str, float]]]] = {}  # most answers stay the same objects
        self._directory = monitor.checkpoint().directory if strategy.resumable else None

    def add_scores(self, number: int, row: Mapping[str, Answers]) -> None:
        """Write the scores of the answers after so many tasks, 0 before training, beside the others."""
        key = self._unit.key["strategy"], self._unit.key["seed"]
        new = [
            Score(*key, task.name, number, metric, value, len(task.test))
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
        """Keep what was learned of so many tasks."""
        if self._directory is None:
            return
        strategy = self.strategy
        with new_directory(self._directory / f"learned-{number}") as folder:
            strategy.save(folder)
            about = {"seconds": self.seconds, "updates": strategy.updates, "phases": strategy.seconds}
            _NOTE.write(folder / _LEARNED, {}, {"about": json.dumps(about | {"files": described_files(folder)})})
        self._monitor.checkpoint().forget()

    def keep_answers(self, number: int) -> None:
        """Keep the answers after so many tasks, and the scores so far."""
        if self._directory is None:
            return
        folder = self._directory / f"learned-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        link_or_copy(self._unit.directory / SCORES_FILE, folder / SCORES_FILE)
        rows = {"answers": self.answers.answers, "samples": self.answers.sampled}
        entries = [(place, task, answers) for place, row in rows.items() for task, answers in row.items()]
        tensors = {  # copies, for several answers may hold the labels of the rows themselves
            f"{entry}/{name}": torch.tensor(array, device="cpu")
            for entry, (_, _, answers) in enumerate(entries)
            for name, array in answers.tensors().items()
        }
        about = {
            "entries": [[place, task] for place, task, _ in entries],
            "kept_bytes": self.kept_bytes,
            "broken": self.answers.broken,
            "phases": self.strategy.seconds,
            "files": {SCORES_FILE: size_and_sha256(folder / SCORES_FILE)},
        }
        _NOTE.write(folder / _ANSWERS, tensors, {"about": json.dumps(about)})
        shutil.rmtree(self._directory / f"learned-{number - 1}", ignore_errors=True)

    def restore(self) -> tuple[int, int | None]:
        """Bring all to where it was kept, and return how many tasks are learned, and after how many it was answered."""
        if self._directory is None:
            return 0, None
        folders = {int(path.name.removeprefix("learned-")): path for path in self._directory.glob("learned-*")}
        try:
            return self._restore(folders)
        except (ForgetfreeError, LookupError, TypeError, ValueError):  # none, or damaged: all tasks are learned again
            for folder in folders.values():
                shutil.rmtree(folder, ignore_errors=True)
            return 0, None

    def _restore(self, folders: Mapping[int, Path]) -> tuple[int, int]:
        strategy, done = self.strategy, max(folders)
        answered = max(number for number, folder in folders.items() if (folder / _ANSWERS).is_file())
        if done not in (answered, answered + 1):
            raise RunError(f"There are answers after {answered} tasks, and {done} are learned.")
        about, tensors = _read_note(folders[answered], _ANSWERS)
        tasks = {task.name: task for task in strategy.stream.tasks}
        rows: dict[str, dict[str, Answers]] = {"answers": {}, "samples": {}}
        for entry, (place, task) in enumerate(about["entries"]):
            arrays = {
                name.removeprefix(f"{entry}/"): tensor.numpy()
                for name, tensor in tensors.items()
                if name.startswith(f"{entry}/")
            }
            rows[place][task] = tasks[task].kind.kept_answers(tasks[task].definition, arrays)
        phases = about["phases"]
        if done:
            measured, _ = _read_note(folders[done], _LEARNED)
            strategy.load(folders[done])
            strategy.updates.update(measured["updates"])
            self.seconds = measured["seconds"]
            phases = measured["phases"] | phases if done == answered else phases | measured["phases"]
        strategy.seconds |= phases
        self.kept_bytes = about["kept_bytes"]
        self.answers.broken += about["broken"]
        self.answers.resume(strategy.stream.tasks[:answered], rows["answers"], rows["samples"])
        self.scores = read_scores(folders[answered] / SCORES_FILE)
        link_or_copy(folders[answered] / SCORES_FILE, self._unit.directory / SCORES_FILE)
        self._monitor.log_scores([score for score in self.scores if score.after == answered])
        return done, answered


def _read_note(folder: Path, name: str) -> tuple[Json, dict[str, torch.Tensor]]:
    """Return what stands in a note of `LearnedStream`; raise ``RunError`` where it, or a file that it names, is damaged."""
    header, tensors = _NOTE.read(folder / name)
    about, files = parse_json(header["about"]), described_files(folder)
    if any(files.get(file) != entry for file, entry in about["files"].items()):
        raise RunError(f"{folder} has changed since it was written.")
    return about, tensors


# -- What its outcome says of its ledger -----------------------------------------------------------------


def ledger_summary(ledger: Ledger | None) -> Json | None:
    """Return what results.json says of a ledger."""
    if ledger is None:
        return None
    return {
        "tasks": ledger.tasks,
        "composition": ledger.composition,
        **({"alone": [record.alone for record in ledger.records]} if ledger.composition == "auto" else {}),
        "region_size": [len(record.region) for record in ledger.records],
        "owned_size": [len(record.owned.region) for record in ledger.records],
        "bytes": ledger.size_in_bytes,
        "overlap": ledger.overlap(),
    }
