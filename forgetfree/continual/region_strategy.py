"""The contract of a strategy on a ledger: each task trains a region that no later task can reach.

Such a strategy says which region a task may train. The region minus what earlier tasks own is trained as one small vector and
recorded, and a task is answered with what the ledger's composition says. An author meets `RegionStrategy` and its options here,
and in `ledger_model` what the model holds when; `forgetfree.continual.strategy` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, final

from forgetfree.continual.ledger_model import LedgerModel
from forgetfree.continual.strategy import ContinualStrategy, EncodedTask, Stream, TaskwiseOptions, Training
from forgetfree.continual.strategy_parts import TaskRegion
from forgetfree.core.parameters import load_tensors_
from forgetfree.core.regions import Region
from forgetfree.core.selection import budget
from forgetfree.core.trained import RegionParameters, TrainedParameters
from forgetfree.data.rows import representative
from forgetfree.ledger import Composition, Ledger
from forgetfree.models.state import ModelState
from forgetfree.options import option
from forgetfree.training.encoded_task import loss_of
from forgetfree.training.single_task import VALIDATION_ROWS
from forgetfree.training.training_options import LocalizationOptions, TrainingOptions, region_rate


@dataclass(frozen=True, kw_only=True)
class RegionOptions(TrainingOptions):
    """Options of training a region that is chosen."""

    region_steps: int | None = option(None, "updates of the region; none: as many as fine-tuning", at_least=0)
    region_rate_factor: float = option(
        1.0,
        "the rate of a region is that of fine-tuning times this, with AdamW also times √(N/s) for s of N entries, so that an "
        "update is as long as there; 3 lets each of few entries go further",
        above=0,
    )

    def region_updates(self, full: int) -> int:
        """Return the updates of a region, of a task that fine-tuning gives ``full`` updates."""
        return full if self.region_steps is None else self.region_steps

    def for_region(self, space_size: int, allowed: int) -> Self:
        """Return the options by which a region is trained that may have ``allowed`` of the N entries of the space."""
        return replace(
            self,
            readout_learning_rate=self.readout_learning_rate or self.learning_rate,
            l1=0.0,  # a region is as sparse as it gets
            learning_rate=self.region_rate_factor * region_rate(self, space_size, allowed),
            dropout=self.dropout is True,
        )


@dataclass(frozen=True, kw_only=True)
class LedgerOptions(RegionOptions, TaskwiseOptions):
    """Options of training a region, and a model per task."""


@dataclass(frozen=True, kw_only=True)
class SkillOptions(LedgerOptions, LocalizationOptions):
    """Fine-tuning, then localizing, then training the region."""

    region_start: Literal["fine-tuned", "pre-trained"] = option(
        "fine-tuned", "values the region is trained from; always θ_pre where region_from needs no θ_ft"
    )


class RegionStrategy(ContinualStrategy):
    """Base of strategies on a ledger: `setup` opens the ledger, `begin` returns a `region_training`, `commit` records it.

    Between tasks the model carries the union of all regions where tasks are answered with unions, else θ_pre.
    """

    Options: ClassVar[type[TrainingOptions]] = LedgerOptions
    forget_free: ClassVar[bool] = True
    #: Whether γ is sought on θ_pre and depends on no other task, so that a run of another stream may take it over.
    localizes_alone: ClassVar[bool] = False
    #: Who owns what, with the values.
    ledger: Ledger
    #: The model as the ledger says: ``ledger_model.of(task)`` is what `answering` returns.
    ledger_model: LedgerModel

    @final
    def open_ledger(self, composition: Composition) -> None:
        """Begin an empty ledger, which becomes what the strategy keeps.

        Args:
            composition: what a task is answered with: ``union``, ``alone``, ``selection`` or ``auto``, see `Ledger`.
        """
        self.known_regions: dict[str, Region] = {}
        self.ledger_model = LedgerModel(self, composition)

    @final
    def fine_tuned(self, task: EncodedTask) -> ModelState:
        """Return θ_ft of ``task``, made of θ_pre and it alone, once for all who share the store; the model is as before.

        Where `SkillOptions` choose γ at θ_pre, return θ_pre with a readout that is trained alone.
        """
        options = self.options
        with self.ledger_model.base(union=False):
            if isinstance(options, SkillOptions) and not options.needs_fine_tuned:
                return self.bench(task).with_readout(options)
            return self.bench(task).fine_tuned(options)

    @final
    def localize(self, task: EncodedTask, tuned: ModelState) -> Region:
        """Return γ of ``task`` as its `LocalizationOptions` say: by ``region_from=mask``, eqs. 3 and 4; the model is as before.

        Args:
            task: the task.
            tuned: what `fine_tuned` returned.
        """
        if (known := self.known_regions.get(task.name)) is not None:
            return known
        with self.ledger_model.base(union=False):
            return self.bench(task).region(tuned, self.options)

    @final
    def region_training(
        self,
        task: EncodedTask,
        region: Region,
        start: ModelState | None = None,
        *,
        sparsity: float | None = None,
        alone: bool = False,
        rate_for: int | None = None,
        steps: int | None = None,
        options: TrainingOptions | None = None,
        trained: Callable[[], TrainedParameters] | None = None,
    ) -> Training:
        """Return the training of what no earlier task owns of γ, on top of the union, or of all of γ on θ_pre alone.

        Args:
            task: the task.
            region: γ.
            start: where its free entries and the readout start from, such as θ_ft; default: θ_pre, and the untrained readout.
                With ``region_start=pre-trained`` the entries start from θ_pre all the same.
            sparsity: the share of the space that γ was allowed; default: that of the options, or else what γ has.
            alone: whether the task stands on θ_pre alone; in a ledger of composition ``alone``, each does.
            rate_for: how many entries the rate of AdamW is meant for; default: as many as γ was allowed.
            steps: updates; default: `RegionOptions.region_updates`.
            options: how it is trained; default: `RegionOptions.for_region`.
            trained: makes what is trained, which may move any entry of a model between whose tasks θ_pre stands; default: the
                values of the free entries.
        """
        model, space, own = self.model, self.space, self.options
        if sparsity is None and isinstance(own, LocalizationOptions):
            sparsity = own.sparsity
        # Though fewer entries may have moved, the rate is that of as many as γ may have.
        allowed = len(region) if sparsity is None else budget(len(space), sparsity)
        alone = alone or self.ledger.composition == "alone"
        free = self.ledger.free(region, alone=alone)
        module = self.ledger_model.begin(task, free, alone=alone, moves_anything=trained is not None)
        load_tensors_(module, (start or self.pre_trained).readouts[task.name])
        if start is not None and not (isinstance(own, SkillOptions) and own.region_start == "pre-trained"):
            space.scatter_(model.backbone, free.indices, start.theta[free.indices])
        what = trained() if trained else RegionParameters(model.backbone, space, free)
        readouts = list(module.parameters())
        if steps is None:
            steps = own.region_updates(task.full_steps(own))
        if not any(parameter.numel() for parameter in (*what.parameters, *readouts)):
            steps = 0
        options = options or own.for_region(len(space), rate_for or allowed)
        task_region = TaskRegion(region, len(region) / len(space) if sparsity is None else sparsity, alone)
        return Training(task, what, readouts, steps, options, region=task_region)

    @final
    def better_training(self, task: EncodedTask, tuned: ModelState, region: Region) -> Training:
        """Return the training on the union; at its end it gives way to what was trained alone, if that has the lower loss.

        The region is trained on θ_pre alone first, by the plain loop; on the union, Avalanche's plugins meet the training.

        Args:
            task: the task; the ledger is of composition ``auto``, and has a union.
            tuned: θ_ft, with the readout that is trained further.
            region: γ.
        """
        chosen = task.validation.subset(representative(task.validation.targets, VALIDATION_ROWS))

        def loss() -> float:
            return loss_of(self.model, task, chosen, self.options)

        with self.ledger_model.base(union=False):
            alone = self.region_training(task, region, start=tuned, alone=True)
            try:
                self.bench(task).train_(
                    alone.options,
                    "train",
                    alone.trained,
                    alone.steps,
                    logged=False,  # one training a task is
                    about=("alone",),
                )
                record, loss_alone = self.ledger_model.record(alone), loss()
            finally:
                self.ledger_model.roll_back()
        training = self.region_training(task, region, start=tuned)

        def better() -> Training:
            if loss_alone < loss():
                self.ledger_model.put_alone(task, record)
                return replace(training, region=alone.region)
            return training

        return replace(training, finish=better)

    @final
    def record(self, training: Training, region: Region | None = None) -> None:
        """Record who owns what, with the values that the model holds; it holds what the next task starts from after.

        Args:
            training: of the task.
            region: γ, where it is known only after training.
        """
        self.ledger_model.commit(self.ledger_model.record(training, region))

    def changed_by(self, learned: EncodedTask) -> list[EncodedTask] | None:
        """Return the learned tasks where each stands alone: θ_pre answers for what is not learned yet. Else return all."""
        apart = (
            self.forget_free and self.stream.scenario == "task" and self.ledger.composition in ("alone", "selection")
        )
        return list(self.learned) if apart else None


__all__ = [
    "EncodedTask",
    "LedgerOptions",
    "Region",
    "RegionOptions",
    "RegionStrategy",
    "SkillOptions",
    "Stream",
    "Training",
]
