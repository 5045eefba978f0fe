"""Files that are written completely or not at all, directories that commands write, and JSON that somebody may have changed.

JSON is read within bounds, and checked before it is used: a check raises ``ValueError`` with the place, what is expected
there and what was found; `read_json` makes the reader's own error of it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forgetfree.display import brief, first_twice, json_text
from forgetfree.errors import ForgetfreeError, RunError, UsageError, first_line

if TYPE_CHECKING:
    from pydantic import TypeAdapter

#: What our functions take as a path.
StrPath = str | os.PathLike[str]
#: The name of what is being written: the name that it is to have, what makes it unique, by `tempfile`, and a word of ours.
_UNFINISHED = re.compile(r"\..+\.[a-z0-9_]{8}\.unfinished")
#: The numbers of errors of a disk without room, or a quota or limit that is reached.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: In a job's directory while a process works in it.
LOCK = ".lock"
#: A directory in place of the user's cache.
CACHE_VARIABLE = "FORGETFREE_CACHE"
#: How many characters of a name fit beside its end, if each takes four of the 255 bytes of a name.
_MOST_NAME = 58


def cache_directory() -> Path | None:
    """Return where what took time is kept: ``FORGETFREE_CACHE``, or as by the hub's library ``~/.cache`` or ``XDG_CACHE_HOME``.

    Nothing for a user without a home.
    """
    if override := os.environ.get(CACHE_VARIABLE):
        return Path(override).absolute()
    cache = os.path.expanduser(os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "forgetfree"))
    return Path(cache) if os.path.isabs(cache) else None


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write ``content`` to a temporary file beside ``path``, sync it, and rename it to ``path``."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a file to write; after the block it is ``path``, complete and on the disk, or removed if an error was raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(**_unfinished(path))
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        # mkstemp makes the file private; give it the permissions any new file would have.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync_directory(path: Path) -> None:
    """Put the names in a directory on the disk, where the system can."""
    with suppress(OSError):  # some file systems cannot
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Give a directory to fill; after the block it becomes ``path``, complete, or is removed if an error was raised.

    What killed processes left of the same path is removed, too.

    Args:
        path: a path that does not exist, or an empty directory.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(path.parent, path.name)
    temporary = Path(tempfile.mkdtemp(**_unfinished(path)))
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
        _sync_directory(temporary)
        os.chmod(temporary, 0o777 & ~_umask())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _unfinished(path: Path) -> dict[str, Any]:
    """Return how `tempfile` names what is to become ``path``."""
    return {"dir": path.parent, "prefix": f".{path.name[:_MOST_NAME]}.", "suffix": ".unfinished"}


def remove_unfinished(directory: Path, name: str = "") -> None:
    """Remove what killed processes did not finish, where no other process writes now.

    Args:
        directory: where it lies.
        name: that it was to have; default: any.
    """
    with suppress(OSError):
        for path in directory.iterdir():
            if is_unfinished(path) and path.name.startswith(f".{name[:_MOST_NAME]}") and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def is_unfinished(path: Path) -> bool:
    """Say whether a name is that of what is being written, or of what a killed process left."""
    return _UNFINISHED.fullmatch(path.name) is not None


def is_full(error: BaseException | None) -> bool:
    """Say whether an error, or what led to it, is that of a disk without room: safetensors tells it in words alone."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(f"(os error {number})" in str(error) for number in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Keep other processes and threads out, inside.

    Args:
        path: a file that is there only while somebody is inside.
        wait: for whoever is.

    Raises:
        BlockingIOError: somebody is inside, and ``wait`` is false.
        RunError: files cannot be locked there.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=-1 if wait else 0)
    try:
        lock.acquire(poll_interval=0.1)
    except Timeout as error:
        raise BlockingIOError(errno.EAGAIN, "another process works on it", str(path)) from error
    except OSError as error:
        path.unlink(missing_ok=True)
        raise RunError(
            f"Files in {path.parent} cannot be locked ({first_line(error)}), so two processes might write there at once. "
            "Give a directory on a local disk, or on a file system with locks (of NFS: mounted without nolock)."
        ) from error
    try:
        yield
    finally:
        # Before it is free: whoever waits for the file finds that it is gone, and makes a new one.
        path.unlink(missing_ok=True)
        lock.release()


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as readable JSON, atomically."""
    write_atomically(path, json_text(value, indent=1))


def is_place(name: str) -> bool:
    """Return whether a model's name can only mean a directory, and not ``OWNER/NAME`` on the hub."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link_or_copy(source: Path, path: Path) -> None:
    """Give a file a second name in the place of what has it, or copy it where the file system has no hard links."""
    path.unlink(missing_ok=True)
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, before it is opened: reading a pipe or a device might never end.

    Raises:
        OSError: it is missing, a directory, a pipe or a device.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory, expected a file", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, expected a file", str(path))
    return status.st_size


