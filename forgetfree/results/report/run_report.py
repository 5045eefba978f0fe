"""The report of runs: the outcome in a sentence, notes, figures, tables, and how to repeat it; all a function of `Results`.

>>> print(render(load_results("runs/a", "runs/b"), "markdown"))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from forgetfree.display import json_text
from forgetfree.errors import ReportError
from forgetfree.files import write_atomically, write_json
from forgetfree.options import typed
from forgetfree.results.config_file import repeating_command
from forgetfree.results.metrics import Floats
from forgetfree.results.report.page import Page, Table, render_html, render_page
from forgetfree.results.report.run_tables import tables_of
from forgetfree.results.report.words import headline, notes, stream_name
from forgetfree.results.runs import UNION, Run, RunRecord, read_run, to_csv
from forgetfree.results.table import Results, evidence_of, floors_by_seed

Json = dict[str, Any]


def write_report(out: Path, *, ended: bool) -> Json:
    """Make results.json and report.md of the units that a run directory holds, and return the content of results.json.

    Args:
        out: the directory.
        ended: nothing more is run, so that answers are read, and report.html is made, too.

    Raises:
        ReportError: it is no directory of a run, or damaged.
    """
    results = Results([read_run(out, running=not ended)])
    content = content_of(results)
    write_json(out / "results.json", content)
    if results.entries:
        write_atomically(out / "report.md", render(results, "markdown"))
    if ended:
        write_atomically(out / "report.html", render(results, "html"))
    return content


def render(results: Results, format: str) -> str:
    """Return results as text.

    Args:
        results: of one or several runs.
        format: ``rich`` (plain text as wide as the terminal), ``markdown`` (GitHub's tables), ``html`` (a page that needs no
            other file), ``json`` (the tables, and every run in full) or ``csv`` (one file, which can be read again).

    Returns:
        Text that ends with a newline.
    """
    if format == "csv":
        return to_csv(whole(results))
    page = lay_out(results)
    if format == "json":
        return json_text(content_of(results) | {"report": asdict(page)}, indent=2)
    if format == "html":
        from forgetfree.results.report.figures import style_sheet  # matplotlib takes its time
        from forgetfree.results.report.run_figures import sections_of

        tables = (table for record in results.records for table in _configuration(record))
        return render_html(replace(page, tables=(*page.tables, *tables)), sections_of(results), style_sheet())
    return render_page(page, format)


def lay_out(results: Results) -> Page:
    """Return the report's headline, notes and tables."""
    evidence = evidence_of(results)
    return Page(
        title=f"forgetfree: {stream_name(results)}",
        notes=tuple(notes(results)),
        headline=headline(results, evidence),
        tables=tuple(tables_of(results, evidence)),
    )


def _configuration(record: RunRecord) -> Iterator[Table]:
    """Yield a table of what a run was asked for and ran with, where its config.json is known."""
    config = record.config
    if not config:
        return
    asked: Mapping[str, Any] = config["run"]
    rows = [("command to repeat it", repeating_command(asked, Path(record.source)))]
    named = ((key if key == "stream" else f"--{key.replace('_', '-')}", value) for key, value in asked.items())
    rows += [(name, typed(value)) for name, value in named if value not in (None, "", [], {})]
    rows += [(f"version of {name}", typed(value)) for name, value in config.get("versions", {}).items()]
    rows += [(name, typed(value)) for name, value in config.get("machine", {}).items()]
    yield Table(f"Configuration of {record.source}", ("option", "value"), tuple(rows))


# ---- for other programs ---------------------------------------------------------------------------------


def whole(results: Results) -> RunRecord:
    """Return all runs as one, with what the first says of the whole: what one CSV file holds.

    Raises:
        ReportError: there are two configurations of one strategy, or several set-ups.
    """
    strategies = [entry.strategy for entry in results.entries]
    if results.strategies != strategies:
        raise ReportError(
            f"One CSV file holds one set-up and one configuration of a strategy, got {', '.join(results.strategies)}. Write a "
            "file for each."
        )
    about = results.records[0].about
    if about.floors:
        about = about.model_copy(update={"floors": about.floors.model_copy(update=floors_by_seed(results.records))})
    return RunRecord(about, tuple(results.runs))


def content_of(results: Results) -> Json:
    """Return all that is known of one or several runs as JSON: the content of results.json."""
    records = [each.about.model_dump(exclude_unset=True) for each in results.records]
    sources = [{"source": each.source} for each in results.records]
    content = records[0]
    if len(records) > 1:
        content = {"records": [its | source for its, source in zip(records, sources, strict=True)]}
    labelled = {(run.source, run.strategy, run.seed): (e.label, run) for e in results.entries for run in e.runs}
    units = [(each.source, run.strategy, run.seed) for each in results.records for run in each.runs]
    pairs = [labelled[unit] for unit in units if unit in labelled]  # what two directories hold alike stands there once
    return content | {"runs": [{"label": label, **_run(run)} for label, run in pairs]}


def _run(run: Run) -> Json:
    """Return a unit with its matrices and what follows from them."""
    own = {*run.metric, "ece"}
    names = [name for name in run.scores["metric"].unique() if name not in own]
    during = [name for name in names if not np.isnan(run.values(name)[:-1]).all()]
    return {
        **run.facts.model_dump(exclude_unset=True, exclude={"seconds_per_task", "made"}),
        "metric": list(run.metric),
        "matrix": _listed(run.learning_matrix),
        "ece": _listed(run.ece),
        "summary": run.summary,
        **({"more_scores": {name: _listed(run.values(name)) for name in during}} if during else {}),
        **{name: _listed(run.end(name)) for name in names if name not in during and not name.startswith(UNION)},
        **(
            {"union": {n: _listed(run.end(UNION + n)) for n in ("accuracy", "ece")}} if run.knows(f"{UNION}ece") else {}
        ),
    }


def _listed(values: Floats) -> list[Any]:
    """Return an array as lists, with null for what is missing."""
    return np.where(np.isnan(values), None, values.astype(object)).tolist()  # type: ignore[call-overload, no-any-return]
