"""The owner of each entry, in 12 bytes per owned entry, whatever the size of the model.

`Owners` is for records in one line, each of which stands on the one before; `OwnersBelow` is for a tree, made of lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forgetfree.core.regions import Region

#: Sorted indices of entries, and the position of each one's owner.
_Run = tuple[Tensor, Tensor]


class Owners:
    """The first owner of each entry, in sorted runs of entries: each task adds a run, and two runs of about one length merge.

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
        """Return the owners after the regions of tasks, and for each region the owners before it, in the form of `among`.

        All regions are sorted once, where `add` merges runs again and again.

        Args:
            regions: in the tasks' order.
            positions: the positions of the tasks, ascending.
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
        """Add the owner of sorted indices ``(s,)`` that have no owner so far."""
        run = indices, torch.full((len(indices),), owner, dtype=torch.int32, device="cpu")
        while self._runs and len(self._runs[-1][0]) < 2 * len(run[0]):
            run = _merged(self._runs.pop(), run)
        if len(indices):
            self._runs.append(run)

    def among(self, indices: Tensor) -> Tensor:
        """Return the owner of each index, or −1: int64 ``(s,)``."""
        owners = torch.full((len(indices),), -1, device="cpu")
        for own, by in self._runs:
            at = torch.searchsorted(own[:-1], indices)  # larger indices are compared with the last one
            found = own[at] == indices
            owners[found] = by[at[found]].long()
        return owners

    def owned(self, end: int) -> Tensor:
        """Return the sorted indices that have an owner before position ``end``."""
        runs = [own[by < end] for own, by in self._runs]
        return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *runs]).sort(stable=True).values


@dataclass
class _Line:
    """Records in a line: each stands on the one before it.

    Attributes:
        owners: the owners in the line.
        base: the stage that the first record stands on; 0: θ_pre.
        last: the stage of the last record.
    """

    owners: Owners
    base: int
    last: int


class OwnersBelow:
    """The owners of entries on the way from a stage to θ_pre. Stages are numbers of records, from 1; 0 is θ_pre.

    The first record that stands on the last of a line extends the line; any other begins a new line.

    >>> import torch
    >>> owners = OwnersBelow()
    >>> owners.add(torch.tensor([2, 5]), parent=0)
    >>> owners.add(torch.tensor([5]), parent=0)
    >>> owners.among(torch.tensor([1, 2, 5]), stage=1).tolist(), owners.among(torch.tensor([1, 2, 5]), stage=2).tolist()
    ([-1, 0, 0], [-1, -1, 1])
    """

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._line_of: list[int] = [-1]  # by stage

    @classmethod
    def of(cls, regions: Sequence[Region], parents: Sequence[int]) -> tuple[OwnersBelow, list[Tensor]]:
        """Return the owners after records with these regions, and for each region the owners below it, in the form of `among`.

        Args:
            regions: γ of each record.
            parents: the stage of each record's parent; it comes before the record's own.
        """
        below, before = cls(), [torch.empty(0)] * len(regions)
        for parent in parents:
            below._place(parent)
        members: list[list[int]] = [[] for _ in below._lines]
        for position, line in enumerate(below._line_of[1:]):
            members[line].append(position)
        for each, positions in zip(below._lines, members, strict=True):  # a base comes before the lines on it
            each.owners, own = Owners.of([regions[position] for position in positions], positions)
            for position, within in zip(positions, own, strict=True):
                on_base = below.among(regions[position].indices, each.base)
                before[position] = torch.where(on_base >= 0, on_base, within)
        return below, before

    def _place(self, parent: int) -> _Line:
        """Add the next record at the end of its line, and return the line."""
        number = self._line_of[parent]
        if not parent or self._lines[number].last != parent:
            number = len(self._lines)
            self._lines.append(_Line(Owners(), parent, parent))
        self._line_of.append(number)
        self._lines[number].last = len(self._line_of) - 1
        return self._lines[number]

    def add(self, indices: Tensor, parent: int) -> None:
        """Add the entries of the next record: sorted indices ``(s,)`` without an owner at or below the stage ``parent``."""
        self._place(parent).owners.add(indices, len(self._line_of) - 2)

    def among(self, indices: Tensor, stage: int) -> Tensor:
        """Return the position of the record at or below a stage that owns each index, or −1: int64 ``(s,)``."""
        owners = torch.full((len(indices),), -1, device="cpu")
        while stage:
            line = self._lines[self._line_of[stage]]
            own = line.owners.among(indices)
            owners = torch.where((own >= 0) & (own < stage), own, owners)  # the lowest owner counts
            stage = line.base
        return owners

    def owned(self, stage: int) -> Tensor:
        """Return the sorted indices that have an owner at or below a stage."""
        owned = [torch.empty(0, dtype=torch.int64, device="cpu")]
        while stage:
            line = self._lines[self._line_of[stage]]
            owned.append(line.owners.owned(stage))
            stage = line.base
        indices: Tensor = torch.unique(torch.cat(owned))
        return indices


def _merged(one: _Run, other: _Run) -> _Run:
    indices, order = torch.cat([one[0], other[0]]).sort(stable=True)
    return indices, torch.cat([one[1], other[1]])[order]
