"""Files that are written completely or not at all, locks, and checks of the directories that commands write to."""

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

#: The types of a path argument.
StrPath = str | os.PathLike[str]
#: The name of a temporary file or directory: the final name, a unique part by `tempfile`, and our suffix.
_UNFINISHED = re.compile(r"\..+\.[a-z0-9_]{8}\.unfinished")
#: The numbers of errors for a full disk, or a quota or limit that is reached.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: The environment variable with a directory in place of the user's cache.
CACHE_VARIABLE = "FORGETFREE_CACHE"
#: The number of characters of a name that fit before its suffixes, if each takes four of the 255 bytes of a name.
_MOST_NAME = 58


def cache_directory() -> Path | None:
    """Return the cache directory: ``FORGETFREE_CACHE``, or ``forgetfree`` in ``XDG_CACHE_HOME`` or ``~/.cache``, as the hub's.

    ``None`` for a user without a home.
    """
    if override := os.environ.get(CACHE_VARIABLE):
        return Path(override).absolute()
    cache = os.path.expanduser(os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "forgetfree"))
    return Path(cache) if os.path.isabs(cache) else None


def as_there(path: str) -> str:
    """Return a path with its characters encoded as on the disk, where they differ; any other path unchanged."""
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
    """Yield a file to write; after the block it becomes ``path``, complete and synced, or is removed if an error was raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(**_unfinished(path))
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        # mkstemp makes the file private; give it the permissions of any new file.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync_directory(path: Path) -> None:
    """Sync the names in a directory to the disk, if the system can."""
    with suppress(OSError):  # some file systems cannot
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a directory to fill; after the block it becomes ``path``, complete, or is removed if an error was raised.

    Temporary directories that killed processes left for the same path are removed, too.

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
    """Return the arguments of `tempfile` for a temporary file that becomes ``path``."""
    return {"dir": path.parent, "prefix": f".{path.name[:_MOST_NAME]}.", "suffix": ".unfinished"}


def remove_unfinished(directory: Path, name: str = "") -> None:
    """Remove the temporary files of killed processes; call it only where no other process is writing.

    Args:
        directory: the directory of the files.
        name: their final name; default: any.
    """
    with suppress(OSError):
        for path in directory.iterdir():
            if is_unfinished(path) and path.name.startswith(f".{name[:_MOST_NAME]}") and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def is_unfinished(path: Path) -> bool:
    """Return whether this is one of our temporary files."""
    return _UNFINISHED.fullmatch(path.name) is not None


def is_full(error: BaseException | None) -> bool:
    """Return whether an error or its causes report a full disk; safetensors reports the number only in its message."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(f"(os error {number})" in str(error) for number in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock inside, against other processes and threads.

    Args:
        path: the lock file, which exists only while the lock is held.
        wait: wait until the lock is free.

    Raises:
        BlockingIOError: the lock is held elsewhere, and ``wait`` is false.
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
        # Before the release: a process that waits for the file finds that it is gone, and creates a new one.
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
    """Link a file to ``path``, replacing any file there, or copy it if the file system has no hard links."""
    path.unlink(missing_ok=True)
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; call it before opening: reading a pipe or a device might never end.

    Raises:
        OSError: it is missing, a directory, a pipe or a device.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory, expected a file", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, expected a file", str(path))
    return status.st_size


# -- Output directories ----------------------------------------------------------------------------------


def free_directory(stream: str) -> str:
    """Return ``runs/STREAM``, or if it exists, the same with the first free number: ``runs/STREAM-2``."""
    name, number = stream.rstrip(",").replace(",", "-").replace("/", "-")[:60], 2
    path = Path("runs") / name
    while os.path.lexists(path):
        path, number = path.with_name(f"{name}-{number}"), number + 1
    return str(path)


def check_place(path: Path, flag: str = "--out") -> None:
    """Raise ``UsageError`` unless a directory, given by ``flag``, can be written or created; nothing is created here."""
    with _written(path, flag):
        there = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))
        if not there.is_dir():
            reason = errno.EEXIST if there == path.absolute() else errno.ENOTDIR
            raise OSError(reason, os.strerror(reason))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def make_directory(path: Path, flag: str = "--out") -> None:
    """Create a directory, given by ``flag``, unless it exists; raise ``UsageError`` if it cannot be written."""
    with _written(path, flag):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


@contextmanager
def _written(path: Path, flag: str) -> Iterator[None]:
    """Convert errors inside into ``UsageError``: the directory cannot be written."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{flag} {brief(str(path), 200)} cannot be written: {first_line(error)}. Give a directory of your own."
        ) from error


def check_empty(out: Path) -> None:
    """Raise ``UsageError`` unless ``out`` does not exist or is an empty directory."""
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {str(out)!r} exists and is not an empty directory. Give another one.")
