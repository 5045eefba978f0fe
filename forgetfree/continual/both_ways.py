"""``composition=auto``: a task is trained on θ_pre alone and on the union, and what answers better is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from forgetfree.continual.foundations import LocalizeAt
from forgetfree.continual.skills import SkillTraining
from forgetfree.continual.streams import EncodedTask
from forgetfree.continual.task_training import Skill, Training, skill_of
from forgetfree.core.regions import Region
from forgetfree.data.sampling import representative
from forgetfree.learning.cost import Cost, TaskSize
from forgetfree.learning.training import quality_of
from forgetfree.ledger import Record
from forgetfree.models.state import ModelState


@dataclass(frozen=True)
class TrainedAlone:
    """A task as it was trained on θ_pre alone: its record, its skill, and how well it answers, see `quality_of`."""

    record: Record
    skill: Skill
    quality: tuple[float, float]


def cost_both_ways(one_way: Cost, localize_at: LocalizeAt, tasks: Sequence[TaskSize]) -> Cost:
    """Return what it takes, where one way takes that: what goes both ways is trained twice, and sought where it stands."""
    twice = {"train"} | ({"localize"} if localize_at == "union" else set())
    phases = [
        [replace(phase, steps=2 * phase.steps) if phase.steps and phase.phase in twice else phase for phase in each]
        if number and not task.again
        else each
        for number, (task, each) in enumerate(zip(tasks, one_way.phases, strict=True))
    ]
    return replace(one_way, phases=phases)


class BothWays:
    """Trains a task alone first, by the plain loop, then on the union, which Avalanche's plugins meet.

    The better score is recorded, of equal scores the lower loss, of equal losses the union. The first task, which has no union
    to stand on, and a task that is met again are trained one way.

    Args:
        one_way: trains a task one way.
    """

    def __init__(self, one_way: SkillTraining) -> None:
        self._one_way, self._strategy = one_way, one_way.strategy

    def training(self, task: EncodedTask, region: Region, fine_tuned: ModelState) -> Training:
        """Return the training on the union; at its end it gives way to what was trained alone, if that answers better.

        Args:
            task: the task.
            region: γ.
            fine_tuned: θ_ft, with the readout that is trained further.
        """
        first = not self._strategy.regions.ledger.last_of_union
        if first or self._one_way.foundations.versions(task):
            return self._one_way.training(task, region, fine_tuned)
        alone = self._trained_alone(task, region, fine_tuned)
        training = self._one_way.training(task, region, fine_tuned)
        return replace(training, settle=partial(self._better, training, alone))

    def _trained_alone(self, task: EncodedTask, region: Region, fine_tuned: ModelState) -> TrainedAlone:
        """Train the region on θ_pre alone, and return what came of it; the model is as before."""
        strategy, regions = self._strategy, self._strategy.regions
        with regions.holding(union=False):
            if strategy.options.localize_at == "union":  # where it stands; alone, that is θ_pre
                region = strategy.bench(task).localized(fine_tuned, strategy.options)[0].region
            training = self._one_way.training(task, region, fine_tuned, alone=True)
            try:
                strategy.bench(task).train_(
                    training.options,
                    "train",
                    training.trained,
                    training.steps,
                    logged=False,  # one training a task is
                    about=("alone",),
                )
                return TrainedAlone(regions.record(training), skill_of(training), self._quality(task))
            finally:
                regions.withdraw()

    def _better(self, training: Training, alone: TrainedAlone) -> Training:
        """Return the training that is recorded, which the model holds the end of."""
        if alone.quality > self._quality(training.task):
            self._strategy.regions.put_alone(training.task, alone.record)
            return replace(training, skill=alone.skill)
        return training

    def _quality(self, task: EncodedTask) -> tuple[float, float]:
        """Return how well the model answers validation rows now."""
        strategy = self._strategy
        rows = task.validation.subset(representative(task.validation.targets, strategy.options.validation_rows))
        return quality_of(strategy.model, task, rows, strategy.options)
