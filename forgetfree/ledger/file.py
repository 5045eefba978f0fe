"""The ledger's file: one safetensors file without pickle.

Its tensors are bytes:

    layout     the parameter space's layout: the frame of its JSON
    index      the frame of JSON: the names of all ``tasks`` in order, and the ``sizes`` of their frames in bytes
    records    what the file says about every record: the frame of their JSON, a line each, see `Row`
    data       the frames of all records, one after another

and as metadata: format, schema, composition, the layout's hash, the base model's fingerprint, the binding (see
`forgetfree.ledger.binding`), and a checksum of all but ``data``, each of whose frames has a checksum in its line. So one record
is read without the others.

A record's frame (see `frames`) holds, in this order: the gaps between the flat indices that the task owns; those of γ_k that
earlier tasks own; the values of the owned ones, dtype by dtype of the space; its readout's tensors; the buffers that training
changed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.core.tensors import DTYPES, not_finite
from forgetfree.display import brief
from forgetfree.errors import LedgerError, RegionError
from forgetfree.json_file import check, checked, parse_json
from forgetfree.ledger.binding import Binding
from forgetfree.ledger.frames import bytes_tensor, compressed, compressed_text, restored, restored_text
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.records import COMPOSITIONS, Contents, Record
from forgetfree.tasks import TaskDefinition
from forgetfree.tensor_file import TensorFile, check_metadata

FORMAT, SCHEMA = "forgetfree.ledger", 4
#: The tensor that the file's checksum leaves out.
DATA = "data"
FILE = TensorFile(LedgerError, "Restore it from a copy, or run the stream again.", FORMAT, "ledger", apart=(DATA,))
_TENSORS = ("layout", "index", "records", DATA)
#: The number of a class in a readout; no readout has more.
Class = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**48)]
#: A tensor's name, dtype and shape.
_Kind = tuple[str, str, tuple[Count, ...]]
#: The most dimensions of a tensor.
_MOST_SIDES = 16
_METADATA = ("format", "schema", "composition", "layout_hash", "fingerprint", "checksum")


@dataclass(frozen=True)
class Row:
    """What the file says about a record besides its frame.

    Attributes:
        sparsity: the share of the space that γ was allowed.
        definition: the task's labels, prompt and so on.
        classes: the numbers of its labels in the readout.
        owned: how many entries it owns, dtype by dtype of the space.
        shared: how many entries of its γ earlier tasks own.
        readout: the kinds of its readout's tensors.
        buffers: the kinds of the buffers that training changed.
        checksum: the first 16 bytes of its frame's SHA-256.
        alone: whether the task stands alone in a ledger of composition ``auto``; the line says it only where it is so.
    """

    sparsity: Annotated[float, Field(ge=0, le=1)]
    definition: TaskDefinition | None
    classes: tuple[Class, ...]
    owned: tuple[Count, ...]
    shared: Count
    readout: tuple[_Kind, ...]
    buffers: tuple[_Kind, ...]
    checksum: str
    alone: bool = False

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  # pydantic's name


@dataclass(frozen=True)
class _Index:
    """Where each task's frame lies."""

    tasks: tuple[str, ...]
    sizes: tuple[Count, ...]

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  # pydantic's name


@dataclass(frozen=True)
class Packed:
    """A record as the file keeps it: its name, its line and its frame."""

    task: str
    line: str
    frame: bytes


# -- Writing ---------------------------------------------------------------------------------------------


def pack(space: ParameterSpace, record: Record) -> Packed:
    """Return a record as the file keeps it."""
    owned, values = record.owned.region.indices, record.owned.values
    parts = [values[where].to(dtype) for dtype, where in _by_dtype(space, owned)]
    others = [dict(sorted(named.items())) for named in (record.readout, record.buffers)]
    frame = compressed(
        [
            _gaps(space, owned),
            _gaps(space, record.shared.indices),
            *parts,
            *(tensor for named in others for tensor in named.values()),
        ]
    )
    readout, buffers = (
        [[name, _name_of(tensor.dtype), list(tensor.shape)] for name, tensor in named.items()] for named in others
    )
    row = {
        "sparsity": record.sparsity,
        "definition": record.definition.fields if record.definition else None,
        "classes": record.classes,
        "owned": list(map(len, parts)),
        "shared": len(record.shared),
        "readout": readout,
        "buffers": buffers,
        "checksum": _checksum(frame),
    }
    if record.alone:
        row["alone"] = True
    return Packed(record.task, _json(row), frame)


