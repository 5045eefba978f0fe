"""Labels: conversion of a column's cells to the numbers of a task's labels, and detection of likely mistakes."""

from __future__ import annotations

import json
import math
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from forgetfree.data.tables import common_start, shown
from forgetfree.display import counted, is_blank, nfc, with_invisible, without_invisible
from forgetfree.errors import DataError

#: A whole number as programs write it, and the same in a column of real numbers. Longer numbers are names.
_WHOLE = re.compile("0|-?[1-9][0-9]{0,99}")
_WHOLE_AS_REAL = re.compile(rf"(?:{_WHOLE.pattern})\.0")
#: A real number as programs write it.
_REAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:e[+-][0-9]+)?")
#: The most labels that notes name, and the most groups of labels that a message names.
_MOST_NAMES = 5
#: A list that Python or JSON wrote as a text; the separators of labels, and the separators that also occur in names.
_LIST = re.compile(r"""\[[\d\s,.]*\]|[\[({]\s*['"].*[\])}]""", re.DOTALL)
_BETWEEN, _IN_NAMES = "|;\n", ",/+&"
_BLANKS_BESIDE = re.compile(rf" ?([{_BETWEEN}{_IN_NAMES}]) ?")
#: A column with more labels than this, and fewer than two rows per label on average, does not hold labels.
_MANY = 20
#: The most labels that are compared in pairs; and the least ratio of rows between a label and a misspelling of it.
_MOST_COMPARED, _RARER = 500, 5

_A_REAL = (
    "A number that is not whole is a value to predict, but tasks have classes: replace each range by a class name; "
    "if these are class names, list all as label_names in source.json. "
)
#: The remedy for a cell with several labels.
SEVERAL = "Keep one; --kind multi-label reads several; --kind classification takes such cells as labels of their own. "
_A_NAN = "nan often marks rows without a label; if it is a label, name all labels as label_names in source.json. "


def label_cells(
    column: Sequence[Any], typed: bool = True, names: Sequence[str] = (), as_written: bool = False
) -> list[int | str | ValueError]:
    """Return the cells of a label column as whole numbers or names; booleans are the names ``false`` and ``true``.

    A text is a whole number if it is the plain spelling of one; so is ``1.0`` if all numbers of the column are written like
    that. Any other text is a name. If it has a digit, the whole numbers beside it are names, too: 01 and 1 are two codes.

    Args:
        column: the cells.
        typed: whether the file distinguishes numbers from texts; if not, a text may be a real number, which is no label.
        names: the names of the labels, if known: these are labels in any form.
        as_written: whether a cell that seems to hold several labels counts as one label.

    Returns:
        The label of each cell, or an error whose message, which may be empty, explains why the cell is no label.
    """
    texts = {cell: nfc(cell).strip() for cell in column if isinstance(cell, str)}
    known_names = {folded(name) for name in names}
    lists = set[str]() if as_written else several({*texts.values(), *names})
    lists = {text for text in lists if folded(text) not in known_names}
    read = _reader({text for text in texts.values() if not is_blank(text)}, lists, typed, bool(names))
    known: dict[Any, int | str | ValueError] = {
        cell: text if text in names and not _WHOLE.fullmatch(text) else read(text) for cell, text in texts.items()
    }
    return [known[cell] if isinstance(cell, str) else _of_value(cell, names, as_written) for cell in column]


def _of_value(value: Any, names: Sequence[str], as_written: bool) -> int | str | ValueError:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return value
    if isinstance(value, list):
        return json.dumps(value, ensure_ascii=False) if as_written else ValueError(SEVERAL)
    if not isinstance(value, float) or math.isnan(value):
        return ValueError("")
    if value.is_integer():
        return int(value)
    return str(value) if str(value) in names else ValueError(_A_REAL)


