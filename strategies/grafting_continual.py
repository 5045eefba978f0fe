"""GraftingContinual: a tiny region per task, trained once and then frozen (paper, §5.2 and C.3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from forgetfree.continual.skill_strategy import SkillOptions, SkillStrategy
from forgetfree.continual.streams import EncodedTask
from forgetfree.core.mask import LearnedRegion
from forgetfree.learning.training import TrainingOptions
from forgetfree.options import option


@dataclass(frozen=True, kw_only=True)
class GraftingOptions(SkillOptions):
    """Grafting, and what is said at the end of the stream."""

    final_union: bool = option(False, "evaluate the one final union on all tasks too")


class GraftingContinual(SkillStrategy):
    """For each task: fine-tune θ_pre on it alone, localize γ_n, train γ_n minus what is owned, commit (C.3).

    Each task is inferred with θ_pre under the union of the regions up to its own, so what later tasks do cannot reach it.

    Where the paper is silent: the entries of γ_n that earlier tasks own keep those tasks' values; the linear readout
    starts from the fine-tuned one and is trained with the region. If earlier tasks own all of γ_n, nothing but the readout
    is trained. A task that is not learned yet is answered by the union of all regions so far. A task met again is refused.
    """

    Options: ClassVar[type[TrainingOptions]] = GraftingOptions

    def setup(self) -> None:
        """An empty ledger."""
        super().setup()
        self.regions: dict[str, LearnedRegion] = {}
        self._final_union = False

    def note_region(self, task: EncodedTask, learned: LearnedRegion) -> None:
        """Keep what was found, without the scores, which are as large as the model: the ledger's memory is O(T·s)."""
        self.regions[task.name] = replace(learned, scores=learned.scores.new_empty(0))

    def enter_evaluation(self, task: EncodedTask) -> None:
        """Step 4 of C.3: θ_pre under the union of the regions up to the task's own."""
        if self._final_union:
            self._switch.to(len(self.ledger.records))
        else:
            super().enter_evaluation(task)

    def extra_results(self) -> dict[str, Any]:
        """The one final union on all tasks: what the union per task buys, by comparison."""
        if not self.options.final_union:
            return {}
        self._final_union = True
        try:
            answers = self.evaluate()
        finally:
            self._final_union = False
        return {
            "union": {
                "accuracy": [answers[task.name].score(task.definition.metric) for task in self.stream.tasks],
                "ece": [answers[task.name].ece for task in self.stream.tasks],
            }
        }
