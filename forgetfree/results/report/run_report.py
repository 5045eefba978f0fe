"""The report of one or several runs: the outcome in a sentence, notes, figures, tables, and how to repeat it.

>>> results = [load_run_results(Path("runs/a")), load_run_results(Path("runs/b"))]  # doctest: +SKIP
>>> print(render(merge(results), "markdown"))  # doctest: +SKIP
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from forgetfree.display import counted, json_text
from forgetfree.errors import RunError
from forgetfree.options import FLAGGED, typed
from forgetfree.results.comparison import Comparison, StrategyRuns
from forgetfree.results.config_file import PLACES, load_run, located, of_each
from forgetfree.results.report.evidence_tables import Units
from forgetfree.results.report.headline import headline
from forgetfree.results.report.page import WIDE, Page, Table, render_html, render_page
from forgetfree.results.report.run_tables import tables_of
from forgetfree.results.run_results import Failed, Unfinished
from forgetfree.results.unit_folder import UnitFiles, read_unit_files

#: What is told of the set-up in words; what else was set stands as it was typed.
_SETUP = ("model", "scenario", "evaluated_on", "readout", "shots", "steps", "sparsity", "starts", *FLAGGED)
#: What nobody typed.
_UNTOLD = ("parts",)


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
    if format == "json":
        content = comparison.content | {"report": asdict(lay_out(comparison))}
        content = {key: value for key, value in content.items() if key != "learned_floors" or value}
        return json_text(content, indent=2)
    if format == "html":
        from forgetfree.results.report.figures import style_sheet  # matplotlib takes its time
        from forgetfree.results.report.run_figures import sections_of

        units = _units_of(comparison)
        page = _with_configurations(_lay_out(comparison, units), comparison)
        return render_html(page, sections_of(comparison, units), style_sheet())
    return render_page(lay_out(comparison, ended=ended), format)


def lay_out(comparison: Comparison, *, ended: bool = True) -> Page:
    """Return the report; see `render`."""
    return _lay_out(comparison, _units_of(comparison) if ended else {})


def _lay_out(comparison: Comparison, units: Units) -> Page:
    left_out = (note for entry in comparison.strategies if units for note in _left_out(entry, units[entry.label]))
    return Page(
        title=f"forgetfree: {_stream(comparison)}",
        notes=(*_notes(comparison), *left_out),
        tables=tuple(tables_of(comparison, units)),
        headline=headline(comparison),
    )


def _units_of(comparison: Comparison) -> Units:
    """Read the files of all units, once for notes, tables and figures."""
    return {
        entry.label: [read_unit_files(run, comparison.tasks) for run in entry.runs] for entry in comparison.strategies
    }


def _stream(comparison: Comparison) -> str:
    """Return the name of the stream; where it lists many tasks, how many."""
    tasks = comparison.tasks
    listed = len(tasks) > WIDE and "," in comparison.stream
    return f"{len(tasks)} tasks, {tasks[0]} to {tasks[-1]}" if listed else comparison.stream


# ---- notes ---------------------------------------------------------------------------------------------


def _notes(comparison: Comparison) -> Iterable[str]:
    """Yield the sentences above the tables: the set-up, rows and seeds, and what is left out."""
    settings = {key: typed(value) for key, value in comparison.settings.items() if key not in _UNTOLD}
    if setup := [f"{key.replace('_', ' ')} {settings.pop(key)}" for key in _SETUP if key in settings]:
        yield f"Set-up: {', '.join(setup)}."
    if settings:
        yield f"Also set: {' '.join(f'{key}={value}' for key, value in settings.items())}."
    if rows := _test_rows(comparison.test_rows):
        yield rows
    seeds = [(entry.label, [run.seed for run in entry.runs]) for entry in comparison.strategies]
    if any(len(numbers) > 1 for _, numbers in seeds):
        yield "Cells are mean (standard deviation, n - 1) over seeds."
    if seeds and all(numbers == seeds[0][1] for _, numbers in seeds):
        yield f"Every strategy: {_count_seeds(seeds[0][1])}."
    elif seeds:
        yield "; ".join(f"{label}: {_count_seeds(numbers)}" for label, numbers in seeds) + "."
    tuned = [(entry.label, entry.runs[0].trials) for entry in comparison.strategies]
    if any(trials for _, trials in tuned):
        chosen = ", ".join(f"{label} {trials or 'not tuned'}" for label, trials in tuned)
        yield f"Settings that were tried on validation rows: {chosen}."
    for entry in comparison.strategies:
        for run in entry.runs:
            for claim in run.broken_claims:
                yield f"Broken claim of {entry.label}, seed {run.seed}: {claim}."
    for cut in comparison.unfinished:
        done = max(0, len(cut.matrix) - 1)
        yield (
            f"Unfinished and left out: {cut.strategy}, seed {cut.seed}, "
            f"after {done} of {counted(len(comparison.tasks), 'task')}{_place(cut)}."
        )
    for failed in comparison.failed:
        yield f"Failed and left out: {failed.strategy}, seed {failed.seed}{_place(failed)}: {failed.error}"


def _left_out(entry: StrategyRuns, units: Sequence[UnitFiles]) -> Iterable[str]:
    """Yield which answers, losses and times of a strategy are not shown, and why."""
    for run, unit in zip(entry.runs, units, strict=True):
        for what, fault in unit.faults.items():
            yield f"{what} of {entry.label}, seed {run.seed}, are left out: {fault}"


def _place(run: Unfinished | Failed) -> str:
    return f" ({run.source})" if run.source else ""  # that of a run at its own end is clear


def _test_rows(rows: Mapping[str, int]) -> str:
    """Say how many rows each task is scored on."""
    counts = sorted(set(rows.values()))
    if not counts:
        return ""
    if len(counts) == 1:
        return f"Each task is scored on {counted(counts[0], 'row')}."
    if len(rows) > WIDE:
        return f"Tasks are scored on {counts[0]:,} to {counts[-1]:,} rows each."
    return f"Scored on rows: {', '.join(f'{task} {count:,}' for task, count in rows.items())}."


def _count_seeds(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))})"


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
    rows = [("command to repeat it", command_of(asked, directory))]
    named = ((key if key == "stream" else f"--{key.replace('_', '-')}", value) for key, value in asked.items())
    rows += [(name, typed(value)) for name, value in named if value not in (None, "", [], {})]
    rows += [(f"version of {name}", typed(value)) for name, value in config.get("versions", {}).items()]
    machine = config.get("machine")
    rows += [(name, typed(value)) for name, value in machine.items()] if isinstance(machine, dict) else []
    yield Table(f"Configuration of {source}", ("option", "value"), tuple(rows))


def command_of(asked: Mapping[str, Any], directory: Path) -> str:
    """Return the command that repeats a run, from its section of config.json.

    Args:
        asked: the section.
        directory: where the config.json lies: places are relative to it.
    """
    words = ["forgetfree", "run", asked["stream"]]
    for key, value in asked.items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, Mapping):
            held = of_each(located, value, directory) if key in PLACES else value
            words += [word for name, one in held.items() for word in (flag, f"{name}={typed(one)}")]
        elif isinstance(value, list):
            held = of_each(located, value, directory) if key in PLACES else value
            words += [word for each in held for word in (flag, str(each))]
        elif value is True:
            words.append(flag)
        elif key != "stream" and value not in (None, ""):
            words += [flag, located(value, directory) if key in ("model", "data") else str(value)]
    return " ".join(map(shlex.quote, [*words, "--out", os.path.join("runs", "again")]))
