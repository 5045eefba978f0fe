"""Scores as one table, to be read, summarised, compared and drawn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from forgetfree.display import PERCENT, PLAIN, Scale
from forgetfree.errors import ReportError, UnknownNameError, UsageError
from forgetfree.results.evidence import RowScore, interval, shared_variance
from forgetfree.results.learning_matrix import summarize
from forgetfree.results.metrics import scale_of
from forgetfree.results.run_results import REFERENCE
from forgetfree.results.scores import COLUMNS, Score
from forgetfree.results.stored import task_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The metric of a task's own, such as accuracy or F1.
SCORE = "score"
#: The first row of a learning matrix.
BEFORE = "before training"


class ScoreTable:
    """A table of scores.

    Args:
        scores: one measured number a row: the columns that say of what (such as ``strategy`` and ``seed``), then ``task``,
            ``after`` (how many tasks were learned before), ``metric``, ``value`` and ``rows`` (how many were scored).

    Raises:
        ReportError: one thing was measured twice, with different outcomes, or runs scored a task on different numbers of rows.
    """

    def __init__(self, scores: pd.DataFrame) -> None:
        self.units = [name for name in scores.columns if name not in COLUMNS]
        what = [*self.units, "task", "after", "metric"]
        scores = scores.drop_duplicates([*what, "value"], ignore_index=True)
        twice = scores.duplicated(what)
        if twice.any():
            first = scores[twice].iloc[0][what].dropna()
            raise ReportError(
                f"{', '.join(f'{name} {value}' for name, value in first.items())} was measured twice, with different outcomes. "
                "Leave one of the two results out."
            )
        if "strategy" in self.units:
            for (task, metric), counts in scores[scores["rows"] != 0].groupby(["task", "metric"], sort=False)["rows"]:
                if counts.nunique() > 1:
                    raise ReportError(
                        f"{metric} of {task} was measured on {' and on '.join(map(str, counts.unique()[:2]))} test rows: "
                        "runs on different test rows cannot be compared. Load them one by one."
                    )
        self.scores = scores

    @classmethod
    def of_scores(cls, scores: Iterable[Score]) -> Self:
        """Return the table of scores, in their order."""
        rows = [{**s.of, **{name: getattr(s, name) for name in COLUMNS}} for s in scores]
        units = dict.fromkeys(name for row in rows for name in row if name not in COLUMNS)
        return cls(pd.DataFrame(rows, columns=[*units, *COLUMNS]))

    @property
    def tasks(self) -> list[str]:
        """Return the tasks, in the order in which they were learned."""
        return list(self.scores["task"].unique())

    @property
    def strategies(self) -> list[str]:
        """Return the strategies of runs, in the order given."""
        return list(self.scores["strategy"].unique()) if "strategy" in self.units else []

    def matrix(self, strategy: str, seed: int = 0, metric: str = SCORE) -> pd.DataFrame:
        """Return the learning matrix of one run.

        Args:
            strategy: its name, with the options that tell it from others where it has several.
            seed: of the run.
            metric: ``score`` (of the task's own metric, such as accuracy or F1), ``ece``, or what else was measured, such as
                the ``loss`` on right texts.

        Returns:
            Shape (T+1, T), fractions: a row `BEFORE` training and one ``after`` each task, by its name; a column for each
            ``task`` that was evaluated. NaN where it was not evaluated before it was learned.

        Raises:
            UnknownNameError: no such strategy or metric.
            UsageError: the results are those of grafts or experiments.
            ReportError: there is no such seed, or scores are missing.
        """
        self._require_runs()
        if strategy not in self.strategies:
            raise UnknownNameError("strategy in these results:", strategy, self.strategies)
        scores = self._of(metric, strategy=strategy, seed=seed)
        table = scores.pivot(index="after", columns="task", values="value")
        stages = range(len(self.tasks) + 1)
        extra, table = set(table.index) - set(stages), table.reindex(index=stages, columns=self.tasks)
        missing = np.tril(table.isna().to_numpy(), -1)
        if metric != SCORE:  # some answers have no probabilities, or no losses
            missing &= table.notna().any().to_numpy()
        if extra or missing.any():
            seeds = sorted(self.scores.loc[self.scores["strategy"] == strategy, "seed"].unique())
            raise ReportError(
                f"There is no whole matrix of {metric} of {strategy} with seed {seed}: there are seeds "
                f"{', '.join(map(str, seeds))}. Finish the run with --resume, or name another."
            )
        return table.set_axis(pd.Index([BEFORE, *self.tasks], name="after"), axis="index")

    def summary(self) -> pd.DataFrame:
        """Return mean and standard deviation (n − 1) over seeds.

        Returns:
            Of runs, a row for each strategy with ``average``, ``forgetting``, ``bwt``, ``fwt``, ``intransigence`` (against
            `REFERENCE` with the same seed; NaN where there is none, or several that differ in options) and ``ece``, see
            `forgetfree.results.learning_matrix`. Of grafts and experiments, a row for each task and all else but the seed, and
            a column for each metric. Fractions, each with ``mean`` and ``std``.
        """
        if not self._are_runs:
            by = [name for name in (*self.units, "task") if name != "seed"]
            table = self.scores.pivot_table(
                index=by, columns="metric", values="value", aggfunc=["mean", "std"], sort=False, dropna=False
            )
            return (
                table.swaplevel(axis="columns")
                .dropna(how="all")
                .sort_index(axis="columns", level=0, sort_remaining=False)
            )
        rows, runs = [], self._runs()
        for strategy, seed in runs:
            matrix, metric = self.matrix(strategy, seed), self._metrics(strategy, seed)
            ece = self.matrix(strategy, seed, "ece") if "ece" in set(self.scores["metric"]) else None
            known = [name for name, other in runs if other == seed and name.partition(" (")[0] == REFERENCE]
            reference = np.diagonal(self.matrix(known[0], seed).to_numpy(), offset=-1) if len(known) == 1 else None
            rows.append({"strategy": strategy, **summarize(matrix, ece, reference, metric)})
        table = pd.DataFrame(rows).astype({name: float for name in rows[0] if name != "strategy"})
        return table.groupby("strategy", sort=False).agg(["mean", "std"])

    def compare(self, a: str, b: str, metric: str = SCORE) -> pd.DataFrame:
        """Compare two strategies at the end of the stream, in pairs of the same task and seed.

        The interval is that of `forgetfree.results.evidence`: over seeds with n − 1, and over test rows, of which a table of
        scores knows the number only. So rows of both strategies are taken as independent, and the interval is wider than in
        the report of a run directory, which has the answers. In the last row, the difference of a seed is its mean over all
        tasks, because tasks of one seed are not independent.

        Args:
            a: a strategy.
            b: another.
            metric: as in `matrix`; of ``ece``, less is better.

        Returns:
            A row for each task and one for ``all tasks``: the means ``a`` and ``b``, ``difference`` a − b, ``low`` and ``high``
            of its 95 % interval (NaN where there is one seed, or where nothing varies, which says nothing of other seeds),
            ``pairs`` (the number of seeds), and the ``verdict``: ``higher``, ``lower``, or ``undecided``
            where the interval holds 0 or is NaN.

        Raises:
            UnknownNameError: no such strategy or metric.
            UsageError: the results are those of grafts or experiments.
            ReportError: the two have no seed in common.
        """
        self._require_runs()
        seeds = [seed for strategy, seed in self._runs() if strategy == a and (b, seed) in self._runs()]
        if not seeds:
            for strategy in (a, b):
                if strategy not in self.strategies:
                    raise UnknownNameError("strategy in these results:", strategy, self.strategies)
            raise ReportError(f"{a} and {b} have no seed in common. Run both with the same seeds.")
        ends = [np.array([self.matrix(name, seed, metric).iloc[-1] for seed in seeds]) for name in (a, b)]
        ours, theirs = (np.column_stack([end, end.mean(axis=1)]) for end in ends)  # the last column: all tasks
        variances = [self._row_variance(a, b, seeds, metric, task) for task in self.tasks]
        variances.append(sum(variances) / len(variances) ** 2)
        rows = [_compared(*both) for both in zip(ours.T, theirs.T, variances, strict=True)]
        return pd.DataFrame(rows, index=pd.Index([*self.tasks, "all tasks"], name="task"))

    def _row_variance(self, a: str, b: str, seeds: list[int], metric: str, task: str) -> float:
        """Return what test rows add to the variance of a difference of means over seeds, at most."""
        if a == b:
            return 0.0

        def score(strategy: str, seed: int) -> RowScore:
            last = self._of(metric, strategy=strategy, seed=seed, task=task).sort_values("after").iloc[-1]
            accuracy = None
            if metric == "ece" and self._metrics(strategy, seed)[self.tasks.index(task)] == "accuracy":
                accuracy = float(self.matrix(strategy, seed)[task].iloc[-1])
            return RowScore.of_value(float(last["value"]), str(last["metric"]), int(last["rows"]), accuracy)

        return float(np.trace(shared_variance([[score(name, seed) for seed in seeds] for name in (a, b)])))

    def plot(self, metric: str = SCORE) -> Figure:
        """Draw a metric as its scale shows it, with a panel for each task.

        Of runs, it is drawn over the number of tasks that were learned, a line for each strategy: mean and range over seeds.
        Of grafts and experiments, a mark for each seed stands above what was measured.

        Raises:
            UnknownNameError: no such metric.
            ReportError: there are no scores.
        """
        from forgetfree.results.report.figures import legend, panels, styles

        if self.scores.empty:
            raise ReportError("There are no scores to draw. Load results of a job that finished at least one unit.")
        scale = self._scale(metric)
        figure, (axes,) = panels(self.tasks)
        for ax, task in zip(axes, self.tasks, strict=True):
            scores = self._of(metric, task=task)
            if self._are_runs:
                of_strategies = scores.groupby("strategy", sort=False)
                for (strategy, of), style in zip(of_strategies, styles(len(of_strategies)), strict=True):
                    spread = scale.factor * of.groupby("after")["value"].agg(["mean", "min", "max"])
                    ax.fill_between(
                        spread.index, spread["min"], spread["max"], color=style["color"], alpha=0.15, linewidth=0
                    )
                    ax.plot(spread.index, spread["mean"], label=str(strategy), **style)
                ax.set(xlabel="tasks learned", xticks=range(len(self.tasks) + 1))
            else:
                names = [name for name in self.units if name != "seed" and scores[name].nunique(dropna=False) > 1]
                rows = scores[names].itertuples(index=False)
                places = ["\n".join(str(value) for value in row if pd.notna(value)) for row in rows]
                ax.plot(places, scale.factor * scores["value"], "o")
                ax.tick_params(axis="x", rotation=40)
        axes[0].set_ylabel(scale.titled(metric))
        if self._are_runs:
            legend(figure, axes)
        return figure

    @property
    def _are_runs(self) -> bool:
        return "strategy" in self.units and bool(self.scores["metric"].isin(task_metrics()).any())

    def _require_runs(self) -> None:
        if not self._are_runs and not self.scores.empty:
            raise UsageError("grafts and experiments have no matrix; use .summary()")

    def _of(self, metric: str, **wanted: Any) -> pd.DataFrame:
        """Return the scores of a metric, for one strategy, seed or task."""
        names = (SCORE, *task_metrics()) if metric == SCORE else (metric,)
        known = set(self.scores["metric"])
        if known.isdisjoint(names):
            raise UnknownNameError("metric", metric, known | ({SCORE} if known.intersection(task_metrics()) else set()))
        right = self.scores["metric"].isin(names)
        for name, value in wanted.items():
            right &= self.scores[name] == value
        return self.scores[right]

    def _scale(self, metric: str) -> Scale:
        """Return how the numbers of a metric are shown; all that is no score of a task and no loss is a share."""
        known = self._of(metric)["metric"].unique()
        if set(known) <= set(task_metrics()):
            return scale_of(*known)
        return PLAIN if {*known} & {"loss", "perplexity"} else PERCENT

    def _metrics(self, strategy: str, seed: int) -> list[str]:
        """Return what each task of a run is scored by."""
        metrics = self._of(SCORE, strategy=strategy, seed=seed).drop_duplicates("task").set_index("task")["metric"]
        return [str(metrics[task]) for task in self.tasks]

    def _runs(self) -> list[tuple[str, int]]:
        """Return strategy and seed of each run."""
        if "strategy" not in self.units:
            return []
        pairs = self.scores[["strategy", "seed"]].drop_duplicates()
        return [(strategy, int(seed)) for strategy, seed in pairs.itertuples(index=False)]


def _compared(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], row_variance: float) -> dict[str, Any]:
    """Compare numbers paired by seed, see `ScoreTable.compare`."""
    gap = interval(a - b, row_variance)
    return {
        **{"a": float(a.mean()), "b": float(b.mean()), "difference": gap.value, "low": gap.low, "high": gap.high},
        **{"pairs": len(a), "verdict": gap.verdict},
    }
