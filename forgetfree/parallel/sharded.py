"""Regions and grafts on a model whose tensors are sharded over processes, as PyTorch's FSDP2 (``fully_shard``) does it.

Flat indices mean what they mean in the whole model, so regions, grafts and ledgers are the same files. Each process reads and
writes the entries that it holds; none ever has a whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.core.parameters import ParameterSpace, entries
from forgetfree.errors import RegionError


class ShardedSpace(ParameterSpace):
    """The parameter space of a model whose tensors are DTensors on a mesh of one dimension, all or some of them.

    `gather` and `scatter_` must be called by all processes of the mesh alike. What takes a vector of the model's size
    (`flatten`, `load_`) is refused.

    >>> space = ShardedSpace.of(fully_shard(model))  # doctest: +SKIP
    >>> before = graft.apply_(model, space)  # doctest: +SKIP
    """

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the model's own tensors, in order, as shards: after a forward pass, FSDP2 may still hold them whole."""
        modules: list[Any] = [module for module in model.modules() if hasattr(module, "reshard")]
        for module in modules:
            module.reshard()
        return super().parameters(model)

    @torch.no_grad()
    def gather(self, model: nn.Module, indices: Tensor) -> Tensor:
        """Return a copy ``(s,)`` of the model's values at sorted flat ``indices`` ``(s,)``, in all processes.

        Raises:
            RegionError: a tensor is distributed in another way.
        """
        return self.gather_from(self.parameters(model), indices)

    @torch.no_grad()
    def gather_from(self, tensors: Sequence[Any], indices: Tensor) -> Tensor:
        """Return a copy ``(s,)`` of the values at ``indices`` ``(s,)`` of tensors like the model's; 0 where one is ``None``."""
        self.check(indices)
        # As bits in integers, every one of which but one process's are 0: their sum is exact, for −0 and NaN, too.
        there = next((each for each in tensors if each is not None), indices)
        bits = torch.zeros(len(indices), dtype=torch.int64, device=_local(there).device)
        group = next((each.device_mesh.get_group() for each in tensors if _is_sharded(each)), None)
        for i, local, where in self.split(indices):
            if tensors[i] is None:
                continue
            shard, mine, at = _own(tensors[i], local, once=True)
            flat, place = entries(shard, at)
            bits[where][mine] = _bits(flat[place].to(self.dtype))
        if group is not None:
            torch.distributed.all_reduce(bits, group=group)
        return bits.to(_INTEGERS[self.dtype.itemsize]).view(self.dtype)

    @torch.no_grad()
    def scatter_(self, model: nn.Module, indices: Tensor, values: Tensor) -> None:
        """Write ``values`` ``(s,)`` at sorted flat ``indices`` ``(s,)``: each process those of its own entries.

        Raises:
            RegionError: a tensor is distributed in another way.
        """
        self.check(indices)
        parameters = self.parameters(model)
        for i, local, where in self.split(indices):
            shard, mine, at = _own(parameters[i], local)
            flat, place = entries(shard, at)
            flat[place] = values[where].to(mine.device)[mine].to(flat)

    def flatten(self, model: nn.Module) -> Tensor:
        """Raise ``RegionError``: no process holds the whole model."""
        raise RegionError(_TOO_LARGE)

    def load_(self, model: nn.Module, flat: Tensor) -> None:
        """Raise ``RegionError``: no process holds the whole model."""
        raise RegionError(_TOO_LARGE)


_TOO_LARGE = (
    "A sharded model has no flat vector of its size in one process. Gather and scatter the indices of a region."
)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _own(tensor: Any, local: Tensor, once: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tensor's shard, which of its entries this process holds, and where they are in the shard.

    Args:
        tensor: a DTensor or an ordinary one.
        local: numbers of entries ``(s,)`` in the row-major order of the whole tensor.
        once: of what every process holds, only the first says so.
    """
    shard, shape = _local(tensor), tuple(tensor.shape)
    local = local.to(shard.device)
    if not _is_sharded(tensor):
        holds = not once or not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        mine = torch.full((len(local),), holds, dtype=torch.bool, device=shard.device)
        return shard, mine, local[mine]
    (placement,) = tensor.placements if len(tensor.placements) == 1 else (None,)
    if placement is None or not (placement.is_shard() or placement.is_replicate()):
        raise RegionError(
            f"A tensor is distributed as {tensor.placements}, expected shards or copies on a mesh of one dimension. Shard the "
            "model by fully_shard on such a mesh."
        )
    rank, count = tensor.device_mesh.get_local_rank(), tensor.device_mesh.size()
    if placement.is_replicate():
        mine = torch.full((len(local),), not once or rank == 0, dtype=torch.bool, device=shard.device)
        return shard, mine, local[mine]
    # Shards are as torch.chunk makes them: all of one length but the last ones.
    each = -(-shape[placement.dim] // count)
    coordinates = list(torch.unravel_index(local, shape))
    along = coordinates[placement.dim] - rank * each
    mine = (along >= 0) & (along < shard.shape[placement.dim])
    coordinates[placement.dim] = along
    at = torch.zeros_like(local)
    for coordinate, side in zip(coordinates, shard.shape, strict=True):
        at = at * side + coordinate
    return shard, mine, at[mine]


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "placements")


def _local(tensor: Any) -> Tensor:
    held: Tensor = tensor.to_local() if _is_sharded(tensor) else tensor.detach()
    return held


def _bits(values: Tensor) -> Tensor:
    kind = _INTEGERS[values.element_size()]
    return values.view(kind).to(torch.int64)
