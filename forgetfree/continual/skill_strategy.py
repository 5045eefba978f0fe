"""The base of strategies that localize each task's skill first: fine-tune, learn the mask, then train the region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from forgetfree.continual.ledger_strategy import LedgerStrategy, RegionOptions, RegionToTrain
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.core.base_regions import budget
from forgetfree.core.mask import LearnedRegion
from forgetfree.learning.localization import LocalizationOptions, check_localization, localize, mask_options
from forgetfree.learning.training import TrainingOptions
from forgetfree.models.state import ModelState
from forgetfree.options import option


@dataclass(frozen=True, kw_only=True)
class SkillOptions(RegionOptions, LocalizationOptions):
    """Fine-tuning, then localizing, then training the region."""

    region_start: Literal["fine-tuned", "pre-trained"] = option("fine-tuned", "values the region is trained from")


class SkillStrategy(LedgerStrategy):
    """Base of strategies whose regions are localized skills. A subclass sets `composition`, and may keep what was learned."""

    Options: ClassVar[type[TrainingOptions]] = SkillOptions

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """The sparsity must leave an entry, and something must choose the region."""
        super().check(options, stream)
        check_localization(options, stream.model.space())

    def localize(self, task: EncodedTask) -> RegionToTrain:
        """Fine-tune θ_pre on the task alone, and localize γ (eqs. 3 and 4)."""
        fine_tuned = self.fine_tuned(task)
        learned = self.learn_region(task, fine_tuned)
        self.note_region(task, learned)
        start = fine_tuned.theta if self.options.region_start == "fine-tuned" else None
        return RegionToTrain(learned.region, self.options.sparsity, start, dict(fine_tuned.readouts[task.name]))

    def note_region(self, task: EncodedTask, learned: LearnedRegion) -> None:
        """Told of every region that was found."""

    def learn_region(self, task: EncodedTask, fine_tuned: ModelState) -> LearnedRegion:
        """γ of one task; the model holds θ_pre before and after."""
        mask = mask_options(self.options, len(task.train), self.full_steps(task))
        seed = self.phase_seed("localize", task)
        with self.phase("localize", task, mask.steps) as on_step:
            return localize(
                self.task_model,
                task,
                self.pristine,
                fine_tuned,
                self.options,
                mask,
                sparsities=[self.options.sparsity],
                seed=seed,
                on_step=on_step,
            )[0]

    def region_budget(self) -> int:
        """What the sparsity allows, though fewer entries may have moved."""
        return budget(len(self.space), self.options.sparsity)
