"""Entries of a model by flat index, all in one step: its graftable tensors as views of one buffer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from operator import attrgetter, is_, lt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.tensors import ALIGNMENT

_dtype = attrgetter("dtype")


class FlatTensors:
    """A model's graftable tensors, read and written by flat index.

    At the first use their storage becomes one buffer. They remain the parameters that they are, with the same bits, so that
    optimisers, hooks, `state_dict` and files of the model see no difference. What gives them other storage (``model.to(…)``,
    ``load_state_dict(assign=True)``) is noticed at the next use. Tensors that need their own storage are reached one by one:
    those of several dtypes or devices, quantised, sharded, overlapping or not contiguous ones.

    Args:
        model: the model.
        space: its parameter space.
    """

    def __init__(self, model: nn.Module, space: ParameterSpace) -> None:
        self._model, self._space = model, space
        self._tensors: list[nn.Parameter] = []
        self._homes: list[dict[str, Any]] = []  # the modules' dictionaries that they stand in,
        self._names: list[str] = []  # by these names,
        self._addresses: list[int] = []  # where their memory begins,
        self._sizes: list[int] = []  # and how many entries it holds
        self._flat: Tensor | None = None

    def gather(self, indices: Tensor) -> Tensor:
        """Return a copy of the values at sorted flat ``indices`` ``(s,)``, in the space's dtype."""
        if (flat := self._buffer()) is None:
            return self._space.gather(self._model, indices)
        self._space.check(indices)
        return flat.index_select(0, self._positions(indices).to(flat.device))

    def scatter_(self, indices: Tensor, values: Tensor) -> None:
        """Write ``values`` ``(s,)`` at sorted flat ``indices`` ``(s,)`` and nowhere else."""
        self._space.check(indices)
        self.write_([(indices, values)])

    def write_(self, pieces: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Do `scatter_` for several pieces, whose indices are known to lie in the space."""
        if (flat := self._buffer()) is None:
            for indices, values in pieces:
                self._space.scatter_(self._model, indices, values)
            return
        written = list[nn.Parameter]()
        for indices, values in pieces:
            flat.scatter_(0, self._positions(indices).to(flat.device), values.to(flat))
            cuts = torch.searchsorted(indices, self._space.boundaries).tolist()
            written += compress(self._tensors, map(lt, cuts, cuts[1:]))
        # Autograd must notice a tensor that changes between forward and backward pass.
        increment_version(written)

    @torch.no_grad()
    def release(self) -> None:
        """Give the tensors storage of their own again."""
        if self._flat is not None and self._is_laid_out():
            for tensor in self._tensors:
                tensor.data = tensor.detach().clone()
        self._tensors, self._flat = [], None

    def _is_laid_out(self) -> bool:
        # This is asked before every use, so the loops are those of C.
        now = list(map(dict.get, self._homes, self._names))
        return (
            all(map(is_, now, self._tensors))
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
            and list(map(Tensor.numel, self._tensors)) == self._sizes
            and all(map(Tensor.is_contiguous, self._tensors))
            and set(map(_dtype, self._tensors)) == {self._space.dtype}
        )

    def _buffer(self) -> Tensor | None:
        """Return the buffer; ``None`` where the tensors need their own storage."""
        if self._flat is None or not self._is_laid_out():
            self._lay_out()
        return self._flat

    @torch.no_grad()
    def _lay_out(self) -> None:
        tensors, space = self._space.parameters(self._model), self._space
        self._tensors, self._flat = tensors, None
        if any(tensor.dtype != space.dtype or tensor.layout is not torch.strided for tensor in tensors):
            return
        width = ALIGNMENT // space.dtype.itemsize
        ends = torch.tensor([-(-spec.size // width) * width for spec in space.tensors], device="cpu").cumsum(0)
        starts = torch.cat([torch.tensor([0], device="cpu"), ends[:-1]])
        self._shifts = starts - space.boundaries[:-1]
        self._shifted = bool(self._shifts.any())
        flat = _common_buffer(tensors, starts.tolist(), int(ends[-1]))
        if flat is None:
            if not _may_move(self._model, tensors):
                return
            flat = torch.zeros(int(ends[-1]), dtype=space.dtype, device=tensors[0].device)
            for tensor, start in zip(tensors, starts.tolist(), strict=True):
                view = flat[start : start + tensor.numel()].view(tensor.shape)
                tensor.data = view.copy_(tensor)
        places = [spec.name.rpartition(".") for spec in space.tensors]
        self._homes = [self._model.get_submodule(path)._parameters for path, _, _ in places]
        self._names = [name for _, _, name in places]
        self._addresses, self._sizes = [tensor.data_ptr() for tensor in tensors], [spec.size for spec in space.tensors]
        self._flat = flat

    def _positions(self, indices: Tensor) -> Tensor:
        """Return where in the buffer the entries lie."""
        if not self._shifted:
            return indices
        counts = torch.searchsorted(indices, self._space.boundaries).diff()
        return indices + torch.repeat_interleave(self._shifts, counts)


def _may_move(model: nn.Module, tensors: list[nn.Parameter]) -> bool:
    """Return whether the tensors are plain and alike, and nobody else refers to their memory."""
    first, graftable = tensors[0], {id(tensor) for tensor in tensors}
    plain = first.device.type != "meta" and all(
        type(tensor) is nn.Parameter
        and type(tensor.data) is Tensor
        and (tensor.dtype, tensor.device, tensor.layout) == (first.dtype, first.device, torch.strided)
        and tensor.is_contiguous()
        and not tensor.is_inference()
        and not (tensor.device.type == "cpu" and tensor.untyped_storage().is_shared())  # by processes
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        for tensor in tensors
    )
    if not plain:
        return False
    others = [each for each in (*model.parameters(), *model.buffers()) if id(each) not in graftable]
    storages = [each.untyped_storage().data_ptr() for each in tensors if each.numel()]
    storages += {
        each.untyped_storage().data_ptr()
        for each in others
        if type(each.data) is Tensor and each.layout is torch.strided and each.numel()
    }
    return len(set(storages)) == len(storages)


def _common_buffer(tensors: list[nn.Parameter], starts: list[int], size: int) -> Tensor | None:
    """Return the buffer in which the tensors lie already as they would be laid out, if there is one."""
    first = tensors[0].detach()
    if any(type(tensor.data) is not Tensor or not tensor.is_contiguous() for tensor in tensors):
        return None
    storage, offset = first.untyped_storage(), first.storage_offset()
    fits = storage.nbytes() >= (offset + size) * first.itemsize and all(
        tensor.untyped_storage().data_ptr() == storage.data_ptr() and tensor.storage_offset() == offset + start
        for tensor, start in zip(tensors, starts, strict=True)
    )
    return first.as_strided((size,), (1,), offset) if fits else None
