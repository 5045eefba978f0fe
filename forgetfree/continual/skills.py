"""Localizing the skill of a task within a strategy (paper, eqs. 3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forgetfree.continual.regions import RegionOptions, check_region_rate
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.core.mask import LearnedRegion
from forgetfree.learning.localization import LocalizationOptions, check_localization, localize, mask_options
from forgetfree.models.state import ModelState
from forgetfree.options import option


@dataclass(frozen=True, kw_only=True)
class SkillOptions(RegionOptions, LocalizationOptions):
    """Fine-tuning, then localizing, then training the region."""

    region_start: Literal["fine-tuned", "pre-trained"] = option("fine-tuned", "values the region is trained from")


def check_skill(options: SkillOptions, stream: Stream) -> None:
    """Raise ``OptionError`` unless the sparsity leaves an entry, something chooses the region, and its rate is its own."""
    check_region_rate(options)
    check_localization(options, stream.model.space())


def learn_region(strategy: ContinualStrategy, task: EncodedTask, fine_tuned: ModelState) -> LearnedRegion:
    """Return γ of one task by eqs. 3 and 4; the model holds θ_pre before and after.

    Args:
        strategy: its options are `SkillOptions`.
        task: the task.
        fine_tuned: θ_ft, with the task's readout.
    """
    options = strategy.options
    mask = mask_options(options, len(task.train), strategy.full_steps(task))
    seed = strategy.phase_seed("localize", task)
    with strategy.phase("localize", task, mask.steps) as on_step:
        strategy.monitor.learning_rate(lambda step: mask.learning_rate)
        return localize(
            strategy.model,
            task,
            strategy.pre_trained,
            fine_tuned,
            options,
            mask,
            sparsities=[options.sparsity],
            seed=seed,
            on_step=on_step,
        )[0]
