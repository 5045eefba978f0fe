"""The tensors of a model by name, and its parameter space: the graftable tensors under one flat index.

Every region, graft and ledger refers to entries by their flat index in such a space. The space is a
layout (names, shapes, offsets); it holds no weights and copies no model.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.core.families import named_like, never_grafted, outside_of_the_body
from forgetfree.errors import ModelError, RegionError
from forgetfree.json_file import check, parse_json
from forgetfree.tensor_file import DTYPES

#: The most entries that a file's space may have: more than any model has.
MOST_ENTRIES = 2**41


@dataclass(frozen=True)
class TensorSpec:
    """A graftable tensor: its name in the model, its shape, its dtype and its first flat index."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def size(self) -> int:
        """The number of entries."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class ParameterSpace:
    """The ordered graftable tensors of one model under a flat int64 index ``0 … len(space) − 1``.

    Tied weights are one tensor, under the first of their names; if any of their names is excluded, the
    tensor is excluded. The order is the same as in ``model.named_parameters()``.

    >>> space = ParameterSpace.of(torch.nn.Linear(4, 3))
    >>> len(space), [tensor.name for tensor in space.tensors]
    (15, ['weight', 'bias'])
    """

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(
        cls, model: nn.Module, *, include: Sequence[str] = (r".",), exclude: Sequence[str] | None = None
    ) -> ParameterSpace:
        """Return the space of ``model``.

        Args:
            model: any module.
            include: regular expressions; a tensor is graftable if one of them matches in its name
            exclude: and none of these does. Default: exclude `forgetfree.core.families.never_grafted`: embeddings, heads and
                poolers.

        Raises:
            RegionError: no tensor is left.
        """
        excluded = (
            named_like(model, exclude) | outside_of_the_body(model) if exclude is not None else never_grafted(model)
        )
        specs: list[TensorSpec] = []
        offset = 0
        for name, parameter in model.named_parameters():
            wanted = any(re.search(pattern, name) for pattern in include)
            if id(parameter) in excluded or not wanted or not parameter.is_floating_point():
                continue
            specs.append(TensorSpec(name, tuple(parameter.shape), parameter.dtype, offset))
            offset += parameter.numel()
        if not specs:
            raise RegionError(
                f"No graftable tensor in {type(model).__name__}: expected at least one name matching {list(include)} "
                f"{'outside of embeddings, heads and poolers' if exclude is None else f'and none of {list(exclude)}'}. "
                "Pass other patterns to ParameterSpace.of."
            )
        return cls(tuple(specs))

    @classmethod
    def of_layout(cls, layout: str) -> ParameterSpace:
        """Return the space that a `layout` describes.

        Raises:
            RegionError: the text describes no layout.
        """
        specs: list[TensorSpec] = []
        offset = 0
        try:
            rows = parse_json(layout)
            check("the layout", rows, isinstance(rows, list) and bool(rows), "a list of tensors")
            for row in rows:
                check("a tensor of it", row, _is_row(row), "its name, shape and floating-point dtype")
                specs.append(TensorSpec(row[0], tuple(row[1]), getattr(torch, row[2]), offset))
                offset += math.prod(row[1])
            check("its number of entries", offset, offset <= MOST_ENTRIES, f"at most {MOST_ENTRIES:,}")
            narrow = [str(spec.dtype) for spec in specs if spec.dtype.itemsize == 1]
            check(
                "its dtypes", narrow[:1], not narrow or len({s.dtype for s in specs}) == 1, "float8 alone or not at all"
            )
            names = {spec.name for spec in specs}
            check("its number of names", len(names), len(names) == len(specs), f"{len(specs)}, one a tensor")
        except ValueError as error:
            raise RegionError(f"its layout cannot be read ({error}).") from error
        return cls(tuple(specs))

    def __len__(self) -> int:
        last = self.tensors[-1]
        return last.offset + last.size

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of flat vectors: the narrowest that holds every tensor's values exactly."""
        return reduce(torch.promote_types, (spec.dtype for spec in self.tensors))

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the tensors, in the order in which they first appear."""
        return tuple(dict.fromkeys(spec.dtype for spec in self.tensors))

    @cached_property
    def boundaries(self) -> Tensor:
        """The first flat index of every tensor, and the length at the end: int64 ``(P + 1,)``."""
        return torch.tensor([spec.offset for spec in self.tensors] + [len(self)], device="cpu")

    @cached_property
    def layout(self) -> str:
        """The layout as canonical JSON, as files store it."""
        rows = [[t.name, list(t.shape), str(t.dtype).removeprefix("torch.")] for t in self.tensors]
        return json.dumps(rows, separators=(",", ":"))

    @cached_property
    def layout_hash(self) -> str:
        """The SHA-256 of the layout: equal for models of one architecture and dtype."""
        return hashlib.sha256(self.layout.encode()).hexdigest()

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the model's own tensors, in order.

        Raises:
            RegionError: the model lacks one, or has it in another shape.
        """
        named = dict(model.named_parameters(remove_duplicate=False))
        parameters = []
        for spec in self.tensors:
            parameter = named.get(spec.name)
            if parameter is None or tuple(parameter.shape) != spec.shape:
                got = "no such tensor" if parameter is None else f"shape {tuple(parameter.shape)}"
                raise RegionError(
                    f"{type(model).__name__} does not fit this parameter space: expected {spec.name!r} of shape "
                    f"{spec.shape}, got {got}. Use the model the space was made from."
                )
            parameters.append(parameter)
        return parameters

    def check_dtypes(self, model: nn.Module) -> None:
        """Raise ``RegionError`` unless the model has all tensors of the space, in their shapes and dtypes."""
        for spec, tensor in zip(self.tensors, self.parameters(model), strict=True):
            if tensor.dtype != spec.dtype:
                raise RegionError(
                    f"expected {spec.name!r} in {spec.dtype}, got {tensor.dtype}. Load the model with dtype={spec.dtype}."
                )

    def check_trainable(self, model: nn.Module, called: str) -> None:
        """Raise ``ModelError`` if a graftable tensor is frozen, unless the whole model is frozen, as for inference."""
        graftable = zip(self.tensors, self.parameters(model), strict=True)
        frozen = [spec.name for spec, parameter in graftable if not parameter.requires_grad]
        if frozen and any(parameter.requires_grad for parameter in model.parameters()):
            raise ModelError(
                f"{frozen[0]!r} of {called} is frozen (requires_grad=False), and every tensor that may be grafted is trained. "
                "Name those that may be as graftable=…, a regular expression, or freeze none."
            )

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors of a flat vector ``(N,)`` as views in their shapes, without copying."""
        return [flat[spec.offset : spec.offset + spec.size].view(spec.shape) for spec in self.tensors]

    def split(self, indices: Tensor) -> Iterator[tuple[int, Tensor, slice]]:
        """Split sorted flat indices ``(s,)`` by tensor.

        Yields:
            ``(i, local, where)`` for each tensor with an index: its number, the indices within it, and the
            slice of ``indices`` they came from.
        """
        cuts = torch.searchsorted(indices, self.boundaries.to(indices.device)).tolist()
        for i, spec in enumerate(self.tensors):
            where = slice(cuts[i], cuts[i + 1])
            if where.start < where.stop:
                yield i, indices[where] - spec.offset, where

    @torch.no_grad()
    def flatten(self, model: nn.Module, device: str | None = None) -> Tensor:
        """Return a copy of all graftable entries: ``(N,)`` on a device, by default the first tensor's, in the space's dtype."""
        parameters = self.parameters(model)
        return torch.cat([each.detach().reshape(-1).to(device or parameters[0].device) for each in parameters])

    @torch.no_grad()
    def load_(self, model: nn.Module, flat: Tensor) -> None:
        """Copy ``flat`` ``(N,)`` into the model, each tensor in its own dtype; bit for bit for a result of `flatten`."""
        for parameter, values in zip(self.parameters(model), self.views(flat), strict=True):
            parameter.copy_(values)

    @torch.no_grad()
    def gather(self, model: nn.Module, indices: Tensor) -> Tensor:
        """Return a copy ``(s,)`` of the model's values at sorted flat ``indices`` ``(s,)``, in the space's dtype."""
        self.check(indices)
        parameters = self.parameters(model)
        pieces = [torch.empty(0, dtype=self.dtype, device=parameters[0].device)]
        for i, local, _ in self.split(indices):
            flat, at = entries(parameters[i], local)
            pieces.append(flat[at].to(pieces[0]))
        return torch.cat(pieces)

    @torch.no_grad()
    def scatter_(self, model: nn.Module, indices: Tensor, values: Tensor) -> None:
        """Write ``values`` ``(s,)`` at sorted flat ``indices`` ``(s,)`` and nowhere else.

        Values are cast to each tensor's dtype; values from `gather` are written bit for bit.

        Raises:
            RegionError: the indices do not lie in this space, or there is not one value for each; nothing is written.
        """
        self.check(indices)
        if values.shape != indices.shape:
            raise RegionError(
                f"Expected one value for each of {len(indices)} entries, got values of shape {tuple(values.shape)}. Give the "
                "values at the region's own indices, in their order."
            )
        parameters = self.parameters(model)
        for i, local, where in self.split(indices):
            flat, at = entries(parameters[i], local)
            flat[at] = values[where].to(flat)

    def check(self, indices: Tensor) -> None:
        """Raise ``RegionError`` unless ``indices`` lie in this space."""
        if len(indices) and (int(indices[0]) < 0 or int(indices[-1]) >= len(self)):
            raise RegionError(
                f"Indices from {int(indices[0])} to {int(indices[-1])} do not fit a parameter space of "
                f"{len(self)} entries. The region belongs to another model."
            )


def _is_row(row: Any) -> bool:
    """Return whether a JSON value describes a tensor of a layout."""
    if not (isinstance(row, list) and [type(part) for part in row] == [str, list, str]):
        return False
    sides = all(type(side) is int and side >= 0 for side in row[1])
    return sides and row[2] in DTYPES and bool(getattr(torch, row[2]).is_floating_point)


def entries(tensor: Tensor, local: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a view of a tensor and an index into it, to read or write entries in place, for any layout in memory.

    Args:
        tensor: a tensor of any shape and strides, such as a convolution's in channels-last.
        local: the entries' numbers ``(s,)`` in row-major order.
    """
    local = local.to(tensor.device)
    if tensor.is_contiguous():
        return tensor.view(-1), (local,)
    return tensor, torch.unravel_index(local, tensor.shape)


