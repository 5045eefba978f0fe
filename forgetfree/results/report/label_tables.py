"""The tables that say of each task with labels how each label is answered, and what it is taken for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forgetfree.display import NULL
from forgetfree.results.comparison import Comparison
from forgetfree.results.label_scores import LabelScores
from forgetfree.results.metrics import Floats
from forgetfree.results.report.page import WIDE, Table, cell, percent
from forgetfree.results.report.words import meanings


def label_tables(comparison: Comparison) -> Iterator[Table]:
    """Yield a table for each task whose answers are labels, of all seeds at the end of the stream; of long streams none."""
    told = False
    for task in comparison.tasks if len(comparison.tasks) <= WIDE else ():
        of_strategies = {
            entry.label: [LabelScores.of(unit.answers[task], unit.labels[task]) for unit in entry.files]
            for entry in comparison.strategies
            if entry.files and all(task in unit.answers and task in unit.labels for unit in entry.files)
        }
        if of_strategies:
            table = _table(task, of_strategies)
            yield replace(table, legend=()) if told else table
            told = True


def _table(task: str, of_strategies: dict[str, list[LabelScores]]) -> Table:
    names = next(iter(of_strategies.values()))[0].names
    few = len(names) <= WIDE
    apart = any(scores.elsewhere.any() for seeds in of_strategies.values() for scores in seeds)
    answered = [*(f"as {name}" for name in names), *(["as another task's"] if apart else [])]
    last = answered if few else ["most often taken for"]
    several = ", means over seeds" * any(len(seeds) > 1 for seeds in of_strategies.values())
    rows = []
    for strategy, seeds in of_strategies.items():
        for i, name in enumerate(names):
            shares = [cell((float(each[i]) for each in of), percent) for of in _measures(seeds)]
            taken = np.mean([[*each.confusion[i], *([each.elsewhere[i]] if apart else [])] for each in seeds], axis=0)
            ends = [_count(count) for count in taken] if few else [_most(names, i, taken)]
            rows.append((strategy, name, _count(np.mean([scores.rows[i] for scores in seeds])), *shares, *ends))
        macro = [cell(values, percent) for values in zip(*(scores.macro for scores in seeds), strict=True)]
        count = _count(np.mean([scores.rows.sum() for scores in seeds]))
        rows.append((strategy, "macro average", count, *macro, *([NULL] * len(last))))
    return Table(
        f"Labels of {task} at the end (in %; numbers of rows{several})",
        ("strategy", "label", "rows", "precision", "recall", "F1", *last),
        tuple(rows),
        legend=meanings("precision", "recall", "macro average", "as a label" if few else "most often taken for"),
    )


def _measures(seeds: Sequence[LabelScores]) -> Iterator[list[Floats]]:
    """Yield precision, recall and F1 of each seed."""
    for measure in ("precision", "recall", "f1"):
        yield [getattr(scores, measure) for scores in seeds]


def _most(names: Sequence[str], own: int, taken: Floats) -> str:
    """Return the wrong label that most rows of a label are answered with, and how many; a dash where there is none."""
    wrong = [0.0 if i == own else count for i, count in enumerate(taken)]
    place = int(np.argmax(wrong))
    name = names[place] if place < len(names) else "another task's"
    return f"{name}: {_count(wrong[place])}" if wrong[place] else NULL


def _count(count: float | np.floating[Any]) -> str:
    return f"{count:,.1f}".removesuffix(".0")
