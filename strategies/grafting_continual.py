"""GraftingContinual: a tiny region per task, trained once and then frozen (paper, §5.2 and C.3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from forgetfree.continual.regions import RegionStrategy, TaskRegions
from forgetfree.continual.skills import SkillOptions, SkillTraining, check_skill, learn_region, sought_on_theta_pre
from forgetfree.continual.strategy import Training
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.core.mask import LearnedRegion
from forgetfree.errors import OptionError
from forgetfree.learning.monitor import Phase
from forgetfree.learning.training import TrainingOptions
from forgetfree.ledger import Ledger
from forgetfree.models.state import ModelState
from forgetfree.options import option


@dataclass(frozen=True, kw_only=True)
class GraftingOptions(SkillOptions):
    """Grafting, and what is said at the end of the stream."""

    composition: Literal["union", "alone", "auto"] = option(
        "union",
        "what a task stands on: the union of the earlier tasks' regions, as in the paper; θ_pre alone, so that regions may "
        "overlap and no task depends on the order; or auto: for each task what answers its validation rows better, for which "
        "its region is trained twice",
    )
    localize_at: Literal["pretrained", "union"] = option(
        "pretrained", "where γ is searched for: on θ_pre, as in the paper; or on the union so far, among what is free"
    )
    final_union: bool = option(False, "evaluate the one final union on all tasks too")


class GraftingContinual(RegionStrategy):
    """For each task: fine-tune θ_pre on it alone, localize γ_n, train γ_n minus what is owned, commit (C.3).

    Each task is inferred with θ_pre under the union of the regions up to its own, so what later tasks do cannot reach it.
    With ``composition=alone`` each task has its own region on θ_pre instead. With ``auto``, each task after the first is
    trained both ways, from one θ_ft (and one γ, unless ``localize_at=union``), and what answers validation rows better is
    recorded: by score, then by loss; of equal ones, the union. A task that stands alone leaves the union as it was. Plugins
    meet the training on the union only.

    Where the paper is silent: the entries of γ_n that earlier tasks own keep those tasks' values; the linear readout
    starts from the fine-tuned one and is trained with the region. If earlier tasks own all of γ_n, nothing but the readout
    is trained. A task that is not learned yet is answered by the union of all regions so far. A task met again is a version of
    its own, such as ``sst2@2``: θ_ft starts from the union of all regions so far in place of θ_pre, and γ_n is sought among the
    entries that nobody owns. Earlier versions keep theirs. A version of a task that stands alone stands alone, too.
    """

    Options: ClassVar[type[TrainingOptions]] = GraftingOptions
    phases: ClassVar[tuple[Phase, ...]] = ("fine_tune", "localize", "train")
    resumable: ClassVar[bool] = True

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse a sparsity that leaves no entry, and options by which nothing chooses the region."""
        check_skill(options, stream)
        if (options.composition, options.localize_at) == ("alone", "union"):
            raise OptionError(
                "composition=alone stands each task on θ_pre, and localize_at=union searches on a union. Leave one of them out."
            )
        if options.composition == "alone" and options.final_union:
            raise OptionError(
                "composition=alone makes no union, and final_union answers with one. Leave one of them out."
            )

    def setup(self) -> None:
        """Make an empty ledger, in which a task is inferred with the union of all regions up to its own, or with its own."""
        self.regions = TaskRegions(self, self.options.composition)
        self.skills = SkillTraining(self)
        self.noted = self.skills.scales  # a job keeps it
        #: γ_n of tasks for which it was found in another stream.
        self.reused: dict[str, LearnedRegion] = {}
        #: The task whose union answers for all tasks, while the final union is evaluated.
        self._answers_all: EncodedTask | None = None

    def reuse(self, ledger: Ledger) -> set[str]:
        """Take over γ_n wherever it was sought on θ_pre: what other tasks own has no part in it."""
        if self.options.localize_at == "pretrained":
            self.reused = sought_on_theta_pre(ledger)
        return set(self.reused)

    def begin(self, task: EncodedTask) -> Training:
        """Find γ_n, and train of it what no earlier task owns, on top of what they own."""
        self.regions.ledger.check_new(task.name)

        # (1) Fine-tune θ_pre on t_n alone, and localize γ_n: the mask scores S by gradient steps on the loss of the graft
        #     θ(γ) = γ ⊙ θ_ft + (1 − γ) ⊙ θ_pre (eq. 1), with γ = γ_base ⊙ (1 − σ(S)) + (1 − γ_base) ⊙ σ(S) (eqs. 3, 4).
        found = self.reused.get(task.name)
        with self.regions.start_of(task) as start:  # the union, for a task met again; else θ_pre
            alone = self.regions.stands_alone(task)
            fine_tuned = self.fine_tuned(task, start)
            if start is not None and not alone:
                fine_tuned = self.skills.where_free(fine_tuned, start)
            if found is None and (start is not None or self.options.localize_at == "pretrained"):
                found = learn_region(self, task, fine_tuned, start)
        both_ways = start is None and self.regions.ledger.last_of_union and self.options.composition == "auto"
        rival = self.skills.trained_alone(task, found, fine_tuned) if both_ways else None
        if found is None:
            union = ModelState.of(self.model, [task.name])
            found = learn_region(self, task, self.skills.where_free(fine_tuned, union), union)

        # (2) Starting from the union graft so far, train only γ_n \ ∪_{i<n} γ_i: from θ_ft or θ_pre, as the options say.
        training = self.skills.training(task, found, fine_tuned, start, alone=alone)
        return self.skills.against(rival, training) if rival else training

    def commit(self, task: EncodedTask, training: Training) -> None:
        """(3) Record in the ledger who owns what, with its values."""
        self.regions.commit(task, self.skills.localized[task.name].region, self.options.sparsity)

    @contextmanager
    def answering(self, task: EncodedTask) -> Iterator[None]:
        """(4) Answer for t_k with θ_pre under the union of the regions of t_1..t_k."""
        with self.regions.answering(self._answers_all or task):
            yield

    def extra_results(self) -> dict[str, Any]:
        """Return scaled starts, and the scores of the one final union on all tasks: what the union per task buys."""
        extra = {"scales": self.skills.scales} if self.options.region_start == "scaled" else {}
        if not self.options.final_union:
            return extra
        last = self.regions.ledger.records[self.regions.ledger.last_of_union - 1].task
        self._answers_all = next(task for task in self.learned if task.name == last)
        try:
            answers = self.evaluate()
        finally:
            self._answers_all = None
        return extra | {
            "union": {
                "accuracy": [answers[task.name].score(task.definition.metric) for task in self.stream.tasks],
                "ece": [answers[task.name].ece for task in self.stream.tasks],
            }
        }
