"""The texts that a command is asked about: from its arguments, from a file, or from stdin."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.data.bad_rows import refusal
from forgetfree.data.columns import NO_COLUMN_NAMES, READ_DEFAULTS, ColumnNames, ReadOptions, choose_texts, is_label
from forgetfree.data.table_files import FORMATS, PACKED, format_of, lines_of, read_table, text_of
from forgetfree.data.tables import Columns, Table
from forgetfree.display import tell_note
from forgetfree.errors import DataError, UsageError, first_line
from forgetfree.kinds.kind import kind_of

if TYPE_CHECKING:
    from forgetfree.tasks import TaskDefinition

Row = tuple[str, ...]


@dataclass(frozen=True)
class TextRow:
    """The texts of one row.

    Attributes:
        texts: one text or two.
        extra: other columns of the row, which are written beside the answer.
    """

    texts: Row
    extra: Mapping[str, Any] = field(default_factory=dict)


def rows_of_texts(texts: Sequence[str], size: int | None) -> list[Row]:
    """Return texts from the command line as rows of ``size`` texts each: of two, by turns or with a tab between.

    Args:
        texts: the arguments.
        size: 1 or 2; ``None``: a text with a tab in it is two.
    """
    if size == 2 and not any("\t" in text for text in texts) and len(texts) % 2 == 0:
        return list(zip(texts[::2], texts[1::2], strict=True))
    return [row_of_line(text, size) for text in texts]


def row_of_line(line: str, size: int | None) -> Row:
    """Return a line as a row of ``size`` texts, which a tab divides; ``None``: of as many as it has."""
    return (line,) if size == 1 else tuple(line.split("\t"))


def rows_of_stdin(size: int | None) -> Iterator[Row]:
    """Yield a row a line, as they come.

    Raises:
        UsageError: they are not in UTF-8.
    """
    try:
        for line in sys.stdin:
            yield row_of_line(line.rstrip("\n"), size)
    except UnicodeDecodeError as error:
        raise UsageError(f"The texts on stdin are not in UTF-8: {first_line(error)}. Write them in UTF-8.") from error


def rows_of_file(
    path: Path,
    task: TaskDefinition | None,
    columns: ColumnNames = NO_COLUMN_NAMES,
    keep: Sequence[str] = (),
    usual: ReadOptions = READ_DEFAULTS,
) -> Iterator[TextRow]:
    """Yield the rows of a file: of a table by its columns, of txt a text a line.

    Columns are found as those of training data are, or where there are no others than texts. A list of words becomes its JSON.

    Args:
        path: the file.
        task: that is asked; ``None``: rows have one text or two, as the file has them.
        columns: of the texts, where they are named.
        keep: other columns that are wanted.
        usual: names the columns of the texts that are read where ``columns`` names none and the file has them.

    Raises:
        DataError: it cannot be read, or a row is not as it must be; the message says which.
    """
    if not format_of(path.name)[1]:
        raise DataError(
            f"{path} is of no known kind: expected a name that ends in {', '.join(f'.{each}' for each in FORMATS)}; those of "
            f"text may be packed ({', '.join(PACKED)}). Rename it, or write < {path}."
        )
    if is_plain(path):
        try:
            text, note = text_of(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {first_line(error)}. Check its name.") from error
        _tell(note)
        size = len(task.text_columns) if task else None
        yield from (TextRow(row_of_line(line.rstrip("\r\n"), size)) for line in lines_of(text))
        return
    table = read_table(path)
    if table.bad:
        raise refusal(table.bad.faults[0])
    _tell(table.note)
    header = list(table.columns)
    if usual.texts and task and not columns.texts:
        texts = usual.columns(task.name).texts
        columns = ColumnNames(texts) if {*texts} <= {*header} else columns
    names = _columns(f"{path}", header, task, columns)
    if lacking := [name for name in keep if name not in header]:
        raise DataError(
            f"{path} has no column {lacking[0]!r}, which --keep names; it has {', '.join(map(repr, header))}. Name one of them."
        )
    for i, number in enumerate(table.numbers):
        record = Columns(header, partial(_cell, table, i))
        row = _texts(f"{path}, row {number}", record, names, task)
        yield TextRow(row, {name: _as_json(record[name]) for name in keep})


def _cell(table: Table, i: int, name: str) -> Any:
    return table.columns[name][i]


def _tell(note: str) -> None:
    """Say how a file is written, where that is to be known."""
    tell_note(f"{note}." if note else "")


def is_plain(path: Path) -> bool:
    """Return whether a file has a text a line, and no columns."""
    return format_of(path.name)[1] == "txt"


def _as_json(value: Any) -> Any:
    """Return a value as JSON may have it: parquet holds dates, and numbers that are not finite, too."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _texts(where: str, record: Mapping[str, Any], names: Sequence[str], task: TaskDefinition | None) -> tuple[str, ...]:
    cells = {name: record.get(name) for name in names}
    try:
        texts = kind_of(task).texts_of(task, record, names) if task else tuple(cells.values())
    except UsageError as error:
        raise DataError(f"{where}: {error}") from error
    if wrong := [cell for text, cell in zip(texts, cells.items(), strict=False) if not isinstance(text, str)]:
        name, value = wrong[0]
        expected = kind_of(task).cell_type(task) if task else "a text"
        raise DataError(f"{where}: {name!r} must be {expected}, got {value!r}. Write one.")
    return tuple(map(str, texts))


def _columns(where: str, header: list[str], task: TaskDefinition | None, columns: ColumnNames) -> tuple[str, ...]:
    """Return the columns of the texts: those named, of common names, the only ones beside labels, or a lone column."""
    if task:
        kind = kind_of(task)
        names, ours = kind.columns_of_texts(task, where, header, columns), kind.names(task)
    else:
        names, ours = choose_texts(where, header, columns, None), ("text",)
    if names:
        return names
    texts = tuple(name for name in header if len(header) == 1 or not is_label(name))
    if len(texts) == len(ours):
        return texts
    raise DataError(
        f"{where} has the columns {', '.join(map(repr, header)) or 'none'}, and the task reads {' and '.join(ours)}. Name its "
        "columns so, or say with --text-column which to read."
    )