def several(texts: set[str]) -> set[str]:
    """Return the texts that seem to hold several labels.

    They are written lists; texts whose parts between commas, slashes, + or & are all texts of their own; and all texts with a
    vertical bar, a semicolon or a line break, if it separates parts in one of them that all occur in other texts, too.

    >>> sorted(several({"joy", "sad", "joy|sad", "fear|sad", "['joy']", "joy, sad", "Sci/Tech", "UK, Bath", "UK, Leeds"}))
    ["['joy']", 'fear|sad', 'joy, sad', 'joy|sad']
    """
    found, alone = set(filter(_LIST.fullmatch, texts)), {*map(_part, texts)} - {""}
    for sign in _BETWEEN + _IN_NAMES:
        divided = {text for text in texts if sign in text}
        parts = {
            text: tuple(map(_part, text.split(sign))) for text in (texts if sign in _BETWEEN else divided) if divided
        }
        if sign in _IN_NAMES:
            found |= {text for text in divided if len({*parts[text]}) > 1 and alone.issuperset(parts[text])}
            continue
        counts = Counter(
            part for each in {*parts.values()} for part in {*each} if part
        )  # spellings of one text count once
        if any(len({*parts[text]}) > 1 and all(counts[part] > 1 for part in parts[text]) for text in divided):
            found |= divided
    return found


def parts_of(text: str, sign: str) -> list[str]:
    """Return the labels of a cell that holds any number of them: a list as programs write it, or texts separated by ``sign``.

    >>> parts_of("['joy', 'sad']", "|"), parts_of("[0 3]", "|"), parts_of("joy | sad", "|"), parts_of(" ", "|")
    (['joy', 'sad'], ['0', '3'], ['joy', 'sad'], [])
    """
    parts = text.split(sign)
    if _LIST.fullmatch(text.strip()):
        quoted = [part for _, part in re.findall(r"""(['"])(.*?)\1""", text)]
        parts = quoted or re.findall(r"[^\s,\[\]]+", text)
    return [part.strip() for part in parts if part.strip()]


def _part(text: str) -> str:
    return folded(text.strip(" []'\""))


def _reader(texts: set[str], lists: set[str], typed: bool, named: bool) -> Any:
    """Return a function that reads a text of a column with these ``texts``, where ``lists`` seem to hold several labels."""
    numeric = {text for text in texts - lists if any(map(str.isdigit, text))}
    whole = {text for text in numeric if _WHOLE.fullmatch(text)}
    as_reals = bool(numeric) and all(map(_WHOLE_AS_REAL.fullmatch, numeric))
    are_reals = not typed and not as_reals and _are_reals(numeric)
    are_codes = whole < numeric and not are_reals and not named

    def read(text: str) -> int | str | ValueError:
        if is_blank(text):
            return ValueError("")
        if text in lists:
            return ValueError(SEVERAL)
        if text.lower() == "nan":
            return ValueError(_A_NAN)
        if text in whole and not are_codes:
            return int(text)
        if as_reals and text in numeric:
            return int(text.removesuffix(".0"))
        return ValueError(_A_REAL) if are_reals and text in numeric else text

    return read


def _are_reals(texts: set[str]) -> bool:
    """Return whether a program wrote these real numbers: each in its shortest form, or all with the same number of decimals.

    >>> _are_reals({"0.13", "2", "3.5"}), _are_reals({"2.50", "0.13"}), _are_reals({"1.1", "1.10"}), _are_reals({"1", "1.0"})
    (True, True, False, False)
    """
    if not all(map(_REAL.fullmatch, texts)) or all(_WHOLE.fullmatch(text.removesuffix(".0")) for text in texts):
        return False
    decimals = {len(text.partition(".")[2]) for text in texts}
    return (len(decimals) == 1 and 0 not in decimals) or all(
        _WHOLE.fullmatch(text) or repr(float(text)) == text for text in texts
    )


