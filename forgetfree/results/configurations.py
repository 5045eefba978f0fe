"""What options say of a run in a report: which tell it from others, and whether its seconds lack those of fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forgetfree.display import NULL
from forgetfree.options import typed

if TYPE_CHECKING:
    from forgetfree.results.run_results import Run

Json = dict[str, Any]
#: Beside the phases of a run: seconds of fine-tuned models that another strategy or run made; null if one does not tell.
ELSEWHERE = "fine_tune_elsewhere"
#: Strategies that fine-tune each task on its own first, with these ways to find regions.
STAND_ON_FINE_TUNED = (
    *("fine-tune", "grafting-continual", "graft-retrain"),
    *("merge-task-arithmetic", "merge-ties", "merge-stitch"),
)
NEED_FINE_TUNED = ("mask", "midpoint", "movement", "taylor")
_NEED_GRADIENTS = ("taylor", "gradient", "snip", "gallop")


def labels_of(strategy: str, variants: Sequence[Json], always: Sequence[str] = ()) -> list[str]:
    """Return for each configuration the strategy's name, with the options that are not the same in all, or always told.

    An option that is set to nothing goes without saying, and so does one `without_effect`, unless that is all there is to tell
    or others have the same label then.

    Args:
        strategy: its name.
        variants: its options in each configuration.
        always: options that are told wherever they stand.
    """
    short = [_label(strategy, each, variants, always, without_effect(each)) for each in variants]
    return [
        label if short.count(label) == 1 else _label(strategy, each, variants, always)
        for label, each in zip(short, variants, strict=True)
    ]


def _label(
    strategy: str, options: Json, variants: Sequence[Json], always: Sequence[str], idle: frozenset[str] = frozenset()
) -> str:
    keys = dict.fromkeys(key for variant in variants for key in variant)
    telling = [k for k in keys if k in always or any(other.get(k) != options.get(k) for other in variants)]
    telling = [k for k in telling if k not in options or options[k] is not None] or telling
    telling = [k for k in telling if k not in idle]
    if not telling:
        return strategy
    return f"{strategy} ({', '.join(f'{key}={typed(options[key]) if key in options else NULL}' for key in telling)})"


def without_effect(options: Json) -> frozenset[str]:
    """Return which options of a region change nothing beside the others: those of a search beside ``region_from=movement``."""
    region_from, start, idle = options.get("region_from"), options.get("region_start"), set[str]()
    if region_from is None:  # an older file, or a strategy that chooses no region so
        return frozenset()
    if region_from not in ("mask", "midpoint"):
        idle |= {key for key in options if key.startswith("mask_")} | {"validation_rows"}
    if region_from != "mask":
        idle |= {"base", "base_fraction", "mask_score_init"}
    if region_from != "fisher" and (region_from, options.get("base")) != ("mask", "fisher"):
        idle.add("fisher_rows")
    if region_from not in _NEED_GRADIENTS:
        idle.add("gradient_rows")
    if region_from in NEED_FINE_TUNED:
        idle.add("readout_steps")
    else:
        idle.add("region_start")
    if start != "scaled" or region_from not in NEED_FINE_TUNED:
        idle.add("largest_scale")
        if options.get("composition") != "auto":
            idle.add("choice_rows")
    return frozenset(idle)


def seconds_of_fine_tuning(run: Run) -> float:
    """Return the time of all fine-tuned models that a run stands on, whoever made them, as far as it is known."""
    return sum(run.seconds.get(name) or 0.0 for name in ("fine_tune", ELSEWHERE))


def lacks_fine_tuning(run: Run, told_by_others: bool) -> bool:
    """Say whether the seconds of a run lack those of fine-tuned models that a cache gave.

    Args:
        run: any.
        told_by_others: whether another run with its seed, beside it, tells seconds of fine-tuning: older results count a model
            where it was made.
    """
    if ELSEWHERE in run.seconds:
        return run.seconds[ELSEWHERE] is None
    stands = run.strategy in STAND_ON_FINE_TUNED and run.options.get("region_from", "mask") in NEED_FINE_TUNED
    return stands and run.seconds.get("fine_tune") == 0 and not told_by_others
