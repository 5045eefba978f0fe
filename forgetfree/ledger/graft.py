"""A graft: a region and the values that a model takes there, to be kept, saved and used elsewhere (paper, §2, eq. 1).

Its file is one safetensors file without pickle:

    graft/name/index    uint32 (s,)   entries within the tensor ``name`` of the model's body, sorted
    graft/name/value    (s,)          their values, in the parameter's dtype
    readout/name        …             the tensors that read out the task
    buffer/name         …             buffers of the body that training changed (BatchNorm's, say)

and as metadata: format, schema, the layout of the body's parameter space and its hash, the graft's origin (JSON:
the task's definition, the readout, the base model's name and fingerprint, the sparsity), and a checksum of all of that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from forgetfree.core.body import body_fingerprint, body_of, fingerprint_of
from forgetfree.core.parameters import ParameterSpace, TensorSpec
from forgetfree.core.readout_model import ReadoutKind
from forgetfree.core.regions import Region
from forgetfree.core.tensors import check_buffers, not_finite, persistent_buffers
from forgetfree.display import brief, counted
from forgetfree.errors import GraftError, RegionError, UsageError
from forgetfree.files import StrPath, write_atomically
from forgetfree.hub import HubFile
from forgetfree.json_file import check, checked, parse_json
from forgetfree.ledger.binding import Network, network_differences, network_of
from forgetfree.tasks import MAX_LENGTH, TaskDefinition
from forgetfree.tensor_file import TensorFile, check_metadata

FORMAT, SCHEMA = "forgetfree.graft", 1
FILE = TensorFile(GraftError, "Restore it from a copy, or make the graft again.", FORMAT, "graft")
_KINDS = ("graft", "readout", "buffer")
_FILES = "*.safetensors"


@dataclass(frozen=True)
class GraftOrigin:
    """Where a graft comes from, and what else is needed to answer with it.

    Attributes:
        task: the task it was made for.
        readout: how its logits are read: ``linear``, ``prompt``, ``causal`` or ``classifier``.
        model: the base model's name, as the user gave it.
        fingerprint: that of the base model's body, see `forgetfree.core.body.body_fingerprint`.
        sparsity: the share of the space that its region was allowed.
        architecture: the Hugging Face class whose head is the readout; for ``classifier`` only.
        classes: the number of the head's class for each of the task's labels; for ``classifier`` only.
        max_length: the longest row that was read, in tokens.
        network: what the base model computes apart from its weights, see `forgetfree.ledger.binding.network_of`; for
            ``classifier``, what the fine-tuned model computes. Empty if it is not known.
        tokenizer: what its tokenizer does, see `forgetfree.ledger.binding.tokenizer_digest`; empty if it is not known.
    """

    task: TaskDefinition
    readout: ReadoutKind
    model: str
    fingerprint: str
    sparsity: Annotated[float, Field(ge=0, le=1)]
    architecture: str = ""
    classes: tuple[int, ...] = ()
    max_length: Annotated[int, Field(ge=0)] = MAX_LENGTH
    network: Network = ""
    tokenizer: str = ""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  # pydantic's name

    @classmethod
    def of_json(cls, text: str) -> GraftOrigin:
        """Return the origin that `json` described.

        Raises:
            ValueError: a field is not known, is missing or does not fit; the message names each.
        """
        fields = parse_json(text)
        origin = replace(checked(cls, fields), task=TaskDefinition.of_fields(fields["task"]))
        numbered = sorted(origin.classes) in ([], list(range(len(origin.task.labels))))
        check("classes", origin.classes, numbered, "the number of a class for each label")
        return origin

    @property
    def json(self) -> str:
        """The origin as JSON."""
        return json.dumps(asdict(self) | {"task": self.task.fields})


@dataclass(frozen=True)
class Graft(HubFile, tags=["forgetfree", "graft"]):
    """A region and the values that a model takes there. With a parameter space it can be saved and used elsewhere.

    Attributes:
        region: γ.
        values: ``(s,)``.
        space: what the region's indices mean: names, shapes and dtypes of tensors in the *body* of the model.
        readout: the tensors that read out its task, by name.
        buffers: the body's persistent buffers that training changed, by name.
        origin: the task and the base model.
    """

    region: Region
    values: Tensor
    space: ParameterSpace | None = None
    readout: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    origin: GraftOrigin | None = None

    kind = "graft"
    use = (
        "from forgetfree.ledger.graft import Graft\n"
        "from forgetfree.serve.apply import apply_graft\n\n"
        'apply_graft(Graft.from_pretrained("OWNER/NAME"), "BASE MODEL", "model")  # an ordinary model of transformers'
    )

    def __repr__(self) -> str:
        of = f" of {self.origin.task.name} on {self.origin.model}" if self.origin else ""
        return f"Graft({counted(len(self.region), 'entry')}{of})"

    @classmethod
    def of(cls, model: nn.Module, space: ParameterSpace, region: Region) -> Graft:
        """Return a graft of the values that ``model`` holds at ``region``."""
        return cls(region, space.gather(model, region.indices))

    def apply_(self, model: nn.Module, space: ParameterSpace | None = None, *, check: bool = True) -> Graft:
        """Write the graft into ``model`` and return the values it replaced: applying those undoes this, bit for bit.

        Args:
            model: any model with the body that the graft was made for, with a head or without one.
            space: the space of ``model`` itself that the region belongs to; default: the graft's own, of the body.
            check: compare the body's fingerprint with the origin's, where the graft has one (reads the whole body once).
                Leave it out to put one graft on top of another.

        Raises:
            GraftError: the graft has no space, or does not belong to this model; nothing is changed.
            RegionError: the model does not fit ``space``.
        """
        body = body_of(model)
        target, own = (body, self._check(model, check)) if space is None else (model, space)
        buffers = self._buffers_of(body)
        before = replace(
            self,
            values=own.gather(target, self.region.indices),
            readout={},
            buffers={name: buffer.clone() for name, buffer in buffers.items()},
            origin=None,
        )
        own.scatter_(target, self.region.indices, self.values)
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(self.buffers[name])
        return before

    def save(self, path: StrPath) -> None:
        """Write the graft as one file, atomically.

        Raises:
            GraftError: it has no parameter space, or holds NaN or infinity.
        """
        write_atomically(Path(path), _content(self))

    @classmethod
    def load(cls, path: StrPath) -> Graft:
        """Read what `save` wrote and verify everything about it.

        Raises:
            GraftError: with the reason; a damaged file is never half-read.
        """
        return FILE.load(Path(path), _graft_of)

    def facts(self) -> list[dict[str, Any]]:
        """Return task, labels and base model, for the card on the hub."""
        of = self.origin
        about = (
            {"task": of.task.name, "labels": of.task.labels, "model": of.model, "fingerprint": of.fingerprint}
            if of
            else {}
        )
        return [{**about, "entries": len(self.region)}]

    def _check(self, model: nn.Module, fingerprint: bool) -> ParameterSpace:
        """Return the graft's own space after checking that the body of ``model`` is one that the graft was made for."""
        body, backbone = body_of(model), getattr(model, "backbone", model)
        if self.space is None:
            raise GraftError(
                "This graft does not say which tensors its region means. Give the parameter space that it was made in: "
                "apply_(model, space)."
            )
        try:
            self.space.check(self.region.indices)
            self.space.check_dtypes(body)
        except RegionError as error:
            raise GraftError(f"The graft belongs to a model of another layout: {error}") from error
        origin = self.origin
        # For a classifier, the network is the fine-tuned model's: its head may need another one than the base model's.
        bound = origin is not None and origin.readout != "classifier" and origin.network
        if bound and (differ := network_differences(bound, network_of(body))):
            raise GraftError(
                f"The graft belongs to a model that computes otherwise: {'; '.join(differ)}. Load it with the config.json "
                "that the graft was made with."
            )
        if fingerprint and origin is not None:
            got, expected = body_fingerprint(body), origin.fingerprint
            if got != expected and expected not in (fingerprint_of(body), fingerprint_of(backbone)):  # from a ledger
                raise GraftError(
                    f"The graft belongs to other weights, those of {origin.model!r}: expected fingerprint "
                    f"{expected[:12]}, the model's is {got[:12]}. Load the very weights it was made from. In Python, "
                    "check=False puts it on top of another graft."
                )
        return self.space

    def _buffers_of(self, body: nn.Module) -> dict[str, Tensor]:
        """Return those buffers of the body that the graft has values for."""
        own = persistent_buffers(body) if self.buffers else {}
        try:
            check_buffers(own, self.buffers)
        except RegionError as error:
            raise GraftError(
                f"The graft belongs to a model of another layout: {error} Load the model it was made from."
            ) from error
        return {name: own[name] for name in self.buffers}