@torch.no_grad()
def write_(pieces: Sequence[tuple[Tensor, Tensor]], values: Tensor) -> None:
    """Write values ``(s,)`` into pieces, in order; each piece is a tensor with the numbers of its entries."""
    sizes, parts = [len(local) for _, local in pieces], {}
    with torch._C.DisableTorchFunctionSubclass():
        for number, (tensor, local) in enumerate(pieces):
            dtype = tensor.dtype
            if dtype not in parts:
                parts[dtype] = torch.split(values.detach().to(dtype), sizes)
            if tensor.is_contiguous():
                tensor.view(-1).index_copy_(0, local, parts[dtype][number])
            else:
                flat, at = entries(tensor, local)
                flat[at] = parts[dtype][number]


#: The most bytes of tensors that lie in one buffer, see `packed`.
BUFFER = 2**28
#: The tensors of a buffer begin at multiples of this many bytes, like tensors that PyTorch allocates on a GPU.
ALIGNMENT_OF_BUFFERS = 512


@torch.no_grad()
def packed(pieces: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Move tensors into common buffers, so that one operation writes many; on the CPU, where operations cost little, none.

    Args:
        pieces: tensors, each with numbers of its entries; the tensors stay the same objects.

    Returns:
        the buffers with the numbers of these entries in them, in the same order.
    """
    groups: list[list[tuple[Tensor, Tensor]]] = []
    room = 0
    for tensor, local in pieces:
        alone = tensor.device.type == "cpu" or not tensor.is_contiguous()
        if alone or not groups or tensor.nbytes > room or groups[-1][0][0].dtype != tensor.dtype:
            groups.append([])
            room = 0 if alone else BUFFER
        groups[-1].append((tensor, local))
        room -= tensor.nbytes
    return [_buffer(group) if len(group) > 1 else group[0] for group in groups]


def _buffer(group: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Make tensors views of one buffer, and return it with the numbers of their entries in it."""
    first = group[0][0]
    step = ALIGNMENT_OF_BUFFERS // first.element_size()
    starts = [0]
    for tensor, _ in group:
        starts.append(starts[-1] + -(-tensor.numel() // step) * step)
    buffer = first.new_zeros(starts[-1])
    for (tensor, _), start in zip(group, starts, strict=False):
        view = buffer[start : start + tensor.numel()].view(tensor.shape)
        tensor.data = view.copy_(tensor)
    return buffer, torch.cat([local + start for (_, local), start in zip(group, starts, strict=False)])


@torch.no_grad()
def unpack_(pieces: Sequence[tuple[Tensor, Tensor]], buffers: list[tuple[Tensor, Tensor]]) -> None:
    """Give each tensor that `packed` moved its own memory again, and free the buffers one by one: the list is emptied."""
    held: dict[int, list[Tensor]] = {}
    own = {id(tensor) for tensor, _ in pieces}
    for tensor, _ in pieces:
        held.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    while buffers:
        buffer, _ = buffers.pop()
        if id(buffer) not in own:  # else it is a tensor that was not moved
            for tensor in held[buffer.untyped_storage()._cdata]:
                tensor.data = tensor.data.clone()


def values_at(tensor: Tensor, local: Tensor) -> Tensor:
    """Return the entries ``(s,)`` of a tensor at the numbers ``local (s,)``."""
    if tensor.is_contiguous():
        return tensor.view(-1).index_select(0, local.to(tensor.device))
    flat, at = entries(tensor, local)
    return flat[at]


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to add up small steps, which half precision would lose."""
    return torch.promote_types(dtype, torch.float32)


def weight_matrices(space: ParameterSpace) -> list[int]:
    """Return the numbers of the non-empty tensors with two dimensions or more: no biases, no normalisations.

    Raises:
        ModelError: there is none.
    """
    matrices = [i for i, spec in enumerate(space.tensors) if len(spec.shape) >= 2 and spec.size]
    if not matrices:
        raise ModelError(
            f"The model has no graftable weight matrix: expected a tensor of two dimensions or more among its "
            f"{len(space.tensors)}. Choose another model, or a strategy that trains any tensor, such as grafting-continual."
        )
    return matrices


# -- Tensors by name: parameters and persistent buffers ------------------------------------------------

#: Tensors begin at a multiple of this many bytes, as PyTorch allocates them: at other addresses kernels may round differently.
ALIGNMENT = 64


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's parameters and persistent buffers, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


@torch.no_grad()
def load_tensors_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors with these names into ``module``, bit for bit."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        tensor.copy_(tensors[name])


@torch.no_grad()
def align_(module: nn.Module) -> None:
    """Let each parameter on the CPU begin at a multiple of `ALIGNMENT`; parameters read from a file may not."""
    for parameter in module.parameters():
        plain = type(parameter) is nn.Parameter and parameter.device.type == "cpu"
        if plain and parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to a module's state, such as BatchNorm's, without copying."""
    persistent = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def check_buffers(buffers: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise ``RegionError`` unless each of the ``expected`` buffers is among ``buffers``, in its shape and dtype."""
    for name, buffer in expected.items():
        got = buffers.get(name)
        if got is None or got.shape != buffer.shape or got.dtype != buffer.dtype:
            raise RegionError(f"it has no buffer {name!r} of shape {tuple(buffer.shape)} in {buffer.dtype}.")
