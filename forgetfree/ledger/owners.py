"""Who owns which entry, in memory of the size of what is owned: 12 bytes an entry, whatever the size of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forgetfree.core.regions import Region

#: Sorted indices of entries, and the position of each one's owner.
_Run = tuple[Tensor, Tensor]


class Owners:
    """The first owner of each entry: sorted runs of entries, one a task at first; two of about one length become one.

    So there are about as many runs as the number of tasks has binary digits.

    >>> import torch
    >>> owners = Owners()
    >>> owners.add(torch.tensor([2, 5]), 0)
    >>> owners.among(torch.tensor([1, 2, 5])).tolist()
    [-1, 0, 0]
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    @classmethod
    def of(cls, regions: Sequence[Region], positions: Sequence[int]) -> tuple[Owners, tuple[Tensor, ...]]:
        """Return the owners after regions of tasks, and for each region the owners before it, as `among` does.

        All regions are sorted once, where `add` merges runs again and again.

        Args:
            regions: in the tasks' order.
            positions: those of the tasks, ascending.
        """
        owners, sizes = cls(), [len(region) for region in regions]
        indices, order = torch.cat([Region.empty().indices, *(region.indices for region in regions)]).sort(stable=True)
        lengths = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        tasks = torch.tensor(positions, dtype=torch.int64, device="cpu").repeat_interleave(lengths)[order]
        is_first = torch.ones(len(indices), dtype=torch.bool, device="cpu")
        is_first[1:] = indices[1:] != indices[:-1]
        first = tasks[is_first]
        owners._runs = [(indices[is_first], first.to(torch.int32))] if len(indices) else []
        before = torch.empty_like(tasks)
        owner = first[is_first.cumsum(0) - 1]
        before[order] = torch.where(owner < tasks, owner, -1)
        return owners, torch.split(before, sizes)

    def add(self, indices: Tensor, owner: int) -> None:
        """Note the owner of sorted indices ``(s,)``, which nobody owns so far."""
        run = indices, torch.full((len(indices),), owner, dtype=torch.int32, device="cpu")
        while self._runs and len(self._runs[-1][0]) < 2 * len(run[0]):
            run = _merged(self._runs.pop(), run)
        if len(indices):
            self._runs.append(run)

    def among(self, indices: Tensor) -> Tensor:
        """Return the owner of each index, or −1: int64 ``(s,)``."""
        owners = torch.full((len(indices),), -1, device="cpu")
        for own, by in self._runs:
            at = torch.searchsorted(own[:-1], indices)  # the last one stands for all that come after
            found = own[at] == indices
            owners[found] = by[at[found]].long()
        return owners

    def owned(self) -> Tensor:
        """Return the sorted indices that have an owner."""
        runs = [own for own, _ in self._runs]
        return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *runs]).sort(stable=True).values


def _merged(one: _Run, other: _Run) -> _Run:
    indices, order = torch.cat([one[0], other[0]]).sort(stable=True)
    return indices, torch.cat([one[1], other[1]])[order]
