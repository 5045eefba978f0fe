"""The uncertainty of scores: one 95 % interval over both seeds and test rows.

An average over seeds, or a paired difference, is x̄ = μ + the error from seeds + the error from rows. Seeds are independent, so
the variance of their error is s²/S, with n − 1. All seeds share the test rows: the row error that is common to all seeds does
not shrink with more seeds, and s² does not contain it. Its variance is c/n, where c is the covariance between seeds of a row's
contribution. Both variances add up:

    v = s²/S + c/n        x̄ ± √v · (s²/S · t(S − 1) + c/n · z) / v

The quantile is the mean of Student's and the normal one, weighted by the variances (Cochran and Cox, Experimental Designs,
1957). ``python -m benchmarks.coverage`` simulates how often such intervals contain the true value.

Intervals are clipped to possible values: an average to the bounds of its metrics, a difference to ± their distance.

A CSV file stores only which rows were right. For an ECE, and for an accuracy in older files, an upper bound therefore replaces
c: the whole variance of a row's contribution, with strategies treated as independent. Such intervals are mostly wider than
necessary. F1 alone gives no bound: its intervals are over seeds, on the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from forgetfree import registry
from forgetfree.display import PERCENT
from forgetfree.results.answers import Answers
from forgetfree.results.metrics import BINS, Floats, forgetting_per_task, limits_of, mean_of, reliability, sign

#: The probability that an interval does not contain the true value.
ALPHA = 0.05
#: Shares of a gain below this are not reported.
LEAST_SHARED = 0.03


# ---- an interval ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval.

    Attributes:
        value: the mean over seeds.
        low: the lower end; NaN with one seed, or if nothing varies: neither shows how other seeds would score.
        high: the upper end; as ``low``.
        p: returns the two-sided p-value for a true value at a threshold; below 0.05 outside the interval.
    """

    value: float
    low: float
    high: float
    p: Callable[[float], float] = field(default=lambda threshold: math.nan, compare=False, repr=False)

    def within(self, low: float, high: float) -> Interval:
        """Return the interval, clipped to the possible values."""
        return replace(self, low=max(self.low, low), high=min(self.high, high))  # in this order NaN stays

    @property
    def verdict(self) -> str:
        """Whether a difference is ``higher``, ``lower``, or ``undecided`` because the interval contains 0 or is NaN."""
        return "higher" if self.low > 0 else "lower" if self.high < 0 else "undecided"

    @property
    def text(self) -> str:
        """The value, a share, and its interval in %; the value alone if there is no interval."""
        value, low, high = map(PERCENT.text, (self.value, self.low, self.high))
        return value if math.isnan(self.low) else f"{value} [{low}, {high}]"


def interval(values: Sequence[float] | Floats, row_variance: float = 0.0) -> Interval:
    """Return the mean over seeds and its interval.

    Args:
        values: one per seed, assumed independent and nearly normal.
        row_variance: the estimated variance c/n of the mean from the test rows that all seeds share; below 0 counts as 0.
            Without it, this is Student's interval, for other seeds on the same rows.
    """
    numbers = np.asarray(values, dtype=float)
    mean, spread = float(numbers.mean()), _Spread(_seed_variance(numbers), max(0.0, row_variance), len(numbers))
    half = spread.half()
    return Interval(mean, mean - half, mean + half, lambda threshold: spread.p(abs(mean - threshold)))


