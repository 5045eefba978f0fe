"""Labels: cells of a column as the numbers of a task's labels, and what of them may be a mistake."""

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

#: A whole number as programs write it, and the same in a column of real numbers. Longer ones are names.
_WHOLE = re.compile("0|-?[1-9][0-9]{0,99}")
_WHOLE_AS_REAL = re.compile(rf"(?:{_WHOLE.pattern})\.0")
#: A real number as programs write it.
_REAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:e[+-][0-9]+)?")
#: How many labels a note names, and how many groups of labels a message.
_MOST_NAMES = 5
#: A list that Python or JSON wrote as a text; the signs that stand between labels, and those that names have, too.
_LIST = re.compile(r"""\[[\d\s,.]*\]|[\[({]\s*['"].*[\])}]""", re.DOTALL)
_BETWEEN, _IN_NAMES = "|;\n", ",/+&"
_BLANKS_BESIDE = re.compile(rf" ?([{_BETWEEN}{_IN_NAMES}]) ?")
#: Where more labels than these have, on average, fewer than two rows, the column holds something else.
_MANY = 20
#: How many labels are compared in pairs, at most; and how many times as many rows the right one of two has, at least.
_MOST_COMPARED, _RARER = 500, 5

_A_REAL = (
    "A number that is not whole is a value to predict, but tasks have classes: replace each range by a class name; "
    "if these are class names, list all as label_names in source.json. "
)
#: Why a cell with several labels is none.
SEVERAL = "Keep one; --kind multi-label reads several; --kind classification takes such cells as labels of their own. "
_A_NAN = "nan often marks rows without a label; if it is a label, name all labels as label_names in source.json. "


def label_cells(
    column: Sequence[Any], typed: bool = True, names: Sequence[str] = (), as_written: bool = False
) -> list[int | str | ValueError]:
    """Return the cells of a label column as whole numbers or names; truth values are the names ``false`` and ``true``.

    A text is a whole number where it is the plain spelling of one, and ``1.0`` is where all numbers of the column are written
    so. Any other text is a name, and makes names of the whole numbers beside it if it holds a digit: 01 and 1 are two codes.

    Args:
        column: the cells.
        typed: whether numbers and texts are told apart by the file; else a text may be a real number, which is no label.
        names: of the labels, where they are known: these are labels in any form.
        as_written: whether a cell that seems to hold several labels is one.

    Returns:
        Of each cell the label, or an error that says why it is none, where there is more to say.
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

    These are written lists; texts whose parts between commas, slashes, + or & are all texts of their own; and all with a
    vertical bar, a semicolon or a line break, where one of these stands between parts that other texts have, too.

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
    """Return the labels of a cell that holds any number of them: a list as programs write it, or texts with a sign between.

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
    """Return a reader of a text in a column that holds these, of which some seem to hold several labels."""
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
    """Return whether a program wrote these real numbers: each in its shortest form, or all with as many decimals.

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
        """Return the labels of these names, which may be written as numbers from 0, too."""
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
    """Return the labels that training rows have; of names that look alike the commonest, see `check_alike`.

    ``numbered`` says that numbers are the places of ``names``, as in a ``ClassLabel``; else a number may itself be a name.

    Raises:
        DataError: these are no labels.
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
    """Return the places of the names that are whole numbers, or look like one, by these."""
    alike = {int(seen): i for i, name in enumerate(names) if _WHOLE.fullmatch(seen := folded(name))}
    return alike | {int(name): i for i, name in enumerate(names) if _WHOLE.fullmatch(name)}


# -- Labels that look alike ------------------------------------------------------------------------------


def check_alike(
    where: str, cells: Sequence[Any], rows: Sequence[int], what: str = "labels", key: str = "label_names"
) -> None:
    """Raise ``DataError`` if names look alike to a reader, or are one number: see `folded`."""
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
    """Return notes on rare labels that one slip of typing makes of a common one, see `is_slip`."""
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
    """Return whether words of four letters or more differ by a letter that is another, missing, or swapped with the next.

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
    """Return a name as a reader sees it: without case, invisible characters, blanks beside signs; é in one code; 1.0 is 1."""
    seen = " ".join(unicodedata.normalize("NFKC", without_invisible(name)).casefold().split())
    seen = _BLANKS_BESIDE.sub(r"\1", unicodedata.normalize("NFKC", seen))
    return seen.removesuffix(".0") if _WHOLE_AS_REAL.fullmatch(seen) else seen


def _listed(names: Sequence[str]) -> str:
    texts = [f'"{name}"' if "," in name else name for name in map(with_invisible, names)]
    return ", ".join(texts if len(texts) <= 12 else [*texts[:10], "…", texts[-1]])


def notes_of_labels(cells: Iterable[int | str], labels: Labels, split: str) -> list[str]:
    """Return notes on the labels of a split that are written otherwise than their names."""
    places = {cell: labels.place(cell) for cell in dict.fromkeys(cells) if str(cell) not in labels.names}
    read = [  # a number may be that of a name, which is no other spelling
        (cell, labels.names[place])
        for cell, place in places.items()
        if place is not None and (isinstance(cell, str) or folded(str(cell)) == folded(labels.names[place]))
    ]
    return [f"{split} label {shown(cell)} is read as {shown(name)}" for cell, name in read[:_MOST_NAMES]]
