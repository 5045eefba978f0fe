"""The tables that say what the scores of a comparison are worth; made of the answers that runs keep beside their scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from forgetfree.results.evidence import Answers, Evidence, Interval, debiased_ece, ece_noise_floor
from forgetfree.results.headline import NAIVE, REFERENCE
from forgetfree.results.legend import MEANINGS
from forgetfree.results.metrics import Predictions
from forgetfree.results.rendering import NULL, Table, cell, percent
from forgetfree.results.run_results import Comparison
from forgetfree.results.unit_files import answers_of


def evidence_tables(comparison: Comparison) -> list[Table]:
    """Return averages with intervals and calibration beside chance; nothing where the answers are not there.

    That is where a run was made elsewhere, where runs were tested on other rows, and for entity F1, whose rows are sentences:
    the files do not have their ends.
    """
    metrics = dict(zip(comparison.tasks, comparison.metric, strict=True))
    answers: dict[str, Answers] = {}
    for entry in comparison.strategies:
        found = {run["seed"]: answers_of(run, comparison.tasks) for run in entry.runs}
        if found and all(found.values()) and all(_of_rows(each, metrics) for each in found.values()):
            answers[entry.label] = found
    if not answers or len({_rows(each) for found in answers.values() for each in found.values()}) > 1:
        return []
    return [_intervals(comparison, answers, metrics), _calibration(answers)]


def _of_rows(answers: dict[str, Predictions], metrics: dict[str, str]) -> bool:
    return all(metrics[task] == "accuracy" or each.logits.shape[1] == 2 for task, each in answers.items())


def _rows(answers: Mapping[str, Predictions]) -> tuple[tuple[str, bytes], ...]:
    """Return what tells the test rows of one run from others: their labels."""
    return tuple((task, each.labels.astype(np.int64).tobytes()) for task, each in answers.items())


def _intervals(comparison: Comparison, answers: dict[str, Answers], metrics: dict[str, str]) -> Table:
    evidence = Evidence(answers, metrics)
    labels = [entry.label for entry in comparison.strategies if entry.label in answers]
    others = {
        name: next(
            (e.label for e in comparison.strategies if e.label in answers and e.runs[0]["strategy"] == name), None
        )
        for name in (REFERENCE, NAIVE)
    }
    reference = others[REFERENCE]
    floor = None if comparison.constant is None else float(np.mean(comparison.constant))
    kept = floor is not None and reference is not None
    compared = [label for label in others.values() if label is not None]
    header = ["strategy", "average", *(f"minus {label}" for label in compared)]
    rows = []
    for label in labels:
        row = [label, _shown(evidence.average(label))]
        for other in compared:
            difference = None if other == label else evidence.difference(label, other)
            row.append(NULL if difference is None else f"{_shown(difference)} {difference.verdict}")
        if floor is not None and reference is not None:
            share = evidence.retention(label, reference, floor)
            row.append(NULL if share is None else _shown(share))
        rows.append(tuple(row))
    named = [
        "average",
        "interval",
        *(["minus another"] if compared else []),
        *(["kept above a constant answer"] * kept),
    ]
    return Table(
        "Averages with their 95 % intervals (in %, differences in percentage points)",
        (*header, *(["kept above a constant answer"] if kept else [])),
        tuple(rows),
        legend=tuple((name, MEANINGS[name]) for name in named),
    )


def _calibration(answers: dict[str, Answers]) -> Table:
    """Return for each strategy ECE, what chance shows, and what is left without it: means over tasks."""
    measures: dict[str, Callable[[Predictions], float]] = {
        "ECE": lambda each: each.ece,
        "noise floor": ece_noise_floor,
        "ECE without noise": debiased_ece,
    }
    rows = [
        (
            label,
            *(
                cell(
                    (float(np.mean([measure(each) for each in of_task.values()])) for of_task in found.values()),
                    percent,
                )
                for measure in measures.values()
            ),
        )
        for label, found in answers.items()
    ]
    return Table(
        "Calibration beside chance (in percentage points; means over tasks)",
        ("strategy", *measures),
        tuple(rows),
        legend=tuple((name, MEANINGS[name]) for name in measures),
    )


def _shown(interval: Interval) -> str:
    return f"{percent(interval.value)} [{percent(interval.low)}, {percent(interval.high)}]"
