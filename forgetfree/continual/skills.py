"""Localizing the skill of a task within a strategy (paper, eqs. 3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from forgetfree.continual.regions import RegionOptions, check_region_rate
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.core.graft import interpolate
from forgetfree.core.mask import LearnedRegion
from forgetfree.core.regions import Region
from forgetfree.core.tensors import load_tensors_, tensors_of
from forgetfree.learning.localization import LocalizationOptions, check_localization, localize, mask_options
from forgetfree.learning.scaled_start import choose_scale
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
