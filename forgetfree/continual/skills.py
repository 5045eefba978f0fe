"""How the skill of a task is trained, once it is localized: from which values, on what, at which rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forgetfree.continual.foundations import Foundations
from forgetfree.continual.regions import RegionOptions, RegionStrategy, check_region_rate
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.continual.task_training import Skill, Training
from forgetfree.core.base_regions import budget
from forgetfree.core.regions import Region
from forgetfree.learning.cost import Cost, TaskSize, fine_tuning, ledger_bytes, search, training
from forgetfree.learning.localization import LocalizationOptions, check_localization
from forgetfree.models.state import ModelState
from forgetfree.options import option


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


def skills_cost(options: SkillOptions, tasks: Sequence[TaskSize], *, builds_on: bool = False) -> Cost:
    """Return what localizing and training a region a task takes.

    Args:
        options: how.
        tasks: of what sizes.
        builds_on: whether θ_ft of a task that is met again builds on what was learned since, so that no other unit has it.
    """
    return Cost(
        [
            [
                replace(fine_tuning(options, task), shared=not (builds_on and task.again)),
                search(options, task),
                training(options, task, options.region_steps),
            ]
            for task in tasks
        ],
        lambda space: ledger_bytes(space, *[int(options.sparsity * len(space))] * len(tasks)),
    )


class SkillTraining:
    """Trains what is free of γ on the union so far, or all of it on θ_pre where a task stands alone.

    Args:
        strategy: its options are `SkillOptions`.
        foundations: what its tasks are built on.
    """

    def __init__(self, strategy: RegionStrategy, foundations: Foundations) -> None:
        self.strategy, self.foundations = strategy, foundations

    def training(
        self, task: EncodedTask, region: Region, fine_tuned: ModelState, *, alone: bool | None = None
    ) -> Training:
        """Return the training of γ, from as far along fine-tuning's move as ``region_start`` says.

        Args:
            task: the task.
            region: γ.
            fine_tuned: θ_ft, with the readout that is trained further.
            alone: whether the task is to stand on θ_pre alone; default: as `Foundations.stands_alone` says.
        """
        regions, options = self.strategy.regions, self.strategy.options
        alone = self.foundations.stands_alone(task) if alone is None else alone
        with self.foundations.region(task, alone=alone) as bench:
            if options.region_start == "scaled":
                free, stands_in = (
                    regions.ledger.free(region, alone=alone),
                    replace(bench.pre, readouts=fine_tuned.readouts),
                )
                scale = bench.scale(fine_tuned, free, options, options.largest_scale, stands_in)
            else:
                scale = {"pre-trained": 0.0, "fine-tuned": 1.0}[options.region_start]
            start = bench.moved(fine_tuned, scale)
        skill = Skill(region, options.sparsity, alone=alone, scale=scale)
        # Though fewer entries may have moved, the rate is that of as many as γ may have.
        return regions.training(task, skill, start, budget=budget(len(self.strategy.space), options.sparsity))
