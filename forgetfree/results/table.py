"""What runs measured, together: one table of scores, summarised, compared, drawn, and what a report is made of.

>>> results = load_results("runs/a", "runs/b")  # doctest: +SKIP
>>> results.matrix("grafting-continual", seed=0)  # doctest: +SKIP
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from forgetfree import registry
from forgetfree.display import NULL, PERCENT, PLAIN, brief
from forgetfree.errors import ReportError, UnknownNameError, UsageError
from forgetfree.files import StrPath
from forgetfree.options import typed
from forgetfree.results.answers import LabelAnswers, confusion, label_scores, same_rows, unpack_rows
from forgetfree.results.evidence import Evidence, RowScore
from forgetfree.results.metrics import Floats, limits_of, scale_of, sign
from forgetfree.results.runs import CONSTANT, LEARNED_FLOORS, REFERENCE, UNTRAINED, Run, RunRecord, frame_of, read_run
from forgetfree.results.scores import Score
from forgetfree.results.unit_folder import check_own

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from forgetfree.ledger import Ledger
    from forgetfree.ledger.graft import Graft

Json = dict[str, Any]
#: The metric of a task's own, such as accuracy or F1.
SCORE = "score"
#: The first row of a learning matrix.
BEFORE = "before training"
#: What goes without saying in a report.
_USUAL: Json = {"scenario": "task", "evaluated_on": "test"}
#: What of the set-up may differ between runs that stand side by side; their rows say it.
_MAY_DIFFER = ("model", "fingerprint", "graftable", "readout", "shots", "steps", "max_length")
#: What a unit may keep in a file of that name.
_KEPT = ("ledger", "graft")


@dataclass(frozen=True, eq=False)
class StrategyRuns:
    """The runs of one strategy in one configuration, one per seed.

    Attributes:
        label: the strategy's name, with the options in which it differs from its other configurations.
        runs: its runs, by rising seed.
        options: what makes the configuration: its options, and what else differs between directories.
    """

    label: str
    runs: tuple[Run, ...]
    options: Json

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return self.runs[0].strategy


def load_results(*paths: StrPath) -> Results:
    """Read what was measured.

    Args:
        paths: any of: directories that ``forgetfree run`` wrote; CSV files of ``forgetfree report --format csv``; a scores.csv.
            Several are brought together: runs of one strategy whose options differ are told apart by them, ``lora (rank=8)``.

    Raises:
        ReportError: a file is missing or damaged, runs must not be compared, or one thing was measured twice with different
            outcomes.
        UsageError: there is no path.
    """
    if not paths:
        raise UsageError("load_results needs at least one path. Give what forgetfree run wrote.")
    return Results([read_run(Path(path)) for path in paths])


class Results:
    """Runs that may stand side by side, because they learned the same tasks and were scored on the same rows.

    Args:
        records: what `read_run` returned.

    Raises:
        ReportError: the runs must not be compared, or there is one strategy and seed twice with different outcomes.

    Attributes:
        scores: one measured number a row: ``strategy``, ``seed``, ``task``, ``after`` (how many tasks were learned before),
            ``metric``, ``value`` and ``rows`` (how many were scored; 0 where it is not known).
        entries: the runs of each strategy in each configuration, in the order first seen.
        records: each run as it was read.
        stream: its name.
        tasks: in the order of learning.
        metric: what each task is scored by.
        signs: of each task, 1 where higher scores are better, else -1.
        sign: that of averages over tasks; 0 where tasks differ in it.
        scales: how the scores of each task are shown.
        scale: how averages over tasks are shown.
        settings: what all runs say alike of the set-up, for display.
        constant: per task, the best score of a constant answer; None where it is not known.
        learned_floors: by their names in tables, what is scored without fine-tuning, per task, as means over seeds.
        test_rows: per task, how many rows are scored, as far as it is known.
    """

    def __init__(self, records: Sequence[RunRecord]) -> None:
        if len(records) > 1:
            records = [replace(each, source=each.source or f"results {i}") for i, each in enumerate(records, start=1)]
        for other in records[1:]:
            _check_comparable(records[0], other)
        self.records, about = tuple(records), records[0].about
        self.stream, self.tasks = about.stream, list(about.tasks)
        self.metric = [about.metric[task] for task in about.tasks]
        self.signs, self.sign = [sign(metric) for metric in self.metric], sign(*self.metric)
        self.scales, self.scale = [scale_of(metric) for metric in self.metric], scale_of(*self.metric)
        self.test_rows: Mapping[str, int] = records[0].test_rows
        self.settings = _shared_settings(records)
        floors = next((each.about.floors for each in records if each.about.floors), None)
        self.constant: tuple[float, ...] | None = tuple(floors.constant) if floors else None
        entries = _entries(records)
        self.entries = tuple(
            replace(entry, runs=tuple(self._beside_reference(entries, entry, run) for run in entry.runs))
            for entry in entries
        )
        self.learned_floors = {} if _differing(records) else _learned_floors(records)
        tables = [run.scores for run in self.runs if len(run.scores)]
        self.scores = pd.concat(tables, ignore_index=True) if tables else frame_of([])
        self._held: dict[tuple[str, str, int], Any] = {}

    # ---- what a report reads ------------------------------------------------------------------------------

    @property
    def strategies(self) -> list[str]:
        """The strategies, in the order given, with the options that tell one's configurations apart."""
        return [entry.label for entry in self.entries]

    @property
    def runs(self) -> list[Run]:
        """The runs of all strategies."""
        return [run for entry in self.entries for run in entry.runs]

    @property
    def by_strategy(self) -> Mapping[str, StrategyRuns]:
        """The first configuration of each strategy, by its name; where it has several, their labels say which is which."""
        return {entry.strategy: entry for entry in reversed(self.entries)}

    @property
    def best_floors(self) -> list[tuple[str, float]]:
        """Of each task the name of its best floor, and its score; nothing where they are not known."""
        if self.constant is None:
            return []
        named = {CONSTANT: self.constant, **self.learned_floors}
        floors = []
        for i, better in enumerate(self.signs):
            known = [(name, score) for name, scores in named.items() if (score := scores[i]) is not None]
            floors.append((max if better == 1 else min)(known, key=itemgetter(1)))
        return floors

    def _beside_reference(self, entries: Sequence[StrategyRuns], entry: StrategyRuns, run: Run) -> Run:
        """Return a run with its label, and with what the fine-tuned models of its seed say of it.

        They are those of its own directory, or of another with equal options. Agreement is the share of test rows of each task
        whose answer is theirs, where both are kept.
        """
        tuned = [(each, its) for each in entries if each.strategy == REFERENCE for its in each.runs]
        tuned = [(each, its) for each, its in tuned if its.seed == run.seed]
        own = next((its for _, its in tuned if its.source == run.source), None)
        reference = own or next((its for each, its in tuned if _agree(entry.options, each.options)), None)
        scores = run.scores.assign(strategy=entry.label)
        if reference and not run.knows("agreement"):
            pairs = [(run.answers.get(task), reference.answers.get(task)) for task in self.tasks]
            if all(one and other and (own or same_rows(one, other)) for one, other in pairs):
                agreed = [
                    Score(entry.label, run.seed, task, len(self.tasks), "agreement", one.agreement(other), rows)
                    for task, (one, other) in zip(self.tasks, pairs, strict=True)
                    for rows in [self.test_rows.get(task, 0)]
                    if one and other
                ]
                scores = pd.concat([scores, frame_of(agreed)], ignore_index=True)
        return replace(run, scores=scores, reference=reference)

    def evidence(self, metric: str | None = None) -> Evidence:
        """Return the scores at the end of the stream with how each depends on its rows, as far as the answers are kept.

        Args:
            metric: ``ece``, or what else was measured; default: that of each task.
        """
        kept = [run.answers for run in self.runs if run.answers]
        alike = all(
            each.keys() == kept[0].keys() and all(same_rows(kept[0][task], its) for task, its in each.items())
            for each in kept[1:]
        )

        def scores(run: Run) -> Iterator[tuple[str, RowScore]]:
            """Yield each task that has such a score, with it."""
            for number, (task, own) in enumerate(zip(self.tasks, self.metric, strict=True)):
                its, rows = metric or own, self.test_rows.get(task, 0)
                value, accuracy = float(run.end(its)[number]), float(run.end("accuracy")[number])
                if np.isnan(value):
                    continue
                if alike and task in run.answers and (found := RowScore.of_answers(run.answers[task], its)):
                    yield task, found
                elif its == "accuracy" and task in run.facts.right_rows and rows:
                    yield task, RowScore.of_rows(unpack_rows(run.facts.right_rows[task], rows), "accuracy")
                else:
                    yield task, RowScore.of_value(value, its, rows, accuracy if own == "accuracy" else None)

        return Evidence({entry.label: {run.seed: dict(scores(run)) for run in entry.runs} for entry in self.entries})

    # ---- for users ----------------------------------------------------------------------------------------

    def matrix(self, strategy: str, seed: int = 0, metric: str = SCORE) -> pd.DataFrame:
        """Return the learning matrix of one run.

        Args:
            strategy: its name, with the options that tell it from others where it has several.
            seed: of the run.
            metric: ``score`` (of the task's own metric, such as accuracy or F1), ``ece``, or what else was measured, such as
                the ``loss`` on right texts.

        Returns:
            Shape (T+1, T), fractions: a row `BEFORE` training and one ``after`` each task, by its name; a column for each
            ``task``. NaN where it was not measured.

        Raises:
            UnknownNameError: no such strategy or metric.
            ReportError: there is no such seed.
        """
        run = self._run(strategy, seed)
        index = pd.Index([BEFORE, *self.tasks], name="after")
        return pd.DataFrame(self._values(run, metric), index, pd.Index(self.tasks, name="task"))

    def summary(self) -> pd.DataFrame:
        """Return mean and standard deviation (n − 1) over seeds.

        Returns:
            A row for each strategy with ``average``, ``forgetting``, ``bwt``, ``fwt``, ``intransigence`` (against `REFERENCE`
            with the same seed) and ``ece``, see `forgetfree.results.metrics`: fractions, each with ``mean`` and
            ``std``; NaN where a part is missing.
        """
        rows = [{"strategy": entry.label, **run.summary} for entry in self.entries for run in entry.runs]
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
            ReportError: the two have no seed in common.
        """
        self._values(self._entry(a).runs[0], metric)
        self._entry(b)
        scores = self.evidence(None if metric == SCORE else metric).scores
        seeds = [seed for seed in scores[a] if seed in scores[b]]
        if not seeds:
            raise ReportError(f"{a} and {b} have no seed in common. Run both with the same seeds.")
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
        """Return how each label of a task is answered at the end of the stream.

        Args:
            strategy: as in `matrix`.
            task: one whose answers are labels.
            seed: of the run.

        Returns:
            A row for each label, and one for ``macro average``, the mean of the labels that some test row has: ``precision``,
            ``recall`` and ``f1``, fractions, and ``rows``, how many test rows have it.

        Raises:
            UnknownNameError: no such strategy or task.
            ReportError: there is no such seed; answers are not there, as in a table of scores; or they are no labels.
        """
        return label_scores(*self._labelled(strategy, task, seed))

    def confusion(self, strategy: str, task: str, seed: int = 0) -> pd.DataFrame:
        """Return which labels of a task are taken for which at the end of the stream: numbers of test rows.

        Arguments and errors as those of `label_scores`.

        Returns:
            A row for each label that is right, a column for each that is answered; where the task is withheld, another for
            labels of other tasks.
        """
        return confusion(*self._labelled(strategy, task, seed))

    def plot(self, metric: str = SCORE) -> Figure:
        """Draw a metric over the number of tasks that were learned, a panel for each task: mean and range over seeds.

        Raises:
            UnknownNameError: no such metric.
            ReportError: there are no scores.
        """
        from forgetfree.results.report.figures import course, legend, panels, styles

        if self.scores.empty:
            raise ReportError("There are no scores to draw. Load results of a run that finished at least one unit.")
        scale = self.scale
        if metric != SCORE:
            shares = PERCENT if limits_of(metric) == (0, 1) else PLAIN
            scale = scale_of(metric) if metric in registry.metrics() else shares
        figure, (axes,) = panels(self.tasks)
        for entry, style in zip(self.entries, styles(len(self.entries)), strict=True):
            values = scale.factor * np.array([self._values(run, metric) for run in entry.runs])
            for place, ax in enumerate(axes):
                course(ax, values[:, :, place], style | {"label": entry.label})
        for ax in axes:
            ax.set(xlabel="tasks learned", xticks=range(len(self.tasks) + 1))
        axes[0].set_ylabel(scale.titled(metric))
        legend(figure, axes)
        return figure

    def ledger(self, strategy: str = "grafting-continual", seed: int = 0) -> Ledger:
        """Return the ledger that a run left: who owns which parameter, and its value.

        Args:
            strategy: as in `matrix`.
            seed: of the run.

        Raises:
            UnknownNameError: no such strategy.
            ReportError: the strategy keeps no ledger, or there is no such seed.
        """
        ledger: Ledger = self._kept("ledger", strategy, seed)
        return ledger

    def graft(self, seed: int = 0, strategy: str = "bare-graft") -> Graft:
        """Return a graft that ``graft`` made, or another run of one task with ``bare-graft``; errors as those of `ledger`.

        Args:
            seed: of the graft.
            strategy: as in `matrix`.
        """
        graft: Graft = self._kept("graft", strategy, seed)
        return graft

    def hold(self) -> None:
        """Read ledgers and grafts into memory, because their files will be removed."""
        self._held = {place: self._kept(*place) for place in self._places()}

    def _places(self) -> list[tuple[str, str, int]]:
        """Return of which strategies and seeds there is a ledger or a graft."""
        units = [(entry.label, run) for entry in self.entries for run in entry.runs]
        every = [(kind, label, run.seed) for label, run in units for kind in _KEPT if _file(run, kind).is_file()]
        return [*self._held, *every]

    def _kept(self, kind: str, strategy: str, seed: int) -> Any:
        run, place = self._run(strategy, seed), (kind, strategy, seed)
        if place in self._held:
            return self._held[place]
        path = _file(run, kind)
        if not path.is_file():
            there = "; ".join(f"{kind} of {label}, seed {number}" for kind, label, number in self._places())
            raise ReportError(f"There is no {kind} of {strategy} with seed {seed}. There are: {there or 'none'}.")
        from forgetfree.ledger import Ledger  # with torch, which scores do not need
        from forgetfree.ledger.graft import Graft

        check_own(path, ReportError)
        return Ledger.load(path) if kind == "ledger" else Graft.load(path)

    def __repr__(self) -> str:
        from forgetfree.results.report.page import render_page

        page = registry.REPORT.load()(self)
        return render_page(replace(page, tables=page.tables[:1]), "rich").rstrip()

    def _repr_html_(self) -> str:
        """Return the tables of the report for a notebook."""
        from forgetfree.results.report.page import notebook_html

        return notebook_html(registry.REPORT.load()(self))

    # ---- parts --------------------------------------------------------------------------------------------

    def _entry(self, strategy: str) -> StrategyRuns:
        if strategy not in self.strategies:
            raise UnknownNameError("strategy in these results:", strategy, self.strategies)
        return self.entries[self.strategies.index(strategy)]

    def _run(self, strategy: str, seed: int) -> Run:
        runs = {run.seed: run for run in self._entry(strategy).runs}
        if seed not in runs:
            raise ReportError(f"{strategy} has no seed {seed}: there are seeds {', '.join(map(str, runs))}.")
        return runs[seed]

    def _values(self, run: Run, metric: str) -> Floats:
        if metric == SCORE:
            return run.learning_matrix
        if metric not in (known := set(self.scores["metric"])):
            raise UnknownNameError("metric", metric, {*known, SCORE})
        return run.values(metric)

    def _labelled(self, strategy: str, task: str, seed: int) -> tuple[LabelAnswers, Mapping[int, str]]:
        run = self._run(strategy, seed)
        if task not in self.tasks:
            raise UnknownNameError("task in these results:", task, self.tasks)
        if not run.answers:
            raise ReportError("There are no answers beside these scores. Load the directory of a run.")
        if task not in run.probabilities or task not in run.labels:
            raise ReportError(
                f"Task {task!r} is not answered by one label a row. Take another, or read its scores by matrix()."
            )
        return run.probabilities[task], run.labels[task]


def _file(run: Run, kind: str) -> Path:
    return Path(run.source) / run.strategy / f"seed-{run.seed}" / f"{kind}.safetensors"


# ---- which runs stand side by side ----------------------------------------------------------------------


def _check_comparable(ours: RunRecord, theirs: RunRecord) -> None:
    """Raise ``ReportError`` where two runs cannot be compared task by task; it names what differs first."""
    one, other = map(_measured, (ours, theirs))
    for what in one | other:
        a, b = one.get(what), other.get(what)
        if a != b:
            raise ReportError(
                f"{ours.source} and {theirs.source} cannot be compared: {what} is {brief(a)} in one and {brief(b)} in the "
                "other. Report on them separately."
            )


def _measured(record: RunRecord) -> Json:
    """Return what was measured, in the user's words: the tasks, and each task's metric and rows."""
    about = record.about
    whole = {"the list of tasks": about.tasks, "scenario": about.scenario, "evaluated_on": about.evaluated_on}
    rows = about.data.get("fingerprints") or {}
    return whole | {
        f"{what} of {task}": of_tasks.get(task)
        for what, of_tasks in (
            ("the metric", about.metric),
            ("SHA-256 of the rows", rows),
            ("test rows", record.test_rows),
        )
        for task in about.tasks
    }


def _stated(record: RunRecord, key: str) -> Any:
    """Return what a run says of its set-up, wherever it says it; of a fingerprint the first eight digits."""
    about = record.about
    if key == "model":
        return about.model.get("name")
    places = (dict(about), about.data, about.model, about.set)
    value = next((place[key] for place in places if place.get(key) is not None), None)
    return str(value)[:8] if key == "fingerprint" else value


def _differing(records: Sequence[RunRecord]) -> list[str]:
    """Return what of the set-up differs between runs; of models of other names, nothing is said of their entries."""
    keys = [key for key in _MAY_DIFFER if len({_stated(record, key) for record in records}) > 1]
    return [key for key in keys if key not in ("fingerprint", "graftable") or "model" not in keys]


def _shared_settings(records: Sequence[RunRecord]) -> Json:
    """Return what all runs say alike of the set-up, as far as it is no default."""
    settings = []
    for record in records:
        keys = ("model", "scenario", "evaluated_on", "readout", "shots", "steps", "sparsity", *record.about.set)
        its = {key: _stated(record, key) for key in keys}
        settings.append({k: v for k, v in its.items() if isinstance(v, str | int | float) and v != _USUAL.get(k)})
    return {key: value for key, value in settings[0].items() if all(other.get(key) == value for other in settings)}


def _entries(records: Sequence[RunRecord]) -> list[StrategyRuns]:
    """Return the runs of each configuration of each strategy.

    Raises:
        ReportError: one strategy and seed has two outcomes.
    """
    telling = _differing(records)
    # strategy → its options as JSON → seed → run
    found: dict[str, dict[str, dict[int, Run]]] = {}
    for record in records:
        setup = {key: _stated(record, key) for key in telling}
        for run in record.runs:
            options = json.dumps(setup | run.facts.options, sort_keys=True)
            earlier = found.setdefault(run.strategy, {}).setdefault(options, {}).setdefault(run.seed, run)
            if run is not earlier and run.outcome != earlier.outcome:
                raise ReportError(
                    f"{run.strategy} with seed {run.seed} is in {earlier.source} and in {run.source}, with "
                    "different outcomes. Leave one of them out, or run with another seed."
                )
    entries = []
    for strategy, variants in found.items():
        options_of_each = [json.loads(variant) for variant in variants]
        labels = _labels_of(strategy, options_of_each, telling)
        for label, its, seeds in zip(labels, options_of_each, variants.values(), strict=True):
            entries.append(StrategyRuns(label, tuple(seeds[seed] for seed in sorted(seeds)), its))
    return entries


def _labels_of(strategy: str, variants: Sequence[Json], always: Sequence[str]) -> Iterator[str]:
    """Yield for each configuration the strategy's name, with the options that are not the same in all, or always told.

    An option that is set to nothing goes without saying, unless that is all there is to tell.
    """
    keys = dict.fromkeys(key for variant in variants for key in variant)
    for options in variants:
        telling = [k for k in keys if k in always or any(other.get(k) != options.get(k) for other in variants)]
        telling = [k for k in telling if k not in options or options[k] is not None] or telling
        told = ", ".join(f"{key}={typed(options[key]) if key in options else NULL}" for key in telling)
        yield f"{strategy} ({told})" if told else strategy


def _agree(ours: Json, theirs: Json) -> bool:
    return all(ours[key] == theirs[key] for key in ours.keys() & theirs.keys())


# ---- floors ---------------------------------------------------------------------------------------------


def floors_by_seed(records: Sequence[RunRecord]) -> dict[str, dict[str, list[float | None]]]:
    """Return the floors that were fitted to training rows: by name and seed, those of each task."""
    floors: dict[str, dict[str, list[float | None]]] = {}
    for name in LEARNED_FLOORS:
        for record in records:
            if record.about.floors and (of_seeds := getattr(record.about.floors, name)):
                floors[name] = floors.get(name, {}) | of_seeds
    return floors


def _learned_floors(records: Sequence[RunRecord]) -> dict[str, tuple[float | None, ...]]:
    """Return floors that some task has, by their names in tables: of each task the mean over seeds, where all have it."""
    floors = {}
    for name, its in floors_by_seed(records).items():
        floors[LEARNED_FLOORS[name]] = tuple(map(mean_of_known, zip(*its.values(), strict=True)))
    texts = [run for each in records for run in each.runs if each.about.model.get("readout") == "generate"]
    rows = [run.learning_matrix[0] for run in texts]  # a model that writes texts may know the tasks already
    if rows and not np.isnan(rows).any():
        floors[UNTRAINED] = tuple(fmean(scores) for scores in zip(*rows, strict=True))
    return {name: scores for name, scores in floors.items() if any(score is not None for score in scores)}


def mean_of_known(scores: Sequence[float | None]) -> float | None:
    """Return the mean; ``None`` where one is missing."""
    return None if None in scores else fmean(score for score in scores if score is not None)
