"""Graft re-training: find a task's region, then train it anew from θ_pre (Panigrahi et al., 2023, §3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from forgetfree.grafting import budget
from forgetfree.ledger import Composition
from forgetfree.ledger_strategy import LedgerStrategy, Localized
from forgetfree.localization import LocalizationOptions, check_grafting, localize
from forgetfree.options import option
from forgetfree.streams import Stream, StreamTask
from forgetfree.training import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class GraftRetrainOptions(LocalizationOptions):
    """Grafting's, with regions trained from θ_pre."""

    region_start: Literal["fine-tuned", "pre-trained"] = option("pre-trained", "values the region is trained from")


class GraftRetrain(LedgerStrategy):
    """For each task: fine-tune θ_pre on it alone, localise γ, train γ alone from θ_pre (arXiv:2302.06600, §3.1).

    The paper does so for one task, to see whether γ is enough to learn it. Here each task of the stream has a region of
    its own, so that regions may overlap and no task depends on the order.

    Where the paper is silent: a linear readout starts from the fine-tuned one and is trained with the region.
    """

    Options: ClassVar[type[TrainingOptions]] = GraftRetrainOptions
    composition: ClassVar[Composition] = "alone"

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """The sparsity must leave an entry, and something must choose the region."""
        super().check(options, stream)
        check_grafting(options, stream)

    def localize(self, task: StreamTask) -> Localized:
        """Eqs. 3 and 4 of the paper."""
        fine_tuned = self.fine_tuned(task)
        region = localize(self, task, fine_tuned).region
        start = fine_tuned.theta if self.options.region_start == "fine-tuned" else None
        return Localized(region, self.options.sparsity, start, dict(fine_tuned.readouts[task.name]))

    def region_budget(self) -> int:
        """What the sparsity allows, though fewer entries may have moved."""
        return budget(len(self.space), self.options.sparsity)
