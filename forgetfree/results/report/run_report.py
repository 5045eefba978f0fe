"""The report of one or several runs: the outcome in a sentence, notes, figures, tables, and how to repeat it.

Runs of other tasks, rows or models have a leaderboard in its place: what each ended at, and what it cost.

>>> results = [load_run_results(Path("runs/a")), load_run_results(Path("runs/b"))]  # doctest: +SKIP
>>> print(render(merge(results), "markdown"))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from forgetfree.display import NULL, PERCENT, json_text
from forgetfree.errors import RunError
from forgetfree.options import typed
from forgetfree.results.comparison import USUAL, Comparison, StrategyRuns, differing, merge, same_rows, with_files
from forgetfree.results.config_file import load_run, repeating_command
from forgetfree.results.evidence import Evidence
from forgetfree.results.report.page import (
    WIDE,
    Page,
    Table,
    cell,
    render_html,
    render_page,
    size,
    titled,
    with_best,
)
from forgetfree.results.report.run_tables import tables_of
from forgetfree.results.report.words import headline, meanings, notes, stream_name, uncounted
from forgetfree.results.run_results import Failed, RunResults, Unfinished


def render(comparison: Comparison, format: str, *, ended: bool = True) -> str:
    """Return a comparison as text.

    Args:
        comparison: what `merge` returned.
        format: one of `FORMATS`: `rich` (plain text as wide as the terminal), `markdown` (GitHub's tables),
            `json` (the tables, and every run in full), `html` (a page that needs no other file) or `latex`
            (tables for the booktabs package).
        ended: nothing more is run, so that tables which read all answers are worth their time.

    Returns:
        Text that ends with a newline.
    """
    if ended or format == "html":  # figures are made of them
        comparison = with_files(comparison)
    page = _page(comparison)
    if format == "json":
        content = comparison.content | {"report": asdict(page)}
        content = {key: value for key, value in content.items() if key != "learned_floors" or value}
        return json_text(content, indent=2)
    if format == "html":
        from forgetfree.results.report.figures import style_sheet  # matplotlib takes its time
        from forgetfree.results.report.run_figures import sections_of

        return render_html(_with_configurations(page, comparison), sections_of(comparison), style_sheet())
    return render_page(page, format)


def lay_out(comparison: Comparison, *, ended: bool = True) -> Page:
    """Return the report; see `render`."""
    return _page(with_files(comparison) if ended else comparison)


def _page(comparison: Comparison) -> Page:
    evidence = Evidence.of(comparison)
    return Page(
        title=f"forgetfree: {stream_name(comparison)}",
        notes=tuple(notes(comparison)),
        headline=headline(comparison, evidence),
        tables=tuple(tables_of(comparison, evidence)),
    )


# ---- how to repeat it ----------------------------------------------------------------------------------


def _with_configurations(page: Page, comparison: Comparison) -> Page:
    """Return the page with a table of what each run was asked for; a note says which is left out."""
    tables, notes = list[Table](), list[str]()
    for source in comparison.sources:
        try:
            tables += _configuration(Path(source))
        except RunError as error:
            notes.append(f"The configuration of {source} is left out: {error}")
    return replace(page, notes=(*page.notes, *notes), tables=(*page.tables, *tables))


def _configuration(source: Path) -> Iterator[Table]:
    """Yield a table of what a run was asked for and ran with, where its config.json is there.

    Raises:
        RunError: it is damaged.
    """
    directory = source.parent if source.suffix == ".json" else source
    if not (directory / "config.json").exists():
        return
    config = load_run(directory)
    asked: Mapping[str, Any] = config["run"]
    rows = [("command to repeat it", repeating_command(asked, directory))]
    named = ((key if key == "stream" else f"--{key.replace('_', '-')}", value) for key, value in asked.items())
    rows += [(name, typed(value)) for name, value in named if value not in (None, "", [], {})]
    rows += [(f"version of {name}", typed(value)) for name, value in config.get("versions", {}).items()]
    machine = config.get("machine")
    rows += [(name, typed(value)) for name, value in machine.items()] if isinstance(machine, dict) else []
    yield Table(f"Configuration of {source}", ("option", "value"), tuple(rows))


# ---- runs that cannot be compared by task ---------------------------------------------------------------


def render_leaderboard(results: Sequence[RunResults], format: str) -> str:
    """Return the leaderboard of several runs as text, in any format of `render`."""
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
    tables = [_ranking(each) for each in runs if any(run.strategies for run in each)]
    return Page(f"forgetfree: {len(results)} runs", tuple(_notes_on_runs(results, runs)), tuple(tables))


def _notes_on_runs(results: Sequence[RunResults], groups: Sequence[Sequence[Comparison]]) -> Iterator[str]:
    yield f"The runs are not compared task by task; they differ in: {', '.join(differing(results))}."
    if len(groups) > 1:
        yield "Each table has test rows of its own: averages of different tables say nothing of one another."
    runs = [run for group in groups for run in group]
    if any(len(entry.runs) > 1 for run in runs for entry in run.strategies):
        yield "Cells are mean (standard deviation, n - 1) over seeds."
    for run in runs:
        yield from uncounted(run)
        kinds: Sequence[tuple[str, Sequence[Unfinished | Failed]]]
        kinds = (("Unfinished", run.unfinished), ("Failed", run.failed))
        for what, left in kinds:
            for each in left:
                yield f"{what} and left out: {each.strategy}, seed {each.seed} ({each.source})."


def _ranking(runs: Sequence[Comparison]) -> Table:
    """Return the strategies of runs that were scored on the same rows."""
    entries = [(each, entry) for each in runs for entry in each.strategies]
    better = runs[0].sign  # 0 leaves the order as it is: such averages have no best
    entries.sort(key=lambda pair: -better * float(np.mean([run.average for run in pair[1].runs])))
    unit = "in %; forgetting in percentage points" if runs[0].scale == PERCENT else ""
    names = ("average", "best floor", "forgetting", "kept", "seconds")
    header = ("strategy", "run", "model", "seeds", "average", "best floor", "forgetting", "kept", "seconds")
    table = Table(
        titled(_tasks(runs[0]), unit),
        header,
        tuple(_row(each, entry) for each, entry in entries),
        legend=meanings(*names, metrics=runs[0].metric),
    )
    return with_best(table, [0, 0, 0, better, 0, -1, 0, 0])


def _row(comparison: Comparison, entry: StrategyRuns) -> tuple[str, ...]:
    summaries, show = [run.summary for run in entry.runs], comparison.scale.text
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
