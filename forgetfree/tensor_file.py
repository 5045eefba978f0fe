"""Tensor files: safetensors with metadata, which are checked before they are used. No pickle.

Every kind of tensor file is described by a `TensorFile`. The metadata of a file have its ``format``, if it has one, and a
``checksum`` of metadata and tensors.

Ledgers, grafts, adapters and whole models are `TaskFile`: each tensor belongs to a task. ``3/readout/weight`` belongs to the
fourth task. The metadata list the ``tasks``: the name of each, its fields, and a checksum of its tensors. So one task can be
loaded without the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forgetfree.display import brief, first_twice
from forgetfree.errors import ForgetfreeError, RegionError, first_line
from forgetfree.files import replacing, size_of
from forgetfree.json_file import checked, parse_json

if TYPE_CHECKING:
    from torch import Tensor

_Made = TypeVar("_Made")
#: The names of dtypes in safetensors, by torch's names. Other dtypes are refused.
DTYPES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64", "bool": "BOOL"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8"},
    **{"uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
    **{"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"},
}
#: The version of the form of a `TaskFile`.
_SCHEMA = 5


@dataclass(frozen=True)
class TensorFile:
    """A kind of tensor file.

    Attributes:
        error: the error to raise if a file is missing, damaged or of another kind.
        remedy: the last sentence of its message.
        format: the format in the metadata; empty for none.
        name: the name of the kind for users, such as ``ledger``.
    """

    error: type[ForgetfreeError]
    remedy: str
    format: str = ""
    name: str = "file of a run"

    def content(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
        """Return the bytes of a file. Equal tensors and metadata give equal bytes, which safetensors does not guarantee."""
        return b"".join(_parts(tensors, self._signed(tensors, metadata)))

    def write(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write a file atomically, without a copy of it in memory."""
        self._write(path, tensors, self._signed(tensors, metadata))

    def read(self, path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Return metadata and tensors of a file.

        Raises:
            ForgetfreeError: `error`: it is missing, damaged or of another kind, with the reason.
        """
        file = self._opened(path)
        with self._readable(path):
            tensors = {name: file.tensor(name) for name in file.names}
        if file.metadata.get("checksum") != checksum(tensors, file.metadata):
            raise self.error(f"{path} is damaged: its contents do not match its checksum. {self.remedy}")
        return file.metadata, tensors

    @staticmethod
    def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        with replacing(path) as temporary, temporary.open("wb") as file:
            for part in _parts(tensors, metadata):
                file.write(part)

    def _signed(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, str]:
        """Return the metadata with the format and the checksum."""
        header = dict(metadata or {}) | ({"format": self.format} if self.format else {})
        return header | {"checksum": checksum(tensors, header)}

    def _opened(self, path: Path) -> OpenFile:
        """Return a file of this format."""
        with self._readable(path):
            file = OpenFile(path)
        if self.format and (format := file.metadata.get("format", "none")) != self.format:
            raise self.error(
                f"{path} is no {self.name}: expected the format {self.format!r}, got {brief(format)}. {self.remedy}"
            )
        return file

    @contextmanager
    def _readable(self, path: Path) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except (SafetensorError, OSError) as fault:
            raise self.error(f"{path} cannot be read as a {self.name}: {first_line(fault)}. {self.remedy}") from fault


# -- Files by task ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TaskTensors:
    """The tensors of one task in a `TaskFile`.

    Attributes:
        task: its name; empty for tensors that do not belong to a single task.
        tensors: the tensors by name. A slash groups them: ``readout/weight`` is in the group ``readout``.
        fields: further data on the task, as JSON.
    """

    task: str
    tensors: Mapping[str, Tensor]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def group(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a group, by the rest of their names."""
        start = f"{name}/"
        return {key.removeprefix(start): each for key, each in self.tensors.items() if key.startswith(start)}

    @cached_property
    def checksum(self) -> str:
        """The checksum of the tensors."""
        return checksum(self.tensors)

    @cached_property
    def size_in_bytes(self) -> int:
        """The bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def grouped(**groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of groups as `TaskTensors` names them, on the CPU."""
    return {
        f"{group}/{name}": tensor.detach().cpu() for group, named in groups.items() for name, tensor in named.items()
    }


@dataclass(frozen=True)
class _Task:
    """The metadata of a task."""

    task: str
    checksum: str
    fields: dict[str, Any]

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  # pydantic's name


@dataclass(frozen=True)
class TaskFile(TensorFile):
    """A kind of file with tensors by task.

    Attributes:
        keys: further metadata that it must have.
        groups: the groups of its tensors, and the tensors without a group.
    """

    keys: Collection[str] = ()
    groups: Collection[str] = ()

    def write_tasks(self, path: Path, tasks: Sequence[TaskTensors], metadata: Mapping[str, str]) -> None:
        """Write a file, atomically. Equal content gives equal bytes."""
        rows = [{"task": each.task, "checksum": each.checksum, "fields": each.fields} for each in tasks]
        header = {"schema": str(_SCHEMA), "tasks": json.dumps(rows, separators=(",", ":")), **metadata}
        tensors = {f"{k}/{name}": tensor for k, each in enumerate(tasks) for name, tensor in each.tensors.items()}
        self._write(path, tensors, self._signed({}, header))  # its checksum covers those of the tasks

    def load(self, path: Path, make: Callable[[StoredTasks], _Made]) -> _Made:
        """Return the result of ``make`` for the tasks of a file.

        Args:
            path: the file.
            make: raises ``RegionError`` or ``ValueError``, with the reason, if the content is not valid.

        Raises:
            ForgetfreeError: `error`: the file is missing, damaged, of another kind or not valid.
        """
        file = self._opened(path)
        try:
            with self._readable(path):
                return make(StoredTasks(file, self.keys, self.groups))
        except (RegionError, ValueError) as fault:
            raise self.error(f"{path} is not a sound {self.name}: {str(fault).rstrip('.')}. {self.remedy}") from fault


class StoredTasks:
    """The tasks of a `TaskFile`; the tensors of a task are loaded, and checked, when they are used.

    Attributes:
        metadata: the file's metadata, which match their checksum.
        tasks: the names, in order.
    """

    def __init__(self, file: OpenFile, keys: Collection[str], groups: Collection[str]) -> None:
        self.metadata = header = file.metadata
        self._file, self._groups = file, groups
        if header.get("schema", str(_SCHEMA)) != str(_SCHEMA):
            raise ValueError(f"it has schema {brief(header['schema'])}, and this version reads schema {_SCHEMA}")
        if missing := {"schema", "tasks", "checksum", *keys} - set(header):
            raise ValueError(f"its metadata lacks {', '.join(sorted(missing))}")
        if header["checksum"] != checksum({}, header):
            raise ValueError("its metadata do not match their checksum")
        try:
            self._rows = checked(tuple[_Task, ...], parse_json(header["tasks"]))
        except ValueError as error:
            raise ValueError(f"its tasks cannot be read ({error})") from error
        self.tasks = [row.task for row in self._rows]
        if (twice := first_twice(self.tasks)) is not None:
            raise ValueError(f"it has two records of task {brief(twice)}")
        self._names: dict[str, list[str]] = {str(k): [] for k in range(len(self._rows))}
        for key in file.names:
            number, _, name = key.partition("/")
            if number not in self._names or name.partition("/")[0] not in groups:
                raise ValueError(f"it holds the unexpected tensor {brief(key)}")
            self._names[number].append(name)

    def fields(self, k: int) -> dict[str, Any]:
        """Return the fields of a task, which are not checked."""
        return self._rows[k].fields

    def read(self, k: int) -> TaskTensors:
        """Return the tensors and fields of a task.

        Raises:
            ValueError: its tensors do not match their checksum, or hold NaN or infinity.
        """
        row = self._rows[k]
        found = TaskTensors(
            row.task, {name: self._file.tensor(f"{k}/{name}") for name in self._names[str(k)]}, row.fields
        )
        if found.checksum != row.checksum:
            raise ValueError(f"{_of(row.task)} do not match their checksum")
        kept = {name: tensor for name, tensor in found.tensors.items() if not name.startswith("buffer/")}
        if damaged := not_finite(kept):
            raise ValueError(f"{_of(row.task)} hold NaN or infinity, in {brief(damaged)}")
        return found

    def __iter__(self) -> Iterator[TaskTensors]:
        return map(self.read, range(len(self.tasks)))


def _of(task: str) -> str:
    return f"the tensors of task {task!r}" if task else "its tensors"


# -- The bytes of a file ---------------------------------------------------------------------------------


class OpenFile:
    """A safetensors file whose tensors are loaded when they are used. Its content is not checked.

    Attributes:
        metadata: its metadata.
        names: the names of its tensors.

    Raises:
        SafetensorError, OSError: the file is damaged or missing.
    """

    def __init__(self, path: Path) -> None:
        import safetensors

        size_of(path)
        read: Any = safetensors.safe_open
        self._file = read(path, "pt")
        self.metadata: dict[str, str] = dict(self._file.metadata() or {})
        self.names: list[str] = list(self._file.keys())

    def tensor(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            SafetensorError: it cannot be read.
        """
        from safetensors import SafetensorError

        try:
            tensor: Tensor = self._file.get_tensor(name)
        # torch raises these for a dtype or a shape that it does not know.
        except (ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise SafetensorError(first_line(error)) from error
        return tensor


def _parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterable[Any]:
    """Yield the bytes of a safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    # The widest entries first, so that each tensor begins at a multiple of its width.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    end = 0
    for name, tensor in ordered:
        dtype = str(tensor.dtype).removeprefix("torch.")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, tensor in ordered:
        yield bytes_of(tensor)


def checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> str:
    """Return the SHA-256 over tensors (names, dtypes, shapes, bytes) and a header without its ``checksum``."""
    digest = hashlib.sha256()
    for key, value in sorted((header or {}).items()):
        if key != "checksum":
            digest.update(f"{key}={value}\n".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity, if there is one."""
    for name, tensor in tensors.items():
        numbers = tensor.float() if tensor.itemsize == 1 else tensor  # float8 has no isfinite
        if tensor.is_floating_point() and not bool(numbers.isfinite().all()):
            return name
    return None


def bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a tensor, without a copy if it is on the CPU and contiguous."""
    import torch  # here, so that modules that only define a kind of file do not import it

    data = tensor.detach().cpu().contiguous().flatten()
    return data.view(dtype=torch.uint8).numpy().data if len(data) else b""
