"""A table of rows with columns, checked row by row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forgetfree.data.bad_rows import BadRow, BadRows, refusal
from forgetfree.data.columns import Columns
from forgetfree.data.forms import form_of, refusal_of
from forgetfree.data.labels import Labels, shown, written
from forgetfree.data.rows import Rows
from forgetfree.display import is_text
from forgetfree.errors import DataError


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

    def cells(self, column: str, names: Sequence[str]) -> list[int | str | None]:
        """Return what is written in the label column of training rows; of bad rows nothing.

        Args:
            column: its name.
            names: of the labels, if they are known; else the rows must have all numbers from 0, or all names.
        """
        found = [self._written(self.columns[column][i], names) for i in range(len(self.numbers))]
        kinds = Counter(type(cell) for cell in found if not isinstance(cell, ValueError))
        usual = max(kinds, key=kinds.__getitem__, default=int)  # of as many, the first
        expected = "an integer from 0" if usual is int else "a name, as in the other rows"
        cells = list[int | str | None]()
        for i, cell in enumerate(found):
            fault: BadRow | None = None
            if isinstance(cell, ValueError):
                fault = self._no_label(column, i, expected, str(cell))
            elif not names and (type(cell) is not usual or (isinstance(cell, int) and cell < 0)):
                why = "-1 often marks rows without a label. " if cell == -1 else ""
                remedy = f"{why}If it is a label, name all labels in order as label_names in source.json. "
                what = "negative label" if isinstance(cell, int) and cell < 0 else "label of another kind"
                fault = self._fault(column, i, what, expected, remedy)
            if fault:
                self.bad.add(fault)
            cells.append(None if fault or isinstance(cell, ValueError) else cell)
        return cells

    def rows(self, columns: Columns, labels: Labels, task: str) -> tuple[Rows, Sequence[int]]:
        """Return the good rows of a task, and their numbers; bad rows are added to `bad`.

        Args:
            columns: where texts and labels are.
            labels: what labels there are.
            task: its name, for messages.

        Raises:
            DataError: a column is missing or empty.
        """
        assert columns.label is not None
        self.check_texts(columns)
        places = [self.bad.attempt(self._place, columns.label, i, labels, task) for i in range(len(self.numbers))]
        keep = [i for i, number in enumerate(self.numbers) if number not in self.bad.numbers]
        texts = [tuple(self.columns[name][i] for i in keep) for name in columns.texts]
        rows = Rows(texts[0], texts[1] if len(texts) > 1 else (), tuple(places[i] for i in keep))
        return rows, [self.numbers[i] for i in keep]

    def check_texts(self, columns: Columns) -> None:
        """Add rows without a text to `bad`.

        Raises:
            DataError: a column is missing or empty.
        """
        self.check_columns(columns)
        for column in columns.texts:
            cells = self.columns[column]
            for i, cell in enumerate(cells):
                if not is_text(cell):
                    self.bad.add(self._fault(column, i, "no text", "a text"))
            if len(cells) and not any(not isinstance(cell, str) or cell.strip() for cell in cells):
                raise DataError(f"{self.where}: column {column!r} is empty in every row. Write the texts into it.")

    def check_columns(self, columns: Columns) -> None:
        """Raise ``DataError`` if a column is missing."""
        for column in (*columns.texts, *filter(None, [columns.label])):
            if column not in self.columns:
                raise DataError(
                    f"{self.where} has no column {column!r}, which the training rows have; found "
                    f"{', '.join(map(repr, self.columns)) or 'none'}. Rename or add the column."
                )

    def _place(self, column: str, i: int, labels: Labels, task: str) -> int:
        """Return the number of a row's label."""
        cell = self._written(self.columns[column][i], labels.names)
        if isinstance(cell, ValueError):
            raise refusal(self._no_label(column, i, labels.expected, str(cell)))
        place = labels.place(cell)
        if place is not None:
            return place
        names, count = ", ".join(labels.names), len(labels.names)
        if isinstance(cell, int) and [*labels.numbers] == [*range(count)] and cell >= 0:
            has = f"task {task!r} has the {count} labels 0 to {count - 1} ({names})"
            message = (
                f"{self.where}, row {self.numbers[i]}, column {column!r}: {cell} is out of range, {has}. Fix the row, or the "
                "label_names in source.json."
            )
            remedy = f"{has[0].upper()}{has[1:]}."
            raise refusal(BadRow(self.where, self.numbers[i], column, "unknown label", shown(cell), message, remedy))
        has = f"Task {task!r} has the {count} labels {names}, and every label needs training rows. "
        raise refusal(self._fault(column, i, "unknown label", labels.expected, has))

    def _written(self, value: Any, names: Sequence[str]) -> int | str | ValueError:
        """Return a label as it is written, or why it is none."""
        try:
            return written(value)
        except ValueError as error:
            text = str(value).strip()
            return text if isinstance(value, str | float) and text in names else error

    def _no_label(self, column: str, i: int, expected: str, why: str) -> BadRow:
        """Return the fault of a row without a label that could be one."""
        value = self.columns[column][i]
        is_nan = isinstance(value, float) and math.isnan(value)
        is_empty = value is None or is_nan or (isinstance(value, str) and not value.strip())
        return self._fault(column, i, "no label" if is_empty else "not a label", expected, why)

    def _fault(self, column: str, i: int, what: str, expected: str, more: str = "") -> BadRow:
        text = shown(self.columns[column][i])
        other = refusal_of(form_of(self.columns[column][i]))
        message = (
            f"{self.where}, row {self.numbers[i]}, column {column!r}: expected {expected}, got {text}. "
            f"{other or f'{more}Fix or remove the row.'}"
        )
        return BadRow(self.where, self.numbers[i], column, what, text, message, other or more.strip())
