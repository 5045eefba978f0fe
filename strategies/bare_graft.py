"""A bare graft: find a task's region and put fine-tuning's values there, without training it (paper, §2)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from forgetfree.continual.memory import LedgerFile
from forgetfree.continual.regions import RegionStrategy, TaskRegions
from forgetfree.continual.strategy import TaskwiseOptions, Training
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.continual.task_training import Skill, skill_of
from forgetfree.models.state import ModelState
from forgetfree.options import option
from forgetfree.training.localization import check_localization
from forgetfree.training.scaled_start import ScaleOptions, scales
from forgetfree.training.training_options import TrainingOptions

#: The graft of a stream of one task, beside the ledger.
GRAFT = "graft.safetensors"


@dataclass(frozen=True, kw_only=True)
class BareGraftOptions(TaskwiseOptions, ScaleOptions):
    """How a task is fine-tuned, localized, and grafted without further training."""

    largest_scale: float = option(
        1.0,
        "a graft's values are θ_pre + c·(θ_ft − θ_pre), with the c of 0, 1, 2, 4, … up to this by which validation rows have "
        "the least loss; 1: the paper's c, and no other is tried",
        at_least=1,
    )

    @property
    def choices(self) -> int:
        """One for each c."""
        return len(scales(self.largest_scale)) if self.largest_scale > 1 else 0


class BareGraft(RegionStrategy):
    """For each task: fine-tune θ_pre on it alone, localize γ, graft: θ(γ) = γ ⊙ θ_ft + (1 − γ) ⊙ θ_pre (eq. 1).

    Nothing of the region is trained. Each task stands on θ_pre alone, so that regions may overlap and no task depends on the
    order. The readout is the fine-tuned one. Where ``region_from`` needs no θ_ft, γ takes the values of θ_ft all the same.
    """

    Options: ClassVar[type[TrainingOptions]] = BareGraftOptions
    resumable: ClassVar[bool] = True

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse a sparsity that leaves no entry, and options by which nothing chooses the region."""
        check_localization(options, stream.model.space())

    def setup(self) -> None:
        """Make an empty ledger, in which each task stands alone."""
        self.regions = TaskRegions(self, "alone")
        self.kept = _LedgerAndGraft(self, self.regions)

    def begin(self, task: EncodedTask) -> Training:
        """Fine-tune θ_pre on the task alone, localize γ, and put θ_ft there: no update follows."""
        self.regions.ledger.check_new(task.name)
        bench, largest = self.bench(task), self.options.largest_scale
        fine_tuned = bench.fine_tuned(self.options)
        (region,) = bench.regions(fine_tuned, self.options)
        scale = bench.scale(fine_tuned, region, self.options, largest) if largest > 1 else 1.0
        start = bench.moved(fine_tuned, scale)
        skill = Skill(region, self.options.sparsity, alone=True, scale=scale)
        training = self.regions.training(task, skill, start, steps=0, options=self.options)
        start.load_beside_theta_(self.model, [task.name])
        return training

    def commit(self, task: EncodedTask, training: Training) -> None:
        """Record the region and its values."""
        self.regions.commit(training)
        self.notes[task.name] = skill_of(training).scale

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Answer with the task's own graft on θ_pre."""
        return self.regions.answering(task)

    def extra_results(self) -> dict[str, Any]:
        """Return how far along fine-tuning's move each graft stands, where that was chosen."""
        return {"scales": self.notes} if self.options.largest_scale > 1 else {}


class _LedgerAndGraft(LedgerFile):
    """Writes the ledger; of a stream of one task the graft, too, as a file of its own."""

    def __init__(self, strategy: BareGraft, regions: TaskRegions) -> None:
        super().__init__(strategy, regions)
        self._graft_of = strategy

    def save(self, directory: Path) -> None:
        """Write both."""
        super().save(directory)
        strategy = self._graft_of
        if len(strategy.stream.tasks) > 1 or not self.ledger.records:
            return
        (task,), (record,), pre = strategy.stream.tasks, self.ledger.records, strategy.pre_trained
        theta = pre.theta.clone()
        theta[record.region.indices] = record.owned.values.to(theta)
        state = ModelState(theta, {task.name: record.readout}, {**pre.buffers, **record.buffers})
        strategy.bench(task).graft(state, record.region, record.sparsity).save(directory / GRAFT)
