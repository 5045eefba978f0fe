"""Runs of other tasks, rows or models in one view: what each ended at and what it cost, where no table by task can be made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np

from forgetfree.display import NULL, PERCENT, json_text
from forgetfree.results.comparison import USUAL, Comparison, StrategyRuns, differing, merge, same_rows
from forgetfree.results.metrics import scale_of, sign
from forgetfree.results.report.legend import meanings
from forgetfree.results.report.page import WIDE, Page, Table, cell, render_page, size, titled, with_best
from forgetfree.results.run_results import Failed, RunResults, Unfinished


def render_leaderboard(results: Sequence[RunResults], format: str) -> str:
    """Return the leaderboard of several runs as text, in any format of `forgetfree.results.report.run_report.render`."""
    page = lay_out_leaderboard(results)
    if format == "json":
        comparisons = [merge([result]).content for result in results]
        return json_text({"comparisons": comparisons, "report": asdict(page)}, indent=2)
    return render_page(page, format)


def lay_out_leaderboard(results: Sequence[RunResults]) -> Page:
    """Return a table for each set of test rows, and in it a row for each strategy of each run, the best average first.

    Args:
        results: what `load_run_results` returned, of at least one run each.
    """
    groups: list[list[RunResults]] = []
    for result in results:
        own = next((group for group in groups if same_rows(group[0], result)), None)
        if own is None:
            groups.append(own := [])
        own.append(result)
    runs = [[merge([result]) for result in group] for group in groups]
    tables = [_table(each) for each in runs if any(run.strategies for run in each)]
    return Page(f"forgetfree: {len(results)} runs", tuple(_notes(results, runs)), tuple(tables))


def _notes(results: Sequence[RunResults], groups: Sequence[Sequence[Comparison]]) -> Iterator[str]:
    yield f"The runs are not compared task by task; they differ in: {', '.join(differing(results))}."
    if len(groups) > 1:
        yield "Each table has test rows of its own: averages of different tables say nothing of one another."
    runs = [run for group in groups for run in group]
    if any(len(entry.runs) > 1 for run in runs for entry in run.strategies):
        yield "Cells are mean (standard deviation, n - 1) over seeds."
    for run in runs:
        kinds: Sequence[tuple[str, Sequence[Unfinished | Failed]]]
        kinds = (("Unfinished", run.unfinished), ("Failed", run.failed))
        for what, left in kinds:
            for each in left:
                yield f"{what} and left out: {each.strategy}, seed {each.seed} ({each.source})."


def _table(runs: Sequence[Comparison]) -> Table:
    """Return the strategies of runs that were scored on the same rows."""
    entries = [(each, entry) for each in runs for entry in each.strategies]
    better = sign(*runs[0].metric)  # 0 leaves the order as it is: such averages have no best
    entries.sort(key=lambda pair: -better * float(np.mean([run.average for run in pair[1].runs])))
    unit = "in %; forgetting in percentage points" if scale_of(*runs[0].metric) == PERCENT else ""
    names = ("average", "best floor", "forgetting", "kept", "(s)")
    header = ("strategy", "run", "model", "seeds", "average", "best floor", "forgetting", "kept", "seconds")
    table = Table(
        titled(_tasks(runs[0]), unit),
        header,
        tuple(_row(each, entry) for each, entry in entries),
        legend=tuple(
            (header[names.index(name) + 4], meaning) for name, meaning in meanings(*names, metrics=runs[0].metric)
        ),
    )
    return with_best(table, [0, 0, 0, better, 0, -1, 0, 0])


def _row(comparison: Comparison, entry: StrategyRuns) -> tuple[str, ...]:
    summaries, show = [run.summary for run in entry.runs], scale_of(*comparison.metric).text
    kept = [run.memory for run in entry.runs]
    floors = [score for _, score in comparison.best_floors]
    return (
        entry.label,
        comparison.sources[0],
        str(comparison.settings.get("model", NULL)),
        str(len(entry.runs)),
        cell((each.average for each in summaries), show),
        show(float(np.mean(floors))) if floors else NULL,
        cell((each.forgetting for each in summaries), show) if len(comparison.tasks) > 1 else NULL,
        size(float(np.mean([each[-1] for each in kept]))) if all(kept) else NULL,
        cell((run.all_seconds for run in entry.runs), lambda seconds: f"{seconds:,.1f}"),
    )


def _tasks(comparison: Comparison) -> str:
    """Name the tasks of a table, with the rows that each is scored on, and an unusual scenario."""
    tasks, rows, settings = comparison.tasks, comparison.test_rows, comparison.settings
    which = f"{settings.get('evaluated_on', USUAL['evaluated_on'])} rows"
    if len(tasks) > WIDE:
        named = f"{len(tasks)} tasks, {tasks[0]} to {tasks[-1]}"
        named += f": {min(rows.values()):,} to {max(rows.values()):,} {which} each" if rows else ""
    else:
        named = ", ".join(f"{task}: {rows[task]:,} {which}" if task in rows else task for task in tasks)
    return f"{named}; scenario {settings['scenario']}" if "scenario" in settings else named