def ratio(numerator: Floats, denominator: Floats, rows: Floats | None = None) -> Interval | None:
    """Return the ratio of two means over the same seeds, with Fieller's interval (1954): each r for which n̄ − r·d̄ may be 0.

    ``None`` if the denominator is not significantly above 0.

    Args:
        numerator: one value per seed.
        denominator: one value per seed.
        rows: the covariance of both means from the shared test rows ``(2, 2)``.
    """
    from scipy.optimize import brentq

    shared, seeds = np.zeros((2, 2)) if rows is None else rows, len(numerator)
    top, bottom = float(numerator.mean()), float(denominator.mean())
    if bottom <= 0 or (seeds > 1 and interval(denominator, float(shared[1, 1])).low <= 0):
        return None
    mean = top / bottom
    if seeds == 1:
        return Interval(mean, math.nan, math.nan)
    both = np.cov(numerator, denominator) / seeds

    def gap(r: float) -> tuple[float, _Spread]:
        """Return the distance of n̄ − r·d̄ from 0, and its spread."""
        of_seeds, of_rows = (float(v[0, 0] - 2 * r * v[0, 1] + r * r * v[1, 1]) for v in (both, shared))
        return abs(top - r * bottom), _Spread(of_seeds if of_seeds > 1e-16 else 0.0, max(0.0, of_rows), seeds)

    def beyond(r: float) -> float:
        """Return how far r is outside the interval; below 0 inside."""
        distance, spread = gap(r)
        return distance - spread.half()

    def end(side: int) -> float:
        step = 1e-3
        while beyond(mean + side * step) < 0:
            step *= 2
        return float(brentq(beyond, mean, mean + side * step, xtol=1e-15))

    if math.isnan(beyond(mean)):
        return Interval(mean, math.nan, math.nan)

    def p(threshold: float) -> float:
        distance, spread = gap(threshold)
        return spread.p(distance)

    return Interval(mean, end(-1), end(1), p)


def _seed_variance(values: Floats) -> float:
    """Return the variance of the mean over seeds: NaN for one seed, 0 if values differ only by rounding."""
    if len(values) == 1:
        return math.nan
    return 0.0 if float(np.ptp(values)) <= 1e-12 else float(values.var(ddof=1) / len(values))


class _Spread(NamedTuple):
    """The variance of a mean over seeds, from seeds and from rows, and the number of seeds."""

    of_seeds: float
    of_rows: float
    seeds: int

    def half(self, alpha: float = ALPHA) -> float:
        """Return half the width of the interval, see the head of this file."""
        variance = self.of_seeds + self.of_rows
        if not variance > 0:  # nothing varies, or there is one seed
            return math.nan
        student, normal = _quantiles(alpha, self.seeds)
        return (self.of_seeds * student + self.of_rows * normal) / math.sqrt(variance)

    def p(self, distance: float) -> float:
        """Return the p-value: the alpha whose interval would just reach this far."""
        from scipy.optimize import brentq

        if not self.of_seeds + self.of_rows > 0:
            return math.nan
        if distance <= 0:
            return 1.0

        def beyond(log_alpha: float) -> float:
            return distance - self.half(math.exp(log_alpha))

        least = math.log(1e-12)
        return math.exp(brentq(beyond, least, 0.0, xtol=1e-6)) if beyond(least) < 0 else math.exp(least)


@cache
def _quantiles(alpha: float, seeds: int) -> tuple[float, float]:
    from scipy.stats import norm, t

    return float(t.isf(alpha / 2, seeds - 1)), float(norm.isf(alpha / 2))


