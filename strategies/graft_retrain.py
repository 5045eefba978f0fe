"""Graft re-training: find a task's region, then train it from θ_pre (Panigrahi et al., 2023, §3.1)."""

from __future__ import annotations

from typing import Literal

from forgetfree.continual.region_strategy import RegionStrategy, SkillOptions
from forgetfree.continual.strategy_parts import Training
from forgetfree.options import option
from forgetfree.training.encoded_task import EncodedTask


class GraftRetrainOptions(SkillOptions):
    """Grafting's options, with regions trained from θ_pre."""

    region_start: Literal["fine-tuned", "pre-trained"] = option(
        "pre-trained", "initial values of the region, see grafting-continual"
    )


class GraftRetrain(RegionStrategy):
    """For each task: fine-tune θ_pre on it alone, localize γ, train γ alone from θ_pre (arXiv:2302.06600, §3.1).

    The paper does this for one task, to test whether γ suffices to learn it. Here each task of the stream has its
    own region, so regions may overlap and no task depends on the order.

    Where the paper is silent: a linear readout starts from the fine-tuned one and is trained with the region.
    """

    Options = GraftRetrainOptions
    resumable = True

    def setup(self) -> None:
        """Open a ledger in which tasks are independent."""
        self.open_ledger("alone")

    def begin(self, task: EncodedTask) -> Training:
        """Fine-tune θ_pre on the task alone, localize γ, and train it."""
        tuned = self.fine_tuned(task)
        return self.region_training(task, self.localize(task, tuned), start=tuned)
