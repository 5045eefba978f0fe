"""The directory of a job: its units and how they stand, and who works in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.display import counted
from forgetfree.errors import RunError, UsageError
from forgetfree.files import is_left, locked
from forgetfree.jobs.running.checkpoints import CHECKPOINT, in_a_phase
from forgetfree.jobs.running.resume import read_job_config
from forgetfree.jobs.running.unit import Json, Unit, named
from forgetfree.jobs.stream_learner import tasks_learned

if TYPE_CHECKING:
    from forgetfree.jobs.job import Job

#: In a directory while a process works in it.
LOCK = ".lock"
#: As many units as a message names.
_NAMED = 8


def units_in(out: Path, keys: Mapping[str, Json]) -> list[Unit]:
    """Return the units of a directory, of which config.json has the keys."""
    return [Unit(key, out / folder) for folder, key in keys.items()]


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Keep other processes out of a directory, inside."""
    try:
        with locked(out / LOCK, wait=False):
            yield
    except BlockingIOError as error:
        raise RunError(f"Another process works in {out}. Wait until it has ended, or give another --out.") from error


def check_begun(out: Path) -> None:
    """Raise ``UsageError`` unless there is something to resume in a directory, or it was killed before there was."""
    if not os.path.lexists(out / "config.json") and not is_unused(out):
        raise UsageError(
            f"There is nothing to resume in {str(out)!r}. Give the --out that was begun, or leave --resume out."
        )


def is_unused(out: Path) -> bool:
    """Say whether a directory holds nothing but what is left of a job that was killed before it wrote config.json."""
    return out.is_dir() and all(is_left(path.name) or path.name == LOCK for path in out.rglob("*") if not path.is_dir())


# -- How units stand -------------------------------------------------------------------------------------


#: How a unit stands.
_STANDINGS = (
    "finished",
    "damaged, begins again",
    "goes on",
    "will start again",
    "failed, begins again",
    "not begun",
)


def holdings(job: type[Job[Any]], out: Path) -> str:
    """Say what a job that was cut short has left behind, and how to go on; an empty text where it left nothing."""
    if not (units := _by_standing(job, out)):
        return ""
    parts = [f"finished: {_listed(units['finished'])}"]
    more = ("damaged, begins again", "goes on", "will start again")
    parts += [f"{what}: {_listed(units[what])}" for what in more if units[what]]
    return f"{out} holds what was computed ({'; '.join(parts)}); the same command with --resume --out {out} goes on."


def resumption(job: type[Job[Any]], out: Path) -> str:
    """Say where a job that is resumed goes on; an empty text where nothing was begun."""
    parts = [f"{what}: {_listed(names)}" for what, names in _by_standing(job, out).items() if names]
    return f"Going on in {out}; {'; '.join(parts)}" if parts else ""


def _by_standing(job: type[Job[Any]], out: Path) -> dict[str, list[str]]:
    """Return the names of a directory's units by how they stand; nothing where there is no job."""
    try:
        config = read_job_config(out)
    except RunError:
        return {}
    units: dict[str, list[str]] = {what: [] for what in _STANDINGS}
    for unit in units_in(out, config["units"]):
        record = unit.record()
        if record and record["status"] != "done":
            units["failed, begins again"].append(str(unit))
        elif record and (damaged := unit.damaged(record)):
            units["damaged, begins again"].append(f"{unit} ({', '.join(damaged)})")
        elif record:
            units["finished"].append(str(unit))
        elif unit.is_begun:
            where = _standing(unit, len(config["tasks"]) if job.learns_stream else None)
            units["goes on" if where else "will start again"].append(f"{unit}{where}")
        else:
            units["not begun"].append(str(unit))
    return units


def _standing(unit: Unit, tasks: int | None) -> str:
    """Say from where a unit that was cut short goes on; an empty text where it starts again.

    Args:
        unit: it.
        tasks: of the stream that it learns; ``None``: it is about one task.
    """
    folder, midst = unit.directory / CHECKPOINT, in_a_phase(unit.directory)
    if tasks is None:
        return " in the midst of its training" if midst else ""
    learned = max(map(tasks_learned, folder.iterdir()), default=0) if folder.is_dir() else 0
    if midst:
        return f" in the midst of task {learned + 1} of {tasks}"
    return f" after {learned} of {counted(tasks, 'task')}" if learned else ""


def failures(results: Json) -> list[str]:
    """Return a message for each unit that failed."""
    return [
        f"{named({key: value for key, value in unit.items() if key not in ('error', 'matrix')}, ', ')}: {unit['error']}"
        for unit in results["failed"]
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing" if len(names) <= _NAMED else f"{len(names)} units"
