"""The report of runs: the outcome in a sentence, notes, figures, tables, and how to repeat it; all a function of `Results`.

>>> print(render(load_results("runs/a", "runs/b"), "markdown"))  # doctest: +SKIP
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from forgetfree.display import PERCENT, Scale, counted, json_text
from forgetfree.errors import ReportError
from forgetfree.files import write_atomically, write_json
from forgetfree.options import FLAGGED, typed
from forgetfree.results.config_file import repeating_command
from forgetfree.results.evidence import Evidence, Interval, forgetting
from forgetfree.results.metrics import Floats
from forgetfree.results.report.page import WIDE, Page, Table, render_html, render_page, size
from forgetfree.results.report.run_tables import NAIVE, tables_of
from forgetfree.results.runs import REFERENCE, UNION, Run, RunRecord, read_run, to_csv
from forgetfree.results.table import Results, StrategyRuns, floors_by_seed
from forgetfree.results.unit_folder import ELSEWHERE

Json = dict[str, Any]
OURS = "grafting-continual"
#: They see the data of other tasks at once, or keep a model for each task: nothing to be forgotten, or no stream.
_REFERENCES = (REFERENCE, "joint", "cumulative")
#: What is told of the set-up in words; what else was set stands as it was typed.
_SETUP = ("model", "scenario", "evaluated_on", "readout", "shots", "steps", "sparsity", *FLAGGED)


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
    evidence = results.evidence()
    return Page(
        title=f"forgetfree: {stream_name(results)}",
        notes=tuple(notes(results)),
        headline=" ".join(sentences(results, evidence)),
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


# ---- the outcome ----------------------------------------------------------------------------------------


def sentences(results: Results, evidence: Evidence) -> Iterator[str]:
    """Yield what results say of forgetting, of scores at the end, and of what is not known."""
    if not results.entries:
        yield "No strategy has finished, so there is nothing to compare."
        return
    naive = results.by_strategy.get(NAIVE)
    ours = results.by_strategy.get(OURS) or _best_of_the_others(results)
    told = [entry for entry in (naive, ours) if entry]
    if len(results.tasks) == 1:
        yield "The stream has one task, so nothing can be forgotten."
    elif not any(_learned(entry, results) for entry in results.entries):
        yield "No strategy learned a task above a constant answer, so nothing could be forgotten."
    else:
        text = ", ".join(_lost(entry, results) for entry in told)
        yield f"{text[:1].upper() + text[1:] if naive else text}{_price(ours, len(results.tasks))}."
    if naive and ours:
        yield _difference(ours, naive, results.scale, evidence)


def _best_of_the_others(results: Results) -> StrategyRuns | None:
    others = [entry for entry in results.entries if entry.strategy != NAIVE]
    # Where the sign is 0, the first: such averages have no best.
    return max(
        others, key=lambda entry: (entry.strategy not in _REFERENCES, results.sign * _average(entry)), default=None
    )


def _learned(entry: StrategyRuns, results: Results) -> bool:
    """Say whether any task was above the constant answer right after it was learned; yes where no such answer is known."""
    scores = np.mean([np.diagonal(run.learning_matrix, -1) for run in entry.runs], axis=0)
    floors, signs = results.constant, np.array(results.signs)
    return floors is None or bool(np.any((signs * (scores - floors) > 0) | (signs == 0)))


def _lost(entry: StrategyRuns, results: Results) -> str:
    """Say how much of its score a strategy lost on average, and how sure that is."""
    scale, seeds = results.scale, len(entry.runs)
    name = f"naive fine-tuning ({entry.label})" if entry.strategy == NAIVE else entry.label
    if not _learned(entry, results):
        return f"{name} learned no task above a constant answer"
    loss = forgetting(entry.runs, results.test_rows)
    gained = scale.text(loss.value).startswith("-")
    lost = f"{name} {'gained' if gained else 'lost'} {_points(abs(loss.value), scale)} on average"
    if not any(run.forgetting for run in entry.runs):
        return f"{lost}{', with every seed' if seeds > 1 else ''}"
    return f"{lost} ({_certainty(loss, 'loss', seeds, scale)})"


def _price(entry: StrategyRuns | None, tasks: int) -> str:
    """Say what the strategy named last keeps per task."""
    kept = [run.facts.memory for run in entry.runs] if entry else []
    return f", at {size(float(np.mean([each[-1] for each in kept])) / tasks)} a task" if kept and all(kept) else ""


def _difference(ours: StrategyRuns, naive: StrategyRuns, scale: Scale, evidence: Evidence) -> str:
    """Compare the averages at the end, in pairs of the same seed."""
    scores = f"At the end {ours.label} scores {scale.with_unit(_average(ours))} on average, {naive.label} "
    scores += scale.with_unit(_average(naive))
    difference = evidence.difference(ours.label, naive.label)
    if difference is None:
        return f"{scores} (no seed in common)."
    seeds = len({run.seed for run in ours.runs} & {run.seed for run in naive.runs})
    return f"{scores}: {difference.verdict} ({_certainty(difference, 'difference', seeds, scale)})."


def _certainty(found: Interval, what: str, seeds: int, scale: Scale) -> str:
    """Say how sure a loss or a difference is."""
    if math.isnan(found.low):
        return "one seed" if seeds == 1 else f"the same for each of {seeds} seeds"
    unit = " points" if scale == PERCENT else ""
    return f"95 % interval of the {what} {scale.text(found.low)} to {scale.text(found.high)}{unit} over {seeds} seeds"


def _average(entry: StrategyRuns) -> float:
    return float(np.mean([run.average for run in entry.runs]))


def _points(difference: float, scale: Scale) -> str:
    """Return a difference of scores; one of percentages in points."""
    text = scale.text(difference)
    return f"{text} point{'' if text == '1.0' else 's'}" if scale == PERCENT else scale.with_unit(difference)


# ---- notes ----------------------------------------------------------------------------------------------


def stream_name(results: Results) -> str:
    """Return the name of the stream; where it lists many tasks, how many."""
    tasks = results.tasks
    listed = len(tasks) > WIDE and "," in results.stream
    return f"{len(tasks)} tasks, {tasks[0]} to {tasks[-1]}" if listed else results.stream


def notes(results: Results) -> Iterator[str]:
    """Yield the sentences above the tables: the set-up, rows and seeds, and what is left out."""
    settings = {key: typed(value) for key, value in results.settings.items()}
    if settings.get("precision") == "fp32" and settings.get("dtype") == "bfloat16":  # passes compute in that
        settings["precision"] = f"that of the weights ({settings.pop('dtype')})"
    if setup := [f"{key.replace('_', ' ')} {settings.pop(key)}" for key in _SETUP if key in settings]:
        yield f"Set-up: {', '.join(setup)}."
    if settings:
        yield f"Also set: {' '.join(f'{key}={value}' for key, value in settings.items())}."
    if rows := _test_rows(results.test_rows):
        yield rows
    seeds = [(entry.label, [run.seed for run in entry.runs]) for entry in results.entries]
    if any(len(numbers) > 1 for _, numbers in seeds):
        yield "Cells are mean (standard deviation, n - 1) over seeds."
    if seeds and all(numbers == seeds[0][1] for _, numbers in seeds):
        yield f"Every strategy: {_count_seeds(seeds[0][1])}."
    elif seeds:
        yield "; ".join(f"{label}: {_count_seeds(numbers)}" for label, numbers in seeds) + "."
    for entry in results.entries:
        for run in entry.runs:
            for claim in run.facts.broken_claims:
                yield f"Broken claim of {entry.label}, seed {run.seed}: {claim}."
    several = len(results.records) > 1  # where one run is told of, its place is clear
    for record in results.records:
        place = f" ({record.source})" if several else ""
        for cut in record.about.unfinished:
            yield (
                f"Unfinished and left out: {cut['strategy']}, seed {cut['seed']}, "
                f"after {cut['after']} of {counted(len(results.tasks), 'task')}{place}."
            )
        for failed in record.about.failed:
            yield f"Failed and left out: {failed['strategy']}, seed {failed['seed']}{place}: {failed['error']}"
    for entry in results.entries:
        if any(run.facts.seconds.get(ELSEWHERE, 0.0) is None for run in entry.runs):
            yield (
                f"Seconds of {entry.label} do not count fine-tuning: its fine-tuned models came from a cache that does not say "
                "how long they took."
            )


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