# -- Its file -------------------------------------------------------------------------------------------


def find_graft(path: StrPath) -> Path:
    """Return ``path`` itself, or the one graft file in a directory, or where there is none in it, below it.

    Raises:
        UsageError: the directory holds none, or several.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    inside, below = (
        [each for each in sorted(files) if FILE.is_at(each)] for files in (path.glob(_FILES), path.rglob(_FILES))
    )
    files = inside or below
    if len(files) != 1:
        names = ", ".join(str(each.relative_to(path)) for each in files[:5])
        remedy = "Give the path of a graft.safetensors."
        if (path / "results.json").is_file():
            remedy += " To write a task of a run: forgetfree export."
        raise UsageError(
            f"{str(path)!r} must hold one graft file, got {f'{len(files)}: {names}' if files else 'none'}. {remedy}"
        )
    return files[0]


def _content(graft: Graft) -> bytes:
    """Return the bytes of a graft's file."""
    if (space := graft.space) is None:
        raise GraftError(
            "A graft on its own needs the parameter space of its model's body, and this one has none. Make it with "
            "SingleTask.graft, or give it a space."
        )
    named = {"graft": _pack(space, graft.region, graft.values), "readout": graft.readout, "buffer": graft.buffers}
    tensors = {f"{kind}/{name}": tensor.detach().cpu() for kind in _KINDS for name, tensor in named[kind].items()}
    if damaged := not_finite(tensors):
        raise GraftError(f"The graft holds NaN or infinity in {damaged!r}. Train it again, with a lower rate.")
    header = {
        "schema": str(SCHEMA),
        "layout": space.layout,
        "layout_hash": space.layout_hash,
    }
    if graft.origin is not None:
        header["origin"] = graft.origin.json
    return FILE.content(tensors, header)


def _graft_of(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Graft:
    """Return the graft of a file with this metadata and these tensors."""
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
    return Graft(region, values, space, named["readout"], named["buffer"], origin)


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
    indices, values = (
        [torch.empty(0, dtype=torch.int64, device="cpu")],
        [torch.empty(0, dtype=space.dtype, device="cpu")],
    )
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
