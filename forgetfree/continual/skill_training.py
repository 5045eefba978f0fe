"""Training the region of a skill: on the union so far, on θ_pre alone, or both ways to see which answers better."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from forgetfree.continual.regions import RegionStrategy
from forgetfree.continual.skills import learn_region, starting_values
from forgetfree.continual.streams import EncodedTask
from forgetfree.continual.task_training import Training
from forgetfree.core.base_regions import budget
from forgetfree.core.graft import graft_theta
from forgetfree.core.mask import LearnedRegion
from forgetfree.data.sampling import representative
from forgetfree.learning.scaled_start import quality
from forgetfree.learning.training import fine_tune
from forgetfree.ledger import Ledger, Record
from forgetfree.models.state import ModelState
from forgetfree.tasks import version_of


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
