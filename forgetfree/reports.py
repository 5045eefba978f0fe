"""Tables over one or several runs, read from their results.json.

`load_results` reads and checks a file, `merge` brings runs of several seeds and directories together,
`render` writes them down. In between stands one plain form, a `Page` of `Table`s whose cells are already
text, so that a format is one small function that knows nothing of results.

    >>> results = [load_results(Path("runs/a")), load_results(Path("runs/b"))]  # doctest: +SKIP
    >>> print(render(merge(results), "markdown"))  # doctest: +SKIP
"""

from __future__ import annotations

import html
import io
import json
import math
import re
import reprlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rich.box
import rich.console
import rich.table
import rich.text

from forgetfree.errors import ReportError, UnknownNameError
from forgetfree.metrics import forgetting_per_task

__all__ = [
    "FORMATS",
    "Comparison",
    "Page",
    "StrategyRuns",
    "Table",
    "cell",
    "lay_out",
    "load_results",
    "merge",
    "percent",
    "render",
    "render_page",
    "what_wrote",
]

SCHEMA = 1
#: In STRATEGY/seed-S/: how long each task took to learn.
SECONDS_PER_TASK = "seconds-per-task.json"
NULL = "—"
Json = dict[str, Any]


@dataclass(frozen=True)
class StrategyRuns:
    """One row of the comparison: the runs of one strategy in one configuration, one per seed.

    Attributes:
        label: the strategy's name, with the options in which it differs from its other rows.
        runs: entries of `runs` in results.json, by rising seed.
    """

    label: str
    runs: tuple[Json, ...]