def serialize(ledger: Contents, packed: Sequence[Packed]) -> bytes:
    """Return the bytes of the file.

    Args:
        ledger: what it holds.
        packed: its records.
    """
    index = {"tasks": [each.task for each in packed], "sizes": [len(each.frame) for each in packed]}
    header = {
        "schema": str(SCHEMA),
        "composition": ledger.composition,
        "layout_hash": ledger.space.layout_hash,
        "fingerprint": ledger.fingerprint,
    }
    if ledger.binding:
        header["binding"] = ledger.binding.json
    tensors = {
        "layout": compressed_text(ledger.space.layout),
        "index": compressed_text(_json(index)),
        "records": compressed_text("\n".join(each.line for each in packed)),
        DATA: bytes_tensor(b"".join(each.frame for each in packed)),
    }
    return FILE.content(tensors, header)


# -- Reading: each function raises ``RegionError`` or ``ValueError`` with the reason if the file is not sound -----


def _check_header(header: Mapping[str, str]) -> None:
    """Check the file's metadata."""
    if header.get("schema", str(SCHEMA)) != str(SCHEMA):
        raise RegionError(f"it has schema {brief(header['schema'])}, and this version reads schema {SCHEMA}.")
    check_metadata(header, _METADATA)
    if (composition := header["composition"]) not in COMPOSITIONS:
        raise RegionError(f"its composition is {brief(composition)}, expected one of {', '.join(COMPOSITIONS)}.")


def _joined(task: str, owned: Region, shared: Region) -> Region:
    """Return a task's region: the entries it owns, and those of its entries that earlier tasks own."""
    if not len(shared):
        return owned
    try:
        return Region(torch.cat([owned.indices, shared.indices]).sort().values)
    except RegionError as error:
        raise RegionError(f"task {task!r} shares entries that no earlier task owns.") from error


