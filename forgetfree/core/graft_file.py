"""The file of a graft on its own: one safetensors file without pickle.

    graft/name/index    uint32 (s,)   entries within the tensor ``name`` of the model's body, sorted
    graft/name/value    (s,)          their values, in the parameter's dtype
    readout/name        …             the tensors that read out the task
    buffer/name         …             buffers of the body that training changed (BatchNorm's, say)

and as metadata: format, schema, the layout of the body's parameter space and its hash, where the graft comes from (JSON:
the task's definition, the readout, the base model's name and fingerprint, the sparsity), and a checksum of all of that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor

from forgetfree.core.binding import is_network
from forgetfree.core.graft_origin import GraftOrigin
from forgetfree.core.parameters import ParameterSpace, TensorSpec
from forgetfree.core.readout_model import ReadoutKind
from forgetfree.core.regions import Region
from forgetfree.display import brief
from forgetfree.errors import GraftError, RegionError, UsageError
from forgetfree.files import StrPath, checksum, read_kind, signed_bytes
from forgetfree.json_file import check, check_fields, is_number, parse_json
from forgetfree.tasks import TaskDefinition

FORMAT, SCHEMA = "forgetfree.graft", 1
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
    """The bytes of the file; for the arguments see `forgetfree.core.graft.Graft`.

    Raises:
        GraftError: the graft has no space of its own, or holds NaN or infinity.
    """
    if space is None:
        raise GraftError(
            "A graft on its own needs the parameter space of its model's body, and this one has none. Make it with "
            "SingleTask.graft, or give it a space."
        )
    named = {"graft": pack(space, region, values), "readout": readout, "buffer": buffers}
    tensors = {f"{kind}/{name}": tensor.detach().cpu() for kind in _KINDS for name, tensor in named[kind].items()}
    if damaged := _not_finite(tensors):
        raise GraftError(f"The graft holds NaN or infinity in {damaged!r}. Train it again, with a lower rate.")
    header = {
        "format": FORMAT,
        "schema": str(SCHEMA),
        "layout": space.layout,
        "layout_hash": space.layout_hash,
    }
    if origin is not None:
        header["origin"] = json.dumps(asdict(origin) | {"task": origin.task.fields})
    return signed_bytes(tensors, header)


def read(path: Path) -> dict[str, Any]:
    """The attributes of a graft by name, read and verified; see `Graft.load`."""
    header, tensors = read_kind(path, "graft", FORMAT, GraftError, "make the graft again")
    try:
        return _attributes(header, tensors)
    except RegionError as error:
        raise GraftError(
            f"{path} is not a sound graft: {str(error).rstrip('.')}. Restore it from a copy, or make the graft again."
        ) from error


_FILES = "*.safetensors"


def find_graft(path: StrPath) -> Path:
    """``path`` itself, or the one graft file in a directory, or where there is none in it, below it.

    Raises:
        UsageError: the directory holds none, or several.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    inside, below = (
        [each for each in sorted(found) if _is_graft(each)] for found in (path.glob(_FILES), path.rglob(_FILES))
    )
    found = inside or below
    if len(found) != 1:
        names = ", ".join(str(each.relative_to(path)) for each in found[:5])
        raise UsageError(
            f"{str(path)!r} must hold one graft file, got {f'{len(found)}: {names}' if found else 'none'}. Give the path of a "
            "graft.safetensors."
        )
    return found[0]


# -- Parts that a ledger's file has, too -----------------------------------------------------------------


def pack(space: ParameterSpace, region: Region, values: Tensor | None = None) -> dict[str, Tensor]:
    """A region as ``name/index`` by tensor, and its values as ``name/value``."""
    tensors = {}
    for i, local, where in space.split(region.indices):
        spec = space.tensors[i]
        tensors[f"{spec.name}/index"] = local.to(torch.uint32)
        if values is not None:
            tensors[f"{spec.name}/value"] = values[where].to(spec.dtype)
    return tensors


def unpack(space: ParameterSpace, tensors: Mapping[str, Tensor]) -> tuple[Region, Tensor]:
    """Region and values from what `pack` made, the values in the space's dtype.

    Raises:
        RegionError: indices or values do not fit the space.
    """
    region, values = unpack_region(space, tensors), [torch.empty(0, dtype=space.dtype)]
    for spec in space.tensors:
        index, value = tensors.get(f"{spec.name}/index"), tensors.get(f"{spec.name}/value")
        if (index is None) != (value is None):
            raise RegionError(f"tensor {spec.name!r}: indices and values do not come in pairs.")
        if index is None or value is None:
            continue
        if value.dtype != spec.dtype or value.shape != index.shape:
            raise RegionError(
                f"tensor {spec.name!r}: expected {spec.dtype} values of shape {tuple(index.shape)}, got {value.dtype} of "
                f"shape {tuple(value.shape)}."
            )
        values.append(value)
    return region, torch.cat(values)


