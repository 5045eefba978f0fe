"""The report of runs, computed from `Results` alone: the outcome in a sentence, notes, figures and tables.

>>> print(render(load_results("runs/a", "runs/b"), "markdown"))  # doctest: +SKIP
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forgetfree.display import PERCENT, Scale, counted, json_text, listed
from forgetfree.errors import RunError
from forgetfree.files import write_atomically, write_json
from forgetfree.options import typed
from forgetfree.results.answers import LabelAnswers, pack_rows
from forgetfree.results.evidence import Evidence, Interval
from forgetfree.results.metrics import Floats
from forgetfree.results.report.page import Page, render_html, render_page
from forgetfree.results.report.run_tables import NAIVE, tables_of, words_of
from forgetfree.results.runs import REFERENCE, UNION, Run
from forgetfree.results.table import SCORE, Results, floors_by_seed

Json = dict[str, Any]
OURS = "grafting-continual"
#: Not continual: they train on the data of several tasks at once, or keep a model for each task.
_REFERENCES = (REFERENCE, "joint", "cumulative")
#: The caption of a run's figure.
_CAPTION = (
    "Mean over seeds; shaded: worst to best seed. Vertical line: the task is learned here. Dotted: a constant answer."
)


def write_report(out: Path, results: Results, *, ended: bool) -> None:
    """Write results.json and report.md of a run into its directory.

    Args:
        out: the directory.
        results: the results read from it.
        ended: whether the run has ended, so that report.html is written, too.
    """
    write_json(out / "results.json", content_of(results))
    if results.strategies:
        write_atomically(out / "report.md", render(results, "markdown"))
    if ended:
        write_atomically(out / "report.html", render(results, "html"))


def render(results: Results, format: str) -> str:
    """Return results as text.

    Args:
        results: the results of one or several runs.
        format: ``rich`` (plain text as wide as the terminal), ``markdown`` (GitHub's tables), ``html`` (a self-contained page),
            ``latex`` (tables for booktabs), ``json`` (every run in full) or ``csv`` (one file that `load_results` reads).

    Returns:
        Text that ends with a newline.
    """
    if format == "csv":
        return to_csv(results)
    if format == "json":
        return json_text(content_of(results), indent=2)
    page = lay_out(results)
    if format == "html":
        from forgetfree.results.report import figures  # matplotlib takes its time

        ends = (f"{label} {results.scale.with_unit(_average(label, results))}" for label in results.strategies)
        says = f"Scores over the stream; average at the end: {', '.join(ends)}"
        figure = figures.inlined(results.plot(), says) if results.strategies else ""
        return render_html(page, figure, _CAPTION, figures.style_sheet())
    return render_page(page, format)


def lay_out(results: Results) -> Page:
    """Return the report's headline, notes and tables."""
    evidence = results.evidence()
    tables = tables_of(results, evidence)
    return Page(
        title=f"forgetfree: {listed(results.stream.split(','))}",
        notes=tuple(notes(results)),
        headline=" ".join(sentences(results, evidence)),
        tables=tuple(tables),
        words=words_of(tables),
    )


# ---- the outcome ----------------------------------------------------------------------------------------


def sentences(results: Results, evidence: Evidence) -> Iterator[str]:
    """Yield sentences on forgetting, on final scores, and on the uncertainty of both."""
    if not results.strategies:
        yield "No strategy has finished, so there is nothing to compare."
        return
    naive = results.first_of(NAIVE)
    ours = results.first_of(OURS) or _best_of_the_others(results)
    if len(results.tasks) == 1:
        yield "The stream has one task, so nothing can be forgotten."
    else:
        text = ", ".join(_lost(label, results) for label in (naive, ours) if label)
        yield f"{text[:1].upper() + text[1:] if naive else text}."
    if naive and ours:
        yield _difference(ours, naive, results, evidence)


def _best_of_the_others(results: Results) -> str | None:
    names = {label: next(iter(runs.values())).strategy for label, runs in results.units.items()}
    others = [label for label, name in names.items() if name != NAIVE]
    # If the sign is 0, averages have no best: take the first.
    return max(
        others,
        key=lambda label: (names[label] not in _REFERENCES, results.sign * _average(label, results)),
        default=None,
    )


def _lost(label: str, results: Results) -> str:
    """Return a phrase with a strategy's average loss of score, and its interval."""
    name = f"naive fine-tuning ({label})" if label == results.first_of(NAIVE) else label
    learned: Floats = np.diagonal(results.matrices(label).mean(axis=0), -1)
    if results.constant and not np.any(np.array(results.signs) * (learned - results.constant) > 0):
        return f"{name} did not score above a constant answer on any task"
    loss, scale = results.forgetting(label), results.scale
    verb, what = ("lost", "loss") if loss.value >= 0 else ("gained", "gain")
    if verb == "gained":
        loss = replace(loss, value=-loss.value, low=-loss.high, high=-loss.low)
    points = f"{scale.text(loss.value)} points" if scale == PERCENT else scale.with_unit(loss.value)
    return f"{name} {verb} {points} on average ({_certainty(loss, what, len(results.units[label]), scale)})"


def _difference(ours: str, naive: str, results: Results, evidence: Evidence) -> str:
    """Return a sentence that compares the final averages, paired by seed."""
    scale = results.scale
    scores = f"At the end {ours} scores {scale.with_unit(_average(ours, results))} on average, {naive} "
    scores += scale.with_unit(_average(naive, results))
    difference = evidence.difference(ours, naive)
    if difference is None:
        return f"{scores} (no seed in common)."
    seeds = len(results.units[ours].keys() & results.units[naive].keys())
    return f"{scores}: {difference.verdict} ({_certainty(difference, 'difference', seeds, scale)})."


def _certainty(found: Interval, what: str, seeds: int, scale: Scale) -> str:
    """Return a phrase with the interval of a loss or a difference."""
    if math.isnan(found.low):
        return "one seed" if seeds == 1 else f"the same with each of {seeds} seeds"
    return f"95 % interval of the {what} {scale.text(found.low)} to {scale.text(found.high)}, {seeds} seeds"


def _average(label: str, results: Results) -> float:
    return float(np.mean(results.matrices(label)[:, -1].mean(axis=1)))


# ---- notes ----------------------------------------------------------------------------------------------


def notes(results: Results) -> Iterator[str]:
    """Yield the sentences above the tables: the set-up, rows and seeds, broken claims, and units left out."""
    if settings := [f"{key.replace('_', ' ')} {typed(value)}" for key, value in results.settings.items()]:
        yield f"Set-up: {', '.join(settings)}."
    rows = results.test_rows
    if len({*rows.values()}) == 1:
        yield f"Each task is scored on {counted(max(rows.values()), 'row')}."
    elif rows:
        yield f"Number of rows scored: {', '.join(f'{task} {count:,}' for task, count in rows.items())}."
    seeds = [(label, list(runs)) for label, runs in results.units.items()]
    if any(len(numbers) > 1 for _, numbers in seeds):
        yield "Each cell shows the mean (standard deviation, n - 1) over seeds."
    if seeds and all(numbers == seeds[0][1] for _, numbers in seeds):
        yield f"Every strategy: {_count_seeds(seeds[0][1])}."
    elif seeds:
        yield "; ".join(f"{label}: {_count_seeds(numbers)}" for label, numbers in seeds) + "."
    for label, runs in results.units.items():
        for seed, run in runs.items():
            for claim in run.facts.broken_claims:
                yield f"Broken claim of {label}, seed {seed}: {claim}."
    several = len(results.records) > 1  # with one run, its place is clear
    for record in results.records:
        place = f" ({record.source})" if several else ""
        for cut in record.about.unfinished:
            yield (
                f"Unfinished and left out: {cut['strategy']}, seed {cut['seed']}, "
                f"after {cut['after']} of {counted(len(results.tasks), 'task')}{place}."
            )
        for failed in record.about.failed:
            yield f"Failed and left out: {failed['strategy']}, seed {failed['seed']}{place}: {failed['error']}"


def _count_seeds(seeds: Sequence[int]) -> str:
    return f"{counted(len(seeds), 'seed')} ({', '.join(map(str, seeds))})"


# ---- for other programs ---------------------------------------------------------------------------------


def to_csv(results: Results) -> str:
    """Return the frame as CSV, below a header of facts; with several runs, facts about the whole come from the first.

    Raises:
        RunError: there are two configurations of one strategy, or several set-ups.
    """
    if any(label != run.strategy for label, runs in results.units.items() for run in runs.values()):
        raise RunError(
            f"One CSV file holds one set-up and one configuration of a strategy, got {', '.join(results.strategies)}. Write a "
            "file for each."
        )
    about = results.records[0].about
    if about.floors:
        about = about.model_copy(update={"floors": about.floors.model_copy(update=floors_by_seed(results.records))})
    lines, rows = [about.model_dump(exclude_unset=True)], results.test_rows
    for run in results.runs:
        # Intervals need the right rows, if the score is their share.
        right = {
            task: pack_rows(each.right)
            for task, each in run.answers.items()
            if isinstance(each, LabelAnswers) and (about.metric[task], len(each.right)) == ("accuracy", rows.get(task))
        }
        summary = {"summary": results.summary_of(run.strategy, run.seed)}
        facts = run.facts.model_copy(update={"right_rows": right}) if right else run.facts
        lines.append(facts.model_dump(exclude_unset=True) | summary)
    header = "".join(f"# {json.dumps(line, allow_nan=False)}\n" for line in lines)
    return header + results.scores.to_csv(index=False)


def content_of(results: Results) -> Json:
    """Return everything known about one or several runs as JSON: the content of results.json."""
    records = [each.about.model_dump(exclude_unset=True) for each in results.records]
    sources = [{"source": each.source} for each in results.records]
    content = records[0]
    if len(records) > 1:
        content = {"records": [its | source for its, source in zip(records, sources, strict=True)]}
    labels = {run: label for label, runs in results.units.items() for run in runs.values()}
    runs = [
        run for each in results.records for run in each.runs if run in labels
    ]  # each run once, even if two directories hold it
    return content | {"runs": [{"label": labels[run], **_run(results, labels[run], run)} for run in runs]}


def _run(results: Results, label: str, run: Run) -> Json:
    """Return a unit with its matrices and the numbers computed from them."""
    known = results.scores[(results.scores["strategy"] == label) & (results.scores["seed"] == run.seed)]
    names = [name for name in known["metric"].unique() if name not in (*results.metric, "ece")]
    values = {name: results.values(label, run.seed, name) for name in (SCORE, "ece", *names)}
    during = {name: _listed(values[name]) for name in names if not np.isnan(values[name][:-1]).all()}
    at_end = {name: _listed(values[name][-1]) for name in names if name not in during}
    union = {name: at_end[f"{UNION}{name}"] for name in ("accuracy", "ece") if f"{UNION}ece" in at_end}
    return {
        **run.facts.model_dump(exclude_unset=True, exclude={"seconds_per_task", "made"}),
        "metric": list(results.metric),
        "matrix": _listed(values[SCORE]),
        "ece": _listed(values["ece"]),
        "summary": results.summary_of(label, run.seed),
        **({"more_scores": during} if during else {}),
        **{name: its for name, its in at_end.items() if not name.startswith(UNION)},
        **({"union": union} if union else {}),
    }


def _listed(values: Floats) -> list[Any]:
    """Return an array as lists, with null for NaN."""
    return np.where(np.isnan(values), None, values.astype(object)).tolist()  # type: ignore[call-overload, no-any-return]