# -- Where a command writes ------------------------------------------------------------------------------


def free_directory(stream: str) -> str:
    """Return ``runs/STREAM``, or that with the first number that is free: ``runs/STREAM-2``."""
    name, number = stream.rstrip(",").replace(",", "-").replace("/", "-")[:60], 2
    path = Path("runs") / name
    while os.path.lexists(path):
        path, number = path.with_name(f"{name}-{number}"), number + 1
    return str(path)


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
    """Keep other processes out of a directory, inside; an empty one does not stay."""
    try:
        with locked(out / LOCK, wait=False):
            yield
    except BlockingIOError as error:
        raise RunError(f"Another process works in {out}. Wait until it has ended, or give another --out.") from error
    finally:
        with suppress(OSError):
            out.rmdir()


def check_place(path: Path, flag: str = "--out") -> None:
    """Raise ``UsageError`` unless a directory, given by ``flag``, can be written, or made; nothing is made here."""
    with _written(path, flag):
        there = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))
        if not there.is_dir():
            reason = errno.EEXIST if there == path.absolute() else errno.ENOTDIR
            raise OSError(reason, os.strerror(reason))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def make_directory(path: Path, flag: str = "--out") -> None:
    """Make a directory, given by ``flag``, unless it is there; raise ``UsageError`` if it cannot be written."""
    with _written(path, flag):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