@dataclass(frozen=True)
class Labels:
    """The labels of a task, and how its data write them.

    Attributes:
        names: the names, in the order of the labels' numbers.
        numbers: the number of each label that is written as a whole number, by that whole number.
        expected: a phrase for a valid cell, for messages.
        note: a note on the labels, which may be empty.
    """

    names: tuple[str, ...]
    numbers: Mapping[int, int]
    expected: str = "an integer from 0"
    note: str = ""

    @classmethod
    def named(cls, names: Sequence[str]) -> Labels:
        """Return the labels with these names, which may also be written as numbers from 0."""
        return cls(tuple(names), {i: i for i in range(len(names))})

    def place(self, cell: int | str) -> int | None:
        """Return the number of a label as it is written; ``None`` if there is no such label."""
        if isinstance(cell, int):
            return self.numbers.get(cell)
        if cell in self.names:
            return self.names.index(cell)
        alike = [i for i, name in enumerate(self.names) if folded(name) == folded(cell)]
        return alike[0] if len(alike) == 1 else None

    @property
    def shown(self) -> str:
        """The names, for messages."""
        return _listed(self.names)


def learn_labels(where: str, cells: Sequence[int | str], names: Sequence[str], numbered: bool = False) -> Labels:
    """Return the labels of training rows; of names that look alike, the commonest, see `check_alike`.

    With ``numbered``, numbers are places in ``names``, as in a ``ClassLabel``; otherwise a number may itself be a name.

    Raises:
        DataError: the cells are no labels, or there is only one label.
    """
    integers = {cell for cell in cells if isinstance(cell, int)}
    counts = Counter(cell for cell in cells if isinstance(cell, str))
    by_name = _numbers_of(names)
    if names:
        count = len(names)
        known = any(Labels.named(names).place(text) is not None for text in counts)
        if known or (counts and not integers) or (integers and not numbered and integers <= by_name.keys()):
            return Labels(tuple(names), by_name, "one of the labels")
        if integers == set(range(1, count + 1)):
            note = f"labels 1 to {count} are {_listed(names)}"
            return Labels(tuple(names), {number: number - 1 for number in integers}, "an integer from 1", note)
        return Labels.named(names)
    if not counts and integers == set(range(len(integers))):
        return Labels.named([str(i) for i in range(max(len(integers), 2))])
    texts = [max(group, key=lambda name: (counts[name], name)) for group in _groups(counts)]
    order = [*sorted(integers), *sorted(texts)]
    if len(order) > _MANY and 2 * len(order) > len(cells):
        raise DataError(
            f"{where} has {len(order):,} different labels in {len(cells):,} rows, such as {shown(order[0])}: the "
            "column does not seem to contain class labels. For answers as texts, use --kind generation; otherwise, "
            "name the label column with --label-column, or all labels as label_names in source.json."
        )
    if len(order) < 2:
        raise DataError(f"{where}: every row has label {shown(order[0])}. A task needs rows with at least two labels.")
    known_names = tuple(map(str, order))
    expected = "one of the labels" if texts else "an integer"
    return Labels(known_names, _numbers_of(known_names), expected, f"labels, in this order: {_listed(known_names)}")


def _numbers_of(names: Sequence[str]) -> dict[int, int]:
    """Return the places of the names that are whole numbers, or look like one, by these numbers."""
    alike = {int(seen): i for i, name in enumerate(names) if _WHOLE.fullmatch(seen := folded(name))}
    return alike | {int(name): i for i, name in enumerate(names) if _WHOLE.fullmatch(name)}


# -- Labels that look alike ------------------------------------------------------------------------------


