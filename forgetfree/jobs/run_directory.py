"""The directory of a run as it is written: who works in it, its units, and how they stand.

Units are the smallest pieces of a run that are run, kept and resumed by themselves; each writes into its own folder alone.
`results/run_folder.py` reads all of it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

Json = dict[str, Any]
#: In a job's directory while a process works in it.
LOCK = ".lock"


# -- Who works in it ------------------------------------------------------------------------------------


def check_begun(out: Path) -> None:
    """Raise ``UsageError`` unless there is something to resume in a directory, or it was killed before there was."""
    if not os.path.lexists(out / "config.json") and not is_unused(out):
        raise UsageError(
            f"There is nothing to resume in {str(out)!r}. Give the --out that was begun, or leave --resume out."
        )


def refuse_used(out: Path, remedy: str = "Give another directory, or --resume to continue that run.") -> None:
    """Raise ``UsageError``, which ends with ``remedy``, if a directory is there and not `is_unused`."""
    if os.path.isdir(out) and not is_unused(out):  # a Path raises where a name is too long
        held = sorted(each.name for each in out.iterdir() if each.name != LOCK)
        names = f"{', '.join(held[:5])}{' …' if len(held) > 5 else ''}"
        raise UsageError(f"--out {brief(str(out), 200)} is not empty: it holds {names}. {remedy}")


def is_unused(out: Path) -> bool:
    """Say whether a directory holds nothing but what is left of a job that was killed before it wrote config.json."""
    return out.is_dir() and all(
        is_unfinished(path) or path.name == LOCK for path in out.rglob("*") if not path.is_dir()
    )


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Make a directory, unless it is there, and keep other processes out of it, inside; what was made and is empty goes."""
    made = [each for each in (out, *out.parents) if not os.path.lexists(each)]
    make_directory(out)
    try:
        with locked(out / LOCK, wait=False):
            yield
    except BlockingIOError as error:
        raise RunError(f"Another process works in {out}. Wait until it has ended, or give another --out.") from error
    finally:
        with suppress(OSError):  # one is not empty
            for each in made:
                each.rmdir()


# -- Units -----------------------------------------------------------------------------------------------


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
        return f"{self.key['strategy']} seed {self.key['seed']}"

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

    def empty(self, but: Collection[str] = ()) -> None:
        """Make its folder, or remove all that is in it but for these files."""
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


def units_in(out: Path, keys: Mapping[str, Json]) -> list[Unit]:
    """Return the units of a directory, of which config.json has the keys."""
    return [Unit(key, out / folder) for folder, key in keys.items()]


def begin(out: Path, config: Json, begun: Json, asked: Mapping[str, Json]) -> list[Unit]:
    """Write config.json, and return the units that are not done, each marked as not ended, with its folder.

    Args:
        out: the directory.
        config: its config.json.
        begun: the config.json that it was begun with; empty: nothing was.
        asked: by their folders, the units that are asked for now.
    """
    units = units_in(out, config["units"])
    done = [unit for unit in units if unit.is_done()]
    for unit in done:  # a kill right after unit.json leaves one
        shutil.rmtree(unit.directory / CHECKPOINT, ignore_errors=True)
    missing = [unit for unit in units_in(out, asked) if unit not in done]
    for unit in missing:
        if (record := unit.record()) and record["status"] == "done":
            tell_note(f"files of {unit} have changed or are lost: it begins again.")
        make_directory(unit.directory)
        unit.forget()
    if config != begun:
        text = json_text(config, indent=1)
        for unit in units:  # before it is there: a kill leaves one that all of them know
            if unit not in missing:
                unit.accept(hashlib.sha256(text.encode()).hexdigest())
        write_atomically(out / CONFIG, text)
    return missing


# -- How units stand -------------------------------------------------------------------------------------


def holdings(out: Path) -> str:
    """Say what a run that was cut short has left behind, and how to go on; an empty text where it left nothing."""
    finished = _finished(out)
    return finished and f"{finished} in {out}; the same command with --resume --out {out} goes on."


def resumption(out: Path) -> str:
    """Say where a run that is resumed goes on; an empty text where nothing was begun."""
    finished = _finished(out)
    return finished and f"Going on in {out}; {finished}"


def _finished(out: Path) -> str:
    """Say how many units of a directory are finished; an empty text where there is no run."""
    try:
        units = units_in(out, load_run(out)["units"])
    except RunError:
        return ""
    records = [record for unit in units if (record := unit.record())]
    return f"{sum(record['status'] == 'done' for record in records)} of {counted(len(units), 'unit')} finished"


def failures(results: Json) -> list[str]:
    """Return a message for each unit that failed."""
    return [f"{unit['strategy']}, seed {unit['seed']}: {unit['error']}" for unit in results["failed"]]
