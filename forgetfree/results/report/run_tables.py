"""The tables of runs: which numbers stand in which column, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from forgetfree.display import NULL, PERCENT, Scale
from forgetfree.results.comparison import Comparison, StrategyRuns
from forgetfree.results.metrics import scale_of, sign
from forgetfree.results.records import CONSTANT
from forgetfree.results.report.evidence_tables import Units, evidence_tables
from forgetfree.results.report.legend import meanings
from forgetfree.results.report.page import WIDE, Table, cell, percent, titled, transposed, with_best, without_columns
from forgetfree.results.run_results import LedgerSummary, Run
from forgetfree.tasks import version_of

#: A number of a run, by row and column of a table.
Value = Callable[[Run, int, int], float | None]
Show = Callable[[float], str]


class Columns(NamedTuple):
    """Columns of one kind.

    Attributes:
        headers: their names.
        value: their numbers.
        show: how these are written; or how those of each column are.
        better: 1 where more is better, -1 where less is, 0 where neither is; or one of these for each column.
        legend: under which name `MEANINGS` says what they mean.
    """

    headers: Sequence[str]
    value: Value
    show: Show | Sequence[Show]
    better: int | Sequence[int] = 0
    legend: str = ""

    @property
    def shows(self) -> Sequence[Show]:
        """Return `show` of each column."""
        return [self.show] * len(self.headers) if callable(self.show) else self.show

    @property
    def signs(self) -> Sequence[int]:
        """Return `better` of each column."""
        return [self.better] * len(self.headers) if isinstance(self.better, int) else self.better


#: Streams longer than this show how things grow with the number of tasks.
_LONG = 5
_OUTCOME = "After the last task"


def tables_of(comparison: Comparison, units: Units) -> list[Table]:
    """Return all tables of a report, in the order in which they are read.

    Args:
        comparison: what `merge` returned.
        units: the files of its units; without them, tables that are made of answers are left out.
    """
    strategies, wide = comparison.strategies, len(comparison.tasks) > WIDE
    matrix_table = _course_table if wide else _matrix_table
    by_task = [_outcome_table(comparison), _transfer_table(comparison), _calibration_table(comparison)]
    if len(comparison.tasks) == 1:  # nothing can be forgotten or transferred
        title = titled(_OUTCOME, _unit_of_scores(comparison) or "ECE in percentage points")
        by_task = [without_columns(by_task[0], "average", "forgetting", "BWT", title=title), by_task[2]]
    known = [_readout_table(comparison), _cost_table(comparison)]
    known += [
        table(comparison, entry) for table in (_growth_table, _ledger_table, matrix_table) for entry in strategies
    ]
    return [
        *(transposed(table, "task") if wide and table.rows else table for table in by_task if len(table.header) > 1),
        *(evidence_tables(comparison, units) if units else ()),
        *(table for table in known if table.rows),
    ]


def _table(title: str, corner: str, rows: Iterable[tuple[str, Sequence[Run]]], *groups: Columns) -> Table:
    """Return a table whose cells are means over the runs of a row."""
    body, rows = [], list(rows)
    for row, (name, runs) in enumerate(rows):
        columns = ((of.value, column, show) for of in groups for column, show in enumerate(of.shows))
        body.append((name, *(cell((value(run, row, i) for run in runs), show) for value, i, show in columns)))
    header = (corner, *(header for of in groups for header in of.headers))
    metrics = {metric for _, runs in rows for run in runs for metric in run.metric}
    legend = meanings(*(of.legend for of in groups if of.headers and of.legend), metrics=metrics)
    return with_best(Table(title, header, tuple(body), legend=legend), [each for of in groups for each in of.signs])


def _strategies(comparison: Comparison) -> list[tuple[str, Sequence[Run]]]:
    return [(entry.label, entry.runs) for entry in comparison.strategies]


def _summary(header: str, key: str, better: int, scale: Scale) -> Columns:
    return Columns([header], lambda run, *_: getattr(run.summary, key), scale.text, better, header)


def _outcome_table(comparison: Comparison) -> Table:
    """Return table 4 of the paper: what each strategy still knows of each task at the end."""
    shows, scale = _shows(comparison), scale_of(*comparison.metric)
    columns = [
        Columns(_task_headers(comparison), lambda run, _, i: run.matrix[-1][i], shows, _signs(comparison), "a task"),
        _summary("average", "average", sign(*comparison.metric), scale),
        _summary("forgetting", "forgetting", -1, scale),
        _summary("BWT", "bwt", 1, scale),
        _summary("ECE", "ece", -1, PERCENT),
    ]
    points = "forgetting, BWT and ECE" if scale == PERCENT else "ECE"
    title = titled(_OUTCOME, _unit_of_scores(comparison), f"{points} in percentage points")
    table = _table(title, "strategy", _strategies(comparison), *columns)
    rows = []
    for entry, row in zip(comparison.strategies, table.rows, strict=True):
        rows.append(row)
        if all(run.union for run in entry.runs):
            unions = [run.union for run in entry.runs if run.union]
            scores = [union.accuracy for union in unions]
            average = cell(map(np.mean, scores), scale.text)
            ece = cell((float(np.mean(union.ece)) for union in unions), percent)
            of_tasks = (cell(column, show) for column, show in zip(zip(*scores, strict=True), shows, strict=True))
            rows.append((f"{entry.label} (one final union)", *of_tasks, average, NULL, NULL, ece))
    constant = {CONSTANT: comparison.constant} if comparison.constant else {}
    floors: dict[str, Sequence[float | None]] = {**constant, **comparison.learned_floors}
    for name, floor in floors.items():
        known = [score for score in floor if score is not None]
        average = scale.text(float(np.mean(known))) if len(known) == len(floor) else NULL
        of_tasks = (NULL if score is None else show(score) for score, show in zip(floor, shows, strict=True))
        rows.append((name, *of_tasks, average, NULL, NULL, NULL))
    more = meanings(*floors, "bold", metrics=comparison.metric)
    better = [each for of in columns for each in of.signs]
    return with_best(replace(table, rows=tuple(rows), legend=table.legend + more), better)


def _transfer_table(comparison: Comparison) -> Table:
    scale = scale_of(*comparison.metric)
    return _table(
        titled("Transfer, and forgetting per task", _unit_of_scores(comparison, "in percentage points")),
        "strategy",
        _strategies(comparison),
        _summary("FWT", "fwt", 1, scale),
        _summary("intransigence", "intransigence", -1, scale),
        Columns(
            [f"forgetting {task}" for task in comparison.tasks],
            lambda run, _, i: run.forgotten[i],
            _shows(comparison),
            -1,
            "forgetting of a task",
        ),
        _versions(comparison),
    )


def _versions(comparison: Comparison) -> Columns:
    """Return columns that say what it brought to meet a task again."""
    places: dict[str, list[int]] = {}
    for place, task in enumerate(comparison.tasks):
        places.setdefault(version_of(task)[0], []).append(place)
    signs, shows = _signs(comparison), _shows(comparison)
    ends = [(held[0], held[-1]) for held in places.values() if len(held) > 1]

    def brought(run: Run, _: int, i: int) -> float:
        first, latest = ends[i]
        scores = run.learning_matrix
        return signs[latest] * float(scores[-1][latest] - scores[first + 1][first])

    headers = [f"BWT to {comparison.tasks[latest]}" for _, latest in ends]
    return Columns(headers, brought, [shows[latest] for _, latest in ends], 1, "BWT to a version")


def _calibration_table(comparison: Comparison) -> Table:
    """Return for each task ECE, and how often the answers are those of the fine-tuned model."""
    known = any(run.agreement for entry in comparison.strategies for run in entry.runs)
    agreement = [f"agreement {task}" for task in comparison.tasks] if known else []
    runs, tasks = [run for entry in comparison.strategies for run in entry.runs], comparison.tasks
    calibrated = [i for i in range(len(tasks)) if not runs or any(run.ece[-1][i] is not None for run in runs)]
    ece = [f"ECE {tasks[i]}" for i in calibrated]
    agree = "agreement with the fine-tuned model"
    title = f"Calibration error per task{f', and {agree}' * known}" if calibrated else agree.capitalize()
    return _table(
        f"{title} (in %)",
        "strategy",
        _strategies(comparison) if calibrated or known else (),
        Columns(ece, lambda run, _, i: run.ece[-1][calibrated[i]], percent, -1, "ECE of a task"),
        Columns(
            agreement,
            lambda run, _, i: run.agreement[i] if run.agreement else None,
            percent,
            legend="agreement",
        ),
    )


def _readout_table(comparison: Comparison) -> Table:
    """Return the scores of new readouts on the models as they are at the end, and what they win."""
    entries = [entry for entry in comparison.strategies if all(run.readout_again for run in entry.runs)]

    def again(run: Run, i: int) -> float | None:
        return run.readout_again[i] if run.readout_again else None

    def mean(scores: Sequence[float | None] | None) -> float | None:
        return None if scores is None or None in scores else float(np.mean(np.array(scores, dtype=float)))

    def won(run: Run, *_: int) -> float | None:
        now, own = run.readout_again, run.matrix[-1]
        if now is None or None in now or None in own:
            return None
        return float(np.mean(np.array(signs) * (np.array(now, dtype=float) - np.array(own, dtype=float))))

    signs, shows, show = _signs(comparison), _shows(comparison), scale_of(*comparison.metric).text
    unit = _unit_of_scores(comparison, "in %, the difference in percentage points")

    return _table(
        titled("After re-training the readout on the final model", unit),
        "strategy",
        [(entry.label, entry.runs) for entry in entries],
        Columns(_task_headers(comparison), lambda run, _, i: again(run, i), shows, signs, "a task, re-trained"),
        Columns(["average"], lambda run, *_: mean(run.readout_again), show, sign(*comparison.metric), "average"),
        Columns(["won by re-training"], won, show, 0, "won by re-training"),
    )


def _cost_table(comparison: Comparison) -> Table:
    runs = [run for entry in comparison.strategies for run in entry.runs]
    phases = list(dict.fromkeys(phase for run in runs for phase in run.seconds))
    memory = ("kept (bytes)", "kept per task (bytes)") if any(run.memory for run in runs) else ()
    tasks = len(comparison.tasks)
    return _table(
        "Time per phase, and memory kept",
        "strategy",
        _strategies(comparison) if phases or memory else (),
        Columns(
            [f"{phase.replace('_', '-')} (s)" for phase in phases],
            lambda run, _, i: run.seconds.get(phases[i]),
            _seconds,
            legend="(s)",
        ),
        Columns(
            memory,
            lambda run, _, i: run.memory[-1] / (tasks if i else 1) if run.memory else None,
            _count,
            -1,
            "kept",
        ),
    )


def _growth_table(comparison: Comparison, entry: StrategyRuns) -> Table:
    """Show what each further task costs, and what it does to the first."""
    tasks, first, average = comparison.tasks, scale_of(comparison.metric[0]), scale_of(*comparison.metric)
    known = len(tasks) > _LONG and all(run.kept_bytes and run.seconds_per_task for run in entry.runs)

    def owned(run: Run, row: int, _: int) -> float | None:
        ledger = run.ledger
        return ledger.owned_size[row] / ledger.region_size[row] if ledger and ledger.region_size[row] else None

    return _table(
        f"Growth of {entry.label} with the number of tasks",
        "after",
        [(task, entry.runs) for task in tasks] if known else (),
        Columns(["learning it (s)"], lambda run, row, _: (run.seconds_per_task or [])[row], _seconds),
        Columns(["kept (bytes)"], lambda run, row, _: (run.kept_bytes or [])[row], _count),
        Columns(["of its region not owned before (%)"], owned, percent, legend="of its region not owned before"),
        Columns([first.titled(tasks[0])], lambda run, row, _: run.matrix[row + 1][0], first.text),
        Columns(
            [average.titled("average so far")],
            lambda run, row, _: float(run.learning_matrix[row + 1, : row + 1].mean()),
            average.text,
        ),
    )


def _ledger_table(comparison: Comparison, entry: StrategyRuns) -> Table:
    tasks, known = comparison.tasks, all(run.ledger for run in entry.runs)

    def of_ledger(value: Callable[[LedgerSummary, int, int], float]) -> Value:
        return lambda run, row, column: value(run.ledger, row, column) if run.ledger else None

    def most(ledger: LedgerSummary, row: int, _: int) -> float:
        return max((ledger.overlap[earlier][row] for earlier in range(row)), default=0.0)

    overlap = of_ledger(lambda ledger, row, column: ledger.overlap[row][column])

    overlaps = Columns([f"overlap {task}" for task in tasks], overlap, _share, legend="overlap")
    return _table(
        f"Ledger of {entry.label} (entries of the region, entries owned, overlap of regions)",
        "task",
        [(task, entry.runs) for task in tasks] if known else (),
        Columns(["region"], of_ledger(lambda ledger, row, _: ledger.region_size[row]), _count, legend="region"),
        Columns(["owned"], of_ledger(lambda ledger, row, _: ledger.owned_size[row]), _count, legend="owned"),
        Columns(["largest overlap"], of_ledger(most), _share, legend="largest overlap")
        if len(tasks) > WIDE
        else overlaps,
    )


def _matrix_table(comparison: Comparison, entry: StrategyRuns) -> Table:
    stages = ("before training", *(f"after {task}" for task in comparison.tasks))
    means = np.mean([run.learning_matrix for run in entry.runs], axis=0)
    seeds = "one seed" if len(entry.runs) == 1 else f"mean over {len(entry.runs)} seeds"
    unit = ", ".join(filter(None, [_unit_of_scores(comparison), seeds]))
    rows = ((show(score) for show, score in zip(_shows(comparison), row, strict=True)) for row in means)
    return Table(
        title=titled(f"Learning matrix of {entry.label}", unit),
        header=("stage", *_task_headers(comparison)),
        rows=tuple((stage, *row) for stage, row in zip(stages, rows, strict=True)),
    )


def _course_table(comparison: Comparison, entry: StrategyRuns) -> Table:
    """Return what stands in place of the learning matrix of a stream that is too long for one."""
    stages: dict[str, Callable[[Run, int], float | None]] = {
        "before training": lambda run, i: float(run.learning_matrix[0, i]),
        "once learned": lambda run, i: run.matrix[i + 1][i],
        "at the end": lambda run, i: run.matrix[-1][i],
        "forgetting": lambda run, i: run.forgotten[i],
    }
    values = list(stages.values())
    table = _table(
        titled(f"Each task over the stream of {entry.label}", _unit_of_scores(comparison)),
        "stage",
        [(stage, entry.runs) for stage in stages],
        Columns(_task_headers(comparison), lambda run, row, i: values[row](run, i), _shows(comparison)),
    )
    legend = meanings("once learned", "forgetting of a task", metrics=comparison.metric)
    return replace(transposed(table, "task"), legend=legend)


def _shows(comparison: Comparison) -> list[Show]:
    """Return for each task how its scores are written."""
    return [scale_of(metric).text for metric in comparison.metric]


def _unit_of_scores(comparison: Comparison, percent: str = "in %") -> str:
    """Return what a title says of the unit of scores: of percentages these words, nothing of plain numbers."""
    shares = [scale_of(metric) == PERCENT for metric in comparison.metric]
    return "" if not any(shares) else percent if all(shares) else f"{percent} where scores are shares"


def _signs(comparison: Comparison) -> list[int]:
    """Return for each task 1 where higher scores are better, else -1."""
    return [sign(metric) for metric in comparison.metric]


def _task_headers(comparison: Comparison) -> list[str]:
    """Return task names, with the metric where it is not accuracy."""
    return [
        task if metric == "accuracy" else f"{task} ({metric.upper()})"
        for task, metric in zip(comparison.tasks, comparison.metric, strict=True)
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}"


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _share(fraction: float) -> str:
    return f"{fraction:.3f}"
