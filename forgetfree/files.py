"""Files that are written completely or not at all, and tensor files with checked headers."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forgetfree.display import brief, json_text
from forgetfree.errors import ForgetfreeError, RegionError, RunError, first_line

if TYPE_CHECKING:
    from torch import Tensor

#: What our functions take as a path.
StrPath = str | os.PathLike[str]
_Made = TypeVar("_Made")


#: What ends the name of a file or directory that is being written, so that nobody else's is taken for one.
_UNFINISHED = ".unfinished"
#: Between the name that a temporary file is to have and its end is what makes it unique: eight characters, by `tempfile`.
_TEMPORARY = re.compile(rf"\..+\.[a-z0-9_]{{8}}({re.escape(_UNFINISHED)})?")
#: The numbers of errors of a disk without room, or a quota or limit that is reached.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: The file by which a directory is seen to be writable.
WRITABLE = ".writable"
#: As many characters of that name as there is room for, whatever they are.
_ROOM = 60


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write ``content`` to a temporary file beside ``path``, sync it, and rename it to ``path``."""
    with _replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a file to write; after the block it is ``path``, complete and on the disk, or removed if an error was raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, handle = _unfinished(path, tempfile.mkstemp)
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
    finally:
        os.close(handle)


def _sync_directory(path: Path) -> None:
    """Put the names in a directory on the disk, where the system can."""
    with suppress(OSError):  # some file systems cannot
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def is_left(name: str) -> bool:
    """Say whether a name is that of a file that a writer which was killed has left."""
    return name == WRITABLE or _TEMPORARY.fullmatch(name) is not None


def sweep(directory: Path, *, of: str = "") -> None:
    """Remove what writers that were killed have left in a directory; nobody may be writing there.

    Args:
        directory: which; there may be none.
        of: only what was to become the file of this name, whose first 60 characters must be its own.
    """
    for path in directory.iterdir() if directory.is_dir() else ():
        if is_left(path.name) and path.name.startswith(f".{of[:_ROOM]}"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Give a directory to fill; after the block it becomes ``path``, complete, or is removed if an error was raised.

    What others left beside it that were killed while they filled one is removed, too.

    Args:
        path: a path that does not exist, or an empty directory.

    Raises:
        RunError: there is no room for it.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(path.parent)
    temporary, handle = _unfinished(path, tempfile.mkdtemp)
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
    except BaseException as error:
        written_bytes = sum(file.stat().st_size for file in temporary.rglob("*") if file.is_file())
        shutil.rmtree(temporary, ignore_errors=True)
        if is_full(error):
            raise RunError(
                f"There is no room for {path}: after {written_bytes:,} bytes, {first_line(error)}. Nothing is left behind. "
                "Make room there, or give a directory on another disk."
            ) from error
        raise
    finally:
        os.close(handle)


def _unfinished(path: Path, make: Callable[..., Any]) -> tuple[Path, int]:
    """Make what is to become ``path``, and lock it where that can be, by a handle that a killed process loses.

    Args:
        path: a file or a directory.
        make: of `tempfile`, what makes such a one.
    """
    while True:
        made = make(dir=path.parent, prefix=f".{path.name[:_ROOM]}.", suffix=_UNFINISHED)
        with suppress(FileNotFoundError):  # somebody took it for what a killed process left, before it was locked
            handle, name = made if isinstance(made, tuple) else (os.open(made, os.O_RDONLY), made)
            with suppress(OSError):
                _lock(handle)
            if os.path.lexists(name):
                return Path(name), handle
            os.close(handle)


def remove_unfinished(parent: Path) -> None:
    """Remove the files and directories that killed processes did not finish; those that are being written are locked."""
    with suppress(OSError):
        for path in parent.iterdir():
            if path.name.endswith(_UNFINISHED) and is_left(path.name) and not path.is_symlink():
                with suppress(OSError):
                    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    try:
                        _lock(handle)
                        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
                    finally:
                        os.close(handle)


def _lock(handle: int) -> None:
    """Lock an open file or directory, without waiting.

    Raises:
        OSError: another process has it, or there are no locks.
    """
    try:
        import fcntl
    except ImportError as error:  # Windows
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)) from error
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
    _check_locks(path.parent)
    lock = FileLock(path, timeout=-1 if wait else 0)
    try:
        lock.acquire(poll_interval=0.1)
    except Timeout as error:
        raise BlockingIOError(errno.EAGAIN, "another process works on it", str(path)) from error
    try:
        yield
    finally:
        path.unlink(
            missing_ok=True
        )  # before it is free: whoever waits for the file finds that it is gone, and makes a new one
        lock.release()


