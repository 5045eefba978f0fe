"""How a task is grafted in a stream: what it is built on, from which values its region is trained, and by which composition.

In C.3 a task is fine-tuned from θ_pre, γ is sought on θ_pre, and its region is trained on the union so far, from θ_ft. Beyond
C.3, ``localize_at=union`` seeks γ on the union, among what is free; a task that stands alone has its region on θ_pre; and with
``composition=auto`` a task is trained both ways, and what has the lower loss is recorded. Where γ is chosen at θ_pre alone,
such as with ``region_from=gradient``, there is no θ_ft: the region is trained from θ_pre.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from forgetfree.continual.regions import RegionOptions, RegionStrategy, check_region_rate
from forgetfree.continual.stream import Stream
from forgetfree.continual.task_training import Skill, Training, skill_of
from forgetfree.core.base_regions import budget
from forgetfree.core.regions import Region
from forgetfree.data.sampling import representative
from forgetfree.ledger import Record
from forgetfree.models.state import ModelState
from forgetfree.options import option
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.localization import check_localization
from forgetfree.training.loop import loss_of
from forgetfree.training.scaled_start import ScaleOptions, scales
from forgetfree.training.single_task import SingleTask

LocalizeAt = Literal["pretrained", "union"]


@dataclass(frozen=True, kw_only=True)
class SkillOptions(RegionOptions, ScaleOptions):
    """Fine-tuning, then localizing, then training the region."""

    region_start: Literal["fine-tuned", "pre-trained", "scaled"] = option(
        "fine-tuned",
        "values the region is trained from; scaled: θ_pre + c·(θ_ft − θ_pre), with the c of 0, 1, 2, 4, … by which validation "
        "rows have the least loss; always θ_pre where region_from needs no θ_ft",
    )
    largest_scale: float = option(128.0, "the largest c of region_start=scaled", at_least=1)
    readout_steps: int = option(
        100, "updates of a linear readout alone before γ is chosen, where region_from needs no θ_ft", at_least=0
    )

    @property
    def choices(self) -> int:
        """One for each c of a scaled start."""
        return len(scales(self.largest_scale)) if self.needs_fine_tuned and self.region_start == "scaled" else 0


def check_grafting(options: SkillOptions, stream: Stream) -> None:
    """Raise ``OptionError`` unless the sparsity leaves an entry, something chooses the region, and its rate is its own."""
    check_region_rate(options)
    check_localization(options, stream.model.space())


# -- What a task is built on ----------------------------------------------------------------------------


class TaskBenches:
    """Gives the bench of a task on what the task is built on, step by step.

    Args:
        strategy: with its `regions`.
        localize_at: where γ is sought.
    """

    def __init__(self, strategy: RegionStrategy, localize_at: LocalizeAt = "pretrained") -> None:
        self._strategy, self._localize_at = strategy, localize_at

    @contextmanager
    def fine_tuning(self, task: EncodedTask) -> Iterator[SingleTask]:
        """Inside, the model holds what θ_ft starts from: θ_pre."""
        with self._strategy.regions.holding(union=False):
            yield self._strategy.bench(task)

    @contextmanager
    def search(self, task: EncodedTask) -> Iterator[SingleTask]:
        """Inside, the model holds what γ is sought on: θ_pre, unless ``localize_at`` says the union."""
        if self._localize_at == "union":
            with self._strategy.regions.holding(union=True):
                yield self._bench_on_model(task)
        else:
            with self.fine_tuning(task) as bench:
                yield bench

    @contextmanager
    def region(self, task: EncodedTask, *, alone: bool) -> Iterator[SingleTask]:
        """Inside, the model holds what the region is trained on: the union so far, or θ_pre where it is to stand alone."""
        with self._strategy.regions.holding(union=not alone):
            yield self._bench_on_model(task)

    def _bench_on_model(self, task: EncodedTask) -> SingleTask:
        """Return the bench on what the model holds; γ takes none of the entries that are owned there."""
        strategy = self._strategy
        return strategy.bench(task, ModelState.of(strategy.model, [task.name]), taken=strategy.regions.owned_in_model())


def tuned(bench: SingleTask, options: SkillOptions) -> ModelState:
    """Return what γ is chosen and trained from: θ_ft; θ_pre with a trained readout, where ``region_from`` needs no θ_ft."""
    return bench.fine_tuned(options) if options.needs_fine_tuned else bench.with_readout(options, options.readout_steps)


# -- Training the region --------------------------------------------------------------------------------


class RegionTrainer:
    """Trains what is free of γ on the union so far, or all of it on θ_pre where a task stands alone.

    Args:
        strategy: its options are `SkillOptions`.
        benches: what its tasks are built on.
    """

    def __init__(self, strategy: RegionStrategy, benches: TaskBenches) -> None:
        self.strategy, self.benches = strategy, benches

    def training(
        self, task: EncodedTask, region: Region, fine_tuned: ModelState, *, alone: bool | None = None
    ) -> Training:
        """Return the training of γ, from as far along fine-tuning's move as ``region_start`` says.

        Args:
            task: the task.
            region: γ.
            fine_tuned: θ_ft, with the readout that is trained further.
            alone: whether the task is to stand on θ_pre alone; default: as the ledger's composition says.
        """
        regions, options = self.strategy.regions, self.strategy.options
        alone = regions.ledger.composition == "alone" if alone is None else alone
        with self.benches.region(task, alone=alone) as bench:
            if not options.needs_fine_tuned:
                scale = 0.0
            elif options.region_start == "scaled":
                free = regions.ledger.free(region, alone=alone)
                before = replace(bench.pre, readouts=fine_tuned.readouts)
                scale = bench.scale(fine_tuned, free, options, options.largest_scale, on=before)
            else:
                scale = {"pre-trained": 0.0, "fine-tuned": 1.0}[options.region_start]
            start = bench.moved(fine_tuned, scale)
        skill = Skill(region, options.sparsity, alone=alone, scale=scale)
        # Though fewer entries may have moved, the rate is that of as many as γ may have.
        return regions.training(task, skill, start, budget=budget(len(self.strategy.space), options.sparsity))


# -- Both ways ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AloneResult:
    """A task as it was trained on θ_pre alone: its record, its skill, and its loss on validation rows."""

    record: Record
    skill: Skill
    loss: float


class AutoComposition:
    """Trains a task alone first, by the plain loop, then on the union, which Avalanche's plugins meet.

    What has the lower loss on validation rows is recorded, of equal losses the union. The first task, which has no union to
    stand on, is trained one way.

    Args:
        trainer: trains a task one way.
    """

    def __init__(self, trainer: RegionTrainer) -> None:
        self._trainer, self._strategy = trainer, trainer.strategy

    def training(self, task: EncodedTask, region: Region, fine_tuned: ModelState) -> Training:
        """Return the training on the union; at its end it gives way to what was trained alone, if that answers better.

        Args:
            task: the task.
            region: γ.
            fine_tuned: θ_ft, with the readout that is trained further.
        """
        if not self._strategy.regions.ledger.last_of_union:
            return self._trainer.training(task, region, fine_tuned)
        alone = self._trained_alone(task, region, fine_tuned)
        training = self._trainer.training(task, region, fine_tuned)
        return replace(training, finish=partial(self._better, training, alone))

    def _trained_alone(self, task: EncodedTask, region: Region, fine_tuned: ModelState) -> AloneResult:
        """Train the region on θ_pre alone, and return what came of it; the model is as before."""
        strategy, regions = self._strategy, self._strategy.regions
        with regions.holding(union=False):
            if strategy.options.localize_at == "union":  # where it stands; alone, that is θ_pre
                (region,) = strategy.bench(task).regions(fine_tuned, strategy.options)
            training = self._trainer.training(task, region, fine_tuned, alone=True)
            try:
                strategy.bench(task).train_(
                    training.options,
                    "train",
                    training.trained,
                    training.steps,
                    logged=False,  # one training a task is
                    about=("alone",),
                )
                return AloneResult(regions.record(training), skill_of(training), self._loss(task))
            finally:
                regions.roll_back()

    def _better(self, training: Training, alone: AloneResult) -> Training:
        """Return the training that is recorded, which the model holds the end of."""
        if alone.loss < self._loss(training.task):
            self._strategy.regions.put_alone(training.task, alone.record)
            return replace(training, skill=alone.skill)
        return training

    def _loss(self, task: EncodedTask) -> float:
        """Return the loss of the model on validation rows now."""
        strategy = self._strategy
        rows = task.validation.subset(representative(task.validation.targets, strategy.options.choice_rows))
        return loss_of(strategy.model, task, rows, strategy.options)
