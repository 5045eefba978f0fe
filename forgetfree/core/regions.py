"""Regions: the binary γ of the paper (§2), stored as the sorted flat indices of its ones; and θ(γ), the grafted model.

Equation 1: θ(γ) = γ ⊙ θ_ft + (1 − γ) ⊙ θ_pre.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from forgetfree.core.parameters import ParameterSpace
from forgetfree.errors import ModelError, RegionError

Group = TypeVar("Group", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Region:
    """A set of entries of one parameter space: int64 ``(s,)``, sorted, without repeats, on the CPU.

    >>> (Region.of([3, 1]) | Region.of([1, 7])).indices.tolist()
    [1, 3, 7]
    """

    indices: Tensor

    def __post_init__(self) -> None:
        indices = self.indices
        if indices.dim() != 1 or indices.dtype != torch.int64 or indices.device.type != "cpu":
            raise RegionError(
                "A region needs one int64 vector of indices on the CPU, got "
                f"{indices.dtype} of shape {tuple(indices.shape)} on {indices.device}. Use Region.of(...)."
            )
        if len(indices) and (int(indices[0]) < 0 or not bool((indices[1:] > indices[:-1]).all())):
            raise RegionError(
                "A region's indices must be non-negative, sorted and without repeats. Use Region.of(...)."
            )

    @classmethod
    def of(cls, indices: Tensor | Iterable[int]) -> Region:
        """Return the region with these indices, given in any order and with repeats.

        Raises:
            RegionError: they are not integers.
        """
        tensor = indices if isinstance(indices, Tensor) else torch.tensor(list(indices), device="cpu")
        if tensor.numel() and (tensor.dtype == torch.bool or tensor.is_floating_point()):  # an empty list has no dtype
            raise RegionError(
                f"A region needs integers as indices, got {tensor.dtype}. Of a mask: Region.from_mask(...)."
            )
        return cls(torch.unique(tensor.to("cpu", torch.int64)))

    @classmethod
    def empty(cls) -> Region:
        """Return the region without entries."""
        return cls(torch.empty(0, dtype=torch.int64, device="cpu"))

    @classmethod
    def from_mask(cls, mask: Tensor) -> Region:
        """Return the region of a boolean vector ``(N,)``.

        Raises:
            RegionError: it is not boolean.
        """
        if mask.dtype != torch.bool:  # of indices, nonzero() would return their places
            raise RegionError(f"A mask must be boolean, got {mask.dtype}. Of indices: Region.of(...).")
        return cls(mask.nonzero().squeeze(1).cpu())

    def __len__(self) -> int:
        return len(self.indices)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Region) and torch.equal(self.indices, other.indices)

    __hash__ = None  # type: ignore[assignment]  # equal by content, and content is a tensor

    def mask(self, size: int) -> Tensor:
        """Return the region as a boolean vector ``(size,)``."""
        mask = torch.zeros(size, dtype=torch.bool, device="cpu")
        mask[self.indices] = True
        return mask

    def __or__(self, other: Region) -> Region:
        return Region(torch.unique(torch.cat([self.indices, other.indices])))

    def __and__(self, other: Region) -> Region:
        return Region(self.indices[torch.isin(self.indices, other.indices, assume_unique=True)])

    def __sub__(self, other: Region) -> Region:
        return Region(self.indices[~torch.isin(self.indices, other.indices, assume_unique=True)])

    def __contains__(self, index: int) -> bool:
        return bool((self.indices == index).any())


def biases(space: ParameterSpace) -> Region:
    """Return the region of all biases, including those of LayerNorm.

    Raises:
        ModelError: there is none.
    """
    pieces = [torch.arange(t.offset, t.offset + t.size, device="cpu") for t in space.tensors if t.name.endswith("bias")]
    if not pieces:
        raise ModelError(
            f"The model has no graftable bias: expected a name that ends in 'bias' among its {len(space.tensors)} "
            "graftable tensors. Choose a model with biases, or another strategy or region."
        )
    return Region(torch.cat(pieces))


def distribution(region: Region, space: ParameterSpace, by: Callable[[str], Group]) -> dict[Group, int]:
    """Count entries by a property of their tensor's name, such as its layer.

    Every group of the space appears, in the space's order, even without an entry.
    """
    counts: Counter[Group] = Counter({by(spec.name): 0 for spec in space.tensors})
    for i, local, _ in space.split(region.indices):
        counts[by(space.tensors[i].name)] += len(local)
    return dict(counts)


# -- Grafts (eq. 1), in a model, or as flat vectors (N,) ---------------------------------------------------


@contextmanager
def grafted(model: nn.Module, space: ParameterSpace, region: Region, values: Tensor) -> Iterator[None]:
    """Write ``values`` ``(s,)`` into a region of the model inside the block, and restore it exactly afterwards."""
    before = space.gather(model, region.indices)
    space.scatter_(model, region.indices, values)
    try:
        yield
    finally:
        space.scatter_(model, region.indices, before)


def graft_theta(theta_pre: Tensor, theta_ft: Tensor, region: Region) -> Tensor:
    """Return θ(γ) of eq. 1: γ ⊙ θ_ft + (1 − γ) ⊙ θ_pre."""
    theta = theta_pre.clone()
    theta[region.indices] = theta_ft[region.indices]
    return theta


# -- Files of grafts and of ledgers: a region and its values as tensors ---------------------------------------


#: A gap of this length or more is stored as this number, once or several times, and then the remainder.
_LONG = 2**16 - 1


def entry_tensors(space: ParameterSpace, region: Region, values: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a region and its values ``(s,)``, for the files of grafts and ledgers."""
    return {"index": stored_indices(space, region), "value": values.detach().cpu().to(space.dtype)}


