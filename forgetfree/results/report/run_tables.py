"""The tables of runs: which numbers stand in which column, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from forgetfree.display import PERCENT, PLAIN, Scale
from forgetfree.results.comparison import Comparison, StrategyRuns
from forgetfree.results.configurations import ELSEWHERE
from forgetfree.results.evidence import Evidence
from forgetfree.results.metrics import title_of
from forgetfree.results.records import CONSTANT
from forgetfree.results.report.evidence_tables import evidence_tables
from forgetfree.results.report.page import WIDE, Table, cell, percent, titled, transposed, with_best, without_columns
from forgetfree.results.report.words import meanings
from forgetfree.results.run_results import UNTRAINED, LedgerSummary, Run

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


#: What answers that are texts have beside their score.
LOSS = "loss"
#: Streams longer than this show how things grow with the number of tasks.
_LONG = 5
_OUTCOME = "After the last task"


@dataclass(frozen=True)
class Grid:
    """A table before it is written: of each cell, a number for each seed.

    Attributes:
        title: what it shows, and in which units.
        header: see `Table`.
        rows: the name of each, and the numbers of its cells.
        shows: how those of each column are written.
        better: of each column, see `Columns`.
        legend: names of `MEANINGS`.
        of_tasks: its columns are tasks, which become rows where there are many.
    """

    title: Sequence[str]
    header: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Sequence[float | None]]]]
    shows: Sequence[Show]
    better: Sequence[int]
    legend: Sequence[str]
    of_tasks: bool = False

    @classmethod
    def of_runs(
        cls, title: Sequence[str], corner: str, rows: Iterable[tuple[str, Sequence[Run]]], *groups: Columns
    ) -> Self:
        """Return the grid of the runs of each row, one for each seed."""
        columns = [(of.value, column) for of in groups for column in range(len(of.headers))]
        return cls(
            title,
            (corner, *(header for of in groups for header in of.headers)),
            [
                (name, [[value(run, row, column) for run in runs] for value, column in columns])
                for row, (name, runs) in enumerate(rows)
            ],
            [show for of in groups for show in of.shows],
            [sign for of in groups for sign in of.signs],
            [of.legend for of in groups if of.headers and of.legend],
        )


def tables_of(comparison: Comparison, evidence: Evidence) -> list[Table]:
    """Return all tables of a report, in the order in which they are read.

    Args:
        comparison: what `merge` returned; without `with_files`, tables that are made of answers are left out.
        evidence: of the comparison.
    """
    wide, single = len(comparison.tasks) > WIDE, len(comparison.tasks) == 1
    more = dict.fromkeys(name for run in comparison.runs for name in run.more_scores)
    by_strategy = [_outcome(comparison), _transfer(comparison), _calibration(comparison)]
    by_strategy += [_more(comparison, name) for name in more if name not in _FOLLOWS]
    others = [_held_aside(comparison), _readouts(comparison), _costs(comparison)]
    for grid in (_growth, _ledger, _course if wide else _matrix):
        others += [grid(comparison, entry) for entry in comparison.strategies]

    def written(grid: Grid) -> Table:
        rows = ((name, *map(cell, cells, grid.shows)) for name, cells in grid.rows)
        legend = meanings(*grid.legend, metrics=comparison.metric)
        table = with_best(Table(titled(*grid.title), tuple(grid.header), tuple(rows), legend=legend), grid.better)
        return transposed(table, "task") if wide and grid.rows and grid.of_tasks else table

    by_task = [written(grid) for grid in by_strategy if len(grid.header) > 1]
    if single:  # nothing can be forgotten or transferred
        title = titled(_OUTCOME, _unit_of_scores(comparison) or "ECE in percentage points")
        by_task[:2] = [without_columns(by_task[0], "average", "forgetting", "BWT", title=title)]
    return [
        *by_task,
        *evidence_tables(comparison, evidence),
        *(written(grid) for grid in others if grid.rows),
    ]


def _strategies(
    comparison: Comparison, with_all: Callable[[Run], object] = lambda run: True
) -> list[tuple[str, Sequence[Run]]]:
    """Return the runs of each strategy of which all have something."""
    return [(entry.label, entry.runs) for entry in comparison.strategies if all(map(with_all, entry.runs))]


def _summary(header: str, key: str, better: int, scale: Scale) -> Columns:
    return Columns([header], lambda run, *_: getattr(run.summary, key), scale.text, better, header)


def _outcome(comparison: Comparison) -> Grid:
    """Return table 4 of the paper: what each strategy still knows of each task at the end."""
    scale, shows = comparison.scale, _shows(comparison)
    calibrated = not comparison.runs or any(run.summary.ece is not None for run in comparison.runs)
    told = any(run.updates for run in comparison.runs)
    points = [*(["forgetting, BWT" if calibrated else "forgetting and BWT"] if scale == PERCENT else [])]
    points += ["ECE"] if calibrated else []
    nats = any(LOSS in run.more_scores for run in comparison.runs)
    grid = Grid.of_runs(
        (
            _OUTCOME,
            _unit_of_scores(comparison),
            f"{' and '.join(points)} in percentage points" if points else "",
            "loss in nats a token" if nats else "",
        ),
        "strategy",
        _strategies(comparison),
        Columns(_task_headers(comparison), lambda run, _, i: run.matrix[-1][i], shows, comparison.signs, "a task"),
        _summary("average", "average", comparison.sign, scale),
        Columns([LOSS] if nats else (), lambda run, *_: _loss(run), PLAIN.text, -1, LOSS),
        _summary("forgetting", "forgetting", -1, scale),
        _summary("BWT", "bwt", 1, scale),
        *([_summary("ECE", "ece", -1, PERCENT)] if calibrated else []),
        *([Columns(["updates"], lambda run, *_: run.all_updates, _count, 0, "updates")] if told else []),
    )

    def padded(*cells: Sequence[float | None]) -> list[Sequence[float | None]]:
        return [*cells, *[[] for _ in grid.header[len(cells) + 1 :]]]

    rows = []
    for entry, row in zip(comparison.strategies, grid.rows, strict=True):
        rows.append(row)
        if all(run.union for run in entry.runs):
            unions = [run.union for run in entry.runs if run.union]
            of_tasks = zip(*(union.accuracy for union in unions), strict=True)
            average, ece = [_mean(union.accuracy) for union in unions], [_mean(union.ece) for union in unions]
            more = [ece] if calibrated else []
            rows.append(
                (f"{entry.label} (one final union)", padded(*of_tasks, average, *([[]] if nats else []), [], [], *more))
            )
    floors = ({CONSTANT: comparison.constant} if comparison.constant else {}) | dict(comparison.learned_floors)
    for name, floor in floors.items():
        loss = [_loss(run, 0) for run in comparison.runs] if name == UNTRAINED else []
        rows.append((name, padded(*([score] for score in floor), [_mean(floor)], *([loss[:1]] if nats else []))))
    return replace(grid, rows=rows, legend=[*grid.legend, *floors, "bold"], of_tasks=True)


def _loss(run: Run, row: int = -1) -> float | None:
    """Return the mean loss on right texts, of the tasks that have one; ``None`` where none has."""
    losses = [loss for loss in run.more_scores.get(LOSS, [[]])[row] if loss is not None]
    return _mean(losses) if losses else None


def _mean(scores: Sequence[float | None]) -> float | None:
    """Return the mean; ``None`` where one is missing."""
    return None if None in scores else float(np.mean(np.array(scores, dtype=float)))


def _transfer(comparison: Comparison) -> Grid:
    forgotten = Columns(
        [f"forgetting {task}" for task in comparison.tasks],
        lambda run, _, i: run.forgotten[i],
        _shows(comparison),
        -1,
        "forgetting of a task",
    )
    grid = Grid.of_runs(
        ("Transfer, and forgetting per task", _unit_of_scores(comparison, "in percentage points")),
        "strategy",
        _strategies(comparison),
        _summary("FWT", "fwt", 1, comparison.scale),
        _summary("intransigence", "intransigence", -1, comparison.scale),
        forgotten,
    )
    return replace(grid, of_tasks=True)


def _calibration(comparison: Comparison) -> Grid:
    """Return for each task ECE, and how often the answers are those of the fine-tuned model."""
    known = any(run.agreement for run in comparison.runs)
    agreement = [f"agreement {task}" for task in comparison.tasks] if known else []
    runs, tasks = comparison.runs, comparison.tasks
    calibrated = [i for i in range(len(tasks)) if not runs or any(run.ece[-1][i] is not None for run in runs)]
    ece = [f"ECE {tasks[i]}" for i in calibrated]
    agree = "agreement with the fine-tuned model"
    title = f"Calibration error per task{f', and {agree}' * known}" if calibrated else agree.capitalize()
    grid = Grid.of_runs(
        (title, "in %"),
        "strategy",
        _strategies(comparison) if calibrated or known else (),
        Columns(ece, lambda run, _, i: run.ece[-1][calibrated[i]], percent, -1, "ECE of a task"),
        Columns(agreement, lambda run, _, i: run.agreement[i] if run.agreement else None, percent, legend="agreement"),
    )
    return replace(grid, of_tasks=True)


def _more(comparison: Comparison, name: str) -> Grid:
    """Return what a kind of task measures beside the score: before training, once learned and at the end."""
    title, units, show, better = _MORE.get(name, (name.replace("_", " ").capitalize(), ("",), PLAIN.text, 0))
    last = [run.more_scores[name][-1] for run in comparison.runs if name in run.more_scores]
    known = [i for i in range(len(comparison.tasks)) if any(row[i] is not None for row in last)]

    def at(run: Run, row: int, i: int) -> float | None:
        return run.more_scores[name][row][i] if name in run.more_scores else None

    def mean(row_of: Callable[[int], int]) -> Value:
        return lambda run, *_: _mean([at(run, row_of(i), i) for i in known])

    stages = [("before training", mean(lambda i: 0)), ("once learned", mean(lambda i: i + 1))]
    grid = Grid.of_runs(
        (title, *units, "means over tasks, and at the end of each"),
        "strategy",
        _strategies(comparison),
        *(Columns([stage], value, show, better) for stage, value in stages),
        Columns(["at the end"], mean(lambda i: -1), show, better),
        Columns([comparison.tasks[i] for i in known], lambda run, _, i: at(run, -1, known[i]), show, better),
    )
    return replace(grid, legend=["once learned", *([name] if name in _MORE else [])], of_tasks=True)


#: Scores beside a task's own: title, unit, how they are written, and whether more is better.
_MORE: dict[str, tuple[str, Sequence[str], Show, int]] = {
    LOSS: ("Loss on right texts", ("nats a token",), PLAIN.text, -1),
    "word_accuracy": ("Accuracy of words", ("in %",), percent, 1),
}
#: Those that follow from another.
_FOLLOWS = ("perplexity",)


def _held_aside(comparison: Comparison) -> Grid:
    """Return the loss on texts that no task trains, of each strategy."""

    def loss(run: Run, _: int, column: int) -> float | None:
        if run.held_aside is None:
            return None
        stages = run.held_aside.before, run.held_aside.after, _mean(run.held_aside.by_task or [None])
        return stages[column]

    stages = ["before training", "at the end, without a task", "at the end, as tasks are answered"]
    return Grid.of_runs(
        ("Loss on texts that no task trains", "nats a token"),
        "strategy",
        _strategies(comparison, lambda run: run.held_aside),
        Columns(stages, loss, PLAIN.text, [0, -1, 0], "held aside"),
    )


def _readouts(comparison: Comparison) -> Grid:
    """Return the scores of new readouts on the models as they are at the end, and what they win."""

    def again(run: Run) -> Sequence[float | None]:
        return run.readout_again or [None]

    def won(run: Run, *_: int) -> float | None:
        now, own = again(run), run.matrix[-1]
        if None in now or None in own:
            return None
        return float(np.mean(np.array(signs) * (np.array(now, dtype=float) - np.array(own, dtype=float))))

    signs, show = comparison.signs, comparison.scale.text
    unit = _unit_of_scores(comparison, "in %, the difference in percentage points")
    return Grid.of_runs(
        ("After re-training the readout on the final model", unit),
        "strategy",
        _strategies(comparison, lambda run: run.readout_again),
        Columns(
            _task_headers(comparison), lambda run, _, i: again(run)[i], _shows(comparison), signs, "a task, re-trained"
        ),
        Columns(["average"], lambda run, *_: _mean(again(run)), show, comparison.sign, "average"),
        Columns(["won by re-training"], won, show, 0, "won by re-training"),
    )


def _costs(comparison: Comparison) -> Grid:
    runs = comparison.runs
    phases = list(dict.fromkeys(phase for run in runs for phase in run.seconds if phase != ELSEWHERE))
    elsewhere = [f"{ELSEWHERE.replace('_', '-')} (s)"] if any(ELSEWHERE in run.seconds for run in runs) else []
    memory = ("kept (bytes)", "kept per task (bytes)") if any(run.memory for run in runs) else ()
    tasks = len(comparison.tasks)
    return Grid.of_runs(
        ("Time per phase, and memory kept",),
        "strategy",
        _strategies(comparison) if phases or memory else (),
        Columns(
            [f"{phase.replace('_', '-')} (s)" for phase in phases],
            lambda run, _, i: run.seconds.get(phases[i]),
            _seconds,
            legend="(s)",
        ),
        Columns(elsewhere, lambda run, *_: run.seconds.get(ELSEWHERE), _seconds, legend="".join(elsewhere)),
        Columns(
            memory,
            lambda run, _, i: run.memory[-1] / (tasks if i else 1) if run.memory else None,
            _count,
            -1,
            "kept",
        ),
    )


def _growth(comparison: Comparison, entry: StrategyRuns) -> Grid:
    """Show what each further task costs, and what it does to the first."""
    tasks, first, average = comparison.tasks, comparison.scales[0], comparison.scale
    known = len(tasks) > _LONG and all(run.kept_bytes and run.seconds_per_task for run in entry.runs)

    def owned(run: Run, row: int, _: int) -> float | None:
        ledger = run.ledger
        return ledger.owned_size[row] / ledger.region_size[row] if ledger and ledger.region_size[row] else None

    return Grid.of_runs(
        (f"Growth of {entry.label} with the number of tasks",),
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


def _ledger(comparison: Comparison, entry: StrategyRuns) -> Grid:
    tasks, known = comparison.tasks, all(run.ledger for run in entry.runs)

    def of_ledger(value: Callable[[LedgerSummary, int, int], float]) -> Value:
        return lambda run, row, column: value(run.ledger, row, column) if run.ledger else None

    def most(ledger: LedgerSummary, row: int, _: int) -> float:
        return max((ledger.overlap[earlier][row] for earlier in range(row)), default=0.0)

    overlap = of_ledger(lambda ledger, row, column: ledger.overlap[row][column])
    overlaps = Columns([f"overlap {task}" for task in tasks], overlap, _share, legend="overlap")
    return Grid.of_runs(
        (f"Ledger of {entry.label}", "entries of the region, entries owned, overlap of regions"),
        "task",
        [(task, entry.runs) for task in tasks] if known else (),
        Columns(["region"], of_ledger(lambda ledger, row, _: ledger.region_size[row]), _count, legend="region"),
        Columns(["owned"], of_ledger(lambda ledger, row, _: ledger.owned_size[row]), _count, legend="owned"),
        Columns(["largest overlap"], of_ledger(most), _share, legend="largest overlap")
        if len(tasks) > WIDE
        else overlaps,
    )


def _matrix(comparison: Comparison, entry: StrategyRuns) -> Grid:
    stages = ("before training", *(f"after {task}" for task in comparison.tasks))
    means = np.mean([run.learning_matrix for run in entry.runs], axis=0).tolist()
    seeds = "one seed" if len(entry.runs) == 1 else f"mean over {len(entry.runs)} seeds"
    unit = ", ".join(filter(None, [_unit_of_scores(comparison), seeds]))
    return Grid(
        (f"Learning matrix of {entry.label}", unit),
        ("stage", *_task_headers(comparison)),
        [(stage, [[score] for score in row]) for stage, row in zip(stages, means, strict=True)],
        _shows(comparison),
        [0] * len(comparison.tasks),
        (),
    )


def _course(comparison: Comparison, entry: StrategyRuns) -> Grid:
    """Return what stands in place of the learning matrix of a stream that is too long for one."""
    stages: dict[str, Callable[[Run, int], float | None]] = {
        "before training": lambda run, i: float(run.learning_matrix[0, i]),
        "once learned": lambda run, i: run.matrix[i + 1][i],
        "at the end": lambda run, i: run.matrix[-1][i],
        "forgetting": lambda run, i: run.forgotten[i],
    }
    values = list(stages.values())
    grid = Grid.of_runs(
        (f"Each task over the stream of {entry.label}", _unit_of_scores(comparison)),
        "stage",
        [(stage, entry.runs) for stage in stages],
        Columns(_task_headers(comparison), lambda run, row, i: values[row](run, i), _shows(comparison)),
    )
    return replace(grid, legend=["once learned", "forgetting of a task"], of_tasks=True)


def _shows(comparison: Comparison) -> list[Show]:
    """Return for each task how its scores are written."""
    return [scale.text for scale in comparison.scales]


def _unit_of_scores(comparison: Comparison, percent: str = "in %") -> str:
    """Return what a title says of the unit of scores: of percentages these words, nothing of plain numbers."""
    shares = [scale == PERCENT for scale in comparison.scales]
    return "" if not any(shares) else percent if all(shares) else f"{percent} where scores are shares"


def _task_headers(comparison: Comparison) -> list[str]:
    """Return task names, with the metric where it is not accuracy."""
    return [
        task if metric == "accuracy" else f"{task} ({title_of(metric)})"
        for task, metric in zip(comparison.tasks, comparison.metric, strict=True)
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}"


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _share(fraction: float) -> str:
    return f"{fraction:.3f}"
