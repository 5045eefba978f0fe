"""The tables that say what the scores of a comparison are worth, and what the texts are that were scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from forgetfree.display import NULL, PERCENT
from forgetfree.results.answers import LabelAnswers, shown_rows
from forgetfree.results.calibration import debiased_ece, ece_noise_floor
from forgetfree.results.comparison import Comparison
from forgetfree.results.evidence import Answers, Evidence
from forgetfree.results.report.label_tables import label_tables
from forgetfree.results.report.page import WIDE, Table, cell, percent, transposed
from forgetfree.results.report.words import NAIVE, meanings
from forgetfree.results.run_results import REFERENCE, UNTRAINED


def evidence_tables(comparison: Comparison, evidence: Evidence) -> list[Table]:
    """Return averages with intervals, what is kept above the floor, calibration beside chance, scores of labels, and texts.

    Args:
        comparison: what `merge` or `with_files` returned.
        evidence: of the comparison.
    """
    answers: dict[str, Answers] = {}
    for entry in comparison.strategies:
        of_seeds = {run.seed: unit.answers for run, unit in zip(entry.runs, entry.files, strict=bool(entry.files))}
        if of_seeds and all(of_seeds.values()):
            answers[entry.label] = of_seeds
    several = any(len(entry.runs) > 1 for entry in comparison.strategies)
    shares = comparison.scale == PERCENT and comparison.sign == 1
    return [
        *([_intervals(comparison, evidence)] if shares and several else []),
        *(_retention(comparison, evidence) if shares else ()),
        *([_calibration(comparison, answers)] if answers else []),
        *label_tables(comparison),
        *text_tables(comparison),
    ]


def _intervals(comparison: Comparison, evidence: Evidence) -> Table:
    compared = [entry.label for name in (REFERENCE, NAIVE) if (entry := comparison.by_strategy.get(name))]
    rows = []
    for label in (entry.label for entry in comparison.strategies):
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


def _retention(comparison: Comparison, evidence: Evidence) -> Iterator[Table]:
    """Yield for each task, and for the average, which share is kept of what fine-tuning learned above the best floor."""
    tuned, floors = comparison.by_strategy.get(REFERENCE), comparison.best_floors
    if tuned is None or not floors:
        return
    reference = tuned.label
    average = float(np.mean([score for _, score in floors]))
    rows = [("the floor", *(f"{percent(score)} ({name})" for name, score in floors), percent(average))]
    for label in (entry.label for entry in comparison.strategies):
        shares = [
            evidence.retention(label, reference, floor, task)
            for task, (_, floor) in zip(comparison.tasks, floors, strict=True)
        ]
        shares.append(evidence.retention(label, reference, average))
        rows.append((label, *(NULL if share is None else share.text for share in shares)))
    table = Table(
        f"Kept above the floor (in % of what {reference} has above it, with 95 % intervals)",
        ("strategy", *comparison.tasks, "average"),
        tuple(rows),
        legend=meanings("kept above the floor", "interval"),
    )
    yield transposed(table, "task") if len(comparison.tasks) > WIDE else table


def _calibration(comparison: Comparison, answers: dict[str, Answers]) -> Table:
    """Return for each strategy ECE, what chance shows, and what is left without it and after scaling: means over tasks."""
    measures: dict[str, Callable[[LabelAnswers], float]] = {
        "ECE": lambda each: each.ece,
        "noise floor": lambda each: ece_noise_floor(each.logits, each.labels),
        "ECE without noise": lambda each: debiased_ece(each.logits, each.labels),
    }
    runs = {entry.label: entry.runs for entry in comparison.strategies}
    scaled = {"ECE after scaling": "ece_scaled", "temperature": "temperature"}
    if not any(run.temperature for label in answers for run in runs[label]):
        scaled = {}

    def means(key: str, label: str) -> Iterator[float | None]:
        for run in runs[label]:
            values = [
                value for value, ece in zip(getattr(run, key) or (), run.ece[-1], strict=False) if ece is not None
            ]
            yield None if None in values or not values else float(np.mean(values))

    rows = [
        (
            label,
            *(
                cell(
                    (float(np.mean([measure(each) for each in of_task.values()])) for of_task in of_seeds.values()),
                    percent,
                )
                for measure in measures.values()
            ),
            *(cell(means(key, label), percent if key == "ece_scaled" else _number) for key in scaled.values()),
        )
        for label, of_seeds in answers.items()
    ]
    return Table(
        "Calibration beside chance (in percentage points; means over tasks)",
        ("strategy", *measures, *scaled),
        tuple(rows),
        legend=meanings(*measures, *scaled),
    )


def _number(value: float) -> str:
    return f"{value:.2f}"


# ---- texts ----------------------------------------------------------------------------------------------

#: How many characters of a text are shown.
_CHARACTERS = 200


def text_tables(comparison: Comparison) -> Iterator[Table]:
    """Yield for each task that is answered by texts a few rows, by the first seed of each strategy at the end of the stream."""
    first = {entry.label: entry.files[0].texts for entry in comparison.strategies if entry.files}
    for task in comparison.tasks:
        written = {label: texts[task] for label, texts in first.items() if task in texts}
        if not written:
            continue
        one, *others = written.values()
        if any(other.right != one.right for other in others):  # on other test rows
            continue
        places = shown_rows(len(one.right))
        lines = [("prompt", [one.prompts[place] for place in places])] if one.prompts else []
        lines += [("right text", [one.right[place][0] for place in places])]
        lines += [(UNTRAINED, list(each.before)) for each in written.values() if each.before][:1]
        lines += [(label, [each.texts[place] for place in places]) for label, each in written.items()]
        yield Table(
            f"Texts of {task} at the end, by the first seed",
            ("", *(f"test row {place + 1}" for place in places)),
            tuple((name, *map(_cut, texts)) for name, texts in lines),
        )


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return (line if len(line) <= _CHARACTERS else f"{line[:_CHARACTERS]}…") or "(empty)"
