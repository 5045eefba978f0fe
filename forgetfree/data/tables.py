"""A table of rows with columns, and what is read of a task: the tables of its splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forgetfree.data.bad_rows import BadRows
from forgetfree.data.columns import Columns
from forgetfree.errors import DataError
from forgetfree.tasks import TaskDefinition


@dataclass(frozen=True)
class Table:
    """The content of one file, column by column.

    Attributes:
        where: the file, for messages.
        columns: column name to values.
        numbers: the numbers of the rows, for messages: files of records count from 1, jsonl counts lines, and what is in
            memory counts from 0.
        label_names: column name to the names of its labels, where the data say them themselves (``ClassLabel``).
        note: what a user should know of how the file is written.
        bad: the rows that cannot be used, as far as they were found: what reads the table adds to them.
    """

    where: str
    columns: Mapping[str, Sequence[Any]]
    numbers: Sequence[int]
    label_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    note: str = ""
    bad: BadRows = field(default_factory=BadRows)

    def labelled(self, column: str) -> Table:
        """Return the rows that have a label: in a column of ``ClassLabel``, -1 stands for none."""
        if column not in self.label_names:
            return self
        keep = [i for i, label in enumerate(self.columns.get(column, ())) if label != -1]
        return self.take(keep) if len(keep) < len(self.numbers) else self

    def take(self, rows: Sequence[int]) -> Table:
        """Return some rows, in that order."""
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        return replace(self, columns=columns, numbers=[self.numbers[i] for i in rows])

    def good(self) -> Table:
        """Return the rows that are not known as bad."""
        keep = [i for i, number in enumerate(self.numbers) if number not in self.bad.numbers] if self.bad else []
        return self.take(keep) if self.bad and len(keep) < len(self.numbers) else self

    def check_columns(self, columns: Columns) -> None:
        """Raise ``DataError`` if a column is missing."""
        for column in (*columns.texts, *filter(None, [columns.label])):
            if column not in self.columns:
                raise DataError(
                    f"{self.where} has no column {column!r}, which the training rows have; found "
                    f"{', '.join(map(repr, self.columns)) or 'none'}. Rename or add the column."
                )


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
    columns: Columns
    note: str = ""
    skip_bad_rows: bool = False

    @property
    def train(self) -> Table:
        """The table of the training rows."""
        return self.tables["train"]
