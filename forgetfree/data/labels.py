"""What is written in a label column, as the numbers of a task's labels; and what of it may be a mistake."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from forgetfree.data.tables import TASKS, shown
from forgetfree.display import counted
from forgetfree.errors import DataError

#: The most digits of a label: all such numbers fit into 64 bits.
_DIGITS = 18
#: Labels of fewer characters are remembered.
_SHORT = 100
#: What may stand between the labels of a list.
_SIGNS = ";|,/"
#: How many labels a note names.
_MOST_NAMES = 5
#: Where more labels than these have, on average, fewer than two rows, the column holds something else.
_MANY = 20


def written(value: Any) -> int | str:
    """Return a cell of a label column as a whole number or a name; truth values are the names ``false`` and ``true``.

    Raises:
        ValueError: it is neither; with a sentence that says more, where there is more to say.
    """
    if type(value) is int and abs(value) < 10**_DIGITS:  # nearly all
        return value
    if isinstance(value, bool):
        return str(value).lower()
    return _known(value) if isinstance(value, str) and len(value) < _SHORT else _read(value)


def _read(value: Any) -> int | str:
    text = value.strip() if isinstance(value, str) else str(value)
    if not isinstance(value, str | int | float) or not text or (isinstance(value, float) and math.isnan(value)):
        raise ValueError("")
    if re.fullmatch(r"[+-]?[0-9]+(\.0*)?", text):
        number = text.split(".")[0]
        if len(number.lstrip("+-")) > _DIGITS:
            raise ValueError("")
        return int(number)
    if re.fullmatch(r"[+-]?[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?|[+-]?inf|nan", text, re.IGNORECASE):
        raise ValueError(
            "A number that is not whole is a value to predict, and tasks here have classes: name one for each range. "
        )
    return text.lower() if text.lower() in ("false", "true") else text


#: Texts that are nearly always read before: labels come again and again.
_known = lru_cache(maxsize=4096)(_read)


@dataclass(frozen=True)
class Labels:
    """The labels of a task, and how its data write them.

    Attributes:
        names: in the order of their numbers.
        numbers: what stands for each label that is written as a whole number, to its number.
        expected: what a cell should be, for messages.
        note: what to say of them; nothing where they are numbered from 0.
    """

    names: tuple[str, ...]
    numbers: Mapping[int, int]
    expected: str = "an integer from 0"
    note: str = ""

    @classmethod
    def named(cls, names: Sequence[str]) -> Labels:
        """Return labels of these names, which may be written as numbers from 0, too."""
        return cls(tuple(names), {i: i for i in range(len(names))})

    def place(self, cell: int | str) -> int | None:
        """Return the number of a label as it is written; ``None`` if there is no such label."""
        if isinstance(cell, int):
            return self.numbers.get(cell)
        if cell in self.names:
            return self.names.index(cell)
        alike = [i for i, name in enumerate(self.names) if _compared(name) == _compared(cell)]
        return alike[0] if len(alike) == 1 else None


def learn_labels(
    where: str, cells: Sequence[int | str], names: Sequence[str], rows: Sequence[int], numbered: bool = False
) -> Labels:
    """Return the labels that training rows have.

    Args:
        where: the table, for messages.
        cells: what is `written` in each row; all are numbers or all are names, unless ``names`` are given.
        names: of the labels, in order, where they are known.
        rows: the number of each row, for messages.
        numbered: whether numbers are the places of names, as in a ``ClassLabel``; else a number may itself be a name.

    Raises:
        DataError: these are no labels.
    """
    integers = {cell for cell in cells if isinstance(cell, int)}
    texts = {cell for cell in cells if isinstance(cell, str)}
    by_name = {number: names.index(str(number)) for number in integers if str(number) in names}
    if names:
        count = len(names)
        known = any(Labels.named(names).place(text) is not None for text in texts)
        if known or (texts and not integers) or (integers and not numbered and len(by_name) == len(integers)):
            return Labels(tuple(names), by_name, "one of the labels")
        if integers == set(range(1, count + 1)):
            note = f"labels 1 to {count} are {_listed(names)}"
            return Labels(tuple(names), {number: number - 1 for number in integers}, "an integer from 1", note)
        return Labels.named(names)
    if not texts and integers == set(range(len(integers))):
        return Labels.named([str(i) for i in range(max(len(integers), 2))])
    order = [*sorted(integers), *sorted(texts)]
    if len(order) > _MANY and 2 * len(order) > len(cells):
        raise DataError(
            f"{where} has {len(order):,} different labels in {len(cells):,} rows, such as {shown(order[0])}: the column seems "
            f"to hold something else, such as answers, numbers or lists of labels. {TASKS}Name the label column with "
            "--label-column, or all labels as label_names in source.json."
        )
    if len(order) < 2:
        raise DataError(f"{where}: every row has label {shown(order[0])}. A task needs rows of two labels at least.")
    alike: dict[str, str] = {}
    for name in sorted(texts):
        if (other := alike.setdefault(_compared(name), name)) != name:
            difference = "case alone" if other.casefold() == name.casefold() else "the code of their characters alone"
            both = (f"{shown(each)} ({_rows_of(each, cells, rows)})" for each in (other, name))
            raise DataError(
                f"{where} has the labels {' and '.join(both)}, which differ in {difference}. Write them alike; if "
                "they are two labels, name all labels as label_names in source.json."
            )
    expected = "one of the labels" if texts else "an integer"
    numbers = {number: i for i, number in enumerate(sorted(integers))}
    return Labels(tuple(map(str, order)), numbers, expected, f"labels, in this order: {_listed(order)}")


def _rows_of(cell: str, cells: Sequence[int | str], rows: Sequence[int]) -> str:
    """Return how many rows have a label, and the first of them."""
    count = cells.count(cell)
    first = f"row {rows[cells.index(cell)]}"
    return first if count == 1 else f"{count:,} rows, the first is {first}"


def _compared(name: str) -> str:
    """Return what of a name a reader sees: without case, blanks alike, and é as one character or as e with an accent alike."""
    return " ".join(unicodedata.normalize("NFC", name).casefold().split())


def _listed(names: Sequence[Any]) -> str:
    texts = [str(name) for name in names]
    return ", ".join(texts if len(texts) <= 12 else [*texts[:10], "…", texts[-1]])


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
    counts = Counter(part for own in parts.values() for part in own)
    return [name for name in known if len(parts[name]) > 1 and all(counts[part] > 1 for part in parts[name])]
