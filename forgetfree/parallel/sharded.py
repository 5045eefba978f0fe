"""Regions and grafts on a model whose tensors are sharded over processes, as PyTorch's FSDP2 (``fully_shard``) does it.

Flat indices mean what they mean in the whole model, so regions, grafts and ledgers are the same files. Each process reads and
writes the entries that it holds; none ever has a whole tensor.

Localizing and training need shards along the first dimension. Each process holds θ_pre, θ_ft and S of its own entries. What all
of them hold is as small as a region: its indices and values. Every process takes part in every call; a batch, or each process's
equal share of it, goes through the sharded model itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.core.base_regions import most_moved, top
from forgetfree.core.batch_loss import Batch, BatchLoss
from forgetfree.core.mask import MaskOptions, MaskSearch
from forgetfree.core.parameters import ParameterSpace, at_least_float32, entries
from forgetfree.core.regions import Region
from forgetfree.core.saliency import mean_gradient, most_salient
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
    local: Tensor = tensor.to_local() if _is_sharded(tensor) else tensor.detach()
    return local


def _bits(values: Tensor) -> Tensor:
    kind = _INTEGERS[values.element_size()]
    return values.view(kind).to(torch.int64)


# -- Localizing and training ----------------------------------------------------------------------------


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
        self._starts, self._sizes = (
            torch.tensor(starts, device="cpu"),
            torch.tensor([each.size for each in self.space.tensors], device="cpu"),
        )

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
        pairs: list[Any] = [None] * self._mesh.size()
        torch.distributed.all_gather_object(
            pairs, (self.whole(own).indices, scores.cpu()), group=self._mesh.get_group()
        )
        indices, order = torch.cat([each for each, _ in pairs]).sort()
        return Region(indices[top(torch.cat([each for _, each in pairs])[order], count).indices])

    def most_moved(self, theta_pre: Tensor, theta_ft: Tensor, count: int) -> Region:
        """Return γ_base: the ``count`` entries of the whole model that moved most, of which ``(n,)`` are here."""
        own = most_moved(theta_pre, theta_ft, count)
        wide = at_least_float32(theta_ft.dtype)
        return self.highest(own, (theta_ft[own.indices].to(wide) - theta_pre[own.indices]).abs(), count)

    def mean_gradient(self, batches: Sequence[Batch], loss: BatchLoss) -> Tensor:
        """Return this process's part ``(n,)`` of the gradient of the mean loss, see `forgetfree.core.saliency`."""
        return mean_gradient(self.module, self.space, batches, _ShardLoss(loss, self))[0]

    def most_salient(self, scores: Tensor, count: int) -> Region:
        """Return the ``count`` entries of the whole model that score highest, of which ``(n,)`` are here."""
        own = most_salient(scores, count)
        return self.highest(own, scores[own.indices.to(scores.device)], count)


class _ShardLoss:
    """A `BatchLoss` of a sharded model, whose gradients FSDP2 adds up and hands out: they go to this process's shards."""

    at_once = False

    def __init__(self, loss: BatchLoss, shards: Shards) -> None:
        self._loss, self._shards = loss, shards
        self._parameters = shards.space.parameters(shards.module)

    @property
    def scale(self) -> float:
        return self._loss.scale

    def __call__(self, batch: Sequence[Batch]) -> float:
        for tensor in self._shards.tensors:
            tensor.grad = None  # of an earlier backward pass, to which this one would be added
        loss = self._loss(batch)
        for shard, tensor in zip(self._parameters, self._shards.tensors, strict=True):
            shard.grad = None if tensor.grad is None else tensor.grad.to_local()
            tensor.grad = None
        return loss


class ShardedMaskSearch:
    """A `MaskSearch` in which each process keeps and moves S of its own entries.

    Args:
        shards: this process's entries.
        theta_pre: θ_pre of these ``(n,)``.
        theta_ft: θ_ft of these ``(n,)``.
        base: γ_base, in the whole model.
        options: how S is learned.
        loss: of a batch, through the sharded model.
    """

    def __init__(
        self,
        shards: Shards,
        theta_pre: Tensor,
        theta_ft: Tensor,
        base: Region,
        options: MaskOptions,
        loss: BatchLoss,
    ) -> None:
        self._shards, self._base, self._start = shards, shards.own(base), options.score_init
        own = shards.module, shards.space, theta_pre, theta_ft, self._base
        self._search = MaskSearch(*own, options, _ShardLoss(loss, shards))

    @property
    def shift(self) -> Tensor:
        """S − S_0 of this process's entries ``(n,)``."""
        return self._search.shift

    def step_(self, batch: Sequence[Batch], step: int) -> float:
        """Do as `MaskSearch.step_`, in all processes alike."""
        return self._search.step_(batch, step)

    def region(self, step: int, count: int) -> Region:
        """Return the hard mask of the whole model after ``step`` steps."""
        own = self._search.region(step, count)
        rank = self.shift[own.indices.to(self.shift.device)].double().add_(self._start)
        rank[torch.isin(own.indices, self._base.indices).to(rank.device)] *= -1
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
