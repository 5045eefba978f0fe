"""The learning matrix of a run, from scores that the user's own trainer measures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forgetfree import registry
from forgetfree.display import brief
from forgetfree.errors import MetricError, UsageError
from forgetfree.files import StrPath, write_atomically
from forgetfree.results.metrics import Floats, limits_of, summarize

if TYPE_CHECKING:
    import pandas as pd

    from forgetfree.results.table import Results


class LearningMatrix:
    """Scores of tasks after each task that was learned, in the order of learning.

    Add a score whenever it is measured, such as ``trainer.evaluate()["eval_accuracy"]``. `summary` needs the score of each
    learned task after its own training and after each later task.

    >>> matrix = LearningMatrix()
    >>> for after, task, value in [("a", "a", 0.9), ("b", "a", 0.7), ("b", "b", 0.8)]:
    ...     matrix.add(after=after, task=task, value=value)
    >>> round(matrix.summary()["forgetting"], 2)
    0.2

    Args:
        metric: the registered metric of the values; it defines their bounds and whether higher is better.

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
            after: the task that was learned last; ``None`` before any training.
            task: the task that was scored.
            value: the score.

        Raises:
            MetricError: the value is not a finite number within the bounds of the metric.
            UsageError: this score is already set.
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
                f"The score of task {task!r} after {after or 'nothing'!r} is already set: "
                f"{self._scores[row, task]:g}. Create a new LearningMatrix for another run."
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
        """The learning matrix as a frame: one row per last learned task, one column per task."""
        import pandas as pd

        return pd.DataFrame(self.values, pd.Index(["before", *self._learned], name="after"), self._learned)

    def summary(self) -> dict[str, float | None]:
        """Return ``average``, ``forgetting``, ``bwt`` and ``zero_shot_gain``, which is ``None`` without scores before learning.

        The definitions are the same as for runs: Chaudhry et al. (2018) and Lopez-Paz & Ranzato (2017), see
        docs/results-format.md.

        Raises:
            MetricError: a required score is missing.
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
        known = summarize(values, metrics=[self.metric] * len(self._learned))
        return {name: known[name] for name in ("average", "forgetting", "bwt", "zero_shot_gain")}

    @property
    def results(self) -> Results:
        """The scores as the results of a run, with its tables, figures and report; raises the errors of `summary`."""
        from forgetfree.results.run_folder import Score
        from forgetfree.results.runs import of_scores
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
        """Write the report with tables and figures as one self-contained HTML file."""
        from forgetfree.results.report.run_report import render

        write_atomically(Path(path), render(self.results, "html").encode())

    def __repr__(self) -> str:
        return f"LearningMatrix({self.metric})\n{self.frame}"
