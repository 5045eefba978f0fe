"""Ledgers of version 0.2: schema 1, and schema 2 for other compositions than unions. They are read and no longer written.

For record ``k`` and tensor ``name``:

    owned/k/name/index     uint32 (s,)   entries within the tensor that the task owns, sorted
    owned/k/name/value     (s,)          their values, in the parameter's dtype
    shared/k/name/index    uint32 (r,)   entries of γ_k that an earlier task owns
    readout/k/name         …             the task's own readout tensors
    buffer/k/name          …             buffers that training the task changed

and as metadata: schema, task names in order, sparsity per task, the parameter space's layout and its hash, the base model's
fingerprint, the composition (``union`` where it is not given), and a checksum. They do not say what else answers depend on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field
from torch import Tensor

from forgetfree.core.graft import Graft
from forgetfree.core.graft_file import unpack, unpack_region
from forgetfree.display import brief
from forgetfree.errors import RegionError
from forgetfree.json_file import checked, parse_json
from forgetfree.ledger.file import check_header, joined
from forgetfree.ledger.records import Contents, Record

_Made = TypeVar("_Made")
SCHEMAS = ("1", "2")
_METADATA = ("schema", "tasks", "sparsity", "layout", "layout_hash", "fingerprint", "checksum")
_KINDS = {"owned": ("index", "value"), "shared": ("index",), "readout": (), "buffer": ()}


def parse(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Contents:
    """Return the contents of a file with one of these schemas, without comparing its checksum.

    Raises:
        RegionError: the file is not sound; the message says why.
    """
    space = check_header(header, _METADATA, SCHEMAS)
    tasks = _listed(header, "tasks", list[str])
    sparsity = _listed(header, "sparsity", list[Annotated[float, Field(ge=0, le=1)]])
    if len(tasks) != len(sparsity):
        raise RegionError(f"it names {len(tasks)} tasks but {len(sparsity)} sparsities.")
    composition: Any = header.get("composition", "union")
    records = list[Record]()
    known = {spec.name for spec in space.tensors}
    named: list[dict[str, dict[str, Tensor]]] = [{kind: {} for kind in _KINDS} for _ in tasks]
    numbers = {str(k): k for k in range(len(tasks))}
    for key, each in tensors.items():
        kind, _, rest = key.partition("/")
        number, _, name = rest.partition("/")
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


def _listed(header: Mapping[str, str], key: str, kind: type[_Made]) -> _Made:
    try:
        return checked(kind, parse_json(header[key]))
    except ValueError as error:
        raise RegionError(f"its {key} cannot be read ({error}).") from error
