"""What one task puts into a ledger, and all that a ledger's file holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor

from forgetfree.core.regions import Region
from forgetfree.ledger.graft import Graft
from forgetfree.tasks import TaskDefinition

#: What a task is inferred with on top of θ_pre: the ``union`` of all regions up to its own; its own region with the
#: entries in it that earlier tasks own (``selection``); or its own values ``alone``, so that regions may overlap. In ``auto``
#: some tasks stand alone, and each of the others is inferred with the union of theirs up to its own.
Composition = Literal["union", "selection", "alone", "auto"]
COMPOSITIONS: tuple[Composition, ...] = get_args(Composition)


@dataclass(frozen=True)
class Record:
    """What one task added to the ledger.

    Attributes:
        task: its name.
        region: γ_k, as localized.
        owned: γ_k without what earlier tasks own, with the trained values; all of γ_k where the task stands alone.
        sparsity: the share of the space that γ_k was allowed.
        readout: the task's own readout tensors by name.
        buffers: the model's buffers that training changed, by name.
        definition: the task's labels in order, its prompt and so on; ``None`` if its rows are no texts.
        classes: the numbers of its labels in the readout, which may have other tasks' labels, too; empty: all of them.
        alone: in a ledger of composition ``auto``: whether the task stands on θ_pre alone, apart from the union.
    """

    task: str
    region: Region
    owned: Graft
    sparsity: float
    readout: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    definition: TaskDefinition | None = None
    classes: tuple[int, ...] = ()
    alone: bool = False

    @property
    def shared(self) -> Region:
        """The entries of γ_k that earlier tasks own."""
        return self.region - self.owned.region if len(self.region) > len(self.owned.region) else Region.empty()

    @property
    def own_readout(self) -> dict[str, Tensor]:
        """The rows of the readout that are the task's own labels."""
        return rows_of(self.readout, self.classes)


def rows_of(readout: Mapping[str, Tensor], classes: Sequence[int]) -> dict[str, Tensor]:
    """Return the rows of a readout's tensors that are of some classes; all rows where it has no others."""
    rows, last = list(classes), max(classes, default=-1)
    return {name: tensor[rows] if 0 <= last < len(tensor) else tensor for name, tensor in readout.items()}
