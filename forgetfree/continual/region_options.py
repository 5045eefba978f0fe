"""Options by which a region is chosen and trained, and which of them do not go together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from forgetfree.continual.stream import Stream
from forgetfree.continual.task_inference import TaskwiseOptions
from forgetfree.errors import OptionError
from forgetfree.options import Function, name_of_function, option
from forgetfree.training.localization import LocalizationOptions, check_localization
from forgetfree.training.training_options import TrainingOptions, region_rate, sets_rates


@dataclass(frozen=True, kw_only=True)
class RegionOptions(TaskwiseOptions):
    """How a region is trained."""

    region_steps: int | None = option(None, "updates of the region; none: as many as fine-tuning", at_least=0)
    region_optimizer: Literal["sgd", "adamw"] | Function | None = option(None, "none: that of fine-tuning")
    region_learning_rate: float | None = option(
        None,
        "none: that of fine-tuning; with AdamW times √(N/s) for s of N entries, so that an update is as long as there",
        above=0,
    )
    region_rate_factor: float = option(
        1.0,
        "what the rate of a region is multiplied by where region_learning_rate is none: 3 lets each of few entries go further "
        "than in fine-tuning",
        above=0,
    )
    region_dropout: bool | None = option(
        None, "the backbone's own dropout while a region is trained; none: as `dropout`"
    )


@dataclass(frozen=True, kw_only=True)
class SkillOptions(RegionOptions, LocalizationOptions):
    """Fine-tuning, then localizing, then training the region."""

    region_start: Literal["fine-tuned", "pre-trained"] = option(
        "fine-tuned", "values the region is trained from; always θ_pre where region_from needs no θ_ft"
    )
    readout_steps: int = option(
        100, "updates of a linear readout alone before γ is chosen, where region_from needs no θ_ft", at_least=0
    )


def check_regions(options: TrainingOptions, stream: Stream) -> None:
    """Raise ``OptionError`` for the rate of one optimiser beside another, or where nothing chooses the region."""
    if isinstance(options, RegionOptions):
        own, other = options.region_optimizer, options.optimizer
        if own not in (None, other) and not sets_rates(own) and options.region_learning_rate is None:
            shown = [name_of_function(each) if callable(each) else each for each in (own, other)]
            raise OptionError(
                f"region_optimizer={shown[0]} beside optimizer={shown[1]} needs a region_learning_rate of its own. Set it."
            )
    if isinstance(options, LocalizationOptions):
        check_localization(options, stream.model.space())


def region_training_options(options: RegionOptions, space_size: int, allowed: int) -> TrainingOptions:
    """Return the options by which a region is trained.

    Args:
        options: those of the strategy.
        space_size: the N entries of the space.
        allowed: the s entries that the region may have.
    """
    own = replace(
        options,
        optimizer=options.region_optimizer or options.optimizer,
        readout_learning_rate=options.readout_learning_rate or options.learning_rate,
        l1=0.0,  # a region is as sparse as it gets
        dropout=options.dropout if options.region_dropout is None else options.region_dropout,
    )
    rate = options.region_learning_rate or options.region_rate_factor * region_rate(own, space_size, allowed)
    return replace(own, learning_rate=rate)
