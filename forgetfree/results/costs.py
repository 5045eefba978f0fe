"""What a run took: the seconds of its phases, and those of fine-tuned models that it found made."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forgetfree.results.run_results import Run

#: Beside the phases of a run: seconds of fine-tuned models that another strategy or run made; null if one does not tell.
ELSEWHERE = "fine_tune_elsewhere"
#: Strategies that fine-tune each task on its own first, with these ways to find regions.
STAND_ON_FINE_TUNED = (
    *("fine-tune", "grafting-continual", "graft-retrain"),
    *("merge-task-arithmetic", "merge-ties", "merge-stitch"),
)
NEED_FINE_TUNED = ("mask", "midpoint", "movement", "taylor")


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
