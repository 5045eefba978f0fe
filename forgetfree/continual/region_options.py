"""Options by which a region is chosen and trained, and which of them do not go together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from forgetfree.continual.stream import Stream
from forgetfree.continual.task_inference import TaskwiseOptions
from forgetfree.options import option
from forgetfree.training.localization import LocalizationOptions, check_localization
from forgetfree.training.training_options import TrainingOptions, region_rate


@dataclass(frozen=True, kw_only=True)
class RegionOptions(TaskwiseOptions):
    """How a region is trained."""

    region_steps: int | None = option(None, "updates of the region; none: as many as fine-tuning", at_least=0)
    region_rate_factor: float = option(
        1.0,
        "the rate of a region is that of fine-tuning times this, with AdamW also times √(N/s) for s of N entries, so that an "
        "update is as long as there; 3 lets each of few entries go further",
        above=0,
    )


@dataclass(frozen=True, kw_only=True)
class SkillOptions(RegionOptions, LocalizationOptions):
    """Fine-tuning, then localizing, then training the region."""

    region_start: Literal["fine-tuned", "pre-trained"] = option(
        "fine-tuned", "values the region is trained from; always θ_pre where region_from needs no θ_ft"
    )


def check_regions(options: TrainingOptions, stream: Stream) -> None:
    """Raise ``OptionError`` where nothing chooses the region."""
    if isinstance(options, LocalizationOptions):
        check_localization(options, stream.model.space())


def region_training_options(options: RegionOptions, space_size: int, allowed: int) -> TrainingOptions:
    """Return the options by which a region is trained.

    Args:
        options: those of the strategy.
        space_size: the N entries of the space.
        allowed: the s entries that the region may have.
    """
    return replace(
        options,
        readout_learning_rate=options.readout_learning_rate or options.learning_rate,
        l1=0.0,  # a region is as sparse as it gets
        learning_rate=options.region_rate_factor * region_rate(options, space_size, allowed),
        dropout=options.dropout is True,
    )
