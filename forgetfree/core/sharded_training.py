"""Localizing and training on a model that is sharded over processes by FSDP2 along the first dimension of its tensors.

Each process holds θ_pre, θ_ft and S of its own entries. What all of them hold is as small as a region: its indices and values.
Every process takes part in every call; a batch, or each process's equal share of it, goes through the sharded model itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.core.base_regions import most_moved, top
from forgetfree.core.mask import MaskOptions, MaskSearch
from forgetfree.core.parameters import ParameterSpace, at_least_float32
from forgetfree.core.regions import Region
from forgetfree.core.sharded import ShardedSpace
from forgetfree.errors import RegionError


class Shards:
    """The entries of a sharded model that this process holds, as a space of their own.

    Attributes:
        module: holds the shards, in the model's own storage.
        space: the n entries of ``module``.

    Raises:
        RegionError: a tensor is not sharded along its first dimension.
    """

    def __init__(self, model: nn.Module, space: ShardedSpace) -> None:
        self._model, self._whole, self.module = model, space, nn.Module()
        starts = []
        for number, (spec, tensor) in enumerate(zip(space.tensors, self.tensors, strict=True)):
            placed: Any = getattr(tensor, "placements", ())
            if len(placed) != 1 or not placed[0].is_shard(0):
                raise RegionError(
                    f"{spec.name!r} is placed as {placed}, expected shards of its first dimension. Shard the whole model by "
                    "fully_shard."
                )
            self._mesh = tensor.device_mesh
            each = -(-spec.shape[0] // self._mesh.size())  # rows of every shard but the last ones, which may be empty
            before = min(self._mesh.get_local_rank() * each, spec.shape[0])
            starts.append(spec.offset + before * (spec.size // spec.shape[0]))
            self.module.register_parameter(str(number), nn.Parameter(tensor.detach().to_local()))
        self.space = ParameterSpace.of(self.module, exclude=())
        self._starts, self._sizes = torch.tensor(starts), torch.tensor([each.size for each in self.space.tensors])

    @property
    def tensors(self) -> list[Any]:
        """The model's own tensors."""
        return [*self._whole.parameters(self._model)]

    def values(self) -> Tensor:
        """Return a copy ``(n,)`` of this process's values."""
        return self.space.flatten(self.module)

    def own(self, region: Region) -> Region:
        """Return those entries of a region of the whole model that are here, in the space of the shards."""
        at = (torch.searchsorted(self._starts, region.indices, right=True) - 1).clamp_(min=0)
        local = region.indices - self._starts[at]
        here = (local >= 0) & (local < self._sizes[at])
        return Region((local + self.space.boundaries[at])[here])

    def whole(self, own: Region) -> Region:
        """Return a region of the shards in the space of the whole model."""
        at = torch.searchsorted(self.space.boundaries, own.indices, right=True) - 1
        return Region(own.indices - self.space.boundaries[at] + self._starts[at])

    def highest(self, own: Region, scores: Tensor, count: int) -> Region:
        """Return the ``count`` entries of all processes with the highest scores, of which these are this process's."""
        held: list[Any] = [None] * self._mesh.size()
        told = self.whole(own).indices, scores.cpu()
        torch.distributed.all_gather_object(held, told, group=self._mesh.get_group())
        indices, order = torch.cat([each for each, _ in held]).sort()
        return Region(indices[top(torch.cat([each for _, each in held])[order], count).indices])

    def most_moved(self, theta_pre: Tensor, theta_ft: Tensor, count: int) -> Region:
        """Return γ_base: the ``count`` entries of the whole model that moved most, of which ``(n,)`` are here."""
        own = most_moved(theta_pre, theta_ft, count)
        wide = at_least_float32(theta_ft.dtype)
        return self.highest(own, (theta_ft[own.indices].to(wide) - theta_pre[own.indices]).abs(), count)


class ShardedMaskSearch(MaskSearch):
    """`MaskSearch` of which each process keeps and moves S of its own entries.

    Args:
        shards: this process's entries.
        theta_pre: θ_pre of these ``(n,)``.
        theta_ft: θ_ft of these ``(n,)``.
        base: γ_base, in the whole model.
        how: how S is learned; its batches are not cut into numbered parts.
    """

    def __init__(self, shards: Shards, theta_pre: Tensor, theta_ft: Tensor, base: Region, how: MaskOptions) -> None:
        self._shards = shards
        super().__init__(shards.module, shards.space, theta_pre, theta_ft, shards.own(base), how)

    @torch.no_grad()
    def graft_(self, rate: float = 0.0, step: int = 0) -> None:
        """Do as `MaskSearch.graft_`, with the gradients that FSDP2 has added up and handed out."""
        for shard, tensor in zip(self.tensors, self._shards.tensors, strict=True):
            shard.grad = None if tensor.grad is None else tensor.grad.to_local()
            tensor.grad = None
        super().graft_(rate, step)

    def region(self, step: int, count: int) -> Region:
        """Return the hard mask of the whole model after ``step`` steps."""
        own = super().region(step, count)
        rank = self.climbed[own.indices.to(self.device)].double().add_(self._how.score_init)
        rank[torch.isin(own.indices, self._base.indices).to(self.device)] *= -1
        return self._shards.highest(own, torch.zeros_like(rank) if step == 0 else rank, count)


class ShardedRegion:
    """`RegionParameters` of a sharded model: every process holds all values ``(s,)``, and makes the same updates.

    Args:
        model: sharded by ``fully_shard``.
        space: its space.
        region: what is trained.
    """

    def __init__(self, model: nn.Module, space: ShardedSpace, region: Region) -> None:
        self._model, self._space, self._indices = model, space, region.indices
        self.values = nn.Parameter(space.gather(model, region.indices).to(at_least_float32(space.dtype)))
        self.parameters = [self.values]
        tensors = space.parameters(model)
        self.touched = [tensors[i] for i, _, _ in space.split(region.indices)]

    @torch.no_grad()
    def collect(self) -> None:
        """Take the region's gradients ``(s,)`` from the shards of all processes, and free those."""
        gradients = [tensor.grad for tensor in self._space.parameters(self._model)]
        self.values.grad = self._space.gather_from(gradients, self._indices).to(self.values)
        for tensor in self.touched:
            tensor.grad = None

    def write(self) -> None:
        """Write the region's values into the shards."""
        self._space.scatter_(self._model, self._indices, self.values.detach())
