"""The tables made of answers: of each task with labels how each is answered, and what it is taken for; a few of the texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forgetfree.display import NULL
from forgetfree.results.answers import shown_rows
from forgetfree.results.label_scores import LabelScores
from forgetfree.results.metrics import Floats
from forgetfree.results.report.page import WIDE, Table, cell, percent
from forgetfree.results.report.words import meanings
from forgetfree.results.runs import UNTRAINED
from forgetfree.results.table import Results

#: How many characters of a text are shown.
_CHARACTERS = 200


def label_tables(results: Results) -> Iterator[Table]:
    """Yield a table for each task whose answers are labels, of all seeds at the end of the stream; of long streams none."""
    told = False
    for task in results.tasks if len(results.tasks) <= WIDE else ():
        of_strategies = {
            entry.label: [LabelScores.of(each.probabilities[task], each.labels[task]) for each in files]
            for entry in results.entries
            for files in [[run.files for run in entry.runs]]
            if all(task in each.probabilities and task in each.labels for each in files)
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
            measures = ([scores.precision for scores in seeds], [scores.recall for scores in seeds])
            shares = [cell((float(each[i]) for each in of), percent) for of in (*measures, [s.f1 for s in seeds])]
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


def _most(names: Sequence[str], own: int, taken: Floats) -> str:
    """Return the wrong label that most rows of a label are answered with, and how many; a dash where there is none."""
    wrong = [0.0 if i == own else count for i, count in enumerate(taken)]
    place = int(np.argmax(wrong))
    name = names[place] if place < len(names) else "another task's"
    return f"{name}: {_count(wrong[place])}" if wrong[place] else NULL


def _count(count: float | np.floating[Any]) -> str:
    return f"{count:,.1f}".removesuffix(".0")


def text_tables(results: Results) -> Iterator[Table]:
    """Yield for each task that is answered by texts a few rows, by the first seed of each strategy at the end of the stream."""
    first = {entry.label: entry.runs[0].files for entry in results.entries}
    for task in results.tasks:
        written = {label: files.texts[task] for label, files in first.items() if task in files.texts}
        if not written:
            continue
        one, *others = written.values()
        if any(other.right != one.right for other in others):  # on other test rows
            continue
        places = shown_rows(len(one.right))
        lines = [("prompt", [one.prompts[place] for place in places])] if one.prompts else []
        lines += [("right text", [one.right[place][0] for place in places])]
        lines += [(UNTRAINED, list(files.before[task])) for files in first.values() if task in files.before][:1]
        lines += [(label, [each.texts[place] for place in places]) for label, each in written.items()]
        yield Table(
            f"Texts of {task} at the end, by the first seed",
            ("", *(f"test row {place + 1}" for place in places)),
            tuple((name, *map(_cut, texts)) for name, texts in lines),
        )


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return (line if len(line) <= _CHARACTERS else f"{line[:_CHARACTERS]}…") or "(empty)"
