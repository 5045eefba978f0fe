"""Results as one table: what runs, grafts and experiments measured, to be read, summarised, compared and drawn.

>>> results = load_results("runs/a", "runs/b")  # doctest: +SKIP
>>> results.matrix("grafting-continual", seed=0)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from forgetfree.errors import ReportError, UnknownNameError, UsageError, first_line
from forgetfree.files import StrPath
from forgetfree.json_file import check_fields, read_json
from forgetfree.results import metrics
from forgetfree.results.graft_report import lay_out_graft, load_graft_results
from forgetfree.results.intervals import student
from forgetfree.results.kept import Kept
from forgetfree.results.records import REFERENCE, ExperimentResults, GraftResults, RunResults
from forgetfree.results.rendering import Page, notebook_html, render_page
from forgetfree.results.reports import lay_out
from forgetfree.results.run_results import load_run_results, merge
from forgetfree.results.scores import COLUMNS, SCORES_FILE, Score, read_scores
from forgetfree.results.stored import command_of, find_results, read_stored, task_metrics
from forgetfree.results.unit_record import check_own

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from forgetfree.core.graft import Graft
    from forgetfree.ledger import Ledger

#: The metric of a task's own: accuracy, or F1 where the task is measured by it.
SCORE = "score"
#: The first row of a learning matrix.
BEFORE = "before training"
_REMEDY = "Restore it from a copy, or go on with --resume."


def load_results(*paths: StrPath) -> Results:
    """Read what was measured.

    Args:
        paths: any of: directories that ``forgetfree run``, ``graft`` or ``experiment`` wrote, of this version or 0.2; a
            results.json; a scores.csv; a CSV file of ``forgetfree report --format csv``. Several are brought together: runs of
            one strategy whose options differ are told apart by them, ``lora (rank=8)``.

    Raises:
        ReportError: a file is missing or damaged, runs must not be compared, or one thing was measured twice with different
            outcomes.
        UsageError: there is no path, or some lead to runs of strategies and some do not.
    """
    if not paths:
        raise UsageError("load_results needs at least one path. Give what forgetfree run, graft or experiment wrote.")
    runs, scores = list[RunResults](), list[Score]()
    kept, grafts = Kept(), list[GraftResults]()
    for path in map(Path, paths):
        put_together = find_results(path).exists()
        if path.is_dir() and not put_together and not (path / "config.json").exists():
            raise ReportError(_without_results(path))
        units = sorted(path.rglob("unit.json")) if path.is_dir() and not put_together else []
        if path.name == SCORES_FILE:
            scores += _own_scores(path)
        elif units:  # interrupted before they were put together
            done = [unit for unit in units if read_json(unit, ReportError, _REMEDY, _check_unit)["status"] == "done"]
            scores += [score for unit in done for score in _own_scores(unit.with_name(SCORES_FILE))]
        elif (command := command_of(path)) == "run":
            runs.append(load_run_results(path))
        elif command == "graft":
            grafts.append(load_graft_results(path))
            scores += grafts[-1].scores()
            for graft in grafts[-1].grafts:
                kept.add(find_results(path).parent / graft.file, graft.seed, graft.sparsity)
        else:
            scores += _of_experiment(path)
    comparison = merge(runs) if runs else None
    for entry in comparison.strategies if comparison else ():
        for run in entry.runs:
            own = find_results(run.source).parent / run.strategy / f"seed-{run.seed}"
            kept.add(own / "ledger.safetensors", entry.label, run.seed)
            scores += [replace(score, of={**score.of, "strategy": entry.label}) for score in runs[0].scores_of(run)]
    if len({"strategy" in score.of for score in scores}) > 1:
        raise UsageError("Runs of strategies and other results have no table in common. Load them one by one.")
    results = Results.of_scores(scores)
    results._kept = kept
    if comparison:
        results._page = partial(lay_out, comparison)
    elif len(grafts) == 1:
        results._page = partial(lay_out_graft, grafts[0])
    return results


def _without_results(path: Path) -> str:
    """Say that a directory is not one of a job, and which directories below it are."""
    begun = {file.parent for pattern in ("*/config.json", "*/*/config.json") for file in path.glob(pattern)}
    jobs = {directory for directory in begun if next(directory.rglob("unit.json"), None)}
    jobs |= {file.parent for pattern in ("*/results.json", "*/*/results.json") for file in path.glob(pattern)}
    if not jobs:
        return f"{path} holds no results of its own. Give a directory that forgetfree run, graft or experiment wrote."
    named = ", ".join(map(str, sorted(jobs)[:3])) + (", …" if len(jobs) > 3 else "")
    return f"{path} holds no results of its own, but directories below it do: {named}. Give them one by one."


def _check_unit(record: Any) -> None:
    check_fields("", record, {"status": str})


def _own_scores(path: Path) -> list[Score]:
    """Return the scores of a file, which must be its unit's own where it lies in the folder of one."""
    scores = read_scores(path)
    check_own(path, ReportError)
    return scores


