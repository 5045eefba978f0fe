"""What jobs wrote, read together: the scores as one table, and the ledgers and grafts beside them.

>>> results = load_results("runs/a", "runs/b")  # doctest: +SKIP
>>> results.matrix("grafting-continual", seed=0)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.errors import ReportError, UnknownNameError, UsageError
from forgetfree.files import StrPath
from forgetfree.json_file import check_fields, read_json
from forgetfree.results.comparison import Comparison, merge, with_files
from forgetfree.results.evidence import Evidence
from forgetfree.results.label_scores import LabelScores
from forgetfree.results.report.page import Page, notebook_html, render_page
from forgetfree.results.report.run_report import lay_out
from forgetfree.results.run_results import RunResults
from forgetfree.results.scores import SCORES_FILE, Score, read_scores
from forgetfree.results.stored import find_results, load_run_results
from forgetfree.results.table import SCORE, ScoreTable
from forgetfree.results.unit_folder import check_own

if TYPE_CHECKING:
    import pandas as pd

    from forgetfree.ledger import Ledger
    from forgetfree.ledger.graft import Graft

_REMEDY = "Restore it from a copy, or go on with --resume."


def load_results(*paths: StrPath) -> Results:
    """Read what was measured.

    Args:
        paths: any of: directories that ``forgetfree run`` or ``graft`` wrote; a results.json; a
            scores.csv; a CSV file of ``forgetfree report --format csv``. Several are brought together: runs of one strategy
            whose options differ are told apart by them, ``lora (rank=8)``.

    Raises:
        ReportError: a file is missing or damaged, runs must not be compared, or one thing was measured twice with different
            outcomes.
        UsageError: there is no path, or some lead to runs of strategies and some do not.
    """
    if not paths:
        raise UsageError("load_results needs at least one path. Give what forgetfree run or graft wrote.")
    runs, scores = list[RunResults](), list[Score]()
    artifacts = _Artifacts()
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
        else:
            runs.append(load_run_results(path))
    comparison = merge(runs) if runs else None
    for entry in comparison.strategies if comparison else ():
        for run in entry.runs:
            own = find_results(run.source).parent / run.strategy / f"seed-{run.seed}"
            artifacts.add(own / "ledger.safetensors", entry.label, run.seed)
            artifacts.add(own / "graft.safetensors", "graft", entry.label, run.seed)
            scores += [replace(score, of={**score.of, "strategy": entry.label}) for score in runs[0].scores_of(run)]
    if len({"strategy" in score.of for score in scores}) > 1:
        raise UsageError("Runs of strategies and other results have no table in common. Load them one by one.")
    results = Results.of_scores(scores)
    results._artifacts = artifacts
    if comparison:
        results._with_answers = with_answers = cache(partial(with_files, comparison))
        results._page = lambda: lay_out(with_answers(), ended=False)
    return results


def _without_results(path: Path) -> str:
    """Say that a directory is not one of a job, and which directories below it are."""
    begun = {file.parent for pattern in ("*/config.json", "*/*/config.json") for file in path.glob(pattern)}
    jobs = {directory for directory in begun if next(directory.rglob("unit.json"), None)}
    jobs |= {file.parent for pattern in ("*/results.json", "*/*/results.json") for file in path.glob(pattern)}
    if not jobs:
        return f"{path} holds no results of its own. Give a directory that forgetfree run or graft wrote."
    named = ", ".join(map(str, sorted(jobs)[:3])) + (", …" if len(jobs) > 3 else "")
    return f"{path} holds no results of its own, but directories below it do: {named}. Give them one by one."


def _check_unit(record: Any) -> None:
    check_fields("", record, {"status": str})


def _own_scores(path: Path) -> list[Score]:
    """Return the scores of a file, which must be its unit's own where it lies in the folder of one."""
    scores = read_scores(path)
    check_own(path, ReportError)
    return scores


