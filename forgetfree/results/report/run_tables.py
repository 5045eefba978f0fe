"""The tables of runs: which numbers stand in which column, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from forgetfree.display import NULL, PERCENT, PLAIN, Scale
from forgetfree.results.calibration import debiased_ece, ece_noise_floor
from forgetfree.results.evidence import Evidence
from forgetfree.results.metrics import title_of
from forgetfree.results.report.label_tables import label_tables, text_tables
from forgetfree.results.report.page import WIDE, Table, cell, percent, titled, transposed, with_best, without_columns
from forgetfree.results.report.words import NAIVE, meanings
from forgetfree.results.runs import CONSTANT, REFERENCE, UNION, UNTRAINED, LedgerSummary, Run
from forgetfree.results.table import Results, StrategyRuns
from forgetfree.results.unit_folder import ELSEWHERE

#: A number of a run, by row and column of a table; NaN or none where it is missing.
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


def tables_of(results: Results, evidence: Evidence) -> list[Table]:
    """Return all tables of a report, in the order in which they are read.

    Args:
        results: any; tables that are made of answers are left out where these are not there.
        evidence: of them, see `evidence_of`.
    """
    wide, single = len(results.tasks) > WIDE, len(results.tasks) == 1
    by_strategy = [_outcome(results), _transfer(results), _calibration(results)]
    by_strategy += [_more(results, name) for name in _measured_beside(results)]
    others = [_held_aside(results), _costs(results)]
    for grid in (_growth, _ledger, _course if wide else _matrix):
        others += [grid(results, entry) for entry in results.entries]

    def written(grid: Grid) -> Table:
        rows = ((name, *map(cell, cells, grid.shows)) for name, cells in grid.rows)
        legend = meanings(*grid.legend, metrics=results.metric)
        table = with_best(Table(titled(*grid.title), tuple(grid.header), tuple(rows), legend=legend), grid.better)
        return transposed(table, "task") if wide and grid.rows and grid.of_tasks else table

    by_task = [written(grid) for grid in by_strategy if len(grid.header) > 1]
    if single:  # nothing can be forgotten or transferred
        title = titled(_OUTCOME, _unit_of_scores(results) or "ECE in percentage points")
        by_task[:2] = [without_columns(by_task[0], "average", "forgetting", "BWT", title=title)]
    shares = results.scale == PERCENT and results.sign == 1
    several = any(len(entry.runs) > 1 for entry in results.entries)
    return [
        *by_task,
        *([_intervals(results, evidence)] if shares and several else []),
        *(_retention(results, evidence) if shares else ()),
        *_calibration_beside_chance(results),
        *label_tables(results),
        *text_tables(results),
        *(written(grid) for grid in others if grid.rows),
    ]


def _strategies(
    results: Results, with_all: Callable[[Run], object] = lambda run: True
) -> list[tuple[str, Sequence[Run]]]:
    """Return the runs of each strategy of which all have something."""
    return [(entry.label, entry.runs) for entry in results.entries if all(map(with_all, entry.runs))]


def _summary(header: str, key: str, better: int, scale: Scale) -> Columns:
    return Columns([header], lambda run, *_: run.summary[key], scale.text, better, header)


# ---- scores ---------------------------------------------------------------------------------------------


def _outcome(results: Results) -> Grid:
    """Return table 4 of the paper: what each strategy still knows of each task at the end."""
    scale, runs = results.scale, results.runs
    calibrated = not runs or any(run.summary["ece"] is not None for run in runs)
    told, nats = (any(run.knows(name) for run in runs) for name in ("updates", LOSS))
    points = [*(["forgetting, BWT" if calibrated else "forgetting and BWT"] if scale == PERCENT else [])]
    points += ["ECE"] if calibrated else []
    grid = Grid.of_runs(
        (
            _OUTCOME,
            _unit_of_scores(results),
            f"{' and '.join(points)} in percentage points" if points else "",
            "loss in nats a token" if nats else "",
        ),
        "strategy",
        _strategies(results),
        Columns(
            _task_headers(results),
            lambda run, _, i: run.learning_matrix[-1, i],
            _shows(results),
            results.signs,
            "a task",
        ),
        _summary("average", "average", results.sign, scale),
        Columns([LOSS] if nats else (), lambda run, *_: _known_mean(run.end(LOSS)), PLAIN.text, -1, LOSS),
        _summary("forgetting", "forgetting", -1, scale),
        _summary("BWT", "bwt", 1, scale),
        *([_summary("ECE", "ece", -1, PERCENT)] if calibrated else []),
        *([Columns(["updates"], lambda run, *_: run.end("updates").sum(), _count, 0, "updates")] if told else []),
    )

    def padded(*cells: Sequence[float | None]) -> list[Sequence[float | None]]:
        return [*cells, *[[] for _ in grid.header[len(cells) + 1 :]]]

    rows = []
    for entry, row in zip(results.entries, grid.rows, strict=True):
        rows.append(row)
        if all(run.knows(f"{UNION}accuracy") for run in entry.runs):
            unions, eces = ([run.end(UNION + name) for run in entry.runs] for name in ("accuracy", "ece"))
            means = [[float(each.mean()) for each in of] for of in (unions, eces)]
            cells = [*np.transpose(unions).tolist(), means[0], *([[]] if nats else []), [], []]
            rows.append((f"{entry.label} (one final union)", padded(*cells, *(means[1:] if calibrated else []))))
    floors = ({CONSTANT: results.constant} if results.constant else {}) | dict(results.learned_floors)
    for name, floor in floors.items():
        loss = [_known_mean(run.values(LOSS)[0]) for run in runs[:1]] if name == UNTRAINED else []
        rows.append((name, padded(*([score] for score in floor), [_mean(floor)], *([loss] if nats else []))))
    return replace(grid, rows=rows, legend=[*grid.legend, *floors, "bold"], of_tasks=True)


def _known_mean(values: Sequence[float] | np.ndarray) -> float | None:
    """Return the mean over the tasks that have a value; ``None`` where none has."""
    known = np.array(values)[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _mean(scores: Sequence[float | None]) -> float | None:
    """Return the mean; ``None`` where one is missing."""
    return None if None in scores else float(np.mean(np.array(scores, dtype=float)))


def _transfer(results: Results) -> Grid:
    forgotten = Columns(
        [f"forgetting {task}" for task in results.tasks],
        lambda run, _, i: run.forgotten[i],
        _shows(results),
        -1,
        "forgetting of a task",
    )
    grid = Grid.of_runs(
        ("Transfer, and forgetting per task", _unit_of_scores(results, "in percentage points")),
        "strategy",
        _strategies(results),
        _summary("FWT", "fwt", 1, results.scale),
        _summary("intransigence", "intransigence", -1, results.scale),
        forgotten,
    )
    return replace(grid, of_tasks=True)


def _calibration(results: Results) -> Grid:
    """Return for each task ECE, and how often the answers are those of the fine-tuned model."""
    runs, tasks = results.runs, results.tasks
    known = any(run.knows("agreement") for run in runs)
    agreement = [f"agreement {task}" for task in tasks] if known else []
    calibrated = [i for i in range(len(tasks)) if not runs or any(not np.isnan(run.ece[-1, i]) for run in runs)]
    ece = [f"ECE {tasks[i]}" for i in calibrated]
    agree = "agreement with the fine-tuned model"
    title = f"Calibration error per task{f', and {agree}' * known}" if calibrated else agree.capitalize()
    grid = Grid.of_runs(
        (title, "in %"),
        "strategy",
        _strategies(results) if calibrated or known else (),
        Columns(ece, lambda run, _, i: run.ece[-1, calibrated[i]], percent, -1, "ECE of a task"),
        Columns(agreement, lambda run, _, i: run.end("agreement")[i], percent, legend="agreement"),
    )
    return replace(grid, of_tasks=True)


def _measured_beside(results: Results) -> list[str]:
    """Return the names of what kinds of tasks measure beside their scores, but for what follows from another."""
    during = results.scores["metric"][results.scores["after"] < len(results.tasks)]
    return [name for name in during.unique() if name not in (*results.metric, "ece", "perplexity")]


def _more(results: Results, name: str) -> Grid:
    """Return what a kind of task measures beside the score: before training, once learned and at the end."""
    title, unit, show, better = _MORE.get(name, (name.replace("_", " ").capitalize(), "", PLAIN.text, 0))
    known = [i for i in range(len(results.tasks)) if any(not np.isnan(run.end(name)[i]) for run in results.runs)]

    def mean(row_of: Callable[[int], int]) -> Value:
        return lambda run, *_: float(np.mean([run.values(name)[row_of(i), i] for i in known]))

    stages = [("before training", mean(lambda i: 0)), ("once learned", mean(lambda i: i + 1))]
    grid = Grid.of_runs(
        (title, unit, "means over tasks, and at the end of each"),
        "strategy",
        _strategies(results),
        *(Columns([stage], value, show, better) for stage, value in stages),
        Columns(["at the end"], mean(lambda i: -1), show, better),
        Columns([results.tasks[i] for i in known], lambda run, _, i: run.end(name)[known[i]], show, better),
    )
    return replace(grid, legend=["once learned", *([name] if name in _MORE else [])], of_tasks=True)


#: Scores beside a task's own: title, unit, how they are written, and whether more is better.
_MORE: dict[str, tuple[str, str, Show, int]] = {
    LOSS: ("Loss on right texts", "nats a token", PLAIN.text, -1),
    "word_accuracy": ("Accuracy of words", "in %", percent, 1),
}


# ---- what they are worth --------------------------------------------------------------------------------


def _intervals(results: Results, evidence: Evidence) -> Table:
    compared = [entry.label for name in (REFERENCE, NAIVE) if (entry := results.by_strategy.get(name))]
    rows = []
    for label in results.strategies:
        row = [label, evidence.average(label).text]
        for other in compared:
            difference = None if other == label else evidence.difference(label, other)
            row.append(NULL if difference is None else f"{difference.text} {difference.verdict}")
        rows.append(tuple(row))
    return Table(
        "Averages with their 95 % intervals (in %, differences in percentage points)",
        ("strategy", "average", *(f"minus {label}" for label in compared)),
        tuple(rows),
        legend=meanings("average", "interval", *(["minus another"] if compared else [])),
    )


def _retention(results: Results, evidence: Evidence) -> Iterator[Table]:
    """Yield for each task, and for the average, which share is kept of what fine-tuning learned above the best floor."""
    tuned, floors = results.by_strategy.get(REFERENCE), results.best_floors
    if tuned is None or not floors:
        return
    reference = tuned.label
    average = float(np.mean([score for _, score in floors]))
    rows = [("the floor", *(f"{percent(score)} ({name})" for name, score in floors), percent(average))]
    for label in results.strategies:
        shares = [
            evidence.retention(label, reference, floor, task)
            for task, (_, floor) in zip(results.tasks, floors, strict=True)
        ]
        shares.append(evidence.retention(label, reference, average))
        rows.append((label, *(NULL if share is None else share.text for share in shares)))
    table = Table(
        f"Kept above the floor (in % of what {reference} has above it, with 95 % intervals)",
        ("strategy", *results.tasks, "average"),
        tuple(rows),
        legend=meanings("kept above the floor", "interval"),
    )
    yield transposed(table, "task") if len(results.tasks) > WIDE else table


def _calibration_beside_chance(results: Results) -> Iterator[Table]:
    """Yield ECE, what chance shows, and what is left without it: means over the tasks with probabilities."""
    entries = [entry for entry in results.entries if all(run.files.probabilities for run in entry.runs)]
    if not entries:
        return
    measures: dict[str, Callable[[Any], float]] = {
        "ECE": lambda each: each.ece,
        "noise floor": lambda each: ece_noise_floor(each.logits, each.labels),
        "ECE without noise": lambda each: debiased_ece(each.logits, each.labels),
    }
    rows = []
    for entry in entries:
        answers = [run.files.probabilities.values() for run in entry.runs]
        cells = [
            cell((float(np.mean([measure(each) for each in of])) for of in answers), percent)
            for measure in measures.values()
        ]
        rows.append((entry.label, *cells))
    yield Table(
        "Calibration beside chance (in percentage points; means over tasks)",
        ("strategy", *measures),
        tuple(rows),
        legend=meanings(*measures),
    )


# ---- what was measured beside them, and what they cost --------------------------------------------------


def _held_aside(results: Results) -> Grid:
    """Return the loss on texts that no task trains, of each strategy."""

    def loss(run: Run, _: int, column: int) -> float | None:
        if (aside := run.facts.held_aside) is None:
            return None
        return (aside.before, aside.after, _mean(aside.by_task or [None]))[column]

    stages = ["before training", "at the end, without a task", "at the end, as tasks are answered"]
    return Grid.of_runs(
        ("Loss on texts that no task trains", "nats a token"),
        "strategy",
        _strategies(results, lambda run: run.facts.held_aside),
        Columns(stages, loss, PLAIN.text, [0, -1, 0], "held aside"),
    )


def _costs(results: Results) -> Grid:
    facts, tasks = [run.facts for run in results.runs], len(results.tasks)
    phases = list(dict.fromkeys(phase for each in facts for phase in each.seconds if phase != ELSEWHERE))
    elsewhere = [f"{ELSEWHERE.replace('_', '-')} (s)"] if any(ELSEWHERE in each.seconds for each in facts) else []
    memory = ("kept (bytes)", "kept per task (bytes)") if any(each.memory for each in facts) else ()
    return Grid.of_runs(
        ("Time per phase, and memory kept",),
        "strategy",
        _strategies(results) if phases or memory else (),
        Columns(
            [f"{phase.replace('_', '-')} (s)" for phase in phases],
            lambda run, _, i: run.facts.seconds.get(phases[i]),
            _seconds,
            legend="(s)",
        ),
        Columns(elsewhere, lambda run, *_: run.facts.seconds.get(ELSEWHERE), _seconds, legend="".join(elsewhere)),
        Columns(
            memory,
            lambda run, _, i: run.facts.memory[-1] / (tasks if i else 1) if run.facts.memory else None,
            _count,
            -1,
            "kept",
        ),
    )


def _growth(results: Results, entry: StrategyRuns) -> Grid:
    """Return what each further task costs, and what it does to the first."""
    tasks, first, average = results.tasks, results.scales[0], results.scale
    known = len(tasks) > _LONG and all(run.facts.kept_bytes and run.facts.seconds_per_task for run in entry.runs)

    def owned(run: Run, row: int, _: int) -> float | None:
        ledger = run.facts.ledger
        return ledger.owned_size[row] / ledger.region_size[row] if ledger and ledger.region_size[row] else None

    return Grid.of_runs(
        (f"Growth of {entry.label} with the number of tasks",),
        "after",
        [(task, entry.runs) for task in tasks] if known else (),
        Columns(["learning it (s)"], lambda run, row, _: (run.facts.seconds_per_task or [])[row], _seconds),
        Columns(["kept (bytes)"], lambda run, row, _: (run.facts.kept_bytes or [])[row], _count),
        Columns(["of its region not owned before (%)"], owned, percent, legend="of its region not owned before"),
        Columns([first.titled(tasks[0])], lambda run, row, _: run.learning_matrix[row + 1, 0], first.text),
        Columns(
            [average.titled("average so far")],
            lambda run, row, _: run.learning_matrix[row + 1, : row + 1].mean(),
            average.text,
        ),
    )


def _ledger(results: Results, entry: StrategyRuns) -> Grid:
    tasks, known = results.tasks, all(run.facts.ledger for run in entry.runs)

    def of_ledger(value: Callable[[LedgerSummary, int, int], float]) -> Value:
        return lambda run, row, column: value(run.facts.ledger, row, column) if run.facts.ledger else None

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


# ---- over the stream ------------------------------------------------------------------------------------


def _matrix(results: Results, entry: StrategyRuns) -> Grid:
    stages = ("before training", *(f"after {task}" for task in results.tasks))
    means = np.mean([run.learning_matrix for run in entry.runs], axis=0).tolist()
    seeds = "one seed" if len(entry.runs) == 1 else f"mean over {len(entry.runs)} seeds"
    unit = ", ".join(filter(None, [_unit_of_scores(results), seeds]))
    return Grid(
        (f"Learning matrix of {entry.label}", unit),
        ("stage", *_task_headers(results)),
        [(stage, [[score] for score in row]) for stage, row in zip(stages, means, strict=True)],
        _shows(results),
        [0] * len(results.tasks),
        (),
    )


def _course(results: Results, entry: StrategyRuns) -> Grid:
    """Return what stands in place of the learning matrix of a stream that is too long for one."""
    stages: dict[str, Callable[[Run, int], float | None]] = {
        "before training": lambda run, i: run.learning_matrix[0, i],
        "once learned": lambda run, i: run.learning_matrix[i + 1, i],
        "at the end": lambda run, i: run.learning_matrix[-1, i],
        "forgetting": lambda run, i: run.forgotten[i],
    }
    values = list(stages.values())
    grid = Grid.of_runs(
        (f"Each task over the stream of {entry.label}", _unit_of_scores(results)),
        "stage",
        [(stage, entry.runs) for stage in stages],
        Columns(_task_headers(results), lambda run, row, i: values[row](run, i), _shows(results)),
    )
    return replace(grid, legend=["once learned", "forgetting of a task"], of_tasks=True)


def _shows(results: Results) -> list[Show]:
    """Return for each task how its scores are written."""
    return [scale.text for scale in results.scales]


def _unit_of_scores(results: Results, percent: str = "in %") -> str:
    """Return what a title says of the unit of scores: of percentages these words, nothing of plain numbers."""
    shares = [scale == PERCENT for scale in results.scales]
    return "" if not any(shares) else percent if all(shares) else f"{percent} where scores are shares"


def _task_headers(results: Results) -> list[str]:
    """Return task names, with the metric where it is not accuracy."""
    return [
        task if metric == "accuracy" else f"{task} ({title_of(metric)})"
        for task, metric in zip(results.tasks, results.metric, strict=True)
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}"


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _share(fraction: float) -> str:
    return f"{fraction:.3f}"
