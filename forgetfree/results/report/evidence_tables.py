"""The tables that say what the scores of a comparison are worth; made of the answers that runs keep beside their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from forgetfree.display import NULL
from forgetfree.results.answers import LabelAnswers
from forgetfree.results.calibration import debiased_ece, ece_noise_floor
from forgetfree.results.comparison import Comparison
from forgetfree.results.evidence import Answers, Evidence, Interval
from forgetfree.results.report.page import WIDE, Table, cell, percent, transposed
from forgetfree.results.report.words import NAIVE, meanings
from forgetfree.results.run_results import REFERENCE
from forgetfree.results.unit_folder import Units


def evidence_tables(comparison: Comparison, units: Units) -> list[Table]:
    """Return averages with intervals and calibration beside chance; nothing where the answers are not there.

    Averages are those of all tasks: where answers to one are no probabilities, there is calibration alone, of the others.

    That is where a run was made elsewhere, where runs were tested on other rows, and for entity F1, whose rows are sentences:
    the files do not have their ends.
    """
    metrics = dict(zip(comparison.tasks, comparison.metric, strict=True))
    answers: dict[str, Answers] = {}
    for entry in comparison.strategies:
        of_seeds = {run.seed: unit.answers for run, unit in zip(entry.runs, units[entry.label], strict=True)}
        if of_seeds and all(of_seeds.values()) and all(_of_rows(each, metrics) for each in of_seeds.values()):
            answers[entry.label] = of_seeds
    if not answers or len({_rows(each) for of_seeds in answers.values() for each in of_seeds.values()}) > 1:
        return []
    calibration = _calibration(comparison, answers)
    if any(set(each) != set(metrics) for of_seeds in answers.values() for each in of_seeds.values()):
        return [calibration]
    evidence = Evidence(answers, metrics)
    return [
        _intervals(comparison, answers, evidence),
        *_retention(comparison, answers, evidence),
        calibration,
    ]


def _of_rows(answers: Mapping[str, LabelAnswers], metrics: dict[str, str]) -> bool:
    return all(
        metrics[task] == "accuracy" or (metrics[task] == "f1" and each.logits.shape[1] == 2)
        for task, each in answers.items()
    )


def _rows(answers: Mapping[str, LabelAnswers]) -> tuple[tuple[str, bytes], ...]:
    """Return what tells the test rows of one run from others: their labels."""
    return tuple((task, each.labels.astype(np.int64).tobytes()) for task, each in answers.items())


def _intervals(comparison: Comparison, answers: dict[str, Answers], evidence: Evidence) -> Table:
    compared = [label for name in (REFERENCE, NAIVE) if (label := _label_of(comparison, answers, name))]
    rows = []
    for label in answers:
        row = [label, _shown(evidence.average(label))]
        for other in compared:
            difference = None if other == label else evidence.difference(label, other)
            row.append(NULL if difference is None else f"{_shown(difference)} {difference.verdict}")
        rows.append(tuple(row))
    named = ["average", "interval", *(["minus another"] if compared else [])]
    return Table(
        "Averages with their 95 % intervals (in %, differences in percentage points)",
        ("strategy", "average", *(f"minus {label}" for label in compared)),
        tuple(rows),
        legend=meanings(*named),
    )


def _retention(comparison: Comparison, answers: dict[str, Answers], evidence: Evidence) -> Iterator[Table]:
    """Yield for each task, and for the average, which share is kept of what fine-tuning learned above the best floor."""
    reference, floors = _label_of(comparison, answers, REFERENCE), comparison.best_floors
    if reference is None or not floors:
        return
    average = float(np.mean([score for _, score in floors]))
    rows = [("the floor", *(f"{percent(score)} ({name})" for name, score in floors), percent(average))]
    for label in answers:
        shares = [
            evidence.retention(label, reference, floor, task)
            for task, (_, floor) in zip(comparison.tasks, floors, strict=True)
        ]
        shares.append(evidence.retention(label, reference, average))
        rows.append((label, *(NULL if share is None else _shown(share) for share in shares)))
    table = Table(
        f"Kept above the floor (in % of what {reference} has above it, with 95 % intervals)",
        ("strategy", *comparison.tasks, "average"),
        tuple(rows),
        legend=meanings("kept above the floor", "interval"),
    )
    yield transposed(table, "task") if len(comparison.tasks) > WIDE else table


def _label_of(comparison: Comparison, answers: dict[str, Answers], strategy: str) -> str | None:
    """Return the label of the first row of a strategy whose answers are known."""
    labels = (e.label for e in comparison.strategies if e.label in answers and e.runs[0].strategy == strategy)
    return next(labels, None)


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


def _shown(interval: Interval) -> str:
    return f"{percent(interval.value)} [{percent(interval.low)}, {percent(interval.high)}]"
