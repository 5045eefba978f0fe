"""GraftingContinual: a tiny region per task, trained once and then frozen (paper, §5.2 and C.3)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from forgetfree.continual.regions import RegionStrategy, TaskRegions
from forgetfree.continual.skills import SkillOptions, check_skill, learn_region, starting_values
from forgetfree.continual.strategy import Training
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.core.base_regions import budget
from forgetfree.core.graft import graft_theta
from forgetfree.core.mask import LearnedRegion
from forgetfree.data.sampling import representative
from forgetfree.errors import OptionError
from forgetfree.learning.monitor import Phase
from forgetfree.learning.scaled_start import quality
from forgetfree.learning.training import TrainingOptions, fine_tune
from forgetfree.ledger import Ledger, Record
from forgetfree.models.state import ModelState
from forgetfree.options import option
from forgetfree.tasks import version_of


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


@dataclass(frozen=True)
class _Alone:
    """A task as it was trained on θ_pre alone: its record, how good it is, its γ, and how far along it started."""

    record: Record
    quality: tuple[float, float]
    localized: LearnedRegion
    scale: float


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

    def setup(self) -> None:
        """Make an empty ledger, in which a task is inferred with the union of all regions up to its own, or with its own."""
        self.regions = TaskRegions(self, self.options.composition)
        #: γ_n of each task as it was localized.
        self.localized: dict[str, LearnedRegion] = {}
        #: γ_n of tasks for which it was found in another stream.
        self.reused: dict[str, LearnedRegion] = {}
        #: How far along fine-tuning's move each task's region started.
        self.noted: dict[str, float] = {}
        #: The task whose union answers for all tasks, while the final union is evaluated.
        self._answers_all: EncodedTask | None = None
        #: With ``composition=auto``: what the task in training is on θ_pre alone.
        self._rival: _Alone | None = None

    def reuse(self, ledger: Ledger) -> set[str]:
        """Take over γ_n wherever it was sought on θ_pre: what other tasks own has no part in it."""
        if self.options.localize_at == "pretrained":
            self.reused = {
                record.task: LearnedRegion(record.region, len(record.region), torch.empty(0), 0, (), ())
                for record in ledger.records
                if version_of(record.task)[1] == 1  # later versions are sought on a union
            }
        return set(self.reused)

    def begin(self, task: EncodedTask) -> Training:
        """Find γ_n, and train of it what no earlier task owns, on top of what they own."""
        self.regions.ledger.check_new(task.name)
        self._rival = None

        # (1) Fine-tune θ_pre on t_n alone, and localize γ_n: the mask scores S by gradient steps on the loss of the graft
        #     θ(γ) = γ ⊙ θ_ft + (1 − γ) ⊙ θ_pre (eq. 1), with γ = γ_base ⊙ (1 − σ(S)) + (1 − γ_base) ⊙ σ(S) (eqs. 3, 4).
        found = self.reused.get(task.name)
        with self.regions.start_of(task) as start:  # the union, for a task met again; else θ_pre
            alone = self.regions.stands_alone(task)
            fine_tuned = self.fine_tuned(task, start)
            if start is not None and not alone:
                fine_tuned = self._where_free(fine_tuned, start)
            if found is None and (start is not None or self.options.localize_at == "pretrained"):
                found = learn_region(self, task, fine_tuned, start)
        if start is None and self.regions.ledger.last_of_union and self.options.composition == "auto":
            self._rival = self._trained_alone(task, found, fine_tuned)
        if found is None:
            union = ModelState.of(self.model, [task.name])
            found = learn_region(self, task, self._where_free(fine_tuned, union), union)

        # (2) Starting from the union graft so far, train only γ_n \ ∪_{i<n} γ_i: from θ_ft or θ_pre, as the options say.
        training = self._training(task, found, fine_tuned, start, alone=alone)
        return replace(training, settle=partial(self._settle, task)) if self._rival else training

    def _training(
        self,
        task: EncodedTask,
        found: LearnedRegion,
        fine_tuned: ModelState,
        start: ModelState | None = None,
        *,
        alone: bool,
    ) -> Training:
        """Return the training of what is free of a region, on top of what the model holds."""
        # Without the scores, which are as large as the model: the ledger's memory is O(T·s).
        self.localized[task.name] = replace(found, scores=found.scores.new_empty(0))
        free = self.regions.ledger.free(found.region, alone=alone)
        values, self.noted[task.name] = starting_values(self, task, free, fine_tuned, start)
        return self.regions.training(
            task,
            found.region,
            start=values,
            readout=dict(fine_tuned.readouts[task.name]),
            budget=budget(len(self.space), self.options.sparsity),  # though fewer entries may have moved
            alone=alone,
        )

    def _where_free(self, fine_tuned: ModelState, union: ModelState) -> ModelState:
        """Return θ_ft with the union's values where an entry is owned: one that did not move is never taken."""
        return replace(fine_tuned, theta=graft_theta(fine_tuned.theta, union.theta, self.regions.ledger.owned()))

    # -- composition=auto ------------------------------------------------------------------------------------

    def _trained_alone(self, task: EncodedTask, found: LearnedRegion | None, fine_tuned: ModelState) -> _Alone:
        """Train the region on θ_pre alone, and return what came of it; the model is as before."""
        with self.regions.pre_trained():
            found = found or learn_region(self, task, fine_tuned)
            try:
                training = self._training(task, found, fine_tuned, alone=True)
                with self.phase("train", task, training.steps) as on_step:
                    fine_tune(
                        self.model,
                        task.train,
                        training.options,
                        steps=training.steps,
                        seed=self.phase_seed("train", task),
                        on_step=lambda step, _: on_step(step, math.nan),  # one training a task is logged
                        trained=training.trained,
                        checkpoint=self.monitor.checkpoint(),
                        about=("alone",),
                    )
                record = self.regions.record(task, found.region, self.options.sparsity)
                return _Alone(record, self._quality(task), self.localized[task.name], self.noted[task.name])
            finally:
                self.regions.withdraw()

    def _settle(self, task: EncodedTask) -> None:
        """Put the region that was trained on θ_pre alone in place of the one on the union, if it answers better."""
        assert self._rival is not None
        rival = self._rival
        if rival.quality > self._quality(task):
            self.regions.put_alone(task, rival.record)
            self.localized[task.name], self.noted[task.name] = rival.localized, rival.scale
        self._rival = None

    def _quality(self, task: EncodedTask) -> tuple[float, float]:
        rows = task.validation.subset(representative(task.validation.targets, self.options.validation_rows))
        return quality(self.model, task, rows, self.options)

    def commit(self, task: EncodedTask, training: Training) -> None:
        """(3) Record in the ledger who owns what, with its values."""
        self.regions.commit(task, self.localized[task.name].region, self.options.sparsity)

    @contextmanager
    def answering(self, task: EncodedTask) -> Iterator[None]:
        """(4) Answer for t_k with θ_pre under the union of the regions of t_1..t_k."""
        with self.regions.answering(self._answers_all or task):
            yield

    def extra_results(self) -> dict[str, Any]:
        """Return scaled starts, and the scores of the one final union on all tasks: what the union per task buys."""
        extra = {"scales": self.noted} if self.options.region_start == "scaled" else {}
        if not self.options.final_union:
            return extra
        self._answers_all = self.learned[-1]
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
