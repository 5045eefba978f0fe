"""Ledgers' files of earlier schemas. They are read and no longer written.

Schema 1 is that of version 0.2, and schema 2 for other compositions than unions. For record ``k`` and tensor ``name``:

    owned/k/name/index     uint32 (s,)   entries within the tensor that the task owns, sorted
    owned/k/name/value     (s,)          their values, in the parameter's dtype
    shared/k/name/index    uint32 (r,)   entries of γ_k that an earlier task owns
    readout/k/name         …             the task's own readout tensors
    buffer/k/name          …             buffers that training the task changed

and as metadata: schema, task names in order, sparsity per task, the parameter space's layout and its hash, the base model's
fingerprint, the composition (``union`` where it is not given), and a checksum. They do not say what else answers depend on.

Schema 3 holds the records together: ``records`` (JSON), ``owned/count``, ``owned/index`` (flat indices, uint32, or int64 in
large spaces), ``owned/value/DTYPE``, ``shared/count``, ``shared/index``; readouts and buffers as above; and a binding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from forgetfree.core.graft import Graft
from forgetfree.core.graft_file import space_of, unpack, unpack_region
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.display import brief
from forgetfree.errors import RegionError
from forgetfree.json_file import checked, parse_json
from forgetfree.ledger.file import (
    Class,
    by_dtype,
    check_definition,
    check_header,
    gap_dtype,
    joined,
    name_of,
    read_binding,
)
from forgetfree.ledger.records import Contents, Record
from forgetfree.tasks import TaskDefinition

_Made = TypeVar("_Made")
_Named = dict[str, dict[str, Tensor]]
SCHEMAS = ("1", "2", "3")
_METADATA = ("schema", "tasks", "sparsity", "layout", "layout_hash", "fingerprint", "checksum")
_METADATA_3 = ("format", "schema", "composition", "layout", "layout_hash", "fingerprint", "checksum")
_KINDS = {"owned": ("index", "value"), "shared": ("index",), "readout": (), "buffer": ()}
_Sparsity = Annotated[float, Field(ge=0, le=1)]


def parse(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Contents:
    """Return the contents of a file with one of these schemas, without comparing its checksum.

    Raises:
        RegionError: the file is not sound; the message says why.
    """
    if header.get("schema") == "3":
        return _parse_3(header, tensors)
    check_header(header, _METADATA, SCHEMAS)
    space = space_of(header)
    tasks = _listed(header, "tasks", list[str])
    sparsity = _listed(header, "sparsity", list[_Sparsity])
    if len(tasks) != len(sparsity):
        raise RegionError(f"it names {len(tasks)} tasks but {len(sparsity)} sparsities.")
    composition: Any = header.get("composition", "union")
    records = list[Record]()
    known = {spec.name for spec in space.tensors}
    named: list[_Named] = [{kind: {} for kind in _KINDS} for _ in tasks]
    numbers = {str(k): k for k in range(len(tasks))}
    for key, each in tensors.items():
        kind, number, name = _parts(key)
        tensor, _, part = name.rpartition("/")
        fits = kind in ("readout", "buffer") or (tensor in known and part in _KINDS.get(kind, ()))
        if not fits or number not in numbers:
            raise RegionError(f"it holds the unexpected tensor {brief(key)}.")
        named[numbers[number]][kind][name] = each
    for task, allowed, of_task in zip(tasks, sparsity, named, strict=True):
        try:
            owned, shared = Graft(*unpack(space, of_task["owned"])), unpack_region(space, of_task["shared"])
        except RegionError as error:
            raise RegionError(f"task {task!r}, {error}") from error
        region = joined(task, owned.region, shared)
        records.append(Record(task, region, owned, float(allowed), of_task["readout"], of_task["buffer"]))
    return Contents(space, header["fingerprint"], composition, None, tuple(records))


def _parts(key: str) -> tuple[str, str, str]:
    kind, _, rest = key.partition("/")
    number, _, name = rest.partition("/")
    return kind, number, name


def _listed(header: Mapping[str, str], key: str, kind: type[_Made]) -> _Made:
    try:
        return checked(kind, parse_json(header[key]))
    except ValueError as error:
        raise RegionError(f"its {key} cannot be read ({error}).") from error


# -- Schema 3 --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """What the file says about a record besides its tensors."""

    task: str
    sparsity: _Sparsity
    definition: TaskDefinition | None
    classes: tuple[Class, ...]

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  # pydantic's name


def _parse_3(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Contents:
    check_header(header, _METADATA_3, SCHEMAS)
    space = space_of(header)
    composition: Any = header["composition"]
    binding, about = read_binding(header), _rows(tensors)
    expected = {"records"} | {f"{kind}/{part}" for kind in ("owned", "shared") for part in ("count", "index")}
    expected |= {f"owned/value/{name_of(dtype)}" for dtype in space.dtypes}
    numbers = {str(k): k for k in range(len(about))}
    named: list[_Named] = [{"readout": {}, "buffer": {}} for _ in about]
    for key, tensor in tensors.items():
        kind, number, name = _parts(key)
        if kind in ("readout", "buffer") and number in numbers:
            named[numbers[number]][kind][name] = tensor
        elif key not in expected:
            raise RegionError(f"it holds the unexpected tensor {brief(key)}.")
    owned, shared = (_regions(space, tensors, kind, len(about)) for kind in ("owned", "shared"))
    values = _values(space, tensors, torch.cat([torch.empty(0, dtype=torch.int64), *(each.indices for each in owned)]))
    records = [
        Record(
            row.task,
            joined(row.task, own, rest),
            Graft(own, held),
            row.sparsity,
            own_tensors["readout"],
            own_tensors["buffer"],
            row.definition,
            row.classes,
        )
        for row, own, rest, held, own_tensors in zip(
            about, owned, shared, torch.split(values, [len(region) for region in owned]), named, strict=True
        )
    ]
    return Contents(space, header["fingerprint"], composition, binding, tuple(records))


def _rows(tensors: Mapping[str, Tensor]) -> list[_Row]:
    text = tensors.get("records")
    if text is None or text.dtype != torch.uint8 or text.dim() != 1:
        raise RegionError("its tensor 'records' is missing, or no text.")
    try:
        rows = checked(list[_Row], parse_json(text.numpy().tobytes().decode()))
        for row in rows:
            check_definition(row.definition, row.task, row.classes)
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
    if index.dtype != gap_dtype(space) or index.shape != (int(count.sum()),):
        raise RegionError(
            f"'{kind}/index': expected {gap_dtype(space)} indices of shape ({int(count.sum())},), got {index.dtype} of "
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
    for dtype, held in by_dtype(space, indices):
        name, count = f"owned/value/{name_of(dtype)}", len(values[held])
        given = tensors.get(name)
        if given is None or given.dtype != dtype or given.shape != (count,):
            got = "none" if given is None else f"{given.dtype} of shape {tuple(given.shape)}"
            raise RegionError(f"{name!r}: expected {dtype} values of shape ({count},), got {got}.")
        values[held] = given.to(values.dtype)
    return values
