"""The file of a graft on its own: one safetensors file without pickle.

    graft/name/index    uint32 (s,)   entries within the tensor ``name`` of the model's body, sorted
    graft/name/value    (s,)          their values, in the parameter's dtype
    readout/name        …             the tensors that read out the task
    buffer/name         …             buffers of the body that training changed (BatchNorm's, say)

and as metadata: format, schema, the layout of the body's parameter space and its hash, the graft's origin (JSON:
the task's definition, the readout, the base model's name and fingerprint, the sparsity), and a checksum of all of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgetfree.core.parameters import ParameterSpace, TensorSpec
from forgetfree.core.regions import Region
from forgetfree.core.tensors import not_finite
from forgetfree.display import brief
from forgetfree.errors import GraftError, RegionError, UsageError
from forgetfree.files import StrPath
from forgetfree.ledger.graft_origin import GraftOrigin
from forgetfree.tensor_file import TensorFile, check_metadata

FORMAT, SCHEMA = "forgetfree.graft", 1
FILE = TensorFile(GraftError, "Restore it from a copy, or make the graft again.", FORMAT, "graft")
_KINDS = ("graft", "readout", "buffer")


def serialize(
    *,
    region: Region,
    values: Tensor,
    space: ParameterSpace | None,
    readout: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    origin: GraftOrigin | None,
) -> bytes:
    """Return the bytes of the file; for the arguments see `forgetfree.ledger.graft.Graft`.

    Raises:
        GraftError: the graft has no parameter space, or holds NaN or infinity.
    """
    if space is None:
        raise GraftError(
            "A graft on its own needs the parameter space of its model's body, and this one has none. Make it with "
            "SingleTask.graft, or give it a space."
        )
    named = {"graft": _pack(space, region, values), "readout": readout, "buffer": buffers}
    tensors = {f"{kind}/{name}": tensor.detach().cpu() for kind in _KINDS for name, tensor in named[kind].items()}
    if damaged := not_finite(tensors):
        raise GraftError(f"The graft holds NaN or infinity in {damaged!r}. Train it again, with a lower rate.")
    header = {
        "schema": str(SCHEMA),
        "layout": space.layout,
        "layout_hash": space.layout_hash,
    }
    if origin is not None:
        header["origin"] = origin.json
    return FILE.content(tensors, header)


def read(path: Path) -> dict[str, Any]:
    """Read and verify the attributes of a graft, by name; see `Graft.load`."""
    return FILE.load(path, _attributes)


_FILES = "*.safetensors"


def find_graft(path: StrPath) -> Path:
    """Return ``path`` itself, or the one graft file in a directory, or where there is none in it, below it.

    Raises:
        UsageError: the directory holds none, or several.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    inside, below = (
        [each for each in sorted(found) if FILE.is_at(each)] for found in (path.glob(_FILES), path.rglob(_FILES))
    )
    found = inside or below
    if len(found) != 1:
        names = ", ".join(str(each.relative_to(path)) for each in found[:5])
        remedy = "Give the path of a graft.safetensors."
        if (path / "results.json").is_file():
            remedy += " To write a task of a run: forgetfree export."
        raise UsageError(
            f"{str(path)!r} must hold one graft file, got {f'{len(found)}: {names}' if found else 'none'}. {remedy}"
        )
    return found[0]


def _pack(space: ParameterSpace, region: Region, values: Tensor) -> dict[str, Tensor]:
    """Return a region as ``name/index`` for each tensor, and its values as ``name/value``."""
    tensors = {}
    for i, local, where in space.split(region.indices):
        spec = space.tensors[i]
        tensors[f"{spec.name}/index"] = local.to(torch.uint32)
        tensors[f"{spec.name}/value"] = values[where].to(spec.dtype)
    return tensors


def _unpack(space: ParameterSpace, tensors: Mapping[str, Tensor]) -> tuple[Region, Tensor]:
    """Return region and values from what `_pack` returned, the values in the space's dtype.

    Raises:
        RegionError: indices or values do not fit the space.
    """
    indices, values = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=space.dtype)]
    for spec in space.tensors:
        index, value = tensors.get(f"{spec.name}/index"), tensors.get(f"{spec.name}/value")
        if (index is None) != (value is None):
            raise RegionError(f"tensor {spec.name!r}: indices and values do not come in pairs.")
        if index is None or value is None:
            continue
        indices.append(_check_index(spec, index) + spec.offset)
        if value.dtype != spec.dtype or value.shape != index.shape:
            raise RegionError(
                f"tensor {spec.name!r}: expected {spec.dtype} values of shape {tuple(index.shape)}, got {value.dtype} of "
                f"shape {tuple(value.shape)}."
            )
        values.append(value)
    return Region(torch.cat(indices)), torch.cat(values)


def _space_of(header: Mapping[str, str]) -> ParameterSpace:
    """Return the parameter space of a file, from its ``layout`` and ``layout_hash``.

    Raises:
        RegionError: the layout is none, or not the one of that hash.
    """
    space = ParameterSpace.of_layout(header["layout"])
    if space.layout_hash != header["layout_hash"]:
        raise RegionError("its layout does not match its layout hash.")
    return space


def _check_index(spec: TensorSpec, index: Tensor) -> Tensor:
    """Return the indices within one tensor, int64, after checking them."""
    if index.dtype != torch.uint32 or index.dim() != 1:
        raise RegionError(
            f"tensor {spec.name!r}: expected uint32 indices of shape (s,), got {index.dtype} of shape {tuple(index.shape)}."
        )
    local = index.to(torch.int64)
    if len(local) and int(local.max()) >= spec.size:
        raise RegionError(f"tensor {spec.name!r}: index {int(local.max())} is out of bounds for shape {spec.shape}.")
    if not bool((local[1:] > local[:-1]).all()):
        raise RegionError(f"tensor {spec.name!r}: its indices are not sorted without repeats.")
    return local


# -- Reading ---------------------------------------------------------------------------------------------


def _attributes(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the attributes of a file's graft."""
    check_metadata(header, ("schema", "layout", "layout_hash", "checksum"))
    if header["schema"] != str(SCHEMA):
        raise RegionError(f"it has schema {brief(header['schema'])}, and this version reads schema {SCHEMA}.")
    space = _space_of(header)
    named: dict[str, dict[str, Tensor]] = {kind: {} for kind in _KINDS}
    entries = {f"{spec.name}/{part}" for spec in space.tensors for part in ("index", "value")}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind not in named or (kind == "graft" and name not in entries):
            raise RegionError(f"it holds the unexpected tensor {brief(key)}.")
        named[kind][name] = tensor
    region, values = _unpack(space, named["graft"])
    if damaged := not_finite(tensors):
        raise RegionError(f"{damaged!r} holds NaN or infinity.")
    try:
        origin = GraftOrigin.of_json(header["origin"]) if "origin" in header else None
    except ValueError as error:
        raise ValueError(f"its origin cannot be read ({error})") from error
    return {
        "region": region,
        "values": values,
        "space": space,
        "readout": named["readout"],
        "buffers": named["buffer"],
        "origin": origin,
    }
