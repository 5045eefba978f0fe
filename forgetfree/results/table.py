"""The scores of runs in one table: summaries, comparisons, plots, and the source of reports.

>>> results = load_results("runs/a", "runs/b")  # doctest: +SKIP
>>> results.matrix("grafting-continual", seed=0)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from forgetfree import registry
from forgetfree.display import PERCENT, PLAIN
from forgetfree.errors import RunError, UnknownNameError, UsageError
from forgetfree.files import StrPath
from forgetfree.results.answers import LabelAnswers, confusion, label_scores, same_rows, unpack_rows
from forgetfree.results.configurations import (
    check_comparable,
    configurations_of,
    differing_settings,
    references_of,
    shared_settings,
)
from forgetfree.results.evidence import Evidence, Interval, RowScore, forgetting
from forgetfree.results.metrics import Floats, limits_of, scale_of, sign, summarize
from forgetfree.results.run_folder import Score, check_own
from forgetfree.results.runs import (
    CONSTANT,
    LEARNED_FLOORS,
    UNIT,
    UNTRAINED,
    Run,
    RunRecord,
    frame_of,
    read_run,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from forgetfree.ledger.graft import Graft
    from forgetfree.ledger.ledger import Ledger

Json = dict[str, Any]
#: The task's own metric, such as accuracy or F1.
SCORE = "score"
#: The first row of a learning matrix.
BEFORE = "before training"
#: The objects that a unit may store in a file of that name.
_KEPT = ("ledger", "graft")


def load_results(*paths: StrPath) -> Results:
    """Load the results of runs.

    >>> results = load_results("runs/first", "runs/second")  # doctest: +SKIP

    Args:
        paths: any of: directories that ``forgetfree run`` wrote; CSV files of ``forgetfree report --format csv``; a scores.csv.
            Several are combined: runs of a strategy with different options are distinguished by them, as in ``lora (rank=8)``.

    Raises:
        RunError: a file is missing or damaged, runs are not comparable, or the same unit was measured twice with different
            outcomes.
        UsageError: there is no path.
    """
    if not paths:
        raise UsageError("load_results needs at least one path. Give a directory that forgetfree run wrote.")
    return Results([read_run(Path(path)) for path in paths])


class Results:
    """Results of comparable runs, which learned the same tasks and were scored on the same rows.

    >>> results = load_results("runs/first")  # doctest: +SKIP
    >>> results.matrix("grafting-continual", seed=0)  # doctest: +SKIP
    >>> results.compare("grafting-continual", "continual-ft")  # doctest: +SKIP

    Args:
        records: the results of `read_run`.

    Raises:
        RunError: the runs are not comparable, or a strategy and seed occurs twice with different outcomes.

    Attributes:
        scores: one number per row: ``strategy``, ``seed``, ``task``, ``after`` (the number of tasks learned before),
            ``metric``, ``value`` and ``rows`` (the number of rows scored; 0 if unknown). All tables and figures are
            computed from it. If runs of a strategy differ in options or set-up, its name includes the differences.
        units: further facts about each run, by strategy, as in ``scores``, and ascending seed.
        records: each run as it was read.
        stream: the name of the stream.
        tasks: the tasks in the order of learning.
        metric: the metric of each task.
        signs: for each task, 1 if higher scores are better, else -1.
        sign: the sign of averages over tasks; 0 if the tasks' signs differ.
        scales: the display scale of each task's scores.
        scale: the display scale of averages over tasks.
        settings: the settings that all runs share, for display.
        constant: per task, the best score of a constant answer; None if unknown.
        learned_floors: baselines that are fitted without fine-tuning, by their names in tables: per task, means over seeds.
        test_rows: per task, the number of rows scored, if known.
    """

    def __init__(self, records: Sequence[RunRecord]) -> None:
        if len(records) > 1:
            records = [replace(each, source=each.source or f"results {i}") for i, each in enumerate(records, start=1)]
        for other in records[1:]:
            check_comparable(records[0], other)
        self.records, about = tuple(records), records[0].about
        self.stream, self.tasks = about.stream, list(about.tasks)
        self.metric = [about.metric[task] for task in about.tasks]
        self.signs, self.sign = [sign(metric) for metric in self.metric], sign(*self.metric)
        self.scales, self.scale = [scale_of(metric) for metric in self.metric], scale_of(*self.metric)
        self.test_rows: Mapping[str, int] = records[0].test_rows
        self.settings = shared_settings(records)
        floors = next((each.about.floors for each in records if each.about.floors), None)
        self.constant: tuple[float, ...] | None = tuple(floors.constant) if floors else None
        found = configurations_of(records)
        self.units = {label: {seed: run for seed, (run, _) in units.items()} for label, (_, units) in found.items()}
        self._references = references_of(found)
        tables = [
            self._with_agreement(label, run, record.scores_of(run))
            for label, (_, units) in found.items()
            for run, record in units.values()
        ]
        self.scores = pd.concat(tables, ignore_index=True) if tables else frame_of([])
        self.learned_floors = {} if differing_settings(records) else self._learned_floors()
        self._held: dict[tuple[str, str, int], Any] = {}

    def _with_agreement(self, label: str, run: Run, scores: pd.DataFrame) -> pd.DataFrame:
        """Return the scores of a run under its label, with its agreement with the fine-tuned models, if both keep answers.

        Agreement is the share of test rows of each task with equal answers.
        """
        scores = scores.assign(strategy=label)
        if (place := self._references.get((label, run.seed))) is None or (scores["metric"] == "agreement").any():
            return scores
        reference = self.units[place][run.seed]
        pairs = [(run.answers.get(task), reference.answers.get(task)) for task in self.tasks]
        same_run = reference.source == run.source
        if not all(one and other and (same_run or same_rows(one, other)) for one, other in pairs):
            return scores
        agreed = [
            Score(label, run.seed, task, len(self.tasks), "agreement", one.agreement(other), rows)
            for task, (one, other) in zip(self.tasks, pairs, strict=True)
            for rows in [self.test_rows.get(task, 0)]
            if one and other
        ]
        return pd.concat([scores, frame_of(agreed)], ignore_index=True)

    # ---- the frame, by run --------------------------------------------------------------------------------

    @cached_property
    def _matrices(self) -> dict[Any, Floats]:
        """The values by strategy, seed and metric, each (T+1, T); the tasks' own metrics also under `SCORE`."""
        own = self.scores[self.scores["metric"] == self.scores["task"].map(self.records[0].about.metric)]
        matrices, places = {}, {task: place for place, task in enumerate(self.tasks)}
        for key, its in pd.concat([self.scores, own.assign(metric=SCORE)]).groupby([*UNIT, "metric"], sort=False):
            matrices[key] = np.full((len(places) + 1, len(places)), np.nan)
            matrices[key][its["after"], its["task"].map(places)] = its["value"]
        return matrices

    def values(self, strategy: str, seed: int, metric: str = SCORE) -> Floats:
        """Return the values of a run by a metric, by default its learning matrix: (T+1, T), NaN if not measured."""
        none = np.full((len(self.tasks) + 1, len(self.tasks)), np.nan)
        return self._matrices.get((strategy, seed, metric), none)

    def matrices(self, strategy: str, metric: str = SCORE) -> Floats:
        """Return `values` of all seeds of a strategy, shape (S, T+1, T)."""
        return np.stack([self.values(strategy, seed, metric) for seed in self.units[strategy]])

    def summary_of(self, strategy: str, seed: int) -> dict[str, float | None]:
        """Return the six numbers of `summary` for one run; None if a part is missing."""
        tuned = self._references.get((strategy, seed))
        learned = np.diagonal(self.values(tuned, seed), -1) if tuned else None
        errors = self.values(strategy, seed, "ece")[-1]
        known = errors[~np.isnan(errors)]  # of tasks whose answers have probabilities
        six = summarize(self.values(strategy, seed), learned, self.metric)
        return six | {"ece": float(known.mean()) if len(known) else None}

    # ---- for reports --------------------------------------------------------------------------------------

    @property
    def strategies(self) -> list[str]:
        """The strategies, in the order given, with the options that distinguish configurations."""
        return list(self.units)

    @property
    def runs(self) -> list[Run]:
        """Facts and answers of all runs."""
        return [run for runs in self.units.values() for run in runs.values()]

    def first_of(self, strategy: str) -> str | None:
        """Return the label of a strategy's first configuration, or ``None``."""
        return next(
            (label for label, runs in self.units.items() if next(iter(runs.values())).strategy == strategy), None
        )

    @property
    def best_floors(self) -> list[tuple[str, float]]:
        """The name and score of each task's best floor; empty if floors are unknown."""
        if self.constant is None:
            return []
        named = {CONSTANT: self.constant, **self.learned_floors}
        floors = []
        for i, better in enumerate(self.signs):
            known = [(name, score) for name, scores in named.items() if (score := scores[i]) is not None]
            floors.append((max if better == 1 else min)(known, key=itemgetter(1)))
        return floors

    def evidence(self, metric: str | None = None) -> Evidence:
        """Return the final scores, with the contributions of their rows if the answers are kept.

        Args:
            metric: ``ece`` or another measured metric; default: the metric of each task.
        """
        kept = [run.answers for run in self.runs if run.answers]
        alike = all(
            each.keys() == kept[0].keys() and all(same_rows(kept[0][task], its) for task, its in each.items())
            for each in kept[1:]
        )

        def scores(label: str, run: Run) -> Iterator[tuple[str, RowScore]]:
            """Yield each task that has such a score, with the score."""
            at_end = self.values(label, run.seed, metric or SCORE)[-1]
            accuracies = self.values(label, run.seed, "accuracy")[-1]
            for task, own, value, accuracy in zip(self.tasks, self.metric, at_end, accuracies, strict=True):
                its, rows = metric or own, self.test_rows.get(task, 0)
                if np.isnan(value):
                    continue
                if alike and task in run.answers and (found := RowScore.of_answers(run.answers[task], its)):
                    yield task, found
                elif its == "accuracy" and task in run.facts.right_rows and rows:
                    yield task, RowScore.of_rows(unpack_rows(run.facts.right_rows[task], rows), "accuracy")
                else:
                    known = float(accuracy) if own == "accuracy" else None
                    yield task, RowScore.of_value(float(value), its, rows, known)

        return Evidence(
            {
                label: {seed: dict(scores(label, run)) for seed, run in runs.items()}
                for label, runs in self.units.items()
            }
        )

    def _learned_floors(self) -> dict[str, tuple[float | None, ...]]:
        """Return the floors by their names in tables: for each task the mean over seeds, or None if a seed has none."""
        floors = {
            LEARNED_FLOORS[name]: tuple(map(mean_of_known, zip(*its.values(), strict=True)))
            for name, its in floors_by_seed(self.records).items()
        }
        if self.records[0].about.model.get("readout") == "generate" and len(self.scores):
            # A model that generates texts may solve the tasks already.
            rows = np.concatenate([self.matrices(label)[:, 0] for label in self.units])
            if not np.isnan(rows).any():
                floors[UNTRAINED] = tuple(fmean(scores) for scores in zip(*rows, strict=True))
        return {name: scores for name, scores in floors.items() if any(score is not None for score in scores)}

    def forgetting(self, strategy: str) -> Interval:
        """Return the forgetting of a strategy with its interval, see `forgetfree.results.evidence.forgetting`."""
        return forgetting(self.matrices(strategy), self.metric, [self.test_rows.get(task, 0) for task in self.tasks])

    # ---- for users ----------------------------------------------------------------------------------------

    def matrix(self, strategy: str, seed: int = 0, metric: str = SCORE) -> pd.DataFrame:
        """Return the learning matrix of one run.

        Args:
            strategy: its name, including the options that distinguish several configurations.
            seed: seed of the run.
            metric: ``score`` (of the task's own metric, such as accuracy or F1), ``ece``, or another measured metric, such as
                the ``loss`` on right texts.

        Returns:
            Shape (T+1, T), fractions: a row `BEFORE` training and one ``after`` each task, by its name; one column per
            ``task``. NaN if it was not measured.

        Raises:
            UnknownNameError: no such strategy or metric.
            RunError: there is no such seed.
        """
        self._run(strategy, seed)
        self._check_metric(metric)
        index = pd.Index([BEFORE, *self.tasks], name="after")
        return pd.DataFrame(self.values(strategy, seed, metric), index, pd.Index(self.tasks, name="task"))

    def summary(self) -> pd.DataFrame:
        """Return mean and standard deviation (n − 1) over seeds.

        Returns:
            A row for each strategy with ``average``, ``forgetting``, ``bwt``, ``fwt`` (against `REFERENCE` with the same
            seed), ``zero_shot_gain`` and ``ece``, see `forgetfree.results.metrics`: fractions, each with ``mean`` and
            ``std``; NaN where a part is missing.
        """
        units = [(label, seed) for label, runs in self.units.items() for seed in runs]
        rows = pd.DataFrame([self.summary_of(*unit) for unit in units], [label for label, _ in units], dtype=float)
        return rows.rename_axis("strategy").groupby("strategy", sort=False).agg(["mean", "std"])

    def compare(self, a: str, b: str, metric: str = SCORE) -> pd.DataFrame:
        """Compare the final scores of two strategies, paired by task and seed.

        The interval is computed by `forgetfree.results.evidence`, as in a report: over seeds with n − 1, and over test rows, by
        the answers if they are kept; a table of scores has only the number of rows. In the last row, the difference of a seed
        is its mean over all tasks, because tasks of one seed are not independent.

        Args:
            a: a strategy.
            b: another.
            metric: as in `matrix`; for ``ece``, lower is better.

        Returns:
            A row for each task and one for ``all tasks``: the means ``a`` and ``b``, ``difference`` a − b, ``low`` and ``high``
            of its 95 % interval (NaN with one seed, or if nothing varies, which is no evidence about other seeds),
            ``pairs`` (the number of seeds), and the ``verdict``: ``higher``, ``lower``, or ``undecided`` if the interval
            contains 0 or is NaN.

        Raises:
            UnknownNameError: no such strategy or metric.
            RunError: the two have no seed in common.
        """
        for each in (a, b):
            self._check_strategy(each)
        self._check_metric(metric)
        scores = self.evidence(None if metric == SCORE else metric).scores
        seeds = [seed for seed in scores[a] if seed in scores[b]]
        if not seeds:
            raise RunError(f"{a} and {b} have no seed in common. Run both with the same seeds.")
        evidence = Evidence({each: {seed: scores[each][seed] for seed in seeds} for each in (a, b)})
        rows = []
        for task in (*self.tasks, None):
            if task is None or all(task in of_tasks for of_tasks in evidence.scores[a].values()):
                gap = evidence.difference(a, b, task)
                assert gap is not None  # they share their seeds
                means = (evidence.average(each, task).value for each in (a, b))
                rows.append((*means, gap.value, gap.low, gap.high, len(seeds), gap.verdict))
            else:
                rows.append((*[np.nan] * 5, len(seeds), "undecided"))
        index = pd.Index([*self.tasks, "all tasks"], name="task")
        return pd.DataFrame(rows, index, ["a", "b", "difference", "low", "high", "pairs", "verdict"])

    def label_scores(self, strategy: str, task: str, seed: int = 0) -> pd.DataFrame:
        """Return the final precision, recall and F1 of each label of a task.

        Args:
            strategy: as in `matrix`.
            task: a task with one or more labels per row.
            seed: seed of the run.

        Returns:
            A row for each label, and one for ``macro average``, the mean of the labels that some test row has: ``precision``,
            ``recall`` and ``f1``, fractions, and ``rows``, the number of test rows with the label.

        Raises:
            UnknownNameError: no such strategy or task.
            RunError: there is no such seed; there are no answers, as in a table of scores; or they are not labels.
        """
        return label_scores(*self._labelled(strategy, task, seed))

    def confusion(self, strategy: str, task: str, seed: int = 0) -> pd.DataFrame:
        """Return the final confusion matrix of a task: the number of test rows for each pair of label and prediction.

        Arguments and errors as for `label_scores`.

        Returns:
            A row for each label, a column for each prediction; if the task is unknown at inference, another column for
            labels of other tasks.
        """
        answers, names = self._labelled(strategy, task, seed)
        if answers.compared[0].ndim > 1:
            raise RunError(f"Task {task!r} is multi-label, so it has no confusion matrix. Use label_scores.")
        return confusion(answers, names)

    def plot(self, metric: str = SCORE) -> Figure:
        """Plot a metric over the number of learned tasks, with a panel for each task: mean and range over seeds.

        For more than ten tasks, only the first task and the mean of all tasks so far are plotted. Dotted: a constant answer.

        Raises:
            UnknownNameError: no such metric.
            RunError: there are no scores.
        """
        from forgetfree.results.report.figures import curves

        if self.scores.empty:
            raise RunError("There are no scores to draw. Load results of a run that finished at least one unit.")
        self._check_metric(metric)
        scales = self.scales
        if metric != SCORE:
            shares = PERCENT if limits_of(metric) == (0, 1) else PLAIN
            scales = [scale_of(metric) if metric in registry.metrics() else shares] * len(self.tasks)
        values = {label: self.matrices(label, metric) for label in self.strategies}
        return curves(self.tasks, values, scales, metric, self.constant if metric == SCORE else None)

    def ledger(self, strategy: str = "grafting-continual", seed: int = 0) -> Ledger:
        """Return the ledger of a run: the owner and the value of each trained entry.

        Args:
            strategy: as in `matrix`.
            seed: seed of the run.

        Raises:
            UnknownNameError: no such strategy.
            RunError: the strategy has no ledger, or there is no such seed.
        """
        ledger: Ledger = self._kept("ledger", strategy, seed)
        return ledger

    def graft(self, seed: int = 0, strategy: str = "bare-graft") -> Graft:
        """Return the graft of ``graft``, or of another run of one task with ``bare-graft``; errors as for `ledger`.

        Args:
            seed: seed of the graft.
            strategy: as in `matrix`.
        """
        graft: Graft = self._kept("graft", strategy, seed)
        return graft

    def hold(self) -> None:
        """Read ledgers and grafts into memory, because their files will be removed."""
        units = [(label, seed, run) for label, runs in self.units.items() for seed, run in runs.items()]
        every = [(kind, label, seed) for label, seed, run in units for kind in _KEPT if _file(run, kind).is_file()]
        self._held = {place: self._kept(*place) for place in every}

    def _kept(self, kind: str, strategy: str, seed: int) -> Any:
        run, place = self._run(strategy, seed), (kind, strategy, seed)
        if place in self._held:
            return self._held[place]
        path = _file(run, kind)
        if not path.is_file():
            raise RunError(f"There is no {kind} of {strategy} with seed {seed}. Choose a strategy that stores one.")
        from forgetfree.ledger.graft import Graft
        from forgetfree.ledger.ledger import Ledger  # with torch, which scores do not need

        check_own(path)
        return Ledger.load(path) if kind == "ledger" else Graft.load(path)

    def __repr__(self) -> str:
        from forgetfree.results.report.page import render_page

        page = registry.REPORT.load()(self)
        return render_page(replace(page, tables=page.tables[:1]), "rich").rstrip()

    # ---- parts --------------------------------------------------------------------------------------------

    def _run(self, strategy: str, seed: int) -> Run:
        self._check_strategy(strategy)
        runs = self.units[strategy]
        if seed not in runs:
            raise RunError(f"{strategy} has no seed {seed}; its seeds are {', '.join(map(str, runs))}.")
        return runs[seed]

    def _check_strategy(self, strategy: str) -> None:
        if strategy not in self.units:
            raise UnknownNameError("strategy in these results:", strategy, self.strategies)

    def _check_metric(self, metric: str) -> None:
        known = {SCORE, *self.scores["metric"]}
        if metric not in known:
            raise UnknownNameError("metric", metric, known)

    def _labelled(self, strategy: str, task: str, seed: int) -> tuple[LabelAnswers, Mapping[int, str]]:
        run = self._run(strategy, seed)
        if task not in self.tasks:
            raise UnknownNameError("task in these results:", task, self.tasks)
        if not run.answers:
            raise RunError("These scores come without predictions. Load the directory of a run.")
        if task not in run.probabilities or task not in run.labels:
            raise RunError(
                f"The predictions for task {task!r} are not labels of rows. Choose another task, or read its "
                "scores with matrix()."
            )
        return run.probabilities[task], run.labels[task]


def _file(run: Run, kind: str) -> Path:
    return Path(run.source) / run.strategy / f"seed-{run.seed}" / f"{kind}.safetensors"


# ---- floors ---------------------------------------------------------------------------------------------


def floors_by_seed(records: Sequence[RunRecord]) -> dict[str, dict[str, list[float | None]]]:
    """Return the floors that were fitted to training rows: by name and seed, one per task."""
    floors: dict[str, dict[str, list[float | None]]] = {}
    for name in LEARNED_FLOORS:
        for record in records:
            if record.about.floors and (of_seeds := getattr(record.about.floors, name)):
                floors[name] = floors.get(name, {}) | of_seeds
    return floors


def mean_of_known(scores: Sequence[float | None]) -> float | None:
    """Return the mean; ``None`` if a score is missing."""
    return None if None in scores else fmean(score for score in scores if score is not None)
