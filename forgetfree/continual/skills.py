"""The skill of a task within a strategy: where it lies (paper, eqs. 3 and 4), and how its region is trained.

It is trained on the union so far, on θ_pre alone, or both ways to see which answers better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from forgetfree.continual.regions import RegionOptions, RegionStrategy, check_region_rate
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.continual.task_training import Training
from forgetfree.core.base_regions import budget
from forgetfree.core.graft import graft_theta, interpolate
from forgetfree.core.mask import LearnedRegion
from forgetfree.core.regions import Region
from forgetfree.core.tensors import load_tensors_, tensors_of
from forgetfree.data.sampling import representative
from forgetfree.learning.localization import LocalizationOptions, check_localization, localize, mask_options
from forgetfree.learning.scaled_start import choose_scale, quality
from forgetfree.learning.training import fine_tune
from forgetfree.ledger import Ledger, Record
from forgetfree.models.state import ModelState
from forgetfree.options import option
from forgetfree.tasks import version_of


@dataclass(frozen=True, kw_only=True)
class SkillOptions(RegionOptions, LocalizationOptions):
    """Fine-tuning, then localizing, then training the region."""

    region_start: Literal["fine-tuned", "pre-trained", "scaled"] = option(
        "fine-tuned",
        "values the region is trained from; scaled: θ_pre + c·(θ_ft − θ_pre), with the c of 0, 1, 2, 4, … that "
        "answers training rows best",
    )
    largest_scale: float = option(32.0, "the largest c of region_start=scaled", at_least=1)


def check_skill(options: SkillOptions, stream: Stream) -> None:
    """Raise ``OptionError`` unless the sparsity leaves an entry, something chooses the region, and its rate is its own."""
    check_region_rate(options)
    check_localization(options, stream.model.space())


def learn_region(
    strategy: ContinualStrategy, task: EncodedTask, fine_tuned: ModelState, standing_on: ModelState | None = None
) -> LearnedRegion:
    """Return γ of one task by eqs. 3 and 4; the model holds what γ is searched on before and after.

    Args:
        strategy: its options are `SkillOptions`.
        task: the task.
        fine_tuned: θ_ft, with the task's readout.
        standing_on: what the model holds; default: θ_pre.
    """
    options = strategy.options
    mask = mask_options(options, len(task.train), strategy.full_steps(task))
    seed = strategy.phase_seed("localize", task)
    with strategy.phase("localize", task, mask.steps) as on_step:
        strategy.monitor.learning_rate(lambda step: mask.learning_rate)
        return localize(
            strategy.model,
            task,
            standing_on or strategy.pre_trained,
            fine_tuned,
            options,
            mask,
            sparsities=[options.sparsity],
            seed=seed,
            on_step=on_step,
            checkpoint=strategy.monitor.checkpoint(),
        )[0]


def starting_values(
    strategy: ContinualStrategy,
    task: EncodedTask,
    region: Region,
    fine_tuned: ModelState,
    standing_on: ModelState | None = None,
) -> tuple[Tensor | None, float]:
    """Return the values ``(N,)`` that a region is trained from, ``None`` for those in the model, and how far along they lie.

    Args:
        strategy: its options are `SkillOptions`; its model holds what the region will stand on.
        task: the task.
        region: the entries that are going to be trained.
        fine_tuned: θ_ft, with the task's readout.
        standing_on: what it was fine-tuned from; default: θ_pre.
    """
    options, pre = strategy.options, (standing_on or strategy.pre_trained).theta
    if options.region_start == "pre-trained":
        return None, 0.0
    if options.region_start == "fine-tuned":
        return fine_tuned.theta, 1.0
    module = strategy.model.readout_module(task.label)
    untrained = tensors_of(module)
    load_tensors_(module, fine_tuned.readouts[task.name])
    try:
        scale = choose_scale(
            strategy.model,
            task,
            region,
            pre,
            fine_tuned.theta,
            options,
            largest=options.largest_scale,
            rows=options.validation_rows,
        )
    finally:
        load_tensors_(module, untrained)
    return interpolate(pre, fine_tuned.theta, scale), scale


@dataclass(frozen=True)
class TrainedAlone:
    """A task as it was trained on θ_pre alone: its record, how good it is, its γ, and how far along it started."""

    record: Record
    quality: tuple[float, float]
    localized: LearnedRegion
    scale: float


class SkillTraining:
    """What is known of the skills of a strategy, and the training of the next one.

    Args:
        strategy: its options are `SkillOptions`.

    Attributes:
        localized: γ_n of each task as it was localized.
        scales: how far along fine-tuning's move each task's region started.
    """

    def __init__(self, strategy: RegionStrategy) -> None:
        self.localized: dict[str, LearnedRegion] = {}
        self.scales: dict[str, float] = {}
        self._strategy: Any = strategy

    def training(
        self,
        task: EncodedTask,
        found: LearnedRegion,
        fine_tuned: ModelState,
        start: ModelState | None = None,
        *,
        alone: bool,
    ) -> Training:
        """Return the training of what is free of a region, on top of what the model holds.

        Args:
            task: the task.
            found: γ_n.
            fine_tuned: θ_ft, with the task's readout.
            start: what it was fine-tuned from; default: θ_pre.
            alone: whether the task stands on θ_pre alone, so that all of γ_n is free.
        """
        strategy = self._strategy
        # Without the scores, which are as large as the model: the ledger's memory is O(T·s).
        self.localized[task.name] = replace(found, scores=found.scores.new_empty(0))
        free = strategy.regions.ledger.free(found.region, alone=alone)
        values, self.scales[task.name] = starting_values(strategy, task, free, fine_tuned, start)
        training: Training = strategy.regions.training(
            task,
            found.region,
            start=values,
            readout=dict(fine_tuned.readouts[task.name]),
            budget=budget(len(strategy.space), strategy.options.sparsity),  # though fewer entries may have moved
            alone=alone,
        )
        return training

    def where_free(self, fine_tuned: ModelState, union: ModelState) -> ModelState:
        """Return θ_ft with the union's values where an entry is owned: one that did not move is never taken."""
        owned = self._strategy.regions.ledger.owned()
        return replace(fine_tuned, theta=graft_theta(fine_tuned.theta, union.theta, owned))

    # -- Both ways: composition=auto --------------------------------------------------------------------------

    def trained_alone(self, task: EncodedTask, found: LearnedRegion | None, fine_tuned: ModelState) -> TrainedAlone:
        """Train the region on θ_pre alone, and return what came of it; the model is as before.

        Args:
            task: the task.
            found: γ_n; ``None``: it is sought here.
            fine_tuned: θ_ft, with the task's readout.
        """
        strategy = self._strategy
        with strategy.regions.pre_trained():
            found = found or learn_region(strategy, task, fine_tuned)
            try:
                training = self.training(task, found, fine_tuned, alone=True)
                with strategy.phase("train", task, training.steps) as on_step:
                    fine_tune(
                        strategy.model,
                        task.train,
                        training.options,
                        steps=training.steps,
                        seed=strategy.phase_seed("train", task),
                        on_step=lambda step, _: on_step(step, math.nan),  # one training a task is logged
                        trained=training.trained,
                        checkpoint=strategy.monitor.checkpoint(),
                        about=("alone",),
                    )
                record = strategy.regions.record(task, found.region, strategy.options.sparsity)
                return TrainedAlone(record, self._quality(task), self.localized[task.name], self.scales[task.name])
            finally:
                strategy.regions.withdraw()

    def against(self, rival: TrainedAlone, training: Training) -> Training:
        """Return a training on the union that gives way to the rival at its end, if that answers better."""
        return replace(training, settle=partial(self._settle, training.task, rival))

    def _settle(self, task: EncodedTask, rival: TrainedAlone) -> None:
        if rival.quality > self._quality(task):
            self._strategy.regions.put_alone(task, rival.record)
            self.localized[task.name], self.scales[task.name] = rival.localized, rival.scale

    def _quality(self, task: EncodedTask) -> tuple[float, float]:
        strategy = self._strategy
        rows = task.validation.subset(representative(task.validation.targets, strategy.options.validation_rows))
        return quality(strategy.model, task, rows, strategy.options)


def sought_on_theta_pre(ledger: Ledger) -> dict[str, LearnedRegion]:
    """Return γ of the tasks of a ledger that were sought on θ_pre: later versions were sought on a union."""
    return {
        record.task: LearnedRegion(record.region, len(record.region), torch.empty(0), 0, (), ())
        for record in ledger.records
        if version_of(record.task)[1] == 1
    }
