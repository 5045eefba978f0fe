"""Records and the append-only list of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from forgetfree.errors import LedgerError, RegionError, TaskError
from forgetfree.files import write_atomically
from forgetfree.grafting import Graft
from forgetfree.parameters import ParameterSpace
from forgetfree.regions import Region, overlap

#: What a task is inferred with, on top of θ_pre: the ``union`` of all regions up to its own; its own region with the
#: entries in it that earlier tasks own (``selection``); or its own values ``alone``, so that regions may overlap.
Composition = Literal["union", "selection", "alone"]
COMPOSITIONS: tuple[Composition, ...] = get_args(Composition)


@dataclass(frozen=True)
class Record:
    """What one task put into the ledger.

    Attributes:
        task: its name.
        region: γ_k, as localised.
        owned: γ_k minus all that earlier tasks own, with the trained values; all of γ_k where tasks stand alone.
        sparsity: the share of the space that γ_k was allowed.
        readout: the task's own readout tensors by name.
        buffers: the model's buffers that training changed, by name.
    """

    task: str
    region: Region
    owned: Graft
    sparsity: float
    readout: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


class Ledger:
    """The records of a stream over one base model.

    Args:
        space: the parameter space of the base model.
        fingerprint: of the base model, see `forgetfree.models.loading.fingerprint_of`.
        composition: what a task is inferred with.
    """

    def __init__(self, space: ParameterSpace, fingerprint: str, composition: Composition = "union") -> None:
        self.space = space
        self.fingerprint = fingerprint
        self.composition: Composition = composition
        self._records: list[Record] = []

    @property
    def records(self) -> tuple[Record, ...]:
        """All records, in the order of learning."""
        return tuple(self._records)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks learned, in order."""
        return [record.task for record in self._records]

    def position(self, task: str) -> int:
        """Where a task stands in the order, from 0.

        Raises:
            TaskError: the ledger does not hold it.
        """
        if task not in self.tasks:
            raise TaskError(
                f"The ledger holds no task {task!r}. It holds: {', '.join(self.tasks) or 'none'}. Train the task first."
            )
        return self.tasks.index(task)

    def owned(self, upto: str | None = None) -> Region:
        """The union of all regions up to and including task ``upto``; of all of them if ``None``.

        Where tasks stand alone it counts an entry once, however many tasks have a value for it.
        """
        last = len(self._records) if upto is None else self.position(upto) + 1
        union = Region.empty()
        for record in self._records[:last]:
            union = union | record.owned.region
        return union

    def free(self, region: Region) -> Region:
        """What of ``region`` the next task would own: what no task owns yet, or all of it where tasks stand alone."""
        return region if self.composition == "alone" else region - self.owned()

    def graft(self, task: str) -> Graft:
        """What ``task`` is inferred with, on top of θ_pre: a copy."""
        last = self.position(task)
        if self.composition == "alone":
            return self._records[last].owned
        records = self._records[: last + 1]
        indices = torch.cat([record.owned.region.indices for record in records])
        order = indices.argsort()
        union = Graft(Region(indices[order]), torch.cat([record.owned.values for record in records])[order])
        if self.composition == "union":
            return union
        region = self._records[last].region
        return Graft(region, union.values[torch.searchsorted(union.region.indices, region.indices)])

    def owner(self, index: int) -> str | None:
        """The task that owns the entry of flat index ``index``, or ``None``; where tasks stand alone, the first of them."""
        self.space.check(torch.tensor([index]))
        return next((record.task for record in self._records if index in record.owned.region), None)

    def overlap(self) -> list[list[float]]:
        """``|γ_i ∩ γ_j| / |γ_j|`` for all pairs of localised regions: ``T × T`` (paper, fig. 8)."""
        return [[overlap(a.region, b.region) for b in self._records] for a in self._records]

    def append(self, record: Record) -> None:
        """Commit a task. Nothing in a ledger changes afterwards.

        Raises:
            TaskError: the task is already in it.
            LedgerError: the record takes an entry that is owned, leaves a free one of its region out, or does not fit the
                space.
        """
        self.check_new(record.task)
        where = f"Record of task {record.task!r}"
        try:
            self.space.check(record.region.indices)
        except RegionError as error:
            raise LedgerError(f"{where}: {error}") from error
        if self.composition != "alone" and not self.owned().isdisjoint(record.owned.region):
            raise LedgerError(f"{where} takes entries that earlier tasks own. Commit γ minus ledger.owned().")
        if record.owned.region != self.free(record.region):
            raise LedgerError(
                f"{where} must own its region minus what earlier tasks own: expected {len(self.free(record.region))} entries, "
                f"got {len(record.owned.region)}."
            )
        if record.owned.values.shape != (len(record.owned.region),):
            raise LedgerError(
                f"{where} needs one value an entry: expected shape ({len(record.owned.region)},), got "
                f"{tuple(record.owned.values.shape)}."
            )
        _check_finite(where, {"values": record.owned.values, **record.readout, **record.buffers})
        self._records.append(_frozen(record))

    def check_new(self, task: str) -> None:
        """Raise ``TaskError`` where the ledger holds ``task`` already."""
        if task in self.tasks:
            raise TaskError(
                f"Task {task!r} is already in the ledger (record {self.position(task)}), and what a task owns is frozen. "
                "To learn more of it, train it under another name."
            )

    @property
    def size_in_bytes(self) -> int:
        """Size of the file this ledger is saved as."""
        from forgetfree.ledger.file import serialize

        return len(serialize(self))

    def save(self, path: Path) -> None:
        """Write the ledger atomically: the file is the old one or the new one, never a part."""
        from forgetfree.ledger.file import serialize

        write_atomically(path, serialize(self))

    @classmethod
    def load(cls, path: Path) -> Ledger:
        """Read a ledger and verify everything about it: layout, bounds, order, disjointness, dtypes, checksum.

        Raises:
            LedgerError: with the reason; a damaged file is never half-read.
        """
        from forgetfree.ledger.file import read

        return read(path)


def _check_finite(where: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise LedgerError(
                f"{where}: tensor {name!r} holds NaN or infinity. Train the task again, with a lower rate."
            )


def _frozen(record: Record) -> Record:
    """A record with copies of its own on the CPU: what the caller does to the originals cannot reach it."""

    def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    owned = Graft(record.owned.region, record.owned.values.detach().cpu().clone())
    return Record(record.task, record.region, owned, record.sparsity, copies(record.readout), copies(record.buffers))
