"""A table of rows with columns, checked row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
        said: what a user should know of how the file is written.
    """

    where: str
    columns: Mapping[str, Sequence[Any]]
    numbers: Sequence[int]
    label_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    said: str = ""

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

    def cells(self, column: str, names: Sequence[str]) -> list[int | str]:
        """Return what is written in the label column of training rows.

        Args:
            column: its name.
            names: of the labels, if they are known; else the rows must have all numbers from 0, or all names.

        Raises:
            DataError: a row has no label, or one of another kind than the rows before it.
        """
        cells: list[int | str] = []
        for i in range(len(self.numbers)):
            kind = "an integer from 0" if not cells or isinstance(cells[0], int) else "a name, as in the rows before"
            cell = self._cell(column, i, names, kind)
            if not names and (type(cell) is not type((cells or [cell])[0]) or (isinstance(cell, int) and cell < 0)):
                why = "-1 often marks rows without a label. " if cell == -1 else ""
                remedy = "If it is a label, name all labels in order as label_names in source.json. "
                raise self._fault(column, i, kind, why + remedy)
            cells.append(cell)
        return cells

    def rows(self, columns: Columns, labels: Labels, task: str) -> Rows:
        """Return the rows of a task.

        Args:
            columns: where texts and labels are.
            labels: what labels there are.
            task: its name, for messages.

        Raises:
            DataError: a column is missing or empty, or a row holds something else than texts and a label of the task.
        """
        assert columns.label is not None
        for column in (*columns.texts, columns.label):
            if column not in self.columns:
                raise DataError(
                    f"{self.where} has no column {column!r}, which the training rows have; found "
                    f"{', '.join(map(repr, self.columns)) or 'none'}. Rename or add the column."
                )
        texts = [tuple(self._text(name, i) for i in range(len(self.numbers))) for name in columns.texts]
        for name, held in zip(columns.texts, texts, strict=True):
            if held and not any(text.strip() for text in held):
                raise DataError(f"{self.where}: column {name!r} is empty in every row. Write the texts into it.")
        places = tuple(self._place(columns.label, i, labels, task) for i in range(len(self.numbers)))
        return Rows(texts[0], texts[1] if len(texts) > 1 else (), places)

    def _place(self, column: str, i: int, labels: Labels, task: str) -> int:
        """Return the number of a row's label."""
        cell = self._cell(column, i, labels.names, labels.expected)
        place = labels.place(cell)
        if place is not None:
            return place
        names, count = ", ".join(labels.names), len(labels.names)
        if isinstance(cell, int) and [*labels.numbers] == [*range(count)] and cell >= 0:
            raise DataError(
                f"{self._row(i)}, column {column!r}: {cell} is out of range, task {task!r} has the {count} labels 0 to "
                f"{count - 1} ({names}). Fix the row, or the label_names in source.json."
            )
        raise self._fault(
            column,
            i,
            labels.expected,
            f"Task {task!r} has the {count} labels {names}, and every label needs training rows. ",
        )

    def _cell(self, column: str, i: int, names: Sequence[str], expected: str) -> int | str:
        """Return a row's label as it is written."""
        value = self.columns[column][i]
        try:
            return written(value)
        except ValueError as error:
            if isinstance(value, str | float) and (text := str(value).strip()) in names:
                return text
            raise self._fault(column, i, expected, str(error)) from None  # which says no more

    def _fault(self, column: str, i: int, expected: str, more: str = "") -> DataError:
        other = refusal_of(form_of(self.columns[column][i]))
        return DataError(
            f"{self._row(i)}, column {column!r}: expected {expected}, got {shown(self.columns[column][i])}. "
            f"{other or f'{more}Fix or remove the row.'}"
        )

    def _row(self, i: int) -> str:
        return f"{self.where}, row {self.numbers[i]}"

    def _text(self, column: str, i: int) -> str:
        value = self.columns[column][i]
        if not is_text(value):
            raise self._fault(column, i, "a text")
        text: str = value
        return text