class Stored:
    """A file's contents, whose records are read one by one; its checksum is not compared here.

    Args:
        header: the file's metadata.
        tensors: its tensors, which may lie in the file still.

    Attributes:
        tasks: the names of the tasks, in order.
    """

    def __init__(self, header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
        _check_header(header)
        if unexpected := sorted(tensors.keys() - set(_TENSORS)):
            raise RegionError(f"it holds the unexpected tensor {brief(unexpected[0])}.")
        for name in _TENSORS:
            tensor = tensors.get(name)
            if tensor is None or tensor.dtype != torch.uint8 or tensor.dim() != 1:
                raise RegionError(f"its tensor {name!r} is missing, or no bytes.")
        self._space = ParameterSpace.of_layout(_text(tensors, "layout"))
        if self._space.layout_hash != header["layout_hash"]:
            raise RegionError("its layout does not match its layout hash.")
        composition: Any = header["composition"]
        self._about = (header["fingerprint"], composition, _read_binding(header))
        try:
            index = checked(_Index, parse_json(_text(tensors, "index")))
        except ValueError as error:
            raise RegionError(f"its index cannot be read ({error}).") from error
        self.tasks, text = index.tasks, _text(tensors, "records")
        self._lines = text.split("\n") if text else []
        self._ends, self._data = list(accumulate(index.sizes, initial=0)), tensors[DATA]
        if not len(self.tasks) == len(index.sizes) == len(self._lines):
            raise RegionError(
                f"it has {len(self.tasks)} names, {len(index.sizes)} sizes and {len(self._lines)} lines of records."
            )
        if len(self._data) != self._ends[-1]:
            raise RegionError(f"its records have {self._ends[-1]} bytes, but {DATA!r} has {len(self._data)}.")

    def record(self, position: int) -> Record:
        """Return the record at ``position``, from 0, after checking its frame's checksum and its contents."""
        task = self.tasks[position]
        frame = self._data[self._ends[position] : self._ends[position + 1]].numpy().tobytes()
        try:
            row = checked(Row, parse_json(self._lines[position]))
            _check_definition(row.definition, task, row.classes)
        except ValueError as error:
            raise RegionError(f"what it says of task {task!r} cannot be read ({error}).") from error
        try:
            return _unpacked(self._space, task, row, frame)
        except RegionError as error:
            raise RegionError(f"task {task!r}: {error}") from error

    def contents(self) -> Contents:
        """Return everything that the file holds."""
        return Contents(self._space, *self._about, tuple(self.record(k) for k in range(len(self.tasks))))


def _unpacked(space: ParameterSpace, task: str, row: Row, frame: bytes) -> Record:
    if _checksum(frame) != row.checksum:
        raise RegionError("its contents do not match its checksum.")
    gap, dtypes, count = _gap_dtype(space), space.dtypes, sum(row.owned)
    if len(row.owned) != len(dtypes) or count + row.shared > len(space):
        raise RegionError(f"{row.owned} and {row.shared} entries do not fit a space of {len(space)} entries.")
    kinds = [(gap, count), (gap, row.shared), *zip(dtypes, row.owned, strict=True)]
    others = [(name, _dtype(dtype), shape) for name, dtype, shape in (*row.readout, *row.buffers)]
    kinds += [(dtype, _numel(shape)) for _, dtype, shape in others]
    owned_gaps, shared_gaps, *tensors = restored(frame, kinds)
    owned, shared = (_region(space, gaps) for gaps in (owned_gaps, shared_gaps))
    values = torch.empty(count, dtype=space.dtype, device="cpu")
    for (dtype, where), part in zip(_by_dtype(space, owned.indices), tensors, strict=False):
        if len(values[where]) != len(part):
            raise RegionError(f"it has {len(part)} values in {dtype} for {len(values[where])} entries.")
        values[where] = part.to(values.dtype)
    named = [
        (name, tensor.view(shape)) for (name, _, shape), tensor in zip(others, tensors[len(dtypes) :], strict=True)
    ]
    readout, buffers = dict(named[: len(row.readout)]), dict(named[len(row.readout) :])
    if len(readout) < len(row.readout) or len(buffers) < len(row.buffers):
        raise RegionError("two of its tensors have one name.")
    if damaged := not_finite({"values": values, **readout, **buffers}):
        raise RegionError(f"tensor {damaged!r} holds NaN or infinity.")
    region = _joined(task, owned, shared)
    graft = Graft(owned, values)
    return Record(task, region, graft, row.sparsity, readout, buffers, row.definition, row.classes, row.alone)


def _read_binding(header: Mapping[str, str]) -> Binding | None:
    """Return the binding of a file's metadata."""
    try:
        return Binding.of_json(header["binding"]) if "binding" in header else None
    except ValueError as error:
        raise RegionError(f"its binding cannot be read ({error}).") from error


def _check_definition(definition: TaskDefinition | None, task: str, classes: Sequence[int]) -> None:
    """Check a task's definition and the numbers of its labels."""
    check("classes", classes, len(set(classes)) == len(classes), "different numbers")
    if definition is not None:
        TaskDefinition.of_fields(definition.fields)
        own = definition.name == task and len(classes) in (0, len(definition.labels))
        check("definition", definition.name, own, f"that of task {task!r} with a class for each label, or none")


def _text(tensors: Mapping[str, Tensor], name: str) -> str:
    try:
        return restored_text(tensors[name])
    except (RegionError, ValueError) as error:
        raise RegionError(f"its {name} cannot be read ({error}).") from error


# -- Parts of a frame ------------------------------------------------------------------------------------


def _gaps(space: ParameterSpace, indices: Tensor) -> Tensor:
    """Return how many entries lie between each index and the one before."""
    before = torch.cat([torch.tensor([-1], device="cpu"), indices[:-1]])[: len(indices)]
    return (indices - before - 1).to(_gap_dtype(space))


def _region(space: ParameterSpace, gaps: Tensor) -> Region:
    try:
        region = Region((gaps.to(torch.int64) + 1).cumsum(0) - 1)
    except RegionError as error:
        raise RegionError("its indices are not sorted without repeats.") from error
    if len(region) and (last := int(region.indices[-1])) >= len(space):
        raise RegionError(f"index {last} is out of bounds for {len(space)} entries.")
    return region


def _gap_dtype(space: ParameterSpace) -> torch.dtype:
    """Return the dtype that holds every gap, and every index."""
    return torch.uint32 if len(space) <= 2**32 else torch.int64


def _by_dtype(space: ParameterSpace, indices: Tensor) -> list[tuple[torch.dtype, Tensor | slice]]:
    """Return each dtype of the space, and which of the indices lie in tensors of that dtype."""
    if len(space.dtypes) == 1:
        return [(space.dtype, slice(None))]
    of_tensor = torch.tensor([space.dtypes.index(spec.dtype) for spec in space.tensors], device="cpu")
    # At the boundary of an empty tensor the last one counts: no entry lies in an empty tensor.
    of_entry = of_tensor[torch.searchsorted(space.boundaries, indices, right=True) - 1]
    return [(dtype, of_entry == number) for number, dtype in enumerate(space.dtypes)]


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _checksum(frame: bytes) -> str:
    return hashlib.sha256(frame).hexdigest()[:32]


def _name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise RegionError(f"{brief(name)} is no dtype of a ledger's tensors.")
    return DTYPES[name]


def _numel(shape: Sequence[int]) -> int:
    # The strides of an empty tensor must fit an int64, too.
    if len(shape) > _MOST_SIDES or math.prod(max(side, 1) for side in shape) >= 2**48:
        raise RegionError(f"a tensor of shape {brief(str(list(shape)))} is larger than any.")
    return math.prod(shape)
