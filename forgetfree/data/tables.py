"""Tables: rows with columns, from files and from objects in memory; the conversion of cells; the tables of a task."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from forgetfree.data.bad_rows import BadRow, BadRows
from forgetfree.data.columns import ColumnNames, written_label
from forgetfree.display import first_twice, nfc, with_invisible
from forgetfree.errors import DataError, first_line
from forgetfree.json_file import parse_json
from forgetfree.tasks import TaskDefinition

#: The names of splits, ours first.
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "dev", "eval", "val", "valid"),
    "test": ("test",),
}
#: The tables of a task by split, and a note on them.
Tables = tuple[dict[str, "Table"], str]
#: Arrow's name for the type of cells that are stored as JSON.
_JSON = "extension<arrow.json>"


def split_of(name: str) -> str | None:
    """Return the split with a name such as ``dev``; ``None`` if there is none."""
    return next((split for split, names in _SPLITS.items() if name.lower() in names), None)


class Columns(Mapping[str, Any]):
    """Columns, or the cells of a row: each is read on first access, and then kept; their names are in NFC.

    Args:
        names: the names of the columns, in order, as ``read`` expects them.
        read: returns the cells of a column, or one cell.
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], Any]) -> None:
        self._names, self._read = {nfc(name): name for name in names}, cache(read)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._read(self._names[name])

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
        columns: column name to values, which may be read on access.
        numbers: the numbers of the rows, for messages: files of records count from 1, jsonl counts lines, and rows in memory
            count from 0.
        label_names: column name to the names of its labels, if the data have them (``ClassLabel``).
        note: a note for the user on the file's encoding and format.
        typed: whether the file distinguishes numbers from texts; in csv and tsv all cells are texts.
        bad: the bad rows found so far; readers of the table add to them.
    """

    where: str
    columns: Mapping[str, Sequence[Any]]
    numbers: Sequence[int]
    label_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    note: str = ""
    typed: bool = True
    bad: BadRows = field(default_factory=BadRows)

    def labelled(self, column: str) -> Table:
        """Return the rows that have a label: in a column of ``ClassLabel``, -1 stands for none."""
        if column not in self.label_names:
            return self
        return self.take([i for i, label in enumerate(self.columns.get(column, ())) if label != -1])

    def relabelled(self, column: str, new: Mapping[str, str]) -> tuple[Table, Counter[str]]:
        """Return the rows with ``new`` labels, without rows whose new label is empty, and the number of rows by old label."""
        cells = self.columns[column] if new and column in self.columns else ()
        written = [written_label(cell) for cell in cells]
        found = Counter(label for label in written if label in new)
        if not found:
            return self, found
        mended = [new.get(label, cell) for label, cell in zip(written, cells, strict=True)]
        columns = Columns(self.columns, lambda name: mended if name == column else self.columns[name])
        keep = [i for i, label in enumerate(written) if new.get(label, label) or label not in new]
        return replace(self, columns=columns).take(keep), found

    def take(self, rows: Sequence[int]) -> Table:
        """Return some rows, in that order."""
        columns = Columns(self.columns, lambda name: [self.columns[name][i] for i in rows])
        return replace(self, columns=columns, numbers=[self.numbers[i] for i in rows])

    def good(self) -> Table:
        """Return the rows that are not known to be bad."""
        keep = [i for i, number in enumerate(self.numbers) if number not in self.bad.numbers]
        return self.take(keep) if self.bad else self

    def fault(self, i: int, column: str, what: str, expected: str, got: str, remedy: str = "") -> BadRow:
        """Return a fault in one cell of the row at place ``i``; ``remedy`` is as in `BadRow`."""
        return BadRow(self.where, self.numbers[i], column, what, got, f"expected {expected}, got {got}", remedy)

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
    if (name := first_twice(map(nfc, names))) is not None:
        raise DataError(f"{where} has column {name!r} twice. Rename or remove one of them.")


def of_records(where: str, records: Sequence[Any], numbers: Sequence[int]) -> Table:
    """Return the table of a list of records; one that is no mapping from columns to values is a bad row."""
    bad, good = BadRows(), dict[int, Mapping[str, Any]]()
    for number, record in zip(numbers, records, strict=True):
        if isinstance(record, Mapping):
            good[number] = record
        else:
            text = shown(record)
            remedy = 'Write each row with the names of its columns, such as {"text": "a joy", "label": 1}.'
            bad.add(BadRow(where, number, "", "no columns", text, f"expected columns and values, got {text}", remedy))
    names = dict.fromkeys(str(name) for record in good.values() for name in record)
    if not all(nfc(name) == name for name in names):  # records may write a name in different codes
        good = {i: {nfc(str(name)): cell for name, cell in record.items()} for i, record in good.items()}
    columns = Columns(map(nfc, names), lambda name: [record.get(name) for record in good.values()])
    return Table(where, columns, [*good], bad=bad)


@dataclass(frozen=True)
class TaskTables:
    """A task before its rows are read.

    Attributes:
        name: the name of the task.
        tables: the tables by split; at least the training rows.
        source: the content of ``source.json``.
        folder: the folder of ``source.json``.
        registered: the definition of the task in the registry, if it has one.
        columns: the columns that the user or ``source.json`` named.
        note: a note for the user on the tables.
        skip_bad_rows: whether rows that cannot be used are left out, and not refused.
        new_labels: the label map, from the written label to the new one; rows with an empty new label are dropped.
    """

    name: str
    tables: Mapping[str, Table]
    source: Mapping[str, Any]
    folder: Path
    registered: TaskDefinition | None
    columns: ColumnNames
    note: str = ""
    skip_bad_rows: bool = False
    new_labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def train(self) -> Table:
        """The table of the training rows."""
        return self.tables["train"]


# -- Rows in memory ---------------------------------------------------------------------------------------


def tables_of(where: str, rows: Any) -> Tables:
    """Return the tables of rows in memory, in any of the supported forms.

    Args:
        where: the name of the rows, for messages.
        rows: a ``datasets.Dataset``, ``IterableDataset`` or ``DatasetDict``, a pandas ``DataFrame``, a list of rows, each a
            mapping from columns to values, or a mapping from splits to these.

    Raises:
        DataError: a split is given twice, the training rows are missing, or the rows have another form.
    """
    if not isinstance(rows, Mapping):
        return {"train": _table(where, rows)}, ""
    names = list(map(str, rows))
    ours = {name: split for name in names if (split := split_of(name))}
    unread = [name for name in names if name not in ours]
    if unread and type(rows) is dict:  # a data set of the hub may have more
        raise DataError(
            f"{where}: {unread[0]!r} is not a split; expected train, validation and test. For rows without splits, "
            "give a list of rows, a DataFrame or a Dataset."
        )
    if (twice := first_twice(ours.values())) is not None:
        same = " and ".join(name for name, split in ours.items() if split == twice)
        raise DataError(f"{where} contains {same}, but there must be only one {twice} split. Remove the others.")
    if "train" not in ours.values():
        raise DataError(
            f"{where} has no train split; it contains {', '.join(names) or 'nothing'}. Add the training rows."
        )
    note = f"{', '.join(map(repr, unread))} not read" if unread else ""
    return {ours[name]: _table(f"{where}[{name!r}]", part) for name, part in rows.items() if name in ours}, note


def _table(where: str, rows: Any) -> Table:
    pandas, datasets = sys.modules.get("pandas"), sys.modules.get("datasets")  # imported if there are such rows
    if datasets is not None and isinstance(rows, datasets.Dataset):
        return _of_dataset(where, rows)
    if datasets is not None and isinstance(rows, datasets.IterableDataset):
        return _of_iterable(where, rows)
    if pandas is not None and isinstance(rows, pandas.DataFrame):
        names = {str(name): name for name in rows.columns}
        check_names(where, [str(name) for name in rows.columns])
        return Table(where, Columns(names, lambda name: list(map(plain, rows[names[name]]))), range(len(rows)))
    if isinstance(rows, Sequence) and not isinstance(rows, str | bytes):
        return _of_records(where, rows)
    raise DataError(
        f"{where}: expected a datasets.Dataset, IterableDataset or DatasetDict, a pandas.DataFrame, a list of rows, each a "
        f"dict, or a dict of splits of these, got a {type(rows).__name__}. Give one of them, or the path of a file."
    )


def _of_records(where: str, rows: Sequence[Any]) -> Table:
    table = of_records(where, rows, range(len(rows)))
    return replace(table, columns=Columns(table.columns, lambda name: list(map(plain, table.columns[name]))))


def _of_dataset(where: str, dataset: Any) -> Table:
    def read(name: str) -> Iterable[Any]:
        return dataset.select_columns([name]).with_format("arrow")[:].column(name).chunks  # type: ignore[no-any-return]

    stored = of_arrow(where, dataset.features.arrow_schema, dataset.features, read, range(len(dataset)))
    if dataset.format["type"] != "custom":
        return stored
    changed = _of_stream(f"{where} with its transform", dataset)  # from with_transform or set_transform
    same = {
        name: names
        for name, names in stored.label_names.items()
        if [*map(str, changed.columns.get(name, ()))] == [*map(str, stored.columns[name])]
    }
    return replace(changed, label_names=same)


def _of_iterable(where: str, dataset: Any) -> Table:
    features = {name: getattr(each, "feature", each) for name, each in (dataset.features or {}).items()}
    # Pictures and sounds are neither texts nor labels, and need other libraries to be read.
    unread = [name for name, each in features.items() if hasattr(each, "decode") and type(each).__name__ != "Json"]
    rows = _of_stream(where, dataset.with_format(None).remove_columns(unread))
    return replace(rows, label_names=label_names_of(features))


def _of_stream(where: str, dataset: Any) -> Table:
    """Return the table of the rows that a data set yields one after another."""
    try:
        return _of_records(where, [*dataset])
    except Exception as error:  # the data set, or a user's function, may raise anything
        raise DataError(
            f"{where}: its rows cannot be read: {type(error).__name__}: {first_line(error)}. Fix the code that "
            "yields them."
        ) from error


# -- Arrow's columns ---------------------------------------------------------------------------------------


def of_arrow(
    where: str, schema: Any, features: Mapping[str, Any], read: Callable[[str], Iterable[Any]], numbers: Sequence[int]
) -> Table:
    """Return the table of Arrow's columns, which are read on access.

    Raises:
        DataError: a column's name occurs twice; or, on access, a column cannot be read.
    """
    check_names(where, schema.names)

    def cells(name: str) -> list[Any]:
        try:
            return _cells(name, features.get(name), read(name))
        except Exception as error:
            raise DataError(
                f"{where}: column {name!r} cannot be read: {first_line(error)}. Write the rows again, or leave the column out."
            ) from error

    return Table(where, Columns(schema.names, cells), numbers, label_names_of(features))


def _cells(name: str, feature: Any, arrays: Iterable[Any]) -> list[Any]:
    """Return the cells, where JSON is decoded; pictures and sounds stay as they are stored."""
    cells = [plain(cell) for array in arrays for cell in array.to_pylist()]
    if feature is None:
        return cells
    from datasets import Features

    features = Features({name: feature})
    has_json = _JSON in str(features.arrow_schema.field(name).type)
    return list(features.decode_column(cells, name)) if has_json else cells


def label_names_of(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of labels that features give, by column; also for lists of labels."""
    inner = {column: getattr(feature, "feature", feature) for column, feature in features.items()}
    return {
        nfc(column): [*map(nfc, each.names)] for column, each in inner.items() if type(each).__name__ == "ClassLabel"
    }


def stored_features(schema: Any) -> dict[str, Any]:
    """Return the features that the ``datasets`` library wrote into a file, and the features of columns of JSON.

    A column that this version of the library does not understand has none.
    """
    import pyarrow

    try:
        written = dict(parse_json(schema.metadata[b"huggingface"].decode())["info"]["features"])
    except (ValueError, KeyError, TypeError):  # from another program, or in another form
        written = {}
    features = dict[str, Any]()
    for column in schema:
        is_json = _JSON in str(column.type)
        if is_json or column.name in written:
            from datasets import Features

            with suppress(Exception):  # an unknown form may raise anything
                features |= (
                    Features.from_arrow_schema(pyarrow.schema([column]))
                    if is_json
                    else Features.from_dict({column.name: written[column.name]})
                )
    return features


# -- Cells -----------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """Return a value as a reader of the data sees it, shortened, with invisible characters escaped."""
    text = "nothing" if value is None else with_invisible(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 60 else f"{text[:60]}…"


def common_start(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])


def plain(value: Any) -> Any:
    """Return a value in memory as a JSON value, at any depth; ``None`` for missing values of pandas, such as NaN or NaT."""
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