@dataclass(frozen=True)
class Comparison:
    """Runs that may stand side by side: same tasks, model, readout, shots and data.

    Attributes:
        stream: name of the stream.
        tasks: task names in the order of learning.
        metric: what is measured on each task, `accuracy` or `f1`.
        settings: what the results say of the set-up, for display, e.g. `{"model": "minilm", "shots": 16}`.
        strategies: one entry per row, in the order first seen.
        unfinished: runs cut short, as in results.json, each with its `source`.
        failed: runs that could not go on, likewise.
        sources: the directories read.
    """

    stream: str
    tasks: tuple[str, ...]
    metric: tuple[str, ...]
    settings: Json
    strategies: tuple[StrategyRuns, ...]
    unfinished: tuple[Json, ...]
    failed: tuple[Json, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of text; the first column names the row, the others hold numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Page:
    """A whole report, ready to be written in any format."""

    title: str
    notes: tuple[str, ...]
    tables: tuple[Table, ...]


def what_wrote(path: Path) -> str:
    """The command that results were written by: ``experiment``, ``graft``, else ``run``."""
    file = path / "results.json" if path.is_dir() else path
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "run"  # whose reader says what is wrong
    held = results if isinstance(results, dict) else {}
    return "experiment" if "experiment" in held else "graft" if "grafts" in held else "run"


def load_results(path: Path) -> Json:
    """Reads and checks the results of a finished run.

    Args:
        path: a run directory, or the results.json in it.

    Returns:
        The content of results.json, and under `source` the path it was read from.

    Raises:
        ReportError: the file is missing, not JSON, or not of this schema; the message names file and key.
    """
    path = Path(path)
    file = path / "results.json" if path.is_dir() else path
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(
            f"{file} does not exist. A run writes it when its first strategy is done: give the directory of "
            "such a run, or finish this one with `forgetfree run ... --resume`."
        ) from None
    except OSError as error:
        raise ReportError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # JSON and UTF-8 alike
        raise ReportError(
            f"{file} is not valid JSON, perhaps it was cut short ({error}). "
            "Repeat the run with `forgetfree run ... --resume`."
        ) from error
    try:
        _validate(results)
    except ReportError as error:
        raise ReportError(f"{file}: {error}") from None
    return {**with_timings(results, file.parent), "source": str(path)}


def with_timings(results: Json, directory: Path) -> Json:
    """The results, with each run's ``seconds_per_task`` where a file beside them holds it."""
    runs = []
    for run in results["runs"]:
        path = directory / run["strategy"] / f"seed-{run['seed']}" / SECONDS_PER_TASK
        try:
            seconds = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # what can be said without it is said
            seconds = None
        right = _is_table([seconds], 1, len(results["tasks"]))
        runs.append(run | {"seconds_per_task": seconds} if right else run)
    return results | {"runs": runs}


def merge(results: Sequence[Json]) -> Comparison:
    """Brings the runs of several directories and seeds together.

    Runs of one strategy stand in one row, unless their `options` differ: then each configuration has its own.

    Args:
        results: what `load_results` returned, at least one.

    Raises:
        ReportError: the results must not be compared, or hold one strategy and seed twice with different
            outcomes; the message names both directories.
    """
    if not results:
        raise ReportError("There are no results to report on. Give at least one run directory.")
    sources = tuple(result.get("source", f"results {number}") for number, result in enumerate(results, start=1))
    first = results[0]
    for result, source in zip(results, sources, strict=True):
        for key in ("tasks", "scenario", "model", "readout", "shots", "data"):
            usual = "task" if key == "scenario" else None
            _require_same(key, first.get(key, usual), result.get(key, usual), sources[0], source)
    # strategy → its options as JSON → seed → (run, where it was found)
    found: dict[str, dict[str, dict[int, tuple[Json, str]]]] = {}
    metric: tuple[list[str], str] | None = None
    for result, source in zip(results, sources, strict=True):
        for run in result["runs"]:
            metric = metric or (run["metric"], source)
            _require_same("metric", metric[0], run["metric"], metric[1], source)
            options = json.dumps(run.get("options") or {}, sort_keys=True)
            seeds = found.setdefault(run["strategy"], {}).setdefault(options, {})
            earlier, place = seeds.setdefault(run["seed"], (run, source))
            if _apart_from_seconds(run) != _apart_from_seconds(earlier):
                raise ReportError(
                    f"{run['strategy']} with seed {run['seed']} is in {place} and in {source}, with "
                    "different outcomes. Leave one of them out, or run with another seed."
                )
    return Comparison(
        stream=first["stream"],
        tasks=tuple(first["tasks"]),
        metric=tuple(metric[0]) if metric else ("accuracy",) * len(first["tasks"]),
        settings=_settings(first),
        strategies=tuple(
            StrategyRuns(
                label=_label(strategy, json.loads(options), [json.loads(other) for other in variants]),
                runs=tuple(seeds[seed][0] for seed in sorted(seeds)),
            )
            for strategy, variants in found.items()
            for options, seeds in variants.items()
        ),
        unfinished=tuple(
            {**run, "source": source}
            for result, source in zip(results, sources, strict=True)
            for run in result.get("unfinished", [])
        ),
        failed=tuple(
            {**run, "source": source}
            for result, source in zip(results, sources, strict=True)
            for run in result.get("failed", [])
        ),
        sources=sources,
    )


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
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return render_page(lay_out(comparison), format)


def render_page(page: Page, format: str) -> str:
    """Writes a page down, in any format but ``json``; see `render`."""
    if format not in _RENDERERS:
        raise UnknownNameError("report format", format, FORMATS)
    return _RENDERERS[format](page)


# ---- layout: from results to tables of text -------------------------------------------------------------


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
    with_agreement = any("agreement" in run for entry in comparison.strategies for run in entry.runs)
    rows = []
    for entry in comparison.strategies:
        row = _cells([run["ece"][-1] for run in entry.runs], percent)
        if with_agreement:
            absent = [None] * len(comparison.tasks)
            row += _cells([run.get("agreement", absent) for run in entry.runs], percent)
        rows.append((entry.label, *row))
    agreement = (f"agreement {task}" for task in comparison.tasks) if with_agreement else ()
    return Table(
        title="Calibration error per task, and agreement with the fine-tuned model (in %)",
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
        yield "Set-up: " + ", ".join(f"{key} {value}" for key, value in comparison.settings.items()) + "."
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


def cell(values: Iterable[float | None], show: Callable[[float], str]) -> str:
    """`mean (std)` over seeds, or the one value, or a dash where any seed has none.

    A mean over some of the seeds would stand beside means over all of them and look like one.
    """
    given = list(values)
    known = [value for value in given if value is not None]
    if not known or len(known) < len(given):
        return NULL
    mean = show(float(np.mean(known)))
    return mean if len(known) == 1 else f"{mean} ({show(float(np.std(known, ddof=1)))})"


def _cells(rows: Sequence[Sequence[float | None]], show: Callable[[float], str]) -> list[str]:
    """One cell per column of `rows`, shape (seeds, columns)."""
    return [cell(column, show) for column in zip(*rows, strict=True)]


def percent(fraction: float) -> str:
    """A fraction in percent, to one digit."""
    return f"{100 * fraction:z.1f}"  # z: no minus sign before 0.0


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}"


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _share(fraction: float) -> str:
    return f"{fraction:.3f}"


# ---- formats --------------------------------------------------------------------------------------------


def _as_rich(page: Page) -> str:
    # Where the output is no terminal, nothing needs to be squeezed into 80 columns.
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    text = io.StringIO()
    console = rich.console.Console(file=text, width=10**4, color_system=None, force_terminal=False)

    def write(line: str) -> None:
        console.print(rich.text.Text(line), width=width)  # shown as it is, never read as rich's markup

    for line in (page.title, *page.notes):
        write(line)
    for table in page.tables:
        drawn = _draw(table, broken=False)
        if console.measure(drawn).maximum > width:
            drawn = _draw(table, broken=True)
        write("")
        write(table.title)
        # On the narrowest terminals a table is too wide rather than robbed of columns.
        console.print(drawn, width=max(width, console.measure(drawn).minimum))
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines()) + "\n"