def _of_experiment(path: Path) -> list[Score]:
    results = read_stored(find_results(path), ExperimentResults.of, _REMEDY)
    try:
        return results.scores()
    except (TypeError, ValueError) as error:
        raise ReportError(
            f"{path}: a row holds no number where one was measured ({first_line(error)}). {_REMEDY}"
        ) from error


class Results:
    """A table of scores.

    Args:
        scores: one measured number a row: the columns that say of what (such as ``strategy`` and ``seed``), then ``task``,
            ``after`` (how many tasks were learned before), ``metric``, ``value`` and ``rows`` (how many were scored).

    Raises:
        ReportError: one thing was measured twice, with different outcomes, or runs scored a task on different numbers of rows.
    """

    #: Lays out the tables of the report, where there is one.
    _page: Callable[[], Page] | None = None

    def __init__(self, scores: pd.DataFrame) -> None:
        self._kept = Kept()
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
    def of_scores(cls, scores: Iterable[Score]) -> Results:
        """Return the table of scores, in their order."""
        rows = [{**s.of, **{name: getattr(s, name) for name in COLUMNS}} for s in scores]
        units = dict.fromkeys(name for row in rows for name in row if name not in COLUMNS)
        return cls(pd.DataFrame(rows, columns=[*units, *COLUMNS]))

    def __repr__(self) -> str:
        if self._page is None:
            return f"Results({len(self.scores)} scores of {', '.join(self.units) or 'nothing'})"
        page = self._page()
        return render_page(replace(page, tables=page.tables[:1]), "rich").rstrip()

    def _repr_html_(self) -> str:
        """Return the tables of the report for a notebook; of experiments, and of several grafts, the summary."""
        return self.summary().to_html() if self._page is None else notebook_html(self._page())

    def ledger(self, strategy: str = "grafting-continual", seed: int = 0) -> Ledger:
        """Return the ledger that a run left: who owns which parameter, and its value.

        Args:
            strategy: as in `matrix`.
            seed: of the run.

        Raises:
            UnknownNameError: no such strategy.
            ReportError: the strategy keeps no ledger, or there is no such seed.
        """
        if strategy not in self.strategies:
            raise UnknownNameError("strategy in these results:", strategy, self.strategies)
        found: Ledger = self._kept.get(f"ledger of {strategy} with seed {seed}", strategy, seed)
        return found

    def graft(self, seed: int = 0, sparsity: float | None = None) -> Graft:
        """Return a graft that ``graft`` made.

        Args:
            seed: of the graft.
            sparsity: of its region; default: the first.

        Raises:
            ReportError: there is none.
        """
        if sparsity is None and "sparsity" in self.units:
            sparsity = next(iter(self.scores["sparsity"].dropna().unique()), None)
        found: Graft = self._kept.get(f"graft of seed {seed} and sparsity {sparsity}", seed, sparsity)
        return found

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
            metric: ``score`` (accuracy, or F1 where the task is measured by it), or ``ece``.

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
        held = self._of(metric, strategy=strategy, seed=seed)
        table = held.pivot(index="after", columns="task", values="value")
        stages = range(len(self.tasks) + 1)
        extra, table = set(table.index) - set(stages), table.reindex(index=stages, columns=self.tasks)
        if extra or np.tril(table.isna().to_numpy(), -1).any():
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
            `forgetfree.results.metrics`. Of grafts and experiments, a row for each task and all else but the seed, and a
            column for each metric. Fractions, each with ``mean`` and ``std``.
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
            matrix, ece = self.matrix(strategy, seed), self.matrix(strategy, seed, "ece")
            known = [name for name, other in runs if other == seed and name.partition(" (")[0] == REFERENCE]
            reference = np.diagonal(self.matrix(known[0], seed).to_numpy(), offset=-1) if len(known) == 1 else None
            rows.append({"strategy": strategy, **metrics.summarize(matrix, ece, reference)})
        table = pd.DataFrame(rows).astype({name: float for name in rows[0] if name != "strategy"})
        return table.groupby("strategy", sort=False).agg(["mean", "std"])

    def compare(self, a: str, b: str, metric: str = SCORE) -> pd.DataFrame:
        """Compare two strategies at the end of the stream, in pairs of the same task and seed.

        The interval is Student's: the mean difference ± t(0.975, n − 1) · s / √n over n seeds, whose differences are taken as
        independent and nearly normal. In the last row, the difference of a seed is its mean over all tasks, because tasks of
        one seed are not independent. The interval says what other seeds would give on the same test rows and tasks, and
        nothing of other test rows.

        Args:
            a: a strategy.
            b: another.
            metric: as in `matrix`; of ``ece``, less is better.

        Returns:
            A row for each task and one for ``all tasks``: the means ``a`` and ``b``, ``difference`` a − b, ``low`` and ``high``
            of its 95 % interval (NaN where there is one seed, or where all differences are equal: no spread says nothing
            about other seeds), ``pairs`` (the number of seeds), and the ``verdict``: ``higher``, ``lower``, or ``undecided``
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
        rows = [_compared(*(end[:, i] for end in ends)) for i in range(len(self.tasks))]
        rows.append(_compared(*(end.mean(axis=1) for end in ends)))
        return pd.DataFrame(rows, index=pd.Index([*self.tasks, "all tasks"], name="task"))

    def plot(self, metric: str = SCORE) -> Figure:
        """Draw a metric, in %, with a panel for each task.

        Of runs, it is drawn over the number of tasks that were learned, a line for each strategy: mean and range over seeds.
        Of grafts and experiments, a mark for each seed stands above what was measured.

        Raises:
            UnknownNameError: no such metric.
            ReportError: there are no scores.
        """
        from forgetfree.results.figures import legend, marks, panels

        if self.scores.empty:
            raise ReportError("There are no scores to draw. Load results of a job that finished at least one unit.")
        figure, (axes,) = panels(self.tasks)
        for ax, task in zip(axes, self.tasks, strict=True):
            held = self._of(metric, task=task)
            if self._are_runs:
                for (strategy, of), style in zip(held.groupby("strategy", sort=False), marks(), strict=False):
                    spread = 100 * of.groupby("after")["value"].agg(["mean", "min", "max"])
                    ax.fill_between(
                        spread.index, spread["min"], spread["max"], color=style["color"], alpha=0.15, linewidth=0
                    )
                    ax.plot(spread.index, spread["mean"], label=str(strategy), **style)
                ax.set(xlabel="tasks learned", xticks=range(len(self.tasks) + 1))
            else:
                names = [name for name in self.units if name != "seed" and held[name].nunique(dropna=False) > 1]
                rows = held[names].itertuples(index=False)
                places = ["\n".join(str(value) for value in row if pd.notna(value)) for row in rows]
                ax.plot(places, 100 * held["value"], "o")
                ax.tick_params(axis="x", rotation=40)
        axes[0].set_ylabel(f"{metric} (%)")
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

    def _runs(self) -> list[tuple[str, int]]:
        """Return strategy and seed of each run."""
        if "strategy" not in self.units:
            return []
        pairs = self.scores[["strategy", "seed"]].drop_duplicates()
        return [(strategy, int(seed)) for strategy, seed in pairs.itertuples(index=False)]


def _compared(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Compare numbers paired by seed, see `Results.compare`."""
    difference, low, high = student(a - b)
    verdict = "higher" if low > 0 else "lower" if high < 0 else "undecided"
    return {
        **{"a": float(a.mean()), "b": float(b.mean()), "difference": difference, "low": low, "high": high},
        **{"pairs": len(a), "verdict": verdict},
    }
