"""How often a 95 % interval contains the true value, simulated: ``python -m benchmarks.coverage``.

Two equally good strategies learn with the same seeds and predict the same test rows. The score of a row is a sum of random
effects: of the row on both strategies, of the row on one strategy with every seed, of the seed on every row, and of row and
seed. `forgetfree.results.evidence` computes intervals from each of many simulated worlds, and so do two usual methods that use
the variance between seeds alone. An undefined interval, because nothing varies, counts as a miss.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from forgetfree.results.evidence import Evidence, RowScore
from forgetfree.results.metrics import Floats
from forgetfree.results.report.page import Page, Table, render_page

SEEDS = (3, 5, 10)
_WORLDS, _RESAMPLES = 1500, 500


@dataclass(frozen=True)
class World:
    """The distribution of scores.

    Attributes:
        rows: the number of test rows.
        effect: standard deviation of a seed's effect on the score, times the square root of ``rows``.
        wrong: the share of rows that each strategy predicts wrongly; each row is then 1 or 0. ``None``: each row has a normal
            number.
    """

    rows: int
    effect: float
    wrong: float | None = None

    @property
    def truth(self) -> float:
        """The score of both strategies over all rows and seeds."""
        return 0.0 if self.wrong is None else 1 - self.wrong

    def shown(self, seeds: int, worlds: int) -> Iterator[Floats]:
        """Yield the value of each row for each strategy and seed ``(2, seeds, rows)``."""
        random = np.random.default_rng([seeds, round(10 * self.effect), round(1000 * (self.wrong or 0))])
        hard = math.inf
        if self.wrong is not None:
            from scipy.stats import norm

            hard = norm.isf(self.wrong) * math.sqrt(2 + self.effect**2 / self.rows)
        for _ in range(worlds):
            both, one = random.standard_normal((1, 1, self.rows)), random.standard_normal((2, 1, self.rows))
            chance, seed = random.standard_normal((2, seeds, self.rows)), random.standard_normal((2, seeds, 1))
            rows = (both + one) / math.sqrt(2) + chance + self.effect / math.sqrt(self.rows) * seed
            yield rows if self.wrong is None else (rows < hard).astype(float)


WORLDS = {
    "small": World(200, 0.3),
    "medium": World(200, 1.0),
    "large": World(200, 3.0),
    "0.5 % wrong": World(1000, 1.0, 0.005),
    "2 % wrong": World(1000, 1.0, 0.02),
}


def coverage(seeds: int, world: World, worlds: int = _WORLDS) -> dict[str, float]:
    """Return for each kind of interval the share of worlds in which it contains the true value.

    Args:
        seeds: the number of seeds of a run.
        world: one of `WORLDS`.
        worlds: the number of simulated worlds.
    """
    held: dict[str, list[bool]] = {}
    for rows in world.shown(seeds, worlds):
        for kind, (truth, low, high) in _intervals(rows, world.truth).items():
            held.setdefault(kind, []).append(low <= truth <= high)
    return {kind: float(np.mean(each)) for kind, each in held.items()}


def _intervals(rows: Floats, truth: float) -> Mapping[str, tuple[float, float, float]]:
    """Return for each kind the true value and the ends of an interval."""
    found = {}
    for kind, answers in (("ours", True), ("ours, of scores alone", False)):
        evidence = Evidence(
            {
                name: {seed: {"task": _score(each, answers)} for seed, each in enumerate(of_seeds)}
                for name, of_seeds in zip("ab", rows, strict=True)
            }
        )
        average, difference = evidence.average("a"), evidence.difference("a", "b")
        assert difference is not None  # they share their seeds
        found[f"average, {kind}"] = truth, average.low, average.high
        found[f"difference, {kind}"] = 0.0, difference.low, difference.high
    for name, ends in _RIVALS.items():
        found[f"difference, {name}"] = 0.0, *ends(*rows.mean(axis=2))
    return dict(sorted(found.items(), key=lambda pair: (pair[0].partition(",")[0], "ours" not in pair[0])))


def _score(rows: Floats, answers: bool) -> RowScore:
    return RowScore(rows.mean(), len(rows), float(rows.var()), rows - rows.mean() if answers else None)


def _welch(a: Floats, b: Floats) -> tuple[float, float]:
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():  # if all seeds are equal, there is no interval
        warnings.simplefilter("ignore", RuntimeWarning)
        low, high = ttest_ind(a, b, equal_var=False).confidence_interval()
    return float(low), float(high)


def _bootstrap(a: Floats, b: Floats) -> tuple[float, float]:
    drawn = np.random.default_rng(len(a)).integers(len(a), size=(_RESAMPLES, len(a)))
    low, high = np.quantile((a - b)[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


#: Usual intervals of a difference, from the scores of each seed.
_RIVALS: Mapping[str, Callable[[Floats, Floats], tuple[float, float]]] = {
    "Welch's t": _welch,
    "bootstrap of seeds": _bootstrap,
}


def tables() -> Page:
    """Return the coverage of each kind of interval, for each number of seeds and each world."""
    found = {name: [coverage(seeds, world) for seeds in SEEDS] for name, world in WORLDS.items()}
    kinds = found["small"][0]
    rows = [
        (kind, *(", ".join(f"{each[kind]:.3f}" for each in of_seeds) for of_seeds in found.values())) for kind in kinds
    ]
    title = f"Coverage of 95 % intervals with {', '.join(map(str, SEEDS))} seeds"
    return Page("Coverage", (), (Table(title, ("interval of", *WORLDS), tuple(rows)),))


if __name__ == "__main__":
    print(render_page(tables(), "markdown"))
