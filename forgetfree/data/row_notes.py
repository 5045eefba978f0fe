"""Notes on rows that are read, and may still be a mistake: a user is told, and decides."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from forgetfree.data.labels import Labels, shown
from forgetfree.data.rows import Rows
from forgetfree.display import counted

#: What may stand between the labels of a list.
_SIGNS = ";|,/"
#: How many labels a note names.
_MOST_NAMES = 5


def notes_of_rows(rows: Rows, numbers: Sequence[int]) -> list[str]:
    """Return what to say of training rows: empty texts, repeated rows, and texts with several labels.

    Args:
        rows: the training rows.
        numbers: of the rows, for a user.
    """
    first, same = dict[tuple[str, ...], int](), dict[tuple[Any, ...], int]()
    empty, repeated, differing = list[int](), list[tuple[int, int]](), dict[int, int]()
    for i, (texts, label) in enumerate(zip(rows.texts, rows.labels, strict=True)):
        if not all(text.strip() for text in texts):
            empty.append(i)
        if (before := same.setdefault((texts, label), i)) != i:
            repeated.append((i, before))
        elif (before := first.setdefault(texts, i)) != i:
            differing.setdefault(before, i)
    notes = []
    if empty:
        verb = "has" if len(empty) == 1 else "have"
        notes.append(
            f"{counted(len(empty), 'training row')} {verb} an empty text (the first is row {numbers[empty[0]]})"
        )
    if repeated:
        one, other = repeated[0]
        verb = "repeats" if len(repeated) == 1 else "repeat"
        notes.append(
            f"{counted(len(repeated), 'training row')} {verb} the texts and the label of an earlier one (the first is row "
            f"{numbers[one]}, as row {numbers[other]})"
        )
    if differing:
        one, other = next(iter(differing.items()))
        verb = "stands" if len(differing) == 1 else "stand"
        notes.append(
            f"{counted(len(differing), 'text')} {verb} under several labels in the training rows (the first in rows "
            f"{numbers[one]} and {numbers[other]})"
        )
    return notes


def notes_of_labels(cells: Sequence[int | str], labels: Labels, numbers: Sequence[int]) -> list[str]:
    """Return what to say of labels: those that are written otherwise than their names, and those that look like lists.

    Args:
        cells: what is `written` in each training row.
        labels: what was learned of them.
        numbers: of the rows, for a user.
    """
    counts = Counter(cell for cell in cells if isinstance(cell, str))
    places = {cell: labels.place(cell) for cell in counts if cell not in labels.names}
    notes = [
        f"label {shown(cell)} ({counted(counts[cell], 'row')}, the first is row {numbers[cells.index(cell)]}) is read as "
        f"{shown(labels.names[place])}"
        for cell, place in list(places.items())[:_MOST_NAMES]
        if place is not None
    ]
    if lists := list_labels(counts):
        name = min(lists, key=lambda label: (-counts[label], label))
        whose = f"{shown(name)} ({counted(counts[name], 'row')}, the first is row {numbers[cells.index(name)]})"
        which = f"{whose} looks" if len(lists) == 1 else f"{len(lists):,} labels, such as {whose}, look"
        notes.append(f"{which} like several labels of a row, which no task here reads: such a list is one label here")
    return notes


def list_labels(names: Iterable[str]) -> list[str]:
    """Return the labels whose every part, between signs that make lists, is another label or a part of another one.

    >>> list_labels(["drama", "comedy", "drama;comedy", "Sci/Tech"])
    ['drama;comedy']
    """
    known = list(dict.fromkeys(names))
    parts = {name: {part for each in re.split(f"[{_SIGNS}]", name) if (part := each.strip())} for name in known}
    held = Counter(part for found in parts.values() for part in found)
    return [name for name in known if len(parts[name]) > 1 and all(held[part] > 1 for part in parts[name])]
