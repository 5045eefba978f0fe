"""Tables: rows with columns, what their cells hold, and what is read of a task: the tables of its splits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from forgetfree.data.bad_rows import BadRow, BadRows
from forgetfree.data.columns import ColumnNames
from forgetfree.display import first_twice, with_invisible
from forgetfree.errors import DataError
from forgetfree.tasks import TaskDefinition

#: What is told and refused.
NO_TASK = "several labels a row, or a number to predict"
#: Said wherever data have another form.
TASKS = (
    "A task here has one label a row, for a text or a pair of texts, a tag for each word of a sentence, or a text that "
    "answers a prompt or a chat; see 'forgetfree list kinds'. "
)
_REMEDY = "Make such rows, or name other columns."
#: The names of splits, ours first.
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "dev", "eval", "val", "valid"),
    "test": ("test",),
}
#: Keys of a turn in a chat.
_TURNS = ({"role", "content"}, {"from", "value"})


def split_of(name: str) -> str | None:
    """Split that is meant by a name such as ``dev``; ``None`` if it is none."""
    return next((split for split, names in _SPLITS.items() if name.lower() in names), None)


class Columns(Mapping[str, Any]):
    """Columns, or the cells of a row, of which each is read when it is asked for, and then kept.

    Args:
        names: of the columns, in order.
        read: returns the cells of a column, or one cell.
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], Any]) -> None:
        self._names, self._read = dict.fromkeys(names), cache(read)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Table:
    """The content of one file, column by column.

    Attributes:
        where: the file, for messages.
        columns: column name to values, which may be read only now.
        numbers: the numbers of the rows, for messages: files of records count from 1, jsonl counts lines, and what is in
            memory counts from 0.
        label_names: column name to the names of its labels, where the data say them themselves (``ClassLabel``).
        note: what a user should know of how the file is written.
        typed: whether the file tells numbers from texts; in csv and tsv all cells are texts.
        bad: the rows that cannot be used, as far as they were found: what reads the table adds to them.
    """

    where: str
    columns: Mapping[str, Sequence[Any]]
    numbers: Sequence[int]
    label_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    note: str = ""
    typed: bool = True
    bad: BadRows = field(default_factory=BadRows)

    def labelled(self, column: str) -> Table:
        """Rows that have a label: in a column of ``ClassLabel``, -1 stands for none."""
        if column not in self.label_names:
            return self
        keep = [i for i, label in enumerate(self.columns.get(column, ())) if label != -1]
        return self.take(keep) if len(keep) < len(self.numbers) else self

    def take(self, rows: Sequence[int]) -> Table:
        """Some rows, in that order."""
        columns = Columns(self.columns, lambda name: [self.columns[name][i] for i in rows])
        return replace(self, columns=columns, numbers=[self.numbers[i] for i in rows])

    def good(self) -> Table:
        """Rows that are not known as bad."""
        keep = [i for i, number in enumerate(self.numbers) if number not in self.bad.numbers] if self.bad else []
        return self.take(keep) if self.bad and len(keep) < len(self.numbers) else self

    def fault(self, i: int, column: str, what: str, expected: str, got: str, remedy: str = "") -> BadRow:
        """Fault of the row at place ``i``, by one of its cells; ``remedy`` is as in `BadRow`."""
        message = f"{self.where}, row {self.numbers[i]}, column {column!r}: expected {expected}, got {got}."
        of_row = "" if remedy.endswith(_REMEDY) else "Fix or remove the row."
        message = " ".join(filter(None, [message, remedy, of_row]))
        return BadRow(self.where, self.numbers[i], column, what, got, message, remedy)

    def check_columns(self, columns: ColumnNames) -> None:
        """Raise ``DataError`` if a column is missing."""
        for column in (*columns.texts, *filter(None, [columns.label])):
            if column not in self.columns:
                raise DataError(
                    f"{self.where} has no column {column!r}, which the training rows have; found "
                    f"{', '.join(map(repr, self.columns)) or 'none'}. Rename or add the column."
                )


def check_names(where: str, names: Sequence[str]) -> None:
    """Raise ``DataError`` if a table has a column twice."""
    if (name := first_twice(names)) is not None:
        raise DataError(f"{where} has column {name!r} twice. Rename or remove one of them.")


def of_records(where: str, records: Sequence[Any], numbers: Sequence[int]) -> Table:
    """Table of a list of records; one that is no mapping from columns to values is a bad row."""
    bad, good = BadRows(), dict[int, Mapping[str, Any]]()
    for number, record in zip(numbers, records, strict=True):
        if isinstance(record, Mapping):
            good[number] = record
        else:
            text = shown(record)
            fault = f"{where}, row {number}: expected columns and values, got {text}. Fix or remove the row."
            bad.add(BadRow(where, number, "", "no columns", text, fault))
    names = dict.fromkeys(str(name) for record in good.values() for name in record)
    columns = Columns(names, lambda name: [record.get(name) for record in good.values()])
    return Table(where, columns, [*good], bad=bad)


@dataclass(frozen=True)
class TaskTables:
    """A task before its rows are read.

    Attributes:
        name: of the task.
        tables: by split; the training rows at least.
        source: what ``source.json`` says.
        folder: where that is.
        registered: the definition of the task in the registry, if it has one.
        columns: those that the user or ``source.json`` named.
        note: what the user should know of the tables.
        skip_bad_rows: whether rows that cannot be used are left out, and not refused.
    """

    name: str
    tables: Mapping[str, Table]
    source: Mapping[str, Any]
    folder: Path
    registered: TaskDefinition | None
    columns: ColumnNames
    note: str = ""
    skip_bad_rows: bool = False

    @property
    def train(self) -> Table:
        """The table of the training rows."""
        return self.tables["train"]


# -- Cells -----------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """Value as a reader of the data sees it, shortened, with the characters that nobody sees escaped."""
    text = "nothing" if value is None else with_invisible(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 60 else f"{text[:60]}…"


def other_form(cell: Any) -> str:
    """Sentences that refuse a cell which is an object or a list; nothing for any other.

    >>> other_form([{"role": "user", "content": "Hello"}]).split(",")[0]
    'The column seems to hold a chat'
    """
    first = next(iter(cell), None) if isinstance(cell, list) else cell
    if isinstance(first, Mapping):
        form = "a chat, with its messages" if any(keys <= first.keys() for keys in _TURNS) else "objects"
    elif isinstance(cell, list) and cell:
        form = "several labels, or values, a row"
    else:
        return ""
    return f"The column seems to hold {form}, which is no text and no label. {TASKS}{_REMEDY}"


def plain(value: Any) -> Any:
    """Value in memory as JSON has it, at any depth; what pandas takes as missing, such as NaN or NaT, is ``None``."""
    if type(value).__module__ in ("numpy", "torch") and getattr(value, "ndim", 2) < 2:
        value = value.tolist()
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    import pandas

    return None if pandas.isna(value) is True else value