def _draw(table: Table, broken: bool) -> rich.table.Table:
    """The table for a terminal; `broken` into lines between all words, but for sentences, if that is what it takes to fit."""
    drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for number, cells in enumerate(zip(table.header, *table.rows, strict=True)):
        longest = max((len(word) for cell in cells for word in cell.split()), default=1)
        prose = any(len(cell) > 40 for cell in cells[1:])
        drawn.add_column(
            rich.text.Text(cells[0]),
            justify="right" if number and not prose else "left",
            overflow="fold",
            width=longest if broken and not prose else None,
        )
    for row in table.rows:
        drawn.add_row(*map(rich.text.Text, row))
    return drawn


def _as_markdown(page: Page) -> str:
    def escape(text: str) -> str:
        return re.sub(r"([\\|*_<>\[\]`&~#])", r"\\\1", " ".join(text.split()))

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    blocks = [f"# {escape(page.title)}"]
    if page.notes:
        blocks.append("\n".join(f"- {escape(note)}" for note in page.notes))
    for table in page.tables:
        rule = line(["---"] + ["---:"] * (len(table.header) - 1))
        body = [line(map(escape, row)) for row in table.rows]
        blocks += [f"## {escape(table.title)}", "\n".join([line(map(escape, table.header)), rule, *body])]
    return "\n\n".join(blocks) + "\n"


_HTML_STYLE = (
    "body{font-family:sans-serif;margin:2rem}table{border-collapse:collapse;margin-bottom:2rem}"
    "caption{text-align:left;font-weight:bold;padding:.5rem 0}"
    "th,td{padding:.25rem .75rem;text-align:right;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}"
    "thead{border-top:2px solid;border-bottom:1px solid}tbody{border-bottom:2px solid}"
)


def _as_html(page: Page) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    title = html.escape(page.title)
    lines = ["<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">']
    lines += [f"<title>{title}</title>", f"<style>{_HTML_STYLE}</style>", "</head>"]
    lines += ["<body>", f"<h1>{title}</h1>"]
    lines += [f"<p>{html.escape(note)}</p>" for note in page.notes]
    for table in page.tables:
        lines += ["<table>", f"<caption>{html.escape(table.title)}</caption>"]
        lines += ["<thead>", row(table.header, "th"), "</thead>", "<tbody>"]
        lines += [*(row(cells, "td") for cells in table.rows), "</tbody>", "</table>"]
    return "\n".join([*lines, "</body>", "</html>"]) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # after \\ or \item a bare one would open an optional argument
    "]": "{]}",
    "—": "---",
}