# ---- the contribution of rows ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RowScore:
    """A score on one task's test rows, and how it depends on them.

    Attributes:
        value: the score.
        rows: the number of rows scored; 0 if unknown: then intervals ignore the variance of rows.
        variance: the variance of a row's contribution, or an upper bound.
        influence: the contribution of each row, times the number of rows, minus the mean ``(rows,)``; ``None`` if unknown.
        limits: the lowest and the highest possible score.
    """

    value: float
    rows: int
    variance: float
    influence: Floats | None = None
    limits: tuple[float, float] = (-math.inf, math.inf)

    @classmethod
    def of_value(cls, value: float, metric: str, rows: int, accuracy: float | None = None) -> Self:
        """Return a score from its value alone.

        If the score is the mean m of numbers in [0, 1], such as accuracy, the variance over rows is at most m·(1 − m). A row
        adds ± (right − confidence) to the ECE e. Within a bin, ``right`` varies as accuracy does and confidence by no more than
        half the bin's width w; between bins, their gaps in [0, 1] have the mean e. With accuracy a, or 1/2 if unknown, the
        variance is at most (√(a·(1 − a)) + w/2)² + e·(1 − e). For F1 and other scores that are not means over rows, the value
        alone gives no bound: the variance is 0.

        Args:
            value: the score.
            metric: its name.
            rows: the number of rows scored.
            accuracy: for ``ece``, the accuracy on the same rows.
        """
        if metric == "ece":
            of_right = 0.5 if accuracy is None else math.sqrt(max(0.0, accuracy * (1 - accuracy)))
            variance = (of_right + 0.5 / BINS) ** 2 + value * (1 - value)
        else:
            its = registry.metric(metric) if metric in registry.metrics() else None
            is_mean_of_shares = its is not None and its.rows is not None and its.limits == (0.0, 1.0)
            variance = value * (1 - value) if is_mean_of_shares else 0.0
        return cls(value, rows, max(0.0, variance), limits=limits_of(metric))

    @classmethod
    def of_answers(cls, answers: Answers, metric: str) -> Self | None:
        """Return a score with its rows' contributions: a mean over rows, or F1, macro F1 or ECE of labels; else ``None``."""
        its = answers.metric(metric) if metric in registry.metrics() else None
        if its and its.rows:
            return cls.of_rows(its.rows(answers), metric)
        if answers.choices is None or metric not in ("f1", "macro_f1", "ece"):
            return None
        if its and its is not registry.metric(metric):  # the kind's own metric, which counts something else
            return None
        logits, labels = answers.choices
        predicted = logits.argmax(axis=1)
        if metric == "f1" and logits.shape[1] != 2:
            return None
        if metric == "ece":
            diagram = reliability(logits, labels)
            influence, value = diagram.gaps, diagram.ece
        else:
            those = [1] if metric == "f1" else np.unique(labels).tolist()
            parts = [_f1(predicted == label, labels == label) for label in those]
            value = float(np.mean([score for score, _ in parts]))
            influence = np.mean([adds for _, adds in parts], axis=0)
        return cls._of_parts(value, influence, metric)

    @classmethod
    def of_rows(cls, rows: npt.ArrayLike, metric: str) -> Self:
        """Return the score that is the mean of the values of rows ``(rows,)``, such as whether each is right."""
        values = np.asarray(rows, dtype=np.float64)
        return cls._of_parts(float(values.mean()), values, metric)

    @classmethod
    def _of_parts(cls, value: float, parts: Floats, metric: str) -> Self:
        return cls(value, len(parts), float(parts.var()), parts - parts.mean(), limits_of(metric))


def _f1(predicted: npt.NDArray[np.bool_], right: npt.NDArray[np.bool_]) -> tuple[float, Floats]:
    """Return the F1 of a label, 2·TP / ((TP + FP) + (TP + FN)), and the contributions of rows, times n ``(n,)``."""
    numerator, denominator = 2.0 * (predicted & right), predicted.astype(np.float64) + right
    score = float(numerator.sum() / max(denominator.sum(), 1.0))
    return score, (numerator - score * denominator) / max(float(denominator.mean()), 1e-9)


def shared_variance(scores: Sequence[Sequence[RowScore]]) -> Floats:
    """Return the part of the covariance of means over seeds that comes from the shared rows ``(k, k)``.

    Args:
        scores: the scores of k strategies on one task, for the same S seeds ``(k, S)``.
    """
    k, n = len(scores), scores[0][0].rows
    if not n:
        return np.zeros((k, k))
    influence = [[score.influence for score in of_seeds] for of_seeds in scores]
    if any(each is None for of_seeds in influence for each in of_seeds):
        return np.diag([np.mean([score.variance for score in of_seeds]) for of_seeds in scores]) / n
    rows: npt.NDArray[np.float64] = np.array(influence)  # (k, S, n)
    seeds = rows.shape[1]
    if seeds == 1:
        return np.zeros((k, k))
    total, own = rows.sum(axis=1), np.einsum("ksn,lsn->kl", rows, rows)
    return np.asarray((total @ total.T - own) / (seeds * (seeds - 1)) / (n - 1) / n)


# ---- strategies -----------------------------------------------------------------------------------------


