"""What one file of a data directory holds: parquet, jsonl or csv, read and checked row by row."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgetfree.data.rows import Rows
from forgetfree.errors import DataError
from forgetfree.tasks import Kind, TaskDefinition

FORMATS = ("parquet", "jsonl", "csv")
#: The columns of a pair of texts.
PAIR = ("text_a", "text_b")
_QUOTE = "Quote texts that hold commas, quotes or line breaks"


@dataclass(frozen=True)
class Table:
    """What one file holds, column by column.

    Attributes:
        where: the file, for messages.
        columns: column name to values.
        numbers: how the file itself numbers its rows: parquet from 0, csv records from 1, jsonl by line.
    """

    where: str
    columns: Mapping[str, Sequence[Any]]
    numbers: Sequence[int]

    def rows(self, kind: Kind) -> Rows:
        """The rows of a task of that kind.

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
        """Raise ``DataError`` unless every label is one of the task's."""
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
        if isinstance(value, bool) or not (text.isascii() and text.isdecimal()):
            raise DataError(
                f"{self._row(i)}, column 'label': expected an integer from 0, got {_shown(value)}. "
                "Fix or remove the row; names of labels go into source.json as label_names, in the order of their numbers."
            )
        return int(text)


def read_table(folder: Path, split: str) -> Table | None:
    """The file of a split, whatever its format; ``None`` where there is none.

    Raises:
        DataError: there are several, or it cannot be read.
    """
    paths = [path for f in FORMATS if (path := folder / f"{split}.{f}").is_file()]
    if not paths:
        return None
    if len(paths) > 1:
        names = " and ".join(path.name for path in paths)
        raise DataError(f"{folder} holds {names}, and the {split} split is one file. Remove the others.")
    (path,) = paths
    read = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".csv": _read_csv}[path.suffix]
    try:
        return read(path)
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in UTF-8. Write the file again, in UTF-8.") from error
    except Exception as error:
        raise DataError(
            f"{path} cannot be read as {path.suffix[1:]}: {first_line(error)}. Write the file again."
        ) from error


def _read_parquet(path: Path) -> Table:
    import pyarrow.parquet

    _check_names(path, pyarrow.parquet.read_schema(path).names)
    table = pyarrow.parquet.read_table(path)
    return Table(str(path), table.to_pydict(), range(table.num_rows))


def _read_csv(path: Path) -> Table:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader, lines, begin = csv.reader(file, strict=True), list[list[str]](), 1
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
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = read_json(line, f"{path}, row {number}")
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise DataError(
                    f"{path}, row {number}: expected a JSON object, got {_shown(line.strip())}. Fix or remove the row."
                )
            records.append(record)
            numbers.append(number)
    names = sorted({key for record in records for key in record})
    return Table(str(path), {name: [record.get(name) for record in records] for name in names}, numbers)


def read_json(text: str, where: str) -> Any:
    """What JSON says, if it says everything once.

    Args:
        text: the JSON.
        where: file and row, for the message.

    Raises:
        ValueError: it is no JSON.
        DataError: an object has a key twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise DataError(f"{where}: the key {twice[0]!r} stands twice. Remove one of them.")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def _shown(value: Any) -> str:
    """A value as a reader of the file sees it, shortened."""
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def first_line(error: BaseException) -> str:
    """What an error says, shortened to fit into a message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
