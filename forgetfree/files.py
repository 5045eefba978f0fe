"""Files that are written completely or not at all, and the directories that commands write: who may have one, and when."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forgetfree.display import brief, json_text, nfc
from forgetfree.errors import RunError, UsageError, first_line

#: What our functions take as a path.
StrPath = str | os.PathLike[str]
#: The name of what is being written: the name that it is to have, what makes it unique, by `tempfile`, and a word of ours.
_UNFINISHED = re.compile(r"\..+\.[a-z0-9_]{8}\.unfinished")
#: The numbers of errors of a disk without room, or a quota or limit that is reached.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
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


def as_there(path: str) -> str:
    """Return a path as the disk has it, where its letters are coded otherwise there; any other as it is."""
    parent, name = os.path.split(path)
    if path.isascii() or os.path.lexists(path) or not name:
        return path
    parent = as_there(parent)
    beside = os.listdir(parent or ".") if os.path.isdir(parent or ".") and os.access(parent or ".", os.R_OK) else []
    return os.path.join(parent, next((each for each in beside if nfc(each) == nfc(name)), name))


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
