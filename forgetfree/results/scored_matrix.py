"""What a trainer measured after each task, put together: how much was learned, forgotten and transferred."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forgetfree import registry
from forgetfree.display import brief
from forgetfree.errors import MetricError, UsageError
from forgetfree.files import StrPath, write_atomically
from forgetfree.results.learning_matrix import summarize
from forgetfree.results.metrics import Floats
from forgetfree.results.report.figures import Section, shaded, style_sheet
from forgetfree.results.report.page import Page, Table, notebook_html, render_html, render_page

if TYPE_CHECKING:
    import pandas as pd

#: What each number of the summary is called in tables.
_NAMES = {
    "average": "average",
    "forgetting": "forgetting",
    "bwt": "backward transfer",
    "fwt": "forward transfer",
}
#: The name of the row before any training.
_BEFORE = "before"


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
            MetricError: it is no finite number.
            UsageError: there is such a score already.
        """
        number = float(value) if isinstance(value, int | float | np.number) else math.nan
        if not math.isfinite(number):
            raise MetricError(
                f"The score of task {task!r} after {after!r} must be a finite number, got {brief(value)}."
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

        return pd.DataFrame(self.values, pd.Index([_BEFORE, *self._learned], name="after"), self._learned)

    def summary(self) -> dict[str, float | None]:
        """Return ``average``, ``forgetting``, ``bwt`` and ``fwt``; ``None`` where scores before learning are missing.

        They are those of runs: Chaudhry et al. (2018) and Lopez-Paz & Ranzato (2017), see docs/results-format.md.

        Raises:
            MetricError: a score that they need is missing, or out of the bounds of the metric.
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
        return {name: known[name] for name in _NAMES}

    @property
    def average(self) -> float:
        """The mean of the last row."""
        return float(self.summary()["average"] or 0.0)

    @property
    def forgetting(self) -> float:
        """How far tasks have fallen from their best, on average over all but the last (Chaudhry et al., 2018)."""
        return float(self.summary()["forgetting"] or 0.0)

    @property
    def backward_transfer(self) -> float:
        """The mean change of tasks since they were learned, over all but the last (Lopez-Paz & Ranzato, 2017)."""
        return float(self.summary()["bwt"] or 0.0)

    @property
    def forward_transfer(self) -> float | None:
        """The mean change of tasks before they were learned, over all but the first; none where that was not measured."""
        return self.summary()["fwt"]

    def page(self) -> Page:
        """Return the tables: the matrix, and its summary."""
        rows = tuple(
            (name, *("—" if math.isnan(value) else f"{value:.3f}" for value in row))
            for name, row in zip([_BEFORE, *self._learned], self.values, strict=True)
        )
        numbers = tuple(
            (_NAMES[name], "—" if value is None else f"{value:.3f}") for name, value in self.summary().items()
        )
        return Page(
            "Scores after each task",
            (f"A row is what was learned last, a column the task that was scored ({self.metric}).",),
            (
                Table(f"Learning matrix ({self.metric})", ("after", *self._learned), rows),
                Table("Summary", ("", self.metric), numbers),
            ),
        )

    def plot(self) -> Section:
        """Return the heat map, as report.html has it: ``plot().pictures[0].svg`` is an SVG element."""
        known = self.values[~np.isnan(self.values)]
        low, high = min(0.0, float(known.min())), max(1.0, float(known.max()))
        says = f"{self.average:.3f} on average after the last task"
        rows, names = [_BEFORE, *self._learned], self._learned
        drawn = shaded(self.values, self.metric, says, rows, names, "after", "score on", (low, high), "{:.2f}")
        text = "Read a column downwards: it lights up when the task is learned, and darkens where it is forgotten."
        return Section("matrix", "Scores after each task", text, [drawn])

    def save(self, path: StrPath) -> None:
        """Write the page with tables and heat map as one HTML file, which needs no other and no network."""
        html = render_html(self.page(), [self.plot()], style_sheet())
        write_atomically(Path(path), html.encode())

    def __repr__(self) -> str:
        return (
            render_page(self.page(), "rich").rstrip() if self._learned else f"LearningMatrix({self.metric}; no scores)"
        )

    def _repr_html_(self) -> str:
        return notebook_html(self.page())