def _as_latex(page: Page) -> str:
    def escape(text: str) -> str:
        return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))

    def line(cells: Sequence[str]) -> str:
        numbers = (re.sub(r"^-(?=\d)", "$-$", escape(cell)) for cell in cells[1:])
        return " & ".join([escape(cells[0]), *numbers]) + r" \\"

    lines = [r"% Needs \usepackage{booktabs}."]
    for table in page.tables:
        lines += [r"\begin{table}[htbp]", r"\centering", rf"\caption{{{escape(table.title)}}}"]
        lines += [rf"\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}", r"\toprule", line(table.header)]
        lines += [r"\midrule", *map(line, table.rows), r"\bottomrule", r"\end{tabular}", r"\end{table}", ""]
    if page.notes:
        lines += [r"\begin{itemize}", *(rf"\item {escape(note)}" for note in page.notes), r"\end{itemize}"]
    return "\n".join(lines).rstrip() + "\n"


_RENDERERS: dict[str, Callable[[Page], str]] = {
    "rich": _as_rich,
    "markdown": _as_markdown,
    "html": _as_html,
    "latex": _as_latex,
}
FORMATS = (*_RENDERERS, "json")


# ---- merging --------------------------------------------------------------------------------------------


def _require_same(key: str, ours: Any, theirs: Any, our_source: str, their_source: str) -> None:
    difference = _first_difference(key, ours, theirs)
    if difference:
        raise ReportError(
            f"{our_source} and {their_source} cannot be compared: {difference}. Report on them separately."
        )


def _first_difference(key: str, ours: Any, theirs: Any) -> str | None:
    """Where two JSON values first differ, as a dotted key and both values; None if they are equal."""
    if ours == theirs:
        return None
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = {**ours, **theirs}
        inner = (_first_difference(f"{key}.{name}", ours.get(name), theirs.get(name)) for name in names)
        return next(filter(None, inner), f"{key} differs")
    return f"{key} is {_brief(ours)} in one and {_brief(theirs)} in the other"


def _apart_from_seconds(run: Json) -> Json:
    return {key: value for key, value in run.items() if key not in ("seconds", "seconds_per_task")}


def _label(strategy: str, options: Json, variants: Sequence[Json]) -> str:
    """The strategy's name, with those of its options that are not the same in all of its variants."""
    keys = dict.fromkeys(key for variant in variants for key in variant)
    telling = [key for key in keys if any(other.get(key) != options.get(key) for other in variants)]
    if not telling:
        return strategy
    return f"{strategy} ({', '.join(f'{key}={options.get(key, NULL)}' for key in telling)})"


def _settings(results: Json) -> Json:
    """What the results say of the set-up, wherever they say it."""
    settings = {"model": results["model"].get("name")}
    for key in ("scenario", "readout", "shots", "steps", "sparsity"):
        places = (results, results["data"], results["model"])
        settings[key] = next((place[key] for place in places if place.get(key) is not None), None)
    if settings["scenario"] == "task":
        del settings["scenario"]  # the usual one
    return {key: value for key, value in settings.items() if isinstance(value, str | int | float)}


# ---- the schema of results.json -------------------------------------------------------------------------

_KIND_NAMES = {str: "a string", int: "an integer", list: "a list", dict: "an object"}
_Fields = Mapping[str, type]
_RESULTS: _Fields = {"stream": str, "tasks": list, "model": dict, "data": dict, "runs": list}
_RUN: _Fields = {
    "strategy": str,
    "seed": int,
    "metric": list,
    "matrix": list,
    "ece": list,
    "summary": dict,
    "seconds": dict,
}
_SUMMARY = ("average", "forgetting", "bwt", "fwt", "intransigence", "ece")
_LEDGER: _Fields = {"tasks": list, "region_size": list, "owned_size": list, "bytes": int, "overlap": list}
_UNION: _Fields = {"accuracy": list, "ece": list}
_UNFINISHED: _Fields = {"strategy": str, "seed": int, "matrix": list}
_FAILED: _Fields = {"strategy": str, "seed": int, "error": str}


