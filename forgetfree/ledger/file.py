"""The ledger's file: one safetensors file without pickle.

For all records together, in their order:

    records                uint8 (…)     JSON: task, sparsity, definition and classes of every record
    owned/count            int64 (T,)    how many entries each task owns
    owned/index            uint32 (Σs,)  their flat indices in the parameter space, rising within a record; int64 in large ones
    owned/value/DTYPE      (…)           their values: of the entries whose tensors have that dtype, in the same order
    shared/count           int64 (T,)    how many entries of γ_k earlier tasks own
    shared/index           uint32 (Σr,)  their flat indices

and for record ``k``:

    readout/k/name         …             the task's own readout tensors
    buffer/k/name          …             buffers that training the task changed (BatchNorm's, say)

and as metadata: format, schema, composition, the parameter space's layout and its hash, the base model's fingerprint, the
binding (see `forgetfree.core.binding`), and a checksum of all of the above. Files of version 0.2: `legacy_file`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from forgetfree.core.binding import Binding
from forgetfree.core.graft import Graft
from forgetfree.core.graft_file import space_of
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.display import brief
from forgetfree.errors import RegionError
from forgetfree.files import check_metadata, signed_bytes
from forgetfree.json_file import check, checked, parse_json
from forgetfree.ledger.records import COMPOSITIONS, Contents, Record
from forgetfree.tasks import TaskDefinition

FORMAT, SCHEMA = "forgetfree.ledger", 3
#: The number of a class in a readout; no readout has more.
_Class = Annotated[int, Field(ge=0, lt=2**31)]
_METADATA = ("format", "schema", "composition", "layout", "layout_hash", "fingerprint", "checksum")


@dataclass(frozen=True)
class _Row:
    """What the file says about a record besides its tensors."""

    task: str
    sparsity: Annotated[float, Field(ge=0, le=1)]
    definition: TaskDefinition | None
    classes: tuple[_Class, ...]

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  # pydantic's name


def serialize(ledger: Contents) -> bytes:
    """Return the bytes of the file."""
    space, records = ledger.space, ledger.records
    rows = [
        {
            "task": record.task,
            "sparsity": record.sparsity,
            "definition": record.definition.fields if record.definition else None,
            "classes": list(record.classes),
        }
        for record in records
    ]
    tensors = {"records": torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)}
    for kind, regions in (
        ("owned", [record.owned.region for record in records]),
        ("shared", [record.region - record.owned.region for record in records]),
    ):
        tensors[f"{kind}/count"] = torch.tensor([len(region) for region in regions], dtype=torch.int64)
        indices = torch.cat([torch.empty(0, dtype=torch.int64), *(region.indices for region in regions)])
        tensors[f"{kind}/index"] = indices.to(_index_dtype(space))
        if kind == "owned":
            values = torch.cat([torch.empty(0, dtype=space.dtype), *(record.owned.values for record in records)])
            for dtype, held in _by_dtype(space, indices):
                tensors[f"owned/value/{_name(dtype)}"] = values[held].to(dtype)
    for k, record in enumerate(records):
        for kind, named in (("readout", record.readout), ("buffer", record.buffers)):
            tensors |= {f"{kind}/{k}/{name}": tensor for name, tensor in named.items()}
    header = {
        "format": FORMAT,
        "schema": str(SCHEMA),
        "composition": ledger.composition,
        "layout": space.layout,
        "layout_hash": space.layout_hash,
        "fingerprint": ledger.fingerprint,
    }
    if ledger.binding:
        header["binding"] = ledger.binding.json
    return signed_bytes(tensors, header)


# -- Reading: each function raises ``RegionError`` or ``ValueError`` with the reason if the file is not sound -----


def check_header(header: Mapping[str, str], keys: tuple[str, ...], schemas: tuple[str, ...]) -> ParameterSpace:
    """Check a file's metadata and return its parameter space."""
    if header.get("schema", schemas[0]) not in schemas:
        raise RegionError(f"it has schema {brief(header['schema'])}, and this version reads schema 1 to {SCHEMA}.")
    check_metadata(header, keys)
    composition = header.get("composition", "union")
    if composition not in COMPOSITIONS:
        raise RegionError(f"its composition is {brief(composition)}, expected one of {', '.join(COMPOSITIONS)}.")
    return space_of(header)


def joined(task: str, owned: Region, shared: Region) -> Region:
    """Return a task's region: the entries it owns, and those of its entries that earlier tasks own."""
    if not shared.isdisjoint(owned):
        raise RegionError(f"task {task!r} shares entries that no earlier task owns.")
    return owned | shared