def entries_of(space: ParameterSpace, tensors: Mapping[str, Tensor]) -> tuple[Region, Tensor]:
    """Return region and values from the tensors of `entry_tensors`.

    Raises:
        ValueError, RegionError: one of them is missing, or they do not fit the space.
    """
    region, values = region_of(space, tensors, "index"), tensors.get("value")
    got = "none" if values is None else f"{values.dtype} of shape {tuple(values.shape)}"
    right = values is not None and values.dtype == space.dtype and values.shape == region.indices.shape
    if values is None or not right:
        raise ValueError(f"'value' must be {space.dtype} of shape ({len(region)},), got {got}")
    return region, values


def stored_indices(space: ParameterSpace, region: Region) -> Tensor:
    """Return a region's indices in the form for files, the shorter of two.

    Dense regions are stored as gaps, uint16: the distance of each index from the one before, the first one from 0; 65,535 skips
    as many entries, so a gap of 70,000 is 65,535 and 4,465. Sparse regions are stored as indices, uint32, or int64 in a space
    of more than 2³² entries.
    """
    indices, dtype = region.indices, _index_dtype(space)
    gaps = torch.diff(indices, prepend=indices.new_zeros(1))
    passed = gaps // _LONG
    length = len(gaps) + int(passed.sum())
    if length * torch.uint16.itemsize >= len(indices) * dtype.itemsize:
        return indices.to(dtype)
    words = torch.full((length,), _LONG, device="cpu")
    words[torch.arange(len(gaps), device="cpu") + passed.cumsum(0)] = gaps % _LONG
    return words.to(torch.uint16)


def region_of(space: ParameterSpace, tensors: Mapping[str, Tensor], name: str) -> Region:
    """Return the region that is stored under ``name``, see `stored_indices`.

    Raises:
        ValueError, RegionError: there is none, or it does not fit the space.
    """
    stored, dtype = tensors.get(name), _index_dtype(space)
    if stored is None or stored.dtype not in (torch.uint16, dtype) or stored.dim() != 1:
        got = "none" if stored is None else f"{stored.dtype} of shape {tuple(stored.shape)}"
        raise ValueError(f"{name!r} must be torch.uint16 or {dtype}, in one dimension, got {got}")
    indices = stored.to(torch.int64)
    if stored.dtype == torch.uint16:
        if len(indices) and int(indices[-1]) == _LONG:
            raise ValueError(f"{name!r} ends with {_LONG:,}, which passes over entries and reaches none")
        indices = indices.cumsum(0)[indices < _LONG]
    region = Region(indices)
    space.check(region.indices)
    return region


def _index_dtype(space: ParameterSpace) -> torch.dtype:
    return torch.uint32 if len(space) <= 2**32 else torch.int64