@contextmanager
def _written(path: Path, flag: str) -> Iterator[None]:
    """Raise ``UsageError`` where a directory is found inside to be none that can be written."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{flag} {brief(str(path), 200)} cannot be written: {first_line(error)}. Give a directory of your own."
        ) from error


def check_empty(out: Path) -> None:
    """Raise ``UsageError`` unless a directory does not exist, or holds nothing."""
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {str(out)!r} exists and is not an empty directory. Give another one.")


# -- JSON ------------------------------------------------------------------------------------------

_Made = TypeVar("_Made")
#: The largest file that is read, and how deep its lists and objects may lie in each other.
MOST_BYTES, MOST_DEPTH = 256 * 2**20, 100
#: The most faults that one message names.
MOST_FAULTS = 5

#: How messages of pydantic say what ours say.
_WORDS = {
    "a valid array": "a list",
    "a valid integer": "an integer",
    "a valid ": "a ",
    "greater than or equal to ": "at least ",
    "less than or equal to ": "at most ",
}
_KIND_NAMES = {str: "a string", int: "an integer", bool: "true or false", list: "a list", dict: "an object"}
Fields = Mapping[str, type]


def read_json(
    path: Path,
    error: type[ForgetfreeError],
    remedy: str,
    check: Callable[[Any], None] = lambda value: None,
) -> Any:
    """Read a JSON file and check its content.

    Args:
        path: the file.
        error: the error to raise.
        remedy: the last sentence of its message.
        check: raises ``ValueError`` if the content is not right.

    Raises:
        ForgetfreeError: ``error``, with the file and the reason.
    """
    try:
        value = parse_json(read_bounded(path))
    except OSError as fault:
        raise error(f"{path} cannot be read: {first_line(fault)}. {remedy}") from fault
    except ValueError as fault:
        raise error(f"{path} is not valid JSON: {first_line(fault)}. {remedy}") from fault
    try:
        check(value)
    except ValueError as fault:
        raise error(f"{path}: {first_line(fault)}. {remedy}") from fault
    return value


def read_bounded(path: Path) -> str:
    """Read the text of a file that is no larger than `MOST_BYTES`.

    Raises:
        OSError: the file cannot be read, or is larger.
        ValueError: the file is not in UTF-8.
    """
    if (size := size_of(path)) > MOST_BYTES:
        raise OSError(f"it has {size:,} bytes, and at most {MOST_BYTES:,} are read")
    return path.read_text(encoding="utf-8")


def parse_json(text: str, *, finite: bool = True) -> Any:
    """Return the value of a JSON text.

    Args:
        text: JSON.
        finite: whether numbers must be; else it may hold ``Infinity`` and ``NaN``, as Python writes them.

    Raises:
        ValueError: the text is no JSON, is nested too deep, or holds a key twice, a number that is not finite, or half of a
            surrogate pair, which is no character.
    """
    too_deep = f"its lists and objects are nested more than {MOST_DEPTH} deep"
    try:
        number = _finite if finite else float
        value = json.loads(text, parse_float=number, parse_constant=number, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    if text.count("[") + text.count("{") > MOST_DEPTH:  # else it cannot be deeper
        level, depth = [value], 0
        while level := [inner for each in level if isinstance(each, list | dict) for inner in _inside(each)]:
            depth += 1
            if depth > MOST_DEPTH:
                raise ValueError(too_deep)
    if "\\u" in text:  # how such halves are written
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"a text in it holds {half!r}, half of a surrogate pair and no character") from error
    return value


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"the key {first_twice(key for key, _ in pairs)!r} stands twice")
    return value


def _inside(value: list[Any] | dict[str, Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


# -- Checks ----------------------------------------------------------------------------------------------


def checked(kind: type[_Made], value: Any, context: Mapping[str, Any] | None = None) -> _Made:
    """Return a JSON value as an object of ``kind``, say a dataclass, whose annotations say what is right (pydantic, strict).

    Args:
        kind: what the value must describe. Keys that it does not know are refused where its ``__pydantic_config__`` forbids
            them.
        value: what `parse_json` returned, or an object of ``kind`` that was made without a check.
        context: what validators of ``kind`` compare with.

    Raises:
        ValueError: for each fault the place, what is expected there and what was found.
    """
    from pydantic import ValidationError

    adapter: TypeAdapter[_Made] = _adapter(kind)  # type: ignore[arg-type]  # a type can be hashed
    try:
        if is_dataclass(value):
            return adapter.validate_python(value, strict=True)
        return adapter.validate_json(json.dumps(value), strict=True, context=context)
    except ValidationError as error:
        faults = [_fault(each) for each in error.errors(include_url=False)]
        more = [f"{len(faults) - MOST_FAULTS} more faults"] * (len(faults) > MOST_FAULTS)
        raise ValueError("; ".join(faults[:MOST_FAULTS] + more)) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _fault(fault: Mapping[str, Any]) -> str:
    """Return pydantic's description of one fault in our words."""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).removeprefix(".")
    key, message = place or "the content", str(fault["msg"])
    if fault["type"] == "missing":
        return f"{key} is missing"
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{key} is not known here"
    expected = message.removeprefix("Value error, ").removeprefix("Input should be ")
    for theirs, ours in _WORDS.items():
        expected = expected.replace(theirs, ours)
    return f"{key} must be {expected}, got {brief(fault['input'])}"


def check(key: str, value: Any, right: bool, expected: str) -> None:
    """Raise ``ValueError`` unless the value at ``key`` is ``right``, with what is expected there."""
    if not right:
        raise ValueError(f"{key} must be {expected}, got {brief(value)}")


def check_fields(key: str, value: Any, fields: Fields) -> None:
    """Raise ``ValueError`` unless ``value`` is an object with all ``fields``, each of its type."""
    check(key or "the content", value, isinstance(value, dict), "an object")
    for name, kind in fields.items():
        inner = f"{key}.{name}" if key else name
        if name not in value:
            raise ValueError(f"{inner} is missing, it must be {_KIND_NAMES[kind]}")
        # In Python, unlike in JSON, true and false are integers.
        right = isinstance(value[name], kind) and isinstance(value[name], bool) == (kind is bool)
        check(inner, value[name], right, _KIND_NAMES[kind])


def is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Return whether a JSON value is a finite number in [least, most]."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max and least <= value <= most
