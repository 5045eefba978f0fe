"""Graft re-training: find a task's region, then train it from θ_pre (Panigrahi et al., 2023, §3.1)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from forgetfree.continual.grafting import RegionTrainer, SkillOptions, TaskBenches, check_grafting, tuned
from forgetfree.continual.regions import RegionStrategy, TaskRegions
from forgetfree.continual.strategy import Training
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.options import option
from forgetfree.training.training_options import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class GraftRetrainOptions(SkillOptions):
    """Grafting's options, with regions trained from θ_pre."""

    region_start: Literal["fine-tuned", "pre-trained", "scaled"] = option(
        "pre-trained", "values the region is trained from, see grafting-continual"
    )


class GraftRetrain(RegionStrategy):
    """For each task: fine-tune θ_pre on it alone, localize γ, train γ alone from θ_pre (arXiv:2302.06600, §3.1).

    The paper does so for one task, to see whether γ is enough to learn it. Here each task of the stream has a region of
    its own, so that regions may overlap and no task depends on the order.

    Where the paper is silent: a linear readout starts from the fine-tuned one and is trained with the region.
    """

    Options: ClassVar[type[TrainingOptions]] = GraftRetrainOptions
    resumable: ClassVar[bool] = True

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse a sparsity that leaves no entry, and options by which nothing chooses the region."""
        check_grafting(options, stream)

    def setup(self) -> None:
        """Make an empty ledger, in which each task stands alone."""
        self.regions = TaskRegions(self, "alone")
        self.trainer = RegionTrainer(self, TaskBenches(self))

    def begin(self, task: EncodedTask) -> Training:
        """Fine-tune θ_pre on the task alone, localize γ, and train it."""
        self.regions.ledger.check_new(task.name)
        bench = self.bench(task)
        fine_tuned = tuned(bench, self.options)
        (region,) = bench.regions(fine_tuned, self.options)
        return self.trainer.training(task, region, fine_tuned)

    def commit(self, task: EncodedTask, training: Training) -> None:
        """Record the region and its values."""
        self.regions.commit(training)

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Answer with the task's own region on θ_pre."""
        return self.regions.answering(task)