class Evidence:
    """Scores of strategies on the same test rows, and their uncertainty over rows and seeds.

    Args:
        scores: the scores by strategy, seed and task.
    """

    def __init__(self, scores: dict[str, dict[int, dict[str, RowScore]]]) -> None:
        self.scores = scores

    def average(self, strategy: str, task: str | None = None) -> Interval:
        """Return the score of a strategy on a task, or the average over all, as a fraction."""
        values, rows, limits = self._measured((strategy,), list(self.scores[strategy]), task)
        return interval(values[0], float(rows[0, 0])).within(*limits)

    def difference(self, strategy: str, other: str, task: str | None = None) -> Interval | None:
        """Return the score of a strategy minus the score of another; ``None`` if they share no seed."""
        if not (seeds := self._seeds(strategy, other)):
            return None
        values, rows, (low, high) = self._measured((strategy, other), seeds, task)
        found = interval(values[0] - values[1], float(rows[0, 0] + rows[1, 1] - 2 * rows[0, 1]))
        return found.within(low - high, high - low)

    def retention(self, strategy: str, other: str, floor: float, task: str | None = None) -> Interval | None:
        """Return (score − floor) / (the other's − floor): the kept share of the other's gain over a floor.

        ``None`` if they share no seed, or if the other's gain over the floor is not significant or below `LEAST_SHARED`: such a
        share is noise. The floor, of the task or of the average, counts as exact.
        """
        if not (seeds := self._seeds(strategy, other)):
            return None
        values, rows, _ = self._measured((strategy, other), seeds, task)
        if values[1].mean() - floor < LEAST_SHARED:
            return None
        return ratio(values[0] - floor, values[1] - floor, rows)

    def _seeds(self, strategy: str, other: str) -> list[int]:
        return [seed for seed in self.scores[strategy] if seed in self.scores[other]]

    def _measured(
        self, strategies: Sequence[str], seeds: Sequence[int], task: str | None
    ) -> tuple[Floats, Floats, tuple[float, float]]:
        """Return the scores ``(k, S)`` on one task or averaged over all, their covariance from rows ``(k, k)``, and bounds."""
        tasks = list(self.scores[strategies[0]][seeds[0]]) if task is None else [task]
        names = list(dict.fromkeys(strategies))  # a strategy compared with itself counts once
        values, rows = np.zeros((len(names), len(seeds))), np.zeros((len(names), len(names)))
        low = high = 0.0
        for each in tasks:
            scores = [[self.scores[name][seed][each] for seed in seeds] for name in names]
            values += np.array([[score.value for score in of_seeds] for of_seeds in scores]) / len(tasks)
            rows += shared_variance(scores) / len(tasks) ** 2
            low, high = low + scores[0][0].limits[0] / len(tasks), high + scores[0][0].limits[1] / len(tasks)
        places = [names.index(name) for name in strategies]
        return values[places], rows[np.ix_(places, places)], (low, high)


def forgetting(matrices: Floats, metrics: Sequence[str], rows: Sequence[int]) -> Interval:
    """Return the mean drop from the best score since a task was learned to its last score, over all tasks but the last.

    Earlier answers are not kept: if any seed lost anything, the row errors then and at the end are treated as independent.

    Args:
        matrices: the learning matrices of all seeds ``(S, T+1, T)``.
        metrics: the metric of each task.
        rows: the number of test rows of each task; 0 if unknown.
    """
    forgotten = np.array([forgetting_per_task(matrix, metrics) for matrix in matrices])
    variance = 0.0
    most = mean_of([high - low for low, high in map(limits_of, metrics[:-1])])
    for i, (metric, count) in enumerate(zip(metrics[:-1], rows, strict=False)):
        if count and forgotten[:, i].any():
            of = partial(RowScore.of_value, metric=metric, rows=count)
            ends = matrices[:, i + 1 :, i]
            both = [
                of(float(sign(metric) * max(sign(metric) * scores))).variance + of(float(scores[-1])).variance
                for scores in ends
            ]
            variance += float(np.mean(both)) / count / (len(metrics) - 1) ** 2
    return interval([mean_of(each[:-1]) for each in forgotten], variance).within(-most, most)