def check_alike(
    where: str, cells: Sequence[Any], rows: Sequence[int], what: str = "labels", key: str = "label_names"
) -> None:
    """Raise ``DataError`` if names look alike to a reader, or are the same number: see `folded`."""
    counts = Counter(cell for cell in cells if isinstance(cell, str))
    groups = [group for group in _groups(counts) if len(group) > 1]
    if not groups:
        return
    *rarer, usual = sorted(groups[0], key=lambda name: (counts[name], name))
    can_be_typed = what == "labels" and not any(with_invisible(name) != name for name in groups[0])
    mapped = f", or give {' '.join(_map_flag(name, usual) for name in rarer)}" if can_be_typed else ""

    def described(group: Sequence[str]) -> str:
        each = [f"{shown(name)} (the first in row {rows[cells.index(name)]})" for name in group]
        return f"{' and '.join(each)}, which look alike"

    raise DataError(
        f"{where} has the {what} {'; '.join(map(described, groups[:_MOST_NAMES]))}. Write them alike{mapped}; if they are "
        f"several {what}, name all {what} as {key} in source.json."
    )


def notes_of_slips(cells: Iterable[int | str]) -> list[str]:
    """Return notes on rare labels that differ from a common one by a typing error, see `is_slip`."""
    counts = Counter(cell for cell in cells if isinstance(cell, str))
    if len(counts) > _MOST_COMPARED:
        return []
    pairs = [
        (rare, usual)
        for rare, usual in permutations(counts, 2)
        if counts[rare] * _RARER <= counts[usual] and is_slip(folded(rare), folded(usual))
    ]
    return [
        f"label {shown(rare)} ({counted(counts[rare], 'row')}) may be {shown(usual)} ({counts[usual]:,}): "
        f"{_map_flag(rare, usual)} merges them"
        for rare, usual in pairs[:_MOST_NAMES]
    ]


def is_slip(one: str, other: str) -> bool:
    """Return whether words of at least four letters differ by one letter that is replaced, missing, or swapped with the next.

    >>> is_slip("feautre", "feature"), is_slip("shiping", "shipping"), is_slip("level1", "level2"), is_slip("cat", "car")
    (True, True, False, False)
    """
    start = common_start(one, other)
    ours, theirs = one[start:], other[start:]
    end = common_start(ours[::-1], theirs[::-1])
    ours, theirs = ours[: len(ours) - end], theirs[: len(theirs) - end]
    differ = {len(ours), len(theirs)} <= {0, 1} or (len(ours) == 2 and ours == theirs[::-1])
    return differ and min(len(one), len(other)) >= 4 and not any(map(str.isdigit, ours + theirs))


def _map_flag(old: str, new: str) -> str:
    return f"--map-label {shlex.quote(f'{old}={new}')}"


def _groups(names: Iterable[str]) -> list[list[str]]:
    groups = dict[str, list[str]]()
    for name in sorted(names):
        groups.setdefault(folded(name), []).append(name)
    return [*groups.values()]


def folded(name: str) -> str:
    """Return a name as a reader sees it: in NFKC, without case, invisible characters and blanks beside signs; 1.0 as 1."""
    seen = " ".join(unicodedata.normalize("NFKC", without_invisible(name)).casefold().split())
    seen = _BLANKS_BESIDE.sub(r"\1", unicodedata.normalize("NFKC", seen))
    return seen.removesuffix(".0") if _WHOLE_AS_REAL.fullmatch(seen) else seen


def _listed(names: Sequence[str]) -> str:
    texts = [f'"{name}"' if "," in name else name for name in map(with_invisible, names)]
    return ", ".join(texts if len(texts) <= 12 else [*texts[:10], "…", texts[-1]])


def notes_of_labels(cells: Iterable[int | str], labels: Labels, split: str) -> list[str]:
    """Return notes on the labels of a split that are spelt differently from their names."""
    places = {cell: labels.place(cell) for cell in dict.fromkeys(cells) if str(cell) not in labels.names}
    read = [  # a number that is a label's place is no other spelling
        (cell, labels.names[place])
        for cell, place in places.items()
        if place is not None and (isinstance(cell, str) or folded(str(cell)) == folded(labels.names[place]))
    ]
    return [f"{split} label {shown(cell)} is read as {shown(name)}" for cell, name in read[:_MOST_NAMES]]
