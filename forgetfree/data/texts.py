"""New texts, which have no labels yet: the rows of a file, read from the same columns as training data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgetfree import registry
from forgetfree.data.bad_rows import BadRow, refusal
from forgetfree.data.columns import NO_COLUMN_NAMES, ColumnNames, choose_texts, is_label
from forgetfree.data.table_files import FORMATS, PACKED, format_of, read_lines, read_table
from forgetfree.data.tables import Columns, Table, shown
from forgetfree.display import is_blank
from forgetfree.errors import DataError, UsageError
from forgetfree.tasks import TaskDefinition


def has_columns(path: Path) -> bool:
    """Return whether a file holds a table; a ``.txt`` file has one text per line."""
    return format_of(path.name)[1] != "txt"


def texts_of_line(line: str, size: int | None) -> tuple[str, ...]:
    r"""Return the texts of a line, which tabs divide; for a ``size`` of 1, the whole line.

    >>> texts_of_line("a joy\tindeed", 2)
    ('a joy', 'indeed')
    """
    return (line,) if size == 1 else tuple(line.split("\t"))


def read_texts(
    path: Path,
    task: TaskDefinition | None,
    named: ColumnNames = NO_COLUMN_NAMES,
    usual: ColumnNames = NO_COLUMN_NAMES,
) -> tuple[Table, list[tuple[str, ...]]]:
    """Read the rows that a task is to answer.

    Args:
        path: a file in one of the formats of training data, or ``.txt`` with one text per line, where a tab divides pairs.
        task: the task; ``None``: rows have one text or two, as the file has them.
        named: the columns that the user names.
        usual: the columns to read where none is named, if the file has them.

    Returns:
        The table, and the texts of each of its rows.

    Raises:
        DataError: the file cannot be read, or has no such columns.
        BadDataError: with all rows that lack a text.
    """
    if not format_of(path.name)[1]:
        raise DataError(
            f"{path} has an unknown format: expected a name that ends in "
            f"{', '.join(f'.{each}' for each in FORMATS)}; text formats may be compressed ({', '.join(PACKED)}). "
            f"Rename it, or write < {path}."
        )
    if has_columns(path):
        table = read_table(path)
        header = list(table.columns)
        columns = usual if not named.texts and {*usual.texts} <= {*header} else named
        names = _columns(table, task, columns) if header or not table.bad else ()
    else:
        table, names = read_lines(path), ("text",)
    rows = [table.bad.attempt(_texts, table, i, names, task, not has_columns(path)) for i in range(len(table.numbers))]
    if table.bad:
        raise refusal(*sorted(table.bad.faults, key=lambda fault: fault.row))
    return table, [row for row in rows if row is not None]


def _columns(table: Table, task: TaskDefinition | None, columns: ColumnNames) -> tuple[str, ...]:
    """Return the text columns: the named ones, common names, the only columns beside labels, or a lone column."""
    header = list(table.columns)
    if task:
        kind = registry.kind(task.kind)
        names, ours = kind.columns_of_texts(task, table.where, header, columns), kind.names(task)
    else:
        names, ours = choose_texts(table.where, header, columns, None), ("text",)
    texts = names or [name for name in header if len(header) == 1 or not is_label(name)]
    if not names and len(texts) != len(ours):
        raise DataError(
            f"{table.where} has the columns {', '.join(map(repr, header)) or 'none'}, but the task reads "
            f"{' and '.join(ours)}. Rename its columns, or choose them with --text-column."
        )
    return tuple(texts)


def _texts(table: Table, i: int, names: Sequence[str], task: TaskDefinition | None, are_lines: bool) -> tuple[str, ...]:
    """Return the texts of a row; raise ``BadDataError`` if one is missing."""
    record = Columns(table.columns, lambda name: table.columns[name][i])
    row: tuple[Any, ...] = tuple(record[name] for name in names)
    if are_lines:
        row = texts_of_line(row[0], len(task.text_columns) if task else None)
    elif task:
        try:
            row = registry.kind(task.kind).texts_of(task, record, names)
        except UsageError as error:  # a column beside the prompt cannot be used
            shape = table.where, table.numbers[i], "", "more than a prompt", shown(row)
            raise refusal(BadRow(*shape, str(error).rstrip("."))) from error
    for place, text in enumerate(row):
        if not isinstance(text, str) or is_blank(text):
            name = names[min(place, len(names) - 1)]
            expected = registry.kind(task.kind).cell_type(task) if task and not are_lines else "a text"
            raise refusal(table.fault(i, name, "no text", expected, shown(record[name])))
    return row
