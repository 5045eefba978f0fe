"""How far scores may be off: 95 % intervals over seeds alone, and over test rows and seeds, also of differences in pairs.

Seeds of a run share its test rows, so rows are drawn once for all seeds, and seeds are drawn beside them: one bootstrap over
both (Efron and Tibshirani, 1993, ch. 6). Strategies are drawn together, so a difference is that of equal rows and seeds.
With fewer than about five seeds the intervals are somewhat too narrow: so few say little of others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forgetfree.results.answers import LabelAnswers
from forgetfree.results.metrics import Floats

#: Times that rows and seeds are drawn.
DRAWS = 1000
#: As many draws of rows stand in memory together.
_TOGETHER = 50
#: Answers of one strategy: by seed, then by task.
Answers = Mapping[int, Mapping[str, LabelAnswers]]


def student(values: Sequence[float] | npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval, mean ± t(0.975, n − 1) · s / √n: what other seeds would give.

    Args:
        values: one for each seed, taken as independent and nearly normal.

    Returns:
        The mean, and both ends of the interval: NaN where there is one seed, or where all values are equal (no spread says
        nothing about other seeds).
    """
    from scipy.stats import t

    numbers = np.asarray(values, dtype=float)
    n, mean = len(numbers), float(numbers.mean())
    if float(np.ptp(numbers)) <= 1e-12:  # equal decimals differ in their last bits
        return mean, math.nan, math.nan
    half = float(t.ppf(0.975, n - 1) * numbers.std(ddof=1) / math.sqrt(n))
    return mean, mean - half, mean + half


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval, as fractions."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Say of a difference whether it is ``higher``, ``lower``, or ``undecided`` because the interval holds 0."""
        return "undecided" if self.low <= 0 <= self.high else "higher" if self.value > 0 else "lower"


def contributions(answers: LabelAnswers, metric: str) -> Floats:
    """Return what each row adds to the numerator and the denominator of a score ``(2, n)``: score = Σ first / Σ second.

    Args:
        answers: on one task's test rows, of one label each.
        metric: ``accuracy``, or ``f1`` of label 1: 2·TP / ((TP + FP) + (TP + FN)).
    """
    predicted, labels = answers.logits.argmax(axis=1), answers.labels
    if metric == "accuracy":
        return np.stack([predicted == labels, np.ones(len(labels))]).astype(np.float64)
    positive, there = predicted == 1, labels == 1
    return np.stack([2.0 * (positive & there), positive.astype(np.float64) + there])


def drawn_scores(rows: Floats, task: int, draws: int = DRAWS) -> Floats:
    """Return the scores of ``k`` runs on one task's rows, drawn with replacement ``draws`` times: ``(draws, k)``.

    Args:
        rows: `contributions` of each run ``(k, 2, n)``.
        task: the number of the task, which seeds the draws: every run meets the same.
        draws: how many.
    """
    runs, _, n = rows.shape
    random, scores = np.random.default_rng([task, n]), []
    for start in range(0, draws, _TOGETHER):
        counts = random.multinomial(n, np.full(n, 1 / n), size=min(_TOGETHER, draws - start)).astype(np.float64)
        sums = (counts @ rows.reshape(2 * runs, n).T).reshape(len(counts), runs, 2)
        with np.errstate(invalid="ignore"):  # 0 / 0 where no row of label 1 is drawn
            scores.append(np.nan_to_num(sums[..., 0] / sums[..., 1]))
    return np.concatenate(scores)


class Evidence:
    """Averages of strategies over tasks, with what other rows and seeds might have given.

    Args:
        answers: of each strategy, on the same test rows.
        metrics: of each task, by name, in the stream's order.
        draws: how many times rows and seeds are drawn.
    """

    def __init__(self, answers: Mapping[str, Answers], metrics: Mapping[str, str], draws: int = DRAWS) -> None:
        self._seeds = {name: sorted(of_seed) for name, of_seed in answers.items()}
        places = [(name, seed) for name, seeds in self._seeds.items() for seed in seeds]
        self._tasks = list(metrics)
        exact, drawn = [], []
        for number, (task, metric) in enumerate(metrics.items()):
            rows = np.stack([contributions(answers[name][seed][task], metric) for name, seed in places])
            exact.append([answers[name][seed][task].score(metric) for name, seed in places])
            drawn.append(drawn_scores(rows, number, draws))
        # Of each strategy and seed: the scores of all tasks ``(tasks,)``, and what was drawn of them ``(tasks, draws)``.
        self._exact = dict(zip(places, np.array(exact).T, strict=True))
        self._drawn = dict(zip(places, np.array(drawn).transpose(2, 0, 1), strict=True))

    def average(self, strategy: str) -> Interval:
        """Return the average of a strategy over tasks and seeds, in [0, 1]."""
        return _interval(*self._over_seeds(strategy, self._seeds[strategy]))

    def difference(self, strategy: str, other: str) -> Interval | None:
        """Return how much higher the average of a strategy is than that of another; ``None`` if they share no seed."""
        shared = [seed for seed in self._seeds[strategy] if seed in self._seeds[other]]
        if not shared:
            return None
        (value, drawn), (its, its_drawn) = (self._over_seeds(name, shared) for name in (strategy, other))
        return _interval(value - its, drawn - its_drawn)

    def retention(self, strategy: str, other: str, floor: float, task: str | None = None) -> Interval | None:
        """Return (score − floor) / (the other's − floor): the share of what the other learned above a floor.

        ``None`` if they share no seed, or the other is not above the floor for certain.

        Args:
            strategy: whose share.
            other: of what.
            floor: a score that counts as exact, of the task or the average.
            task: whose scores; default: the average's.
        """
        shared = [seed for seed in self._seeds[strategy] if seed in self._seeds[other]]
        if not shared:
            return None
        (value, drawn), (its, its_drawn) = (self._over_seeds(name, shared, task) for name in (strategy, other))
        if its <= floor or np.quantile(its_drawn, 0.025) <= floor:
            return None
        above = its_drawn > floor  # few draws are not, and have no share
        return _interval((value - floor) / (its - floor), (drawn[above] - floor) / (its_drawn[above] - floor))

    def _over_seeds(self, strategy: str, seeds: Sequence[int], task: str | None = None) -> tuple[float, Floats]:
        tasks = slice(None) if task is None else [self._tasks.index(task)]
        exact = float(np.mean([self._exact[strategy, seed][tasks] for seed in seeds]))
        drawn = np.stack([self._drawn[strategy, seed][tasks].mean(axis=0) for seed in seeds])
        chosen = np.random.default_rng(len(seeds)).integers(len(seeds), size=(drawn.shape[1], len(seeds)))
        return exact, np.take_along_axis(drawn, chosen.T, axis=0).mean(axis=0)


def _interval(value: float, drawn: Floats) -> Interval:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(value, float(low), float(high))
