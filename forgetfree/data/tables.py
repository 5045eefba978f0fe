"""The files of a data directory (parquet, jsonl or csv), read and checked row by row."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from forgetfree.data.rows import Rows
from forgetfree.errors import DataError, first_line
from forgetfree.files import size_of
from forgetfree.json_file import parse_json
from forgetfree.tasks import Kind, TaskDefinition

FORMATS = ("parquet", "jsonl", "csv")
#: The columns of a pair of texts.
PAIR = ("text_a", "text_b")
_QUOTE = "Quote texts that hold commas, quotes or line breaks"
#: The largest file that is read: in bytes (unpacked), in rows, and in characters for a line of csv or jsonl.
MOST_BYTES, MOST_ROWS, MOST_LINE = 4 * 2**30, 50_000_000, 16 * 2**20
#: The most digits of a label: all such numbers fit into 64 bits.
_DIGITS = 18


@dataclass(frozen=True)
class Table:
    """The content of one file, column by column.

    Attributes:
        where: the file, for messages.
        columns: column name to values.
        numbers: the numbers of the rows, for messages: parquet and csv count records from 1, jsonl counts lines.
    """

    where: str
    columns: Mapping[str, Sequence[Any]]
    numbers: Sequence[int]

    def rows(self, kind: Kind) -> Rows:
        """Return the rows of a task of that kind.

        Raises:
            DataError: a column is missing or empty, or a row holds something else than texts and a label from 0.
        """
        names = ("text",) if kind == "single" else PAIR
        for column in (*names, "label"):
            if column not in self.columns:
                text = "text_a and text_b" if kind == "pair" else "text (or text_a and text_b)"
                raise DataError(
                    f"{self.where} has no column {column!r}: expected {text}, and label; found "
                    f"{', '.join(map(repr, self.columns)) or 'none'}. Rename or add the column."
                )
        texts = [tuple(self._text(name, i) for i in range(len(self.numbers))) for name in names]
        labels = tuple(self._label(i) for i in range(len(self.numbers)))
        for name, column in zip(names, texts, strict=True):
            if column and not any(text.strip() for text in column):
                raise DataError(f"{self.where}: column {name!r} is empty in every row. Write the texts into it.")
        return Rows(texts[0], texts[1] if kind == "pair" else (), labels)

    def check_labels(self, rows: Rows, task: TaskDefinition) -> None:
        """Raise ``DataError`` unless every label is one of the task's labels."""
        count = len(task.labels)
        for i, label in enumerate(rows.labels):
            if label >= count:
                raise DataError(
                    f"{self._row(i)}, column 'label': {label} is out of range, task {task.name!r} has the "
                    f"{count} labels 0 to {count - 1} ({', '.join(task.labels)}). Fix the row, or the "
                    "label_names in source.json."
                )

    def _row(self, i: int) -> str:
        return f"{self.where}, row {self.numbers[i]}"

    def _text(self, column: str, i: int) -> str:
        value = self.columns[column][i]
        if not isinstance(value, str):
            raise DataError(
                f"{self._row(i)}, column {column!r}: expected a text, got {_shown(value)}. Fix or remove the row."
            )
        return value

    def _label(self, i: int) -> int:
        value = self.columns["label"][i]
        text = value.strip() if isinstance(value, str) else str(value)
        if isinstance(value, bool) or not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
            raise DataError(
                f"{self._row(i)}, column 'label': expected an integer from 0, got {_shown(value)}. "
                "Fix or remove the row; names of labels go into source.json as label_names, in the order of their numbers."
            )
        return int(text)