class Results(ScoreTable):
    """A table of scores, with the ledgers and grafts that stand beside it, and the report that was made of it.

    Args:
        scores: see `ScoreTable`.
    """

    #: Lays out the tables of the report, where there is one.
    _page: Callable[[], Page] | None = None
    #: Reads the answers that lie beside the scores of runs, once.
    _with_answers: Callable[[], Comparison] | None = None

    def __init__(self, scores: pd.DataFrame) -> None:
        super().__init__(scores)
        self._artifacts = _Artifacts()

    def hold(self) -> None:
        """Read the ledgers, grafts and answers into memory, because their files will be removed."""
        self._artifacts.hold()
        if self._with_answers is not None:
            self._with_answers()

    def __repr__(self) -> str:
        if self._page is None:
            return f"Results({len(self.scores)} scores of {', '.join(self.units) or 'nothing'})"
        page = self._page()
        return render_page(replace(page, tables=page.tables[:1]), "rich").rstrip()

    def _repr_html_(self) -> str:
        """Return the tables of the report for a notebook; of a table of scores, the summary."""
        return self.summary().to_html() if self._page is None else notebook_html(self._page())

    def _evidence(self, metric: str, runs: Mapping[str, Sequence[int]]) -> Evidence:
        """Return that of a table of scores, with the answers to single rows where they are there, as a report has it."""
        evidence, name = super()._evidence(metric, runs), "ece" if metric == "ece" else None
        if self._with_answers is None:
            return evidence
        comparison = self._with_answers()
        known = Evidence.of(comparison, name).scores
        same = [
            task for task, its in zip(comparison.tasks, comparison.metric, strict=True) if metric in (SCORE, its, name)
        ]
        for strategy, of_seeds in evidence.scores.items():
            for seed, scores in of_seeds.items():
                its = known.get(strategy, {}).get(seed, {})
                scores |= {task: its[task] for task in same if task in its}
        return evidence

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
        import pandas as pd

        scores = self._label_scores(strategy, task, seed)
        columns = {"precision": scores.precision, "recall": scores.recall, "f1": scores.f1, "rows": scores.rows}
        table = pd.DataFrame(columns, index=pd.Index(scores.names, name="label"))
        table.loc["macro average"] = [*scores.macro, scores.rows.sum()]
        return table.astype({"rows": int})

    def confusion(self, strategy: str, task: str, seed: int = 0) -> pd.DataFrame:
        """Return which labels of a task are taken for which at the end of the stream: numbers of test rows.

        Arguments and errors as those of `label_scores`.

        Returns:
            A row for each label that is right, a column for each that is answered; where the task is withheld, another for
            labels of other tasks.
        """
        import pandas as pd

        scores = self._label_scores(strategy, task, seed)
        index, columns = pd.Index(scores.names, name="right"), pd.Index(scores.names, name="answered")
        table = pd.DataFrame(scores.confusion, index, columns)
        return table.assign(**{"another task's": scores.elsewhere}) if scores.elsewhere.any() else table

    def _label_scores(self, strategy: str, task: str, seed: int) -> LabelScores:
        for what, name, known in (("strategy", strategy, self.strategies), ("task", task, self.tasks)):
            if name not in known:
                raise UnknownNameError(f"{what} in these results:", name, known)
        entries = self._with_answers().strategies if self._with_answers is not None else ()
        units = {
            run.seed: unit
            for entry in entries
            if entry.label == strategy
            for run, unit in zip(entry.runs, entry.files, strict=True)
        }
        if units and seed not in units:
            raise ReportError(f"{strategy} has no seed {seed}: there are seeds {', '.join(map(str, units))}.")
        if not units or not (units[seed].answers or units[seed].texts):
            fault = units[seed].faults.get("Answers", "") if units else ""
            raise ReportError(fault or "There are no answers beside these scores. Load the directory of a run.")
        unit = units[seed]
        if task not in unit.answers or task not in unit.labels:
            raise ReportError(
                f"Task {task!r} is not answered by one label a row. Take another, or read its scores by matrix()."
            )
        return LabelScores.of(unit.answers[task], unit.labels[task])

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
        artifact: Ledger = self._artifacts.get(f"ledger of {strategy} with seed {seed}", strategy, seed)
        return artifact

    def graft(self, seed: int = 0, strategy: str = "bare-graft") -> Graft:
        """Return a graft that ``graft`` made, or another run of one task with ``bare-graft``.

        Args:
            seed: of the graft.
            strategy: as in `matrix`.

        Raises:
            ReportError: there is none.
        """
        artifact: Graft = self._artifacts.get(f"graft of {strategy} with seed {seed}", "graft", strategy, seed)
        return artifact


class _Artifacts:
    """Ledgers and grafts by strategy and seed: read from files when asked for, or held in memory."""

    def __init__(self) -> None:
        self._files: dict[tuple[Hashable, ...], Path] = {}
        self._held: dict[tuple[Hashable, ...], Any] = {}

    def add(self, path: Path, *key: Hashable) -> None:
        """Note where something may be found."""
        self._files[key] = path

    def hold(self) -> None:
        """Read all that is there into memory, because the files will be removed."""
        self._held = {key: _read(path) for key, path in self._files.items() if path.is_file()}
        self._files.clear()

    def get(self, what: str, *key: Hashable) -> Any:
        """Return a ledger or a graft.

        Args:
            what: its name in a message.
            key: as it was added.

        Raises:
            ReportError: there is none, or its file is that of another seed or run.
            LedgerError, GraftError: its file is damaged.
        """
        if key in self._held:
            return self._held[key]
        if key in self._files and self._files[key].is_file():
            check_own(self._files[key], ReportError)
            return _read(self._files[key])
        known = [*self._held, *(other for other, path in self._files.items() if path.is_file())]
        listed = "; ".join(" ".join(map(str, each)) for each in known) or "none"
        raise ReportError(f"There is no {what}. There are: {listed}.")


def _read(path: Path) -> Ledger | Graft:
    from forgetfree.ledger import Ledger
    from forgetfree.ledger.graft import Graft  # with torch, which a table of scores does not need

    return Ledger.load(path) if path.name.startswith("ledger") else Graft.load(path)
