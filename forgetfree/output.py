"""Where a command writes: whether it can have that directory or file, who works in it, and what an error leaves there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, EEXIST, ENOTDIR
from pathlib import Path
from typing import Any

from forgetfree.display import brief
from forgetfree.errors import RunError, UsageError, first_line
from forgetfree.files import WRITABLE, existing, is_leftover, locked, remove_unfinished

#: In a job's directory while a process works in it.
LOCK = ".lock"
#: As long as what is written into a run directory: paths may not be of any length.
_LONG = "x" * 100


def free_directory(stream: str) -> str:
    """Return ``runs/STREAM``, or that with the first number that is free."""
    name = stream.rstrip(",").replace(",", "-").replace("/", "-")[:60]
    return str(first_free(Path("runs") / name))


def first_free(path: Path) -> Path:
    """Return a path, or that with the first number that is free: ``NAME-2``."""
    free, number = path, 2
    while os.path.lexists(free):
        free, number = path.with_name(f"{path.name}-{number}"), number + 1
    return free


# -- The directory of a job ------------------------------------------------------------------------------


def check_alone(out: Path) -> None:
    """Raise ``RunError`` where another process works in a directory; nothing is made there."""
    if os.path.lexists(out / LOCK):  # which a killed process may have left
        with exclusive(out):
            pass


def check_out(out: Path, command: str, resume: bool) -> None:
    """Raise, and leave nothing behind, unless a job can have its directory.

    Args:
        out: the directory.
        command: of the job.
        resume: whether it goes on with what was begun there; else nobody's work may be there.

    Raises:
        UsageError: nothing was begun there, or it cannot be written, or holds something.
    """
    if resume:
        check_begun(out)
    else:
        check_place(out)
        refuse_used(out, command)


def check_begun(out: Path) -> None:
    """Raise ``UsageError`` unless there is something to resume in a directory, or it was killed before there was."""
    if not os.path.lexists(out / "config.json") and not is_unused(out):
        raise UsageError(
            f"There is nothing to resume in {str(out)!r}. Give the --out that was begun, or leave --resume out."
        )


def refuse_used(out: Path, command: str) -> None:
    """Raise ``UsageError`` if a directory holds anything that a new job would not take for its own: see `is_unused`."""
    refuse_content(out, f"Give another directory, or --resume to continue that {command}.")


def refuse_content(out: Path, remedy: str) -> None:
    """Raise ``UsageError``, which ends with ``remedy``, if a directory is there and not `is_unused`."""
    if os.path.isdir(out) and not is_unused(out):  # a Path raises where a name is too long
        held = sorted(each.name for each in out.iterdir() if each.name != LOCK)
        names = f"{', '.join(held[:5])}{' …' if len(held) > 5 else ''}"
        raise UsageError(f"--out {brief(str(out), 200)} is not empty: it holds {names}. {remedy}")


def is_unused(out: Path) -> bool:
    """Say whether a directory holds nothing but what is left of a job that was killed before it wrote config.json."""
    return out.is_dir() and all(
        is_leftover(path.name) or path.name == LOCK for path in out.rglob("*") if not path.is_dir()
    )


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Keep other processes out of a directory, inside."""
    try:
        with locked(out / LOCK, wait=False):
            yield
    except BlockingIOError as error:
        raise RunError(f"Another process works in {out}. Wait until it has ended, or give another --out.") from error


# -- Any directory or file -------------------------------------------------------------------------------


def check_place(path: Path, flag: str = "--out") -> None:
    """Raise ``UsageError`` unless a directory, given by ``flag``, can be written, or made; nothing is made here."""
    try:
        there = existing(path)
        if not there.is_dir():
            raise OSError(reason := EEXIST if there == path.absolute() else ENOTDIR, os.strerror(reason))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
        with suppress(FileNotFoundError):
            (path / _LONG / _LONG).stat()
    except (OSError, ValueError) as error:
        raise _not_written(path, flag, error) from error


def make_directory(path: Path, flag: str = "--out") -> None:
    """Make a directory, given by ``flag``, unless it is there.

    Raises:
        UsageError: it cannot be written, or has no room for the names of the files that belong there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / WRITABLE
        probe.touch()
        probe.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            (path / _LONG / _LONG).stat()
    except (OSError, ValueError) as error:
        raise _not_written(path, flag, error) from error


def _not_written(path: Path, flag: str, error: Exception) -> UsageError:
    return UsageError(
        f"{flag} {brief(str(path), 200)} cannot be written: {first_line(error)}. Give a directory of your own."
    )


def check_empty(out: Path) -> None:
    """Raise ``UsageError`` unless a directory does not exist, or holds nothing."""
    if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise UsageError(f"--out {str(out)!r} exists and is not an empty directory. Give another one.")


def check_new_file(path: Path) -> None:
    """Raise ``UsageError`` where a file would take the place of another; else remove what killed commands left beside it."""
    if os.path.lexists(path):
        raise UsageError(f"--out {str(path)!r} exists. Give a new name.")
    remove_unfinished(path.absolute().parent)


@contextmanager
def no_empty_directories(*paths: Any) -> Iterator[None]:
    """Remove directories that were made inside and hold nothing, after an error.

    Args:
        paths: that may be made, with the folders they lie in; what is no path, as a file may have it, does not count.
    """
    directories = [Path(path) for path in paths if path and isinstance(path, str | Path)]
    made = [each for path in directories for each in (path, *path.parents) if not os.path.lexists(each)]
    try:
        yield
    except BaseException:
        for path in made:
            try:
                path.rmdir()
            except (OSError, ValueError):  # it holds something, or was not made
                continue
        raise