def read_table(folder: Path, split: str) -> Table | None:
    """Read the file of a split, in any of the formats; ``None`` if there is none.

    Raises:
        DataError: there are several, or it cannot be read.
    """
    paths = [path for f in FORMATS if os.path.lexists(path := folder / f"{split}.{f}")]
    if not paths:
        return None
    if len(paths) > 1:
        names = " and ".join(path.name for path in paths)
        raise DataError(f"{folder} holds {names}, and the {split} split is one file. Remove the others.")
    (path,) = paths
    read = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".csv": _read_csv}[path.suffix]
    try:
        _check_size(path, size_of(path), "bytes", MOST_BYTES)
        return read(path)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}. Put a file there.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in UTF-8. Write the file again, in UTF-8.") from error
    except Exception as error:
        raise DataError(
            f"{path} cannot be read as {path.suffix[1:]}: {first_line(error)}. Write the file again."
        ) from error


def _check_size(path: Path, found: int, unit: str, most: int) -> None:
    if found > most:
        raise DataError(f"{path} holds {found:,} {unit}, and at most {most:,} are read. Take a part of its rows.")


def _read_parquet(path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        _check_names(path, file.schema_arrow.names)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        _check_size(path, file.metadata.num_rows, "rows", MOST_ROWS)
        _check_size(path, sum(group.total_byte_size for group in groups), "bytes when unpacked", MOST_BYTES)
        parts, held = [file.schema_arrow.empty_table()], 0
        for batch in file.iter_batches(
            batch_size=2048
        ):  # a text that is stored once may be repeated any number of times
            columns = [c.dictionary_decode() if pyarrow.types.is_dictionary(c.type) else c for c in batch.columns]
            held += sum(column.nbytes for column in columns)
            _check_size(path, held, "bytes or more when unpacked", MOST_BYTES)
            parts.append(pyarrow.Table.from_arrays(columns, batch.schema.names))
    table = pyarrow.concat_tables(parts[1:] or parts)
    return Table(str(path), table.to_pydict(), range(1, table.num_rows + 1))


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """Yield the lines of a file, and refuse a line without end."""
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        if len(line) > MOST_LINE:
            raise DataError(
                f"{path}, line {number}: expected at most {MOST_LINE:,} characters, got more. Write one row a line, or shorten "
                "the text."
            )
        yield line


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let texts be as long as a line: the csv module reads at most 131,072 characters by default."""
    before = csv.field_size_limit(MOST_LINE)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _read_csv(path: Path) -> Table:
    with path.open(encoding="utf-8-sig", newline="") as file, _long_fields():
        reader, lines, begin = csv.reader(_lines(file, path), strict=True), list[list[str]](), 1
        try:
            for line in reader:
                begin = reader.line_num + 1
                lines += [line] * bool(line)  # blank ones are no rows
        except csv.Error as error:
            raise DataError(
                f"{path}, line {begin}: {first_line(error)}. {_QUOTE}, and double the quotes inside."
            ) from error
    names, *records = lines or [[]]
    _check_names(path, [name for name in names if name])  # a column without a name is not read
    for number, record in enumerate(records, 1):
        if len(record) != len(names):
            column = repr(names[len(record)]) if len(record) < len(names) else len(names) + 1
            raise DataError(
                f"{path}, row {number}, column {column}: expected a cell for each of the {len(names)} columns "
                f"({', '.join(names)}), got {len(record)}. {_QUOTE}."
            )
    columns = zip(*records, strict=True) if records else ([] for _ in names)
    return Table(str(path), dict(zip(names, columns, strict=True)), range(1, len(records) + 1))


def _check_names(path: Path, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{path} has column {name!r} twice. Rename or remove one of them.")


def _read_jsonl(path: Path) -> Table:
    records, numbers = [], []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(_lines(file, path), 1):
            if not line.strip():
                continue
            record, reason = None, ""
            try:
                record = parse_json(line)
            except ValueError as error:
                reason = f" ({first_line(error)})"
            if not isinstance(record, dict):
                raise DataError(
                    f"{path}, row {number}: expected a JSON object, got {_shown(line.strip())}{reason}. Fix or remove the row."
                )
            records.append(record)
            numbers.append(number)
    names = sorted({key for record in records for key in record})
    return Table(str(path), {name: [record.get(name) for record in records] for name in names}, numbers)


def _shown(value: Any) -> str:
    """Return a value as a reader of the file sees it, shortened."""
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"