def unpack_region(space: ParameterSpace, tensors: Mapping[str, Tensor]) -> Region:
    """The region from what `pack` made.

    Raises:
        RegionError: indices do not fit the space.
    """
    found = [
        _check_index(spec, tensors[key]) + spec.offset
        for spec in space.tensors
        if (key := f"{spec.name}/index") in tensors
    ]
    return Region(torch.cat([torch.empty(0, dtype=torch.int64), *found]))


def space_of(header: Mapping[str, str]) -> ParameterSpace:
    """The parameter space of a file, from its ``layout`` and ``layout_hash``.

    Raises:
        RegionError: the layout is none, or not the one of that hash.
    """
    space = ParameterSpace.of_layout(header["layout"])
    if space.layout_hash != header["layout_hash"]:
        raise RegionError("its layout does not match its layout hash.")
    return space


def _check_index(spec: TensorSpec, index: Tensor) -> Tensor:
    """The indices within one tensor, int64."""
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
    """The attributes of the graft of a file; ``RegionError`` with the reason where it is not sound."""
    if missing := {"schema", "layout", "layout_hash", "checksum"} - set(header):
        raise RegionError(f"its metadata lacks {', '.join(sorted(missing))}.")
    if header["schema"] != str(SCHEMA):
        raise RegionError(f"it has schema {brief(header['schema'])}, and this version reads schema {SCHEMA}.")
    space = space_of(header)
    named: dict[str, dict[str, Tensor]] = {kind: {} for kind in _KINDS}
    entries = {f"{spec.name}/{part}" for spec in space.tensors for part in ("index", "value")}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind not in named or (kind == "graft" and name not in entries):
            raise RegionError(f"it holds the unexpected tensor {brief(key)}.")
        named[kind][name] = tensor
    region, values = unpack(space, named["graft"])
    if damaged := _not_finite(tensors):
        raise RegionError(f"{damaged!r} holds NaN or infinity.")
    origin = _origin(header["origin"]) if "origin" in header else None
    # Last, because the checks above say more.
    if checksum(tensors, header) != header["checksum"]:
        raise RegionError("its contents do not match its checksum.")
    return {
        "region": region,
        "values": values,
        "space": space,
        "readout": named["readout"],
        "buffers": named["buffer"],
        "origin": origin,
    }


def _origin(text: str) -> GraftOrigin:
    try:
        found = parse_json(text)
        check_fields(
            "", found, dict.fromkeys(("readout", "model", "fingerprint"), str) | {"task": dict, "classes": list}
        )
        given = found | {"task": TaskDefinition.of_fields(found["task"]), "classes": tuple(found["classes"])}
        origin = GraftOrigin(**given)
        for key in ("architecture", "network", "tokenizer"):
            check(key, getattr(origin, key), isinstance(getattr(origin, key), str), "a string")
        check(
            "readout",
            origin.readout,
            origin.readout in get_args(ReadoutKind),
            f"one of {', '.join(get_args(ReadoutKind))}",
        )
        check("sparsity", origin.sparsity, is_number(origin.sparsity, 0.0, 1.0), "a share")
        longest = origin.max_length
        check("max_length", longest, type(longest) is int and longest >= 0, "a number of tokens")
        numbered = all(type(number) is int for number in origin.classes)
        right = numbered and sorted(origin.classes) in ([], list(range(len(origin.task.labels))))
        check("classes", list(origin.classes), right, "the number of a class for each label")
        if origin.network and not is_network(origin.network):
            raise ValueError("the network's configuration is no JSON object")
    except (ValueError, TypeError) as error:  # TypeError: fields that it does not have
        raise RegionError(f"its origin cannot be read ({error}).") from error
    return origin


def _not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The first tensor that holds NaN or infinity."""
    return next(
        (name for name, each in tensors.items() if each.is_floating_point() and not bool(torch.isfinite(each).all())),
        None,
    )


def _is_graft(path: Path) -> bool:
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            return bool((file.metadata() or {}).get("format") == FORMAT)
    except (SafetensorError, OSError):
        return False