def parse(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Contents:
    """Return the contents of a file with this schema, without comparing its checksum."""
    space = check_header(header, _METADATA, (str(SCHEMA),))
    composition: Any = header["composition"]
    binding, about = _binding(header), _rows(tensors)
    expected = {"records"} | {f"{kind}/{part}" for kind in ("owned", "shared") for part in ("count", "index")}
    expected |= {f"owned/value/{_name(dtype)}" for dtype in {spec.dtype for spec in space.tensors}}
    numbers = {str(k): k for k in range(len(about))}
    named: list[dict[str, dict[str, Tensor]]] = [{"readout": {}, "buffer": {}} for _ in about]
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("/")
        number, _, name = rest.partition("/")
        if kind in ("readout", "buffer") and number in numbers:
            named[numbers[number]][kind][name] = tensor
        elif key not in expected:
            raise RegionError(f"it holds the unexpected tensor {brief(key)}.")
    owned, shared = (_regions(space, tensors, kind, len(about)) for kind in ("owned", "shared"))
    values = _values(space, tensors, torch.cat([torch.empty(0, dtype=torch.int64), *(each.indices for each in owned)]))
    records = [
        Record(
            row.task,
            joined(row.task, own, rest_of),
            Graft(own, held),
            row.sparsity,
            own_tensors["readout"],
            own_tensors["buffer"],
            row.definition,
            row.classes,
        )
        for row, own, rest_of, held, own_tensors in zip(
            about, owned, shared, torch.split(values, [len(region) for region in owned]), named, strict=True
        )
    ]
    return Contents(space, header["fingerprint"], composition, binding, tuple(records))


def _binding(header: Mapping[str, str]) -> Binding | None:
    try:
        return Binding.of_json(header["binding"]) if "binding" in header else None
    except ValueError as error:
        raise RegionError(f"its binding cannot be read ({error}).") from error


def _rows(tensors: Mapping[str, Tensor]) -> list[_Row]:
    """Return what the file says about every record."""
    text = tensors.get("records")
    if text is None or text.dtype != torch.uint8 or text.dim() != 1:
        raise RegionError("its tensor 'records' is missing, or no text.")
    try:
        rows = checked(list[_Row], parse_json(text.numpy().tobytes().decode()))
        for row in rows:
            check("classes", row.classes, len(set(row.classes)) == len(row.classes), "different numbers")
            if row.definition is not None:
                definition = TaskDefinition.of_fields(row.definition.fields)
                own = (definition.name, len(definition.labels)) == (row.task, len(row.classes))
                check("definition", definition.name, own, f"that of task {row.task!r} with a class for each label")
    except ValueError as error:
        raise RegionError(f"its records cannot be read ({error}).") from error
    return rows


def _regions(space: ParameterSpace, tensors: Mapping[str, Tensor], kind: str, records: int) -> list[Region]:
    """Return the regions of one kind, one for each record."""
    count, index = tensors.get(f"{kind}/count"), tensors.get(f"{kind}/index")
    if count is None or index is None:
        raise RegionError(f"its tensors '{kind}/count' and '{kind}/index' do not come together.")
    if count.dtype != torch.int64 or count.shape != (records,) or bool((count < 0).any()):
        raise RegionError(f"'{kind}/count' must hold a number of entries for each of {records} tasks.")
    if index.dtype != _index_dtype(space) or index.shape != (int(count.sum()),):
        raise RegionError(
            f"'{kind}/index': expected {_index_dtype(space)} indices of shape ({int(count.sum())},), got {index.dtype} of "
            f"shape {tuple(index.shape)}."
        )
    indices = index.to(torch.int64)
    if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= len(space)):
        raise RegionError(f"'{kind}/index': index {int(indices.max())} is out of bounds for {len(space)} entries.")
    try:
        return [Region(part) for part in torch.split(indices, count.tolist())]
    except RegionError as error:
        raise RegionError(f"'{kind}/index': its indices are not sorted without repeats.") from error


def _values(space: ParameterSpace, tensors: Mapping[str, Tensor], indices: Tensor) -> Tensor:
    """Return the values at concatenated owned indices, in the space's dtype."""
    values = torch.empty(len(indices), dtype=space.dtype)
    for dtype, held in _by_dtype(space, indices):
        name, count = f"owned/value/{_name(dtype)}", int(held.sum())
        given = tensors.get(name)
        if given is None or given.dtype != dtype or given.shape != (count,):
            got = "none" if given is None else f"{given.dtype} of shape {tuple(given.shape)}"
            raise RegionError(f"{name!r}: expected {dtype} values of shape ({count},), got {got}.")
        values[held] = given.to(values.dtype)
    return values


def _by_dtype(space: ParameterSpace, indices: Tensor) -> list[tuple[torch.dtype, Tensor]]:
    """Return each dtype of the space, with a mask of the indices that lie in tensors of that dtype."""
    dtypes = list(dict.fromkeys(spec.dtype for spec in space.tensors))
    of_tensor = torch.tensor([dtypes.index(spec.dtype) for spec in space.tensors])
    # At the boundary of an empty tensor the last one counts: no entry lies in an empty tensor.
    held = of_tensor[torch.searchsorted(space.boundaries, indices, right=True) - 1]
    return [(dtype, held == number) for number, dtype in enumerate(dtypes)]


def _index_dtype(space: ParameterSpace) -> torch.dtype:
    return torch.uint32 if len(space) <= 2**32 else torch.int64


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
