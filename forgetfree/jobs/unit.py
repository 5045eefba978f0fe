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
from forgetfree.files import is_full, write_atomically, write_json
from forgetfree.jobs.checkpoints import CHECKPOINT, FileCheckpoint
from forgetfree.json_file import parse_json
from forgetfree.results.unit_folder import (
    HISTORY,
    OUTCOME,
    RECORD,
    described_files,
    read_record,
    read_unit_json,
)
from forgetfree.tensor_file import TensorFile
from forgetfree.training.monitor import Monitor, Phase

if TYPE_CHECKING:
    from forgetfree.ledger import Ledger
    from forgetfree.results.unit_folder import Score

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
        kept: where the phases of the unit stand.

    Attributes:
        log: logs losses, rates and scores over the updates of the unit, where that is asked for, see `trackers`.
    """

    log: Callable[[Mapping[str, float], int], object] | None = None

    def __init__(self, monitor: Monitor, directory: Path, kept: Checkpoint) -> None:
        super().__init__(monitor)
        self._rate: Callable[[int], float] = lambda step: math.nan
        self._path, self._kept = directory / HISTORY, kept
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
        """Return the unit's."""
        return self._kept

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
