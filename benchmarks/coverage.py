"""How often a 95 % interval holds the truth, simulated: ``python -m forgetfree.benchmarks.coverage``.

A world has test rows that are harder or easier for every seed, seeds that are better or worse on every row, and chance of a row
with a seed. The truth is 0. `forgetfree.results.evidence` makes the interval of what each of many worlds shows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forgetfree.results.evidence import RowScore, interval, shared_variance
from forgetfree.results.metrics import Floats
from forgetfree.results.report.page import Page, Table, render_page

#: Standard deviation of a seed's mean, in those of the mean over rows.
SEED_EFFECTS = {"small": 0.3, "medium": 1.0, "large": 3.0}
SEEDS = (3, 5, 10)
_ROWS = 200


def coverage(seeds: int, effect: float, worlds: int = 1500, *, answers: bool = True) -> float:
    """Return in which share of worlds the interval holds the truth.

    Args:
        seeds: of a run.
        effect: one of `SEED_EFFECTS`.
        worlds: how many.
        answers: whether the answers to single rows are kept, or only scores.
    """
    held = [_holds(world, answers) for world in _worlds(seeds, effect, worlds)]
    return float(np.mean(held))


def _worlds(seeds: int, effect: float, worlds: int) -> Iterator[Floats]:
    """Yield what each row adds to the score of each seed ``(seeds, rows)``."""
    random = np.random.default_rng([seeds, round(10 * effect)])
    for _ in range(worlds):
        shared, own = random.standard_normal((1, _ROWS)), random.standard_normal((seeds, _ROWS))
        yield shared + own + effect / np.sqrt(_ROWS) * random.standard_normal((seeds, 1))


def _holds(rows: Floats, answers: bool) -> bool:
    scores = [
        RowScore(each.mean(), _ROWS, float(each.var(ddof=1)), each - each.mean() if answers else None) for each in rows
    ]
    found = interval(rows.mean(axis=1), float(shared_variance([scores])[0, 0]))
    return found.low <= 0 <= found.high


def tables() -> Page:
    """Return the share of worlds in which the interval holds the truth, for each number of seeds and each effect."""
    rows = [
        (f"{seeds}", *(f"{coverage(seeds, effect, answers=kept):.3f}" for kept in (True, False) for effect in effects))
        for effects in [SEED_EFFECTS.values()]
        for seeds in SEEDS
    ]
    header = [f"{size}{more}" for more in ("", ", scores alone") for size in SEED_EFFECTS]
    return Page(
        "Coverage", (), (Table("Coverage of 95 % intervals, by the effect of seeds", ("seeds", *header), tuple(rows)),)
    )


if __name__ == "__main__":
    print(render_page(tables(), "markdown"))
