"""Writes the directory of a run: locks it, writes config.json, and starts, ends and lists units.

A unit is the smallest piece of a run that can be run, kept and resumed. Each unit writes into its own folder only.
`results/run_folder.py` reads the directory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.display import brief, counted, json_text, tell_note
from forgetfree.errors import RunError, UsageError
from forgetfree.files import is_unfinished, locked, make_directory, write_atomically, write_json
from forgetfree.results.run_folder import (
    CHECKPOINT,
    CONFIG,
    OUTCOME,
    RECORD,
    described_files,
    load_run,
    read_record,
    read_unit_json,
)

if TYPE_CHECKING:
    from forgetfree.results.table import Results

Json = dict[str, Any]
#: Exists in a run directory while a process works there.
LOCK = ".lock"


# -- The lock of the directory --------------------------------------------------------------------------


def check_begun(out: Path) -> None:
    """Raise ``UsageError`` unless the directory has a run to resume, or a run was killed before it wrote config.json."""
    if not os.path.lexists(out / CONFIG) and not is_unused(out):
        raise UsageError(
            f"There is nothing to resume in {str(out)!r}. Give the --out of the run to resume, or leave --resume out."
        )


def refuse_used(out: Path, remedy: str = "Give another directory, or resume that run with --resume.") -> None:
    """Raise ``UsageError`` if the directory exists and is not `is_unused`; the message ends with ``remedy``."""
    if os.path.isdir(out) and not is_unused(out):  # a Path raises an error if a name is too long
        held = sorted(each.name for each in out.iterdir() if each.name != LOCK)
        names = f"{', '.join(held[:5])}{' …' if len(held) > 5 else ''}"
        raise UsageError(f"--out {brief(str(out), 200)} is not empty: it contains {names}. {remedy}")


def is_unused(out: Path) -> bool:
    """Return whether the directory holds only temporary files and the lock, as a run killed before config.json leaves it."""
    return out.is_dir() and all(
        is_unfinished(path) or path.name == LOCK for path in out.rglob("*") if not path.is_dir()
    )


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Create the directory if needed and lock it inside the block; afterwards remove the created directories that are empty."""
    made = [each for each in (out, *out.parents) if not os.path.lexists(each)]
    make_directory(out)
    try:
        with locked(out / LOCK, wait=False):
            yield
    except BlockingIOError as error:
        raise RunError(f"Another process is working in {out}. Wait until it ends, or give another --out.") from error
    finally:
        with suppress(OSError):  # one is not empty
            for each in made:
                each.rmdir()


# -- Units -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """One unit in a run directory.

    Attributes:
        key: its identity, e.g. ``{"strategy": "fine-tune", "seed": 0}``.
        directory: its folder.
    """

    key: Mapping[str, Any]
    directory: Path

    def __str__(self) -> str:
        return f"{self.key['strategy']} seed {self.key['seed']}"

    def record(self) -> Json | None:
        """Return its record; ``None`` if the unit has not ended, or the record is damaged or belongs to another unit."""
        try:
            record = read_record(self.directory)
        except RunError:
            return None
        return record if record["unit"] == self.key else None

    def is_done(self) -> bool:
        """Return whether the unit ended well and its files have not changed since."""
        record = self.record()
        return record is not None and record["status"] == "done" and record["files"] == described_files(self.directory)

    def forget(self) -> None:
        """Mark the unit as not ended by removing unit.json."""
        (self.directory / RECORD).unlink(missing_ok=True)

    def empty(self, but: Collection[str] = ()) -> None:
        """Create its folder, or remove everything in it except ``but``."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.iterdir():
            if path.name not in but:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def end(
        self,
        made: Json,
        details: Json,
        error: str | None = None,
        seconds: float = 0.0,
        floors: Json | None = None,
        config: str = "",
    ) -> None:
        """Write outcome.json and unit.json, which describe all files in the folder: the unit has ended.

        Args:
            made: versions, machine and command.
            details: facts about the unit that its other files lack.
            error: the reason why the unit failed; ``None``: it ended well.
            seconds: the duration of the unit.
            floors: floors of the seed, kept with the first strategy only.
            config: SHA-256 of the run's config.json; empty: unknown.
        """
        status = {"status": "done" if error is None else "failed", "error": error, "seconds": seconds}
        write_json(self.directory / OUTCOME, {**status, **made, "details": details, "floors": floors or {}})
        files = described_files(self.directory)
        write_json(
            self.directory / RECORD,
            {"schema": 1, "unit": self.key, "config": [config] if config else [], "files": files},
        )

    def accept(self, config: str) -> None:
        """Add the SHA-256 of a new config.json to the record of the unit, if the unit has ended."""
        with suppress(RunError):  # it has not ended
            record = read_unit_json(self.directory)
            write_json(self.directory / RECORD, record | {"config": [*record["config"], config]})


def units_in(out: Path, keys: Mapping[str, Json]) -> list[Unit]:
    """Return the units with these keys, which config.json lists by folder."""
    return [Unit(key, out / folder) for folder, key in keys.items()]


def begin(out: Path, config: Json, begun: Json, asked: Mapping[str, Json]) -> list[Unit]:
    """Write config.json and return the requested units that are not done, each marked as not ended.

    Args:
        out: the directory.
        config: the new content of config.json.
        begun: the previous content of config.json; empty if the run is new.
        asked: the keys of the requested units by folder.
    """
    units = units_in(out, config["units"])
    done = [unit for unit in units if unit.is_done()]
    for unit in done:  # a kill right after unit.json leaves a checkpoint
        shutil.rmtree(unit.directory / CHECKPOINT, ignore_errors=True)
    missing = [unit for unit in units_in(out, asked) if unit not in done]
    for unit in missing:
        if (record := unit.record()) and record["status"] == "done":
            tell_note(f"files of {unit} are missing or have changed: starting it again.")
        make_directory(unit.directory)
        unit.forget()
    if config != begun:
        text = json_text(config, indent=1)
        for unit in units:  # first, so that after a kill every unit knows the config.json that is there
            if unit not in missing:
                unit.accept(hashlib.sha256(text.encode()).hexdigest())
        write_atomically(out / CONFIG, text)
    return missing


# -- The status of units ---------------------------------------------------------------------------------


def holdings(out: Path) -> str:
    """Return a sentence about the finished units of an interrupted run and how to resume it; empty if there is no run."""
    finished = _finished(out)
    return finished and f"{finished} in {out}. To resume, repeat the command with --resume --out {out}."


def resumption(out: Path) -> str:
    """Return a sentence about the finished units of a run that is resumed; empty if there is no run."""
    finished = _finished(out)
    return finished and f"Resuming {out}; {finished}"


def _finished(out: Path) -> str:
    """Return how many units are finished, in words; empty if there is no run."""
    try:
        units = units_in(out, load_run(out)["units"])
    except RunError:
        return ""
    records = [record for unit in units if (record := unit.record())]
    return f"{sum(record['status'] == 'done' for record in records)} of {counted(len(units), 'unit')} finished"


def failures(results: Results) -> list[str]:
    """Return a message for each unit of a run that failed."""
    failed = results.records[0].about.failed
    return [f"{unit['strategy']}, seed {unit['seed']}: {unit['error']}" for unit in failed]