def _check_locks(directory: Path) -> None:
    """Raise ``RunError`` unless files can be locked in a directory, by a file that nobody else has."""
    try:
        import fcntl
    except ImportError:  # Windows, which always can
        return
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(
                f"Files in {directory} cannot be locked ({first_line(error)}), so two processes might write there at once. "
                "Give a directory on a local disk, or on a file system with locks (of NFS: mounted without nolock)."
            ) from error


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


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file with tensors and metadata. Equal content gives equal bytes."""
    from safetensors.torch import save

    data = save({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, dict(metadata))
    # Its header is JSON after eight bytes of length, with the metadata in an order that differs from process to process.
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight
    return b"".join((len(text).to_bytes(8, "little"), text, memoryview(data)[end:]))


def signed_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, apart: Collection[str] = ()) -> bytes:
    """Return `tensor_bytes` with a `checksum` in the metadata: of all content but the tensors ``apart``."""
    signed = {name: tensor for name, tensor in tensors.items() if name not in apart}
    return tensor_bytes(tensors, {**metadata, "checksum": checksum(signed, metadata)})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write what `read_signed` reads, atomically, and without a copy of it in memory; equal content may give other bytes."""
    from safetensors.torch import save_file

    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with _replacing(path) as temporary:
        save_file(held, temporary, {**metadata, "checksum": checksum(held, metadata)})


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read metadata and tensors of a safetensors file.

    Raises:
        SafetensorError, OSError: the file is damaged or missing.
    """
    from safetensors import SafetensorError, safe_open

    size_of(path)
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in names}
    # What torch raises for a dtype or a shape that it does not know.
    except (ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise SafetensorError(first_line(error)) from error


def has_format(path: Path, format: str) -> bool:
    """Say whether a file is a tensor file whose metadata name this format."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return bool((file.metadata() or {}).get("format") == format)
    except (SafetensorError, OSError):
        return False


def read_sound(
    path: Path,
    kind: str,
    format: str,
    error: type[ForgetfreeError],
    again: str,
    make: Callable[[dict[str, str], dict[str, Tensor]], _Made],
    *,
    apart: Collection[str] = (),
) -> _Made:
    """Return what ``make`` makes of a file that `signed_bytes` made, after every check.

    Args:
        path: the file.
        kind: what it is, for messages.
        format: what its metadata must name.
        error: the error to raise.
        again: how to get another file, for messages.
        make: takes metadata and tensors; raises ``RegionError`` or ``ValueError`` with the reason where they are not sound.
        apart: tensors that the checksum leaves out, because ``make`` checks what it reads of them.

    Raises:
        ForgetfreeError: ``error``: the file is missing, damaged, of another kind or not sound.
    """
    from safetensors import SafetensorError

    try:
        header, tensors = read_tensors(path)
    except FileNotFoundError as fault:
        raise error(f"There is no {kind} at {path}. Give the path of a {kind}.safetensors.") from fault
    except (SafetensorError, OSError) as fault:
        raise error(
            f"{path} is not a readable safetensors file ({fault}). It is damaged or cut short. Restore it from a copy, or "
            f"{again}."
        ) from fault
    if (found := header.get("format", "none")) != format:
        raise error(
            f"{path} is no {kind}: expected the format {format!r}, got {brief(found)}. Give the path of a "
            f"{kind}.safetensors."
        )
    try:
        made = make(header, tensors)
        # Last, because the checks in ``make`` say more.
        signed = {name: tensor for name, tensor in tensors.items() if name not in apart}
        if checksum(signed, header) != header["checksum"]:
            raise ValueError("its contents do not match its checksum")
    except (RegionError, ValueError) as fault:
        reason = str(fault).rstrip(".")
        raise error(f"{path} is not a sound {kind}: {reason}. Restore it from a copy, or {again}.") from fault
    return made


def check_metadata(header: Mapping[str, str], keys: Collection[str]) -> None:
    """Raise ``ValueError`` unless a file's metadata have all ``keys``."""
    if missing := set(keys) - set(header):
        raise ValueError(f"its metadata lacks {', '.join(sorted(missing))}")


def read_signed(
    path: Path,
    error: type[ForgetfreeError],
    remedy: str,
    *,
    format: str | None = None,
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read metadata and tensors of what `signed_bytes` returned.

    Args:
        path: the file.
        error: the error to raise.
        remedy: the last sentence of its message.
        format: the format that the metadata must name; default: none.

    Raises:
        ForgetfreeError: ``error``: the file is missing or damaged, with the reason.
    """
    from safetensors import SafetensorError

    try:
        header, tensors = read_tensors(path)
    except (SafetensorError, OSError) as fault:
        raise error(f"{path} cannot be read: {first_line(fault)}. {remedy}") from fault
    if format is not None and header.get("format") != format:
        found = brief(header.get("format", "none"))
        raise error(f"{path} is another file: expected the format {format!r}, got {found}. {remedy}")
    if header.get("checksum") != checksum(tensors, header):
        raise error(f"{path} is damaged: its contents do not match its checksum. {remedy}")
    return header, tensors


def checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> str:
    """Return the SHA-256 over tensors (names, dtypes, shapes, bytes) and a header without its ``checksum``."""
    digest = hashlib.sha256()
    for key, value in sorted((header or {}).items()):
        if key != "checksum":
            digest.update(f"{key}={value}\n".encode())
    for name, tensor in sorted(tensors.items()):
        data = tensor.detach().cpu().contiguous().flatten()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(data.view(dtype=_byte_type()).numpy().data if len(data) else b"")
    return digest.hexdigest()


def _byte_type() -> Any:
    import torch  # here, so that writing JSON does not import it

    return torch.uint8
