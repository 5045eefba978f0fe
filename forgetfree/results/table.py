"""Scores as one table, to be read, summarised, compared and drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd

from forgetfree.display import PERCENT, PLAIN, Scale
from forgetfree.errors import ReportError, UnknownNameError, UsageError
from forgetfree.results.evidence import Evidence, RowScore
from forgetfree.results.learning_matrix import summarize
from forgetfree.results.metrics import scale_of, sign
from forgetfree.results.run_results import REFERENCE
from forgetfree.results.scores import COLUMNS, Score
from forgetfree.results.stored import task_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The metric of a task's own, such as accuracy or F1.
SCORE = "score"
#: What `ScoreTable.plot` draws beside what was measured.
FORGETTING = "forgetting"
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
            UsageError: the results are those of grafts.
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
            `forgetfree.results.learning_matrix`. Of grafts, a row for each task and all else but the seed, and
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

        The interval is that of `forgetfree.results.evidence`, and the same as in a report: over seeds with n − 1, and over test
        rows, as far as the answers to them are there; a table of scores alone knows their number. In the last row, the
        difference of a seed is its mean over all tasks, because tasks of one seed are not independent.

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
            UsageError: the results are those of grafts.
            ReportError: the two have no seed in common.
        """
        self._require_runs()
        seeds = [seed for strategy, seed in self._runs() if strategy == a and (b, seed) in self._runs()]
        if not seeds:
            for strategy in (a, b):
                if strategy not in self.strategies:
                    raise UnknownNameError("strategy in these results:", strategy, self.strategies)
            raise ReportError(f"{a} and {b} have no seed in common. Run both with the same seeds.")
        evidence = self._evidence(metric, {a: seeds, b: seeds})
        rows = [_compared(evidence, a, b, task) for task in (*self.tasks, None)]
        return pd.DataFrame(rows, index=pd.Index([*self.tasks, "all tasks"], name="task"))

    def _evidence(self, metric: str, runs: Mapping[str, Sequence[int]]) -> Evidence:
        """Return what a table of scores knows of a metric at the end of the stream: by strategy, for these seeds."""

        def scores(strategy: str, seed: int) -> dict[str, RowScore]:
            ends = self.matrix(strategy, seed, metric).iloc[-1].dropna()  # checked: no score of a task is missing
            last = self._of(metric, strategy=strategy, seed=seed, after=len(self.tasks)).set_index("task")
            of_task = dict(zip(self.tasks, self._metrics(strategy, seed), strict=True))
            right = self.matrix(strategy, seed).iloc[-1]
            return {
                task: RowScore.of_value(
                    float(ends[task]),
                    str(last["metric"][task]),
                    int(last["rows"][task]),
                    float(right[task]) if of_task[task] == "accuracy" else None,
                )
                for task in ends.index
            }

        return Evidence({name: {seed: scores(name, seed) for seed in seeds} for name, seeds in runs.items()})

    def plot(self, metric: str = SCORE) -> Figure:
        """Draw a metric as its scale shows it, with a panel for each task.

        Beside the metrics of `matrix`, ``forgetting`` of runs is drawn for all tasks but the last: how far the score of a task
        is below its best since it was learned. At the end, the mean over tasks is that of `summary`.

        Of runs, it is drawn over the number of tasks that were learned, a line for each strategy: mean and range over seeds.
        Of grafts, a mark for each seed stands above what was measured.

        Raises:
            UnknownNameError: no such metric.
            ReportError: there are no scores, or a run's are not whole.
            UsageError: forgetting is asked for, and there is none of a single task, or of grafts.
        """
        from forgetfree.results.report.figures import legend, panels, styles

        if self.scores.empty:
            raise ReportError("There are no scores to draw. Load results of a job that finished at least one unit.")
        tasks, drawn = self.tasks, self
        if metric == FORGETTING:
            tasks, drawn = self.tasks[:-1], self._forgetting()
        scale = self._scale(SCORE if metric == FORGETTING else metric)
        figure, (axes,) = panels(tasks)
        for ax, task in zip(axes, tasks, strict=True):
            scores = drawn._of(metric, task=task)
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
        points = metric == FORGETTING and scale == PERCENT
        axes[0].set_ylabel(f"{metric} (points)" if points else scale.titled(metric))
        if self._are_runs:
            legend(figure, axes)
        return figure

    def _forgetting(self) -> ScoreTable:
        """Return how far each task is below its best, from where it was learned to the end."""
        self._require_runs()
        if len(self.tasks) == 1:
            raise UsageError("The stream has one task, so nothing can be forgotten. Draw its scores: plot().")
        rows = []
        for strategy, seed in self._runs():
            signs = np.array([sign(metric) for metric in self._metrics(strategy, seed)])
            scores = signs * self.matrix(strategy, seed).to_numpy()
            for place, task in enumerate(self.tasks[:-1]):
                since = scores[place + 1 :, place]
                lost = [0.0, *(np.maximum.accumulate(since)[:-1] - since[1:])]
                of: dict[str, str | int] = {"strategy": strategy, "seed": seed}
                rows += [
                    Score(of, task, after, FORGETTING, float(each), 0) for after, each in enumerate(lost, place + 1)
                ]
        return ScoreTable.of_scores(rows)

    @property
    def _are_runs(self) -> bool:
        return "strategy" in self.units and bool(self.scores["metric"].isin(task_metrics()).any())

    def _require_runs(self) -> None:
        if not self._are_runs and not self.scores.empty:
            raise UsageError("grafts have no matrix; use .summary()")

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


def _compared(evidence: Evidence, a: str, b: str, task: str | None) -> dict[str, Any]:
    """Compare two strategies on a task, or on all, see `ScoreTable.compare`; NaN where the task has no such scores."""
    pairs = len(evidence.scores[a])
    if task is not None and any(task not in scores for scores in evidence.scores[a].values()):
        return {
            **dict.fromkeys(("a", "b", "difference", "low", "high"), np.nan),
            "pairs": pairs,
            "verdict": "undecided",
        }
    gap = evidence.difference(a, b, task)
    assert gap is not None  # they share their seeds
    means = {"a": evidence.average(a, task).value, "b": evidence.average(b, task).value}
    return {**means, "difference": gap.value, "low": gap.low, "high": gap.high, "pairs": pairs, "verdict": gap.verdict}
