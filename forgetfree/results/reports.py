"""The report of one or several runs: their `Comparison` laid out as a `Page` of tables.

>>> results = [load_run_results(Path("runs/a")), load_run_results(Path("runs/b"))]  # doctest: +SKIP
>>> print(render(merge(results), "markdown"))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from forgetfree.display import json_text
from forgetfree.results.metrics import forgetting_per_task
from forgetfree.results.rendering import CONSTANT, NULL, Page, Table, cell, percent, render_page
from forgetfree.results.run_results import Comparison, StrategyRuns

__all__ = ["lay_out", "render"]

Json = dict[str, Any]


def render(comparison: Comparison, format: str) -> str:
    """Writes a comparison down.

    Args:
        comparison: what `merge` returned.
        format: one of `FORMATS`: `rich` (plain text as wide as the terminal), `markdown` (GitHub's tables),
            `json` (the tables, and every run in full), `html` (a page that needs no other file) or `latex`
            (tables for the booktabs package).

    Returns:
        Text that ends with a newline.
    """
    if format == "json":
        content = {**asdict(comparison), "report": asdict(lay_out(comparison))}
        return json_text(content, indent=2)
    return render_page(lay_out(comparison), format)


# ---- tables ---------------------------------------------------------------------------------------------


def lay_out(comparison: Comparison) -> Page:
    """All tables of a report, in the order in which they are read."""
    tables = [
        _outcome_table(comparison),
        _transfer_table(comparison),
        _calibration_table(comparison),
        _cost_table(comparison),
    ]
    tables += [_growth_table(comparison, entry) for entry in comparison.strategies]
    tables += [_ledger_table(comparison, entry) for entry in comparison.strategies]
    tables += [_matrix_table(comparison, entry) for entry in comparison.strategies]
    return Page(
        title=f"forgetfree: {comparison.stream}",
        notes=tuple(_notes(comparison)),
        tables=tuple(table for table in tables if table is not None),
    )


def _outcome_table(comparison: Comparison) -> Table:
    """Table 4 of the paper: what each strategy still knows of each task at the end."""
    rows = []
    for entry in comparison.strategies:
        last_rows = [run["matrix"][-1] for run in entry.runs]
        summary = [
            cell((run["summary"][key] for run in entry.runs), percent)
            for key in ("average", "forgetting", "bwt", "ece")
        ]
        rows.append((entry.label, *_cells(last_rows, percent), *summary))
        if all(run.get("union") for run in entry.runs):
            scores, eces = ([run["union"][key] for run in entry.runs] for key in ("accuracy", "ece"))
            average, ece = (cell(map(np.mean, values), percent) for values in (scores, eces))
            rows.append((f"{entry.label} (one final union)", *_cells(scores, percent), average, NULL, NULL, ece))
    if comparison.constant:
        average = percent(float(np.mean(comparison.constant)))
        rows.append((CONSTANT, *map(percent, comparison.constant), average, NULL, NULL, NULL))
    return Table(
        title="After the last task (in %; forgetting, BWT and ECE in percentage points)",
        header=("strategy", *_task_headers(comparison), "average", "forgetting", "BWT", "ECE"),
        rows=tuple(rows),
    )


def _transfer_table(comparison: Comparison) -> Table:
    rows = []
    for entry in comparison.strategies:
        fwt, intransigence = (
            cell((run["summary"][key] for run in entry.runs), percent) for key in ("fwt", "intransigence")
        )
        forgotten = _cells([forgetting_per_task(run["matrix"]) for run in entry.runs], percent)
        rows.append((entry.label, fwt, intransigence, *forgotten))
    return Table(
        title="Transfer, and forgetting per task (in percentage points)",
        header=("strategy", "FWT", "intransigence", *(f"forgetting {task}" for task in comparison.tasks)),
        rows=tuple(rows),
    )


def _calibration_table(comparison: Comparison) -> Table:
    """Per task: ECE, and how often the answers are those of the fine-tuned model."""
    with_agreement = any(run.get("agreement") for entry in comparison.strategies for run in entry.runs)
    rows = []
    for entry in comparison.strategies:
        row = _cells([run["ece"][-1] for run in entry.runs], percent)
        if with_agreement:
            absent = [None] * len(comparison.tasks)
            row += _cells([run.get("agreement") or absent for run in entry.runs], percent)
        rows.append((entry.label, *row))
    agreement = (f"agreement {task}" for task in comparison.tasks) if with_agreement else ()
    return Table(
        title=f"Calibration error per task{', and agreement with the fine-tuned model' * with_agreement} (in %)",
        header=("strategy", *(f"ECE {task}" for task in comparison.tasks), *agreement),
        rows=tuple(rows),
    )


def _cost_table(comparison: Comparison) -> Table | None:
    runs = [run for entry in comparison.strategies for run in entry.runs]
    phases = list(dict.fromkeys(phase for run in runs for phase in run["seconds"]))
    with_memory = any(_kept(run) for run in runs)
    if not phases and not with_memory:
        return None
    rows = []
    for entry in comparison.strategies:
        row = [cell((run["seconds"].get(phase) for run in entry.runs), _seconds) for phase in phases]
        if with_memory:
            kept = [_kept(run)[-1] if _kept(run) else None for run in entry.runs]
            row.append(cell(kept, _count))
            row.append(cell((total and total / len(comparison.tasks) for total in kept), _count))
        rows.append((entry.label, *row))
    memory = ("kept (bytes)", "kept per task (bytes)") if with_memory else ()
    return Table(
        title="Time per phase, and memory kept",
        header=("strategy", *(f"{phase.replace('_', '-')} (s)" for phase in phases), *memory),
        rows=tuple(rows),
    )


def _kept(run: Json) -> list[int]:
    """Bytes kept beside the pre-trained model after each task; of older results, those of the ledger at the end."""
    kept: list[int] = run.get("kept_bytes") or ([run["ledger"]["bytes"]] if run["ledger"] else [])
    return kept


#: Streams longer than this show how things grow with the number of tasks.
_LONG = 5


def _growth_table(comparison: Comparison, entry: StrategyRuns) -> Table | None:
    """What each further task costs, and what it does to the first."""
    runs, tasks = entry.runs, comparison.tasks
    if len(tasks) <= _LONG or not all(run.get("kept_bytes") and run.get("seconds_per_task") for run in runs):
        return None
    rows = []
    for index, task in enumerate(tasks):
        seconds = cell((run["seconds_per_task"][index] for run in runs), _seconds)
        kept = cell((run["kept_bytes"][index] for run in runs), _count)
        first = cell((run["matrix"][index + 1][0] for run in runs), percent)
        mean = cell((float(np.mean(run["matrix"][index + 1][: index + 1])) for run in runs), percent)
        left = NULL
        if all(run["ledger"] for run in runs):
            shares = [_owned_share(run["ledger"], index) for run in runs]
            left = cell(shares, percent)
        rows.append((task, seconds, kept, left, first, mean))
    return Table(
        title=f"Growth of {entry.label} with the number of tasks",
        header=(
            "after",
            "learning it (s)",
            "kept (bytes)",
            "of its region not owned before (%)",
            f"{tasks[0]} (%)",
            "average so far (%)",
        ),
        rows=tuple(rows),
    )


def _owned_share(ledger: Json, index: int) -> float | None:
    region = ledger["region_size"][index]
    return ledger["owned_size"][index] / region if region else None


def _ledger_table(comparison: Comparison, entry: StrategyRuns) -> Table | None:
    ledgers = [run["ledger"] for run in entry.runs]
    if not all(ledgers):
        return None
    rows = []
    for index, task in enumerate(comparison.tasks):
        region, owned = (
            cell((ledger[key][index] for ledger in ledgers), _count) for key in ("region_size", "owned_size")
        )
        overlap = _cells([ledger["overlap"][index] for ledger in ledgers], _share)
        rows.append((task, region, owned, *overlap))
    return Table(
        title=f"Ledger of {entry.label} (entries of the region, entries owned, overlap of regions)",
        header=("task", "region", "owned", *(f"overlap {task}" for task in comparison.tasks)),
        rows=tuple(rows),
    )


def _matrix_table(comparison: Comparison, entry: StrategyRuns) -> Table:
    stages = ("before training", *(f"after {task}" for task in comparison.tasks))
    means = np.mean([run["matrix"] for run in entry.runs], axis=0)
    return Table(
        title=f"Learning matrix of {entry.label} (in %, {_mean_over(len(entry.runs))})",
        header=("stage", *_task_headers(comparison)),
        rows=tuple((stage, *map(percent, row)) for stage, row in zip(stages, means, strict=True)),
    )


def _notes(comparison: Comparison) -> Iterable[str]:
    if comparison.settings:
        yield (
            "Set-up: "
            + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in comparison.settings.items())
            + "."
        )
    seeds = [(entry.label, [run["seed"] for run in entry.runs]) for entry in comparison.strategies]
    if any(len(numbers) > 1 for _, numbers in seeds):
        yield "Cells are mean (standard deviation, n - 1) over seeds."
    if seeds and all(numbers == seeds[0][1] for _, numbers in seeds):
        yield f"Every strategy: {_count_seeds(seeds[0][1])}."
    elif seeds:
        yield "; ".join(f"{label}: {_count_seeds(numbers)}" for label, numbers in seeds) + "."
    for run in comparison.unfinished:
        done = max(0, len(run["matrix"]) - 1)
        yield (
            f"Unfinished and left out: {run['strategy']}, seed {run['seed']}, "
            f"after {done} of {len(comparison.tasks)} tasks ({run['source']})."
        )
    for run in comparison.failed:
        yield f"Failed and left out: {run['strategy']}, seed {run['seed']} ({run['source']}): {run['error']}"


def _task_headers(comparison: Comparison) -> list[str]:
    """Task names, with the metric where it is not accuracy."""
    return [
        task if metric == "accuracy" else f"{task} ({metric.upper()})"
        for task, metric in zip(comparison.tasks, comparison.metric, strict=True)
    ]


def _count_seeds(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))})"


def _mean_over(seeds: int) -> str:
    return "one seed" if seeds == 1 else f"mean over {seeds} seeds"


# ---- cells ----------------------------------------------------------------------------------------------


def _cells(rows: Sequence[Sequence[float | None]], show: Callable[[float], str]) -> list[str]:
    """One cell per column of `rows`, shape (seeds, columns)."""
    return [cell(column, show) for column in zip(*rows, strict=True)]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}"


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _share(fraction: float) -> str:
    return f"{fraction:.3f}"
