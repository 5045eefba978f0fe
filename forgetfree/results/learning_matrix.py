"""What was learned, what was forgotten, and what was transferred: numbers of the learning matrix of one run.

The *learning matrix* R of T tasks has shape (T+1, T); row 0 is measured before any training, row i after learning task i, and
column k belongs to the k-th task. Counting from zero as Python does, task k is learned between row k and row k + 1; before,
values may be missing: None or NaN.

All results are fractions, never percent, unless a metric has other bounds. All arithmetic is in float64.

`LearningMatrix` collects the scores that a trainer of one's own measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from forgetfree import registry
from forgetfree.display import brief
from forgetfree.errors import MetricError, UsageError
from forgetfree.files import StrPath, write_atomically
from forgetfree.results.metrics import Floats, floats_of, limits_of, mean_of, sign

if TYPE_CHECKING:
    import pandas as pd

    from forgetfree.results.table import Results


# ---- its numbers ----------------------------------------------------------------------------------------


def average_accuracy(matrix: npt.ArrayLike) -> float:
    """Return the mean over tasks of the last row: every task counts the same, whatever the size of its test set.

    Args:
        matrix: learning matrix, shape (T+1, T), in [0, 1].

    Returns:
        A fraction in [0, 1].
    """
    return mean_of(_matrix_of(matrix, "matrix")[-1])


def forgetting(matrix: npt.ArrayLike) -> float:
    """Return the mean of `forgetting_per_task` over all tasks but the last (Chaudhry et al., ECCV 2018, eq. 3).

    Args:
        matrix: learning matrix, shape (T+1, T), in [0, 1].

    Returns:
        A fraction in [-1, 1], negative where tasks got better later; 0.0 for a stream of one task.
    """
    return mean_of(forgetting_per_task(matrix)[:-1])


def forgetting_per_task(matrix: npt.ArrayLike, metrics: Sequence[str] | None = None) -> list[float]:
    """Return how far each task has fallen from its best: max over the earlier rows since it was learned − last row.

    Chaudhry et al. (ECCV 2018, eq. 2) take the maximum over all earlier rows. We take only those from the
    learning of the task on: what was never learned cannot be forgotten.

    Args:
        matrix: learning matrix, shape (T+1, T), in [0, 1].
        metrics: see `summarize`.

    Returns:
        T fractions in [-1, 1]. The last is 0.0: nothing came after the last task.
    """
    return [float(lost) for lost in forgetting_by_stage(matrix, metrics)[-1]]


def forgetting_by_stage(matrix: npt.ArrayLike, metrics: Sequence[str] | None = None) -> Floats:
    """Return `forgetting_per_task` as it was after each task of the stream, shape (T+1, T), NaN before a task is learned."""
    scores, signs = _scores_and_signs(matrix, metrics)
    lost = np.full(scores.shape, np.nan)
    for task, gains in enumerate((signs * scores).T):
        since = gains[task + 1 :]
        lost[task + 1 :, task] = [0.0, *(np.maximum.accumulate(since)[:-1] - since[1:])]
    return lost


def backward_transfer(matrix: npt.ArrayLike) -> float:
    """Return the mean over tasks but the last of last row − row right after learning (Lopez-Paz & Ranzato, 2017).

    Args:
        matrix: learning matrix, shape (T+1, T), in [0, 1].

    Returns:
        A fraction in [-1, 1], negative where tasks were forgotten; 0.0 for a stream of one task.
    """
    scores = _matrix_of(matrix, "matrix")
    return mean_of((scores[-1] - np.diagonal(scores, -1))[:-1])


def summarize(
    matrix: npt.ArrayLike,
    ece: npt.ArrayLike | None,
    reference: npt.ArrayLike | None = None,
    metrics: Sequence[str] | None = None,
) -> dict[str, float | None]:
    """Return the six numbers that results.json keeps as `summary`.

    Forward transfer is the mean over tasks but the first of row just before learning − row 0 (Lopez-Paz & Ranzato, 2017), which
    is the pre-trained model in place of their random one. Intransigence is the mean of reference − row right after learning
    (Chaudhry et al., ECCV 2018, eq. 4), with the model fine-tuned on the task alone in place of theirs, trained on all so far.

    Args:
        matrix: learning matrix, shape (T+1, T).
        ece: expected calibration errors, same shape and layout as `matrix`, in [0, 1]; None where answers have no
            probabilities.
        reference: one result of separate fine-tuning per task, shape (T,); None if unknown.
        metrics: the name of each task's; default: any of which higher is better, in [0, 1].

    Returns:
        Numbers under `average`, `forgetting`, `bwt`, `fwt` (None where its scores are missing), `intransigence` (None
        without reference) and `ece` (mean over tasks of the last row, None without). Where of a task's metric lower is better,
        its column counts with the other sign, so that to forget is above 0 and to gain is, too; the average is that of the
        scores as they are.
    """
    scores, signs = _scores_and_signs(matrix, metrics)
    gains = signs * scores
    learned = np.diagonal(gains, -1)
    forward, intransigence = mean_of((np.diagonal(gains) - gains[0])[1:]), None
    if reference is not None:
        expected = floats_of(reference, "reference")
        _check_numbers(expected, "reference", metrics is None)
        if expected.shape != signs.shape:
            raise MetricError(
                f"reference must hold one fine-tuning result per task, shape {signs.shape}; got shape {expected.shape}."
            )
        intransigence = mean_of(signs * expected - learned)
    return {
        "average": mean_of(scores[-1]),
        "forgetting": mean_of(forgetting_by_stage(matrix, metrics)[-1, :-1]),
        "bwt": mean_of((gains[-1] - learned)[:-1]),
        "fwt": None if np.isnan(forward) else forward,
        "intransigence": intransigence,
        "ece": None if ece is None else _calibration(ece, scores.shape),
    }


def _calibration(ece: npt.ArrayLike, shape: tuple[int, ...]) -> float | None:
    """Return the mean of the last row over the tasks that have calibration errors; None where no task has."""
    errors = floats_of(ece, "ece")
    lacking = np.isnan(errors).all(axis=0)
    _matrix_of(np.where(lacking, 0.0, errors) if errors.ndim == 2 else errors, "ece")
    if errors.shape != shape:
        raise MetricError(
            f"ece must have the shape of matrix, {shape}; got {errors.shape}. "
            "Both have a row before training and a row after each task."
        )
    return None if lacking.all() else mean_of(errors[-1][~lacking])


def _scores_and_signs(matrix: npt.ArrayLike, metrics: Sequence[str] | None) -> tuple[Floats, Floats]:
    """Return the checked matrix, and the sign of each column by which more is better."""
    scores = _matrix_of(matrix, "matrix", fractions=metrics is None)
    if metrics is None:
        return scores, np.ones(scores.shape[1])
    return scores, np.array([sign(name) for name in metrics], dtype=np.float64)


def _matrix_of(values: npt.ArrayLike, name: str, *, fractions: bool = True) -> Floats:
    """Check a matrix, and return it, shape (T+1, T) with T ≥ 1; NaN for what is missing before a task is learned."""
    matrix = floats_of(values, name)
    _check_numbers(matrix[~np.triu(np.isnan(matrix))] if matrix.ndim == 2 else matrix, name, fractions)
    if matrix.ndim != 2 or matrix.size == 0 or matrix.shape[0] != matrix.shape[1] + 1:
        raise MetricError(
            f"{name} must have shape (T+1, T), a row before training and a row after each of T tasks; "
            f"got shape {matrix.shape}."
        )
    return matrix


def _check_numbers(array: Floats, name: str, fractions: bool) -> None:
    outside = array[~((array >= 0) & (array <= 1)) if fractions else ~np.isfinite(array)]
    if outside.size:
        what = "fractions in [0, 1], not percent" if fractions else "numbers"
        raise MetricError(f"{name} must hold {what}; got {outside[0]}.")


# ---- scores of a trainer of one's own ---------------------------------------------------------------------


class LearningMatrix:
    """Scores of tasks after each task that was learned, in the order of learning.

    Add a score whenever there is one: ``matrix.add(after="a", task="b", value=trainer.evaluate()["eval_accuracy"])``.
    The numbers need, of each task that was learned, a score after each task from its own on.

    Args:
        metric: the registered metric that the values are of, which says whether more is better and what its bounds are.

    Raises:
        UnknownNameError: there is no such metric.
    """

    def __init__(self, metric: str = "accuracy") -> None:
        registry.metric(metric)
        self.metric = metric
        self._scores: dict[tuple[str, str], float] = {}
        self._learned: list[str] = []

    def add(self, after: str | None, task: str, value: float) -> None:
        """Add a score.

        Args:
            after: the task that was learned last; none: before any.
            task: the task that was scored.
            value: the score.

        Raises:
            MetricError: it is no finite number, or beyond the bounds of the metric.
            UsageError: there is such a score already.
        """
        number = float(value) if isinstance(value, int | float | np.number) else math.nan
        low, high = limits_of(self.metric)
        if not (math.isfinite(number) and low <= number <= high):
            raise MetricError(
                f"The score of task {task!r} after {after!r} must be a finite number in [{low:g}, {high:g}], as {self.metric} "
                f"is, got {brief(value)}."
            )
        row = after or ""
        if (row, task) in self._scores:
            raise UsageError(
                f"There is a score of task {task!r} after {after or 'nothing'!r} already: {self._scores[row, task]:g}. Make a "
                "new LearningMatrix for another run."
            )
        self._scores[row, task] = number
        if after and after not in self._learned:
            self._learned.append(after)

    @property
    def tasks(self) -> list[str]:
        """The tasks that were learned, in order."""
        return list(self._learned)

    @property
    def values(self) -> Floats:
        """The learning matrix ``(T + 1, T)``: row 0 is before any training; NaN where nothing was measured."""
        rows = ["", *self._learned]
        return np.array(
            [[self._scores.get((row, task), math.nan) for task in self._learned] for row in rows], dtype=float
        )

    @property
    def frame(self) -> pd.DataFrame:
        """The learning matrix with names: a row for what was learned last, a column a task."""
        import pandas as pd

        return pd.DataFrame(self.values, pd.Index(["before", *self._learned], name="after"), self._learned)

    def summary(self) -> dict[str, float | None]:
        """Return ``average``, ``forgetting``, ``bwt`` and ``fwt``; ``None`` where scores before learning are missing.

        They are those of runs: Chaudhry et al. (2018) and Lopez-Paz & Ranzato (2017), see docs/results-format.md.

        Raises:
            MetricError: a score that they need is missing.
        """
        values = self.values
        for i, after in enumerate(self._learned, 1):
            for task, value in zip(self._learned[:i], values[i], strict=False):
                if math.isnan(value):
                    raise MetricError(
                        f"There is no score of task {task!r} after {after!r}. Add it: "
                        f"matrix.add(after={after!r}, task={task!r}, value=…)."
                    )
        if not self._learned:
            raise MetricError("There are no scores after a task. Add them: matrix.add(after=…, task=…, value=…).")
        known = summarize(values, None, metrics=[self.metric] * len(self._learned))
        return {name: known[name] for name in ("average", "forgetting", "bwt", "fwt")}

    @property
    def results(self) -> Results:
        """The scores as those of a run: its tables, figures and report; errors as those of `summary`."""
        from forgetfree.results.runs import of_scores
        from forgetfree.results.scores import Score
        from forgetfree.results.table import Results

        self.summary()
        stages = ["", *self._learned]
        scores = [
            Score("trainer", 0, task, stages.index(after), self.metric, value, 0)
            for task in self._learned
            for (after, scored), value in self._scores.items()
            if scored == task
        ]
        return Results([of_scores(scores)])

    def save(self, path: StrPath) -> None:
        """Write the report with tables and figures as one HTML file, which needs no other and no network."""
        from forgetfree.results.report.run_report import render

        write_atomically(Path(path), render(self.results, "html").encode())

    def __repr__(self) -> str:
        if not self._learned:
            return f"LearningMatrix({self.metric}; no scores)"
        from forgetfree.results.report.run_report import render

        return render(self.results, "rich").rstrip()

    def _repr_html_(self) -> str:
        return self.results._repr_html_()