def _validate(results: Any) -> None:
    """Checks everything that a report reads; keys that it does not know are left alone."""
    _check("the content", results, isinstance(results, dict), "an object")
    if results.get("schema") != SCHEMA:
        raise ReportError(
            f"schema must be {SCHEMA}, got {_brief(results.get('schema'))}. Another version of forgetfree "
            "wrote it: report with that one, or repeat the run with this one."
        )
    _check_fields("", results, _RESULTS)
    tasks = results["tasks"]
    named = all(isinstance(task, str) for task in tasks) and 0 < len(tasks) == len(set(tasks))
    _check("tasks", tasks, named, "a list of different task names")
    for number, run in enumerate(results["runs"]):
        _validate_run(f"runs[{number}]", run, tasks)
    for key, fields in (("unfinished", _UNFINISHED), ("failed", _FAILED)):
        cut_short = results.get(key, [])
        _check(key, cut_short, isinstance(cut_short, list), "a list")
        for number, run in enumerate(cut_short):
            _check_fields(f"{key}[{number}]", run, fields)


def _validate_run(key: str, run: Any, tasks: list[str]) -> None:
    n = len(tasks)
    _check_fields(key, run, _RUN)
    named = len(run["metric"]) == n and all(isinstance(name, str) for name in run["metric"])
    _check(f"{key}.metric", run["metric"], named, f"{n} names of metrics")
    for name in ("matrix", "ece"):
        right = _is_table(run[name], n + 1, n, most=1.0)
        _check(f"{key}.{name}", run[name], right, f"{n + 1} rows of {n} numbers in [0, 1]")
    for name in _SUMMARY:
        value = run["summary"].get(name, "nothing")
        _check(f"{key}.summary.{name}", value, value is None or _is_number(value), "a number or null")
    for phase, seconds in run["seconds"].items():
        _check(f"{key}.seconds.{phase}", seconds, _is_number(seconds, least=0.0), "a number of seconds")
    if run.get("options") is not None:
        _check(f"{key}.options", run["options"], isinstance(run["options"], dict), "an object")
    if "ledger" not in run:
        raise ReportError(f"{key}.ledger is missing. It is null for a strategy that keeps none.")
    if run["ledger"] is not None:
        _validate_ledger(f"{key}.ledger", run["ledger"], tasks)
    for name in ("kept_bytes", "seconds_per_task"):
        if run.get(name) is not None:
            _check(f"{key}.{name}", run[name], _is_table([run[name]], 1, n), f"{n} numbers of at least 0")
    if run.get("union") is not None:
        _check_fields(f"{key}.union", run["union"], _UNION)
        for name in _UNION:
            values = run["union"][name]
            right = _is_table([values], 1, n, most=1.0)
            _check(f"{key}.union.{name}", values, right, f"{n} numbers in [0, 1]")


def _validate_ledger(key: str, ledger: Any, tasks: list[str]) -> None:
    n = len(tasks)
    _check_fields(key, ledger, _LEDGER)
    _check(f"{key}.tasks", ledger["tasks"], ledger["tasks"] == tasks, f"the tasks of the stream, {tasks}")
    _check(f"{key}.bytes", ledger["bytes"], ledger["bytes"] >= 0, "at least 0")
    for name in ("region_size", "owned_size"):
        _check(f"{key}.{name}", ledger[name], _is_table([ledger[name]], 1, n), f"{n} sizes")
    overlap = ledger["overlap"]
    _check(f"{key}.overlap", overlap, _is_table(overlap, n, n), f"{n} rows of {n} numbers")


def _check_fields(key: str, value: Any, fields: _Fields) -> None:
    _check(key, value, isinstance(value, dict), "an object")
    for name, kind in fields.items():
        inner = f"{key}.{name}" if key else name
        if name not in value:
            raise ReportError(f"{inner} is missing. It must be {_KIND_NAMES[kind]}.")
        # In Python, unlike in JSON, true and false are integers.
        right = isinstance(value[name], kind) and not isinstance(value[name], bool)
        _check(inner, value[name], right, _KIND_NAMES[kind])


def _check(key: str, value: Any, right: bool, expected: str) -> None:
    if not right:
        raise ReportError(f"{key} must be {expected}, got {_brief(value)}.")


def _is_table(value: Any, rows: int, columns: int, most: float = math.inf) -> bool:
    """Whether the JSON value has that shape and holds numbers in [0, most]."""
    return (
        isinstance(value, list)
        and len(value) == rows
        and all(isinstance(row, list) and len(row) == columns for row in value)
        and all(_is_number(number, 0.0, most) for row in value for number in row)
    )


def _is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and least <= value <= most


def _brief(value: Any) -> str:
    return reprlib.repr(value)
