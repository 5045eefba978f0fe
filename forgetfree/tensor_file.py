"""Tensor files: safetensors with metadata, checked as a whole before anything of them is used. No pickle.

Every file of ours that holds tensors is of a kind, a `TensorFile`: a ledger, a graft, weights, answers, adapters, a checkpoint.
Its metadata have its ``format``, if it has one, and a ``checksum`` of metadata and tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forgetfree.display import brief
from forgetfree.errors import ForgetfreeError, RegionError, first_line
from forgetfree.files import replacing, size_of, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class TensorFile:
    """A kind of tensor file.

    Attributes:
        error: what is raised where a file is missing, damaged or another one.
        remedy: the last sentence of its message.
        format: what the metadata name; empty: nothing.
        name: what a user calls a file whose path they give, such as ``ledger``; empty for files that only a job names.
        apart: the tensors that the checksum leaves out, because what is read of them is checked by itself.
    """

    error: type[ForgetfreeError]
    remedy: str
    format: str = ""
    name: str = ""
    apart: Collection[str] = ()

    def content(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
        """Return the bytes of a file. Equal tensors and metadata give equal bytes."""
        return tensor_bytes(tensors, self._signed(tensors, metadata))

    def write(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write a file, atomically."""
        write_atomically(path, self.content(tensors, metadata))

    def write_large(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write a file, atomically, and without a copy of it in memory; equal content may give other bytes."""
        from safetensors.torch import save_file

        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        with replacing(path) as temporary:
            save_file(contiguous, temporary, self._signed(contiguous, metadata))

    def read(self, path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Return metadata and tensors of a file.

        Raises:
            ForgetfreeError: `error`: it is missing, damaged or another one, with the reason.
        """
        header, tensors = self._opened(path)
        if header.get("checksum") != self._checksum(tensors, header):
            raise self.error(f"{path} is damaged: its contents do not match its checksum. {self.remedy}")
        return header, tensors

    def load(self, path: Path, make: Callable[[dict[str, str], dict[str, Tensor]], _Made]) -> _Made:
        """Return what ``make`` makes of a file that a user gives, after every check.

        Args:
            path: the file.
            make: takes metadata and tensors; raises ``RegionError`` or ``ValueError`` with the reason where they are not sound.

        Raises:
            ForgetfreeError: `error`: the file is missing, damaged, another one or not sound.
        """
        header, tensors = self._opened(path)
        with self.sound(path, f"is not a sound {self.name}"):
            made = make(header, tensors)
            # Last, because the checks in ``make`` say more.
            if header.get("checksum") != self._checksum(tensors, header):
                raise ValueError("its contents do not match its checksum")
        return made

    @contextmanager
    def sound(self, path: Path, otherwise: str) -> Iterator[None]:
        """Inside, let what is read of a file say that it is not sound, by ``RegionError`` or ``ValueError``.

        Args:
            path: the file.
            otherwise: what it is then, as the message has it: ``is not a sound file of weights``.

        Raises:
            ForgetfreeError: `error`, with the reason.
        """
        try:
            yield
        except (RegionError, ValueError) as fault:
            raise self.error(f"{path} {otherwise}: {str(fault).rstrip('.')}. {self.remedy}") from fault

    def is_at(self, path: Path) -> bool:
        """Say whether a file is of this kind, as its format tells."""
        from safetensors import SafetensorError

        try:
            return metadata_of(path).get("format") == self.format
        except (SafetensorError, OSError):
            return False

    def _signed(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, str]:
        """Return the metadata with the format and the checksum."""
        header = dict(metadata or {}) | ({"format": self.format} if self.format else {})
        return header | {"checksum": self._checksum(tensors, header)}

    def _checksum(self, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
        return checksum({name: tensor for name, tensor in tensors.items() if name not in self.apart}, header)

    def _opened(self, path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Return metadata and tensors of a file of this format."""
        from safetensors import SafetensorError

        try:
            header, tensors = read_tensors(path)
        except (SafetensorError, OSError) as fault:
            raise self._unreadable(path, fault) from fault
        if self.format and (format := header.get("format", "none")) != self.format:
            is_none = f"is no {self.name}" if self.name else "is another file"
            remedy = f"Give the path of a {self.name}.safetensors." if self.name else self.remedy
            raise self.error(f"{path} {is_none}: expected the format {self.format!r}, got {brief(format)}. {remedy}")
        return header, tensors

    def _unreadable(self, path: Path, fault: Exception) -> ForgetfreeError:
        if not self.name:
            return self.error(f"{path} cannot be read: {first_line(fault)}. {self.remedy}")
        if isinstance(fault, FileNotFoundError):
            return self.error(f"There is no {self.name} at {path}. Give the path of a {self.name}.safetensors.")
        return self.error(
            f"{path} is not a readable safetensors file ({fault}). It is damaged or cut short. {self.remedy}"
        )


def check_metadata(header: Mapping[str, str], keys: Collection[str]) -> None:
    """Raise ``ValueError`` unless a file's metadata have all ``keys``."""
    if missing := set(keys) - set(header):
        raise ValueError(f"its metadata lacks {', '.join(sorted(missing))}")


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


def metadata_of(path: Path) -> dict[str, str]:
    """Read the metadata of a safetensors file, which are not checked.

    Raises:
        SafetensorError, OSError: the file is damaged or missing.
    """
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


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
    import torch  # here, so that what only names a kind of file does not import it

    return torch.uint8
