"""Rows of pandas and of the ``datasets`` library, in memory, in a folder or on the hub, as the tables of a task's splits."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forgetfree.data.places import check_parts, configurations, datasets_errors, has_card, split_of
from forgetfree.data.tables import Columns, Table, cells_of, check_names, of_records
from forgetfree.errors import DataError, NoDataError, UsageError, first_line
from forgetfree.json_file import parse_json
from forgetfree.tasks import HubSource, TaskDefinition, slots

#: How Arrow calls the type of cells that are written as JSON.
_JSON = "extension<arrow.json>"
#: The tables of a task by split, and what to say of them.
Tables = tuple[dict[str, Table], str]


def tables_of(where: str, rows: Any) -> Tables:
    """Return the tables of rows in one of the forms that users have them in.

    Args:
        where: what the rows are called, for messages.
        rows: a ``datasets.Dataset``, ``IterableDataset`` or ``DatasetDict``, a pandas ``DataFrame``, a list of rows, each a
            mapping from columns to values, or a mapping from splits to these.

    Raises:
        DataError: a split is given twice, the training rows are missing, or the rows have another form.
    """
    if not isinstance(rows, Mapping):
        return {"train": _table(where, rows)}, ""
    ours, unread = splits_of(where, map(str, rows))
    if unread and type(rows) is dict:  # a data set of the hub may have more
        raise DataError(
            f"{where}: {unread[0]!r} is no split; expected train, validation and test. For rows in one piece give a list of "
            "rows, a DataFrame or a Dataset."
        )
    note = f"{', '.join(map(repr, unread))} not read" if unread else ""
    return {ours[name]: _table(f"{where}[{name!r}]", part) for name, part in rows.items() if name in ours}, note


def splits_of(where: str, names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return our name of each split by the given one, and the names of what is no split.

    Raises:
        DataError: a split is there twice, or the training rows are missing.
    """
    listed = list(names)
    splits = {name: split for name in listed if (split := split_of(name))}
    for split in splits.values():
        if len(same := [name for name, other in splits.items() if other == split]) > 1:
            raise DataError(f"{where} holds {' and '.join(same)}, and the {split} split is one. Remove the others.")
    if "train" not in splits.values():
        raise DataError(
            f"{where} has no train split; it holds {', '.join(listed) or 'nothing'}. Add the training rows."
        )
    return splits, [name for name in listed if name not in splits]


def _table(where: str, rows: Any) -> Table:
    """Return the table of one split."""
    pandas, datasets = sys.modules.get("pandas"), sys.modules.get("datasets")  # who has such rows has imported them
    if datasets is not None and isinstance(rows, datasets.Dataset):
        return _of_dataset(where, rows)
    if datasets is not None and isinstance(rows, datasets.IterableDataset):
        return _of_iterable(where, rows)
    if pandas is not None and isinstance(rows, pandas.DataFrame):
        names = {str(name): name for name in rows.columns}
        check_names(where, [str(name) for name in rows.columns])
        return Table(where, Columns(names, lambda name: cells_of(rows[names[name]])), range(len(rows)))
    if isinstance(rows, Sequence) and not isinstance(rows, str | bytes):
        return _of_records(where, rows)
    raise DataError(
        f"{where}: expected a datasets.Dataset, IterableDataset or DatasetDict, a pandas.DataFrame, a list of rows, each a "
        f"dict, or a dict of splits of these, got a {type(rows).__name__}. Give one of them, or the path of a file."
    )


def _of_records(where: str, rows: Sequence[Any]) -> Table:
    table = of_records(where, rows, range(len(rows)))
    return replace(table, columns=Columns(table.columns, lambda name: cells_of(table.columns[name])))


def _of_iterable(where: str, dataset: Any) -> Table:
    features = {name: getattr(each, "feature", each) for name, each in (dataset.features or {}).items()}
    # Pictures and sounds, which other libraries would have to read, are neither texts nor labels.
    unread = [name for name, each in features.items() if hasattr(each, "decode") and type(each).__name__ != "Json"]
    rows = _table_of_rows(where, dataset.with_format(None).remove_columns(unread))
    return replace(rows, label_names=_label_names(features))


def _of_dataset(where: str, dataset: Any) -> Table:
    def read(name: str) -> Iterable[Any]:
        return dataset.select_columns([name]).with_format("arrow")[:].column(name).chunks  # type: ignore[no-any-return]

    stored = of_arrow(where, dataset.features.arrow_schema, dataset.features, read, range(len(dataset)))
    if not len(dataset) or dataset.format["type"] != "custom":
        return stored
    rows = _table_of_rows(f"{where} with its transform", dataset)  # of with_transform, or set_transform
    # Written alike: arrays have no truth value of their own.
    same = [
        name
        for name in stored.label_names
        if [*map(str, rows.columns.get(name, ()))] == [*map(str, stored.columns[name])]
    ]
    return replace(rows, label_names={name: stored.label_names[name] for name in same})


def _table_of_rows(where: str, dataset: Any) -> Table:
    """Return the table of the rows that a data set yields one after another."""
    try:
        return _of_records(where, [*dataset])
    except Exception as error:  # whatever it reads, or a user's function raises
        raise DataError(
            f"{where}: its rows cannot be read: {type(error).__name__}: {first_line(error)}. Mend what yields them."
        ) from error


# -- Arrow's columns ---------------------------------------------------------------------------------------


def of_arrow(
    where: str, schema: Any, features: Mapping[str, Any], read: Callable[[str], Iterable[Any]], numbers: Sequence[int]
) -> Table:
    """Return the table of Arrow's columns, which are read when they are asked for.

    Args:
        where: what the table is called, for messages.
        schema: its schema.
        features: of the ``datasets`` library, by column, as far as they are known.
        read: returns the arrays of a column.
        numbers: of the rows, for messages.

    Raises:
        DataError: a column's name comes twice; later, a column cannot be read.
    """
    check_names(where, schema.names)

    def cells(name: str) -> list[Any]:
        try:
            return _cells(name, features.get(name), read(name))
        except Exception as error:
            raise DataError(
                f"{where}: column {name!r} cannot be read: {first_line(error)}. Write the rows again, or leave the column out."
            ) from error

    return Table(where, Columns(schema.names, cells), numbers, _label_names(features))


def _cells(name: str, feature: Any, arrays: Iterable[Any]) -> list[Any]:
    """Return cells as Python has them: no NaN, and what is written as JSON decoded; pictures and sounds as they are stored."""
    cells = [cell for array in arrays for cell in array.to_pylist()]
    cells = [None if isinstance(cell, float) and cell != cell else cell for cell in cells]
    if feature is None:
        return cells
    from datasets import Features

    features = Features({name: feature})
    has_json = _JSON in str(features.arrow_schema.field(name).type)
    return list(features.decode_column(cells, name)) if has_json else cells


def _label_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of labels that features give, by column; of a list of labels, too."""
    inner = {column: getattr(feature, "feature", feature) for column, feature in features.items()}
    return {column: each.names for column, each in inner.items() if type(each).__name__ == "ClassLabel"}


def features_of(schema: Any) -> dict[str, Any]:
    """Return the features of a file's columns: as the ``datasets`` library wrote them there, or as a type alone says.

    A column that this version of the library does not understand has none.
    """
    try:
        written = dict(parse_json(schema.metadata[b"huggingface"].decode())["info"]["features"])
    except (ValueError, KeyError, TypeError):  # another program's, or of another form
        written = {}
    features = dict[str, Any]()
    for field in schema:
        if field.name in written or _JSON in str(field.type):
            features |= _feature_of(field, written.get(field.name))
    return features


def _feature_of(field: Any, written: Any) -> dict[str, Any]:
    import pyarrow
    from datasets import Features

    with suppress(Exception):  # whatever it meets in a form that it does not know
        return dict(Features.from_dict({field.name: written}))
    with suppress(Exception):
        return dict(Features.from_arrow_schema(pyarrow.schema([field])))
    return {}


# -- Folders ---------------------------------------------------------------------------------------------


def read_saved(folder: Path) -> Tables:
    """Read what ``datasets.save_to_disk`` wrote."""
    with datasets_errors(folder):
        from datasets import load_from_disk

        dataset = load_from_disk(str(folder))
    return tables_of(str(folder), dataset)


def read_snapshot(folder: Path, name: str) -> Tables:
    """Read a hub snapshot: its only configuration, or the one called ``name``.

    Raises:
        UsageError: it has several configurations, and none of that name.
        DataError: it cannot be read.
    """
    known = configurations(folder)
    if len(known) > 1 and name not in known:
        raise UsageError(f"{folder} holds the configurations {', '.join(known)}. Name one of them as the task.")
    with datasets_errors(folder), TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        from datasets import load_dataset_builder

        builder = load_dataset_builder(str(folder), known[0] if len(known) < 2 else name, cache_dir=cache)
        for files in (builder.config.data_files or {}).values():
            check_parts(folder, files)
        expected = _rows_of(builder.info)
        builder.download_and_prepare(verification_mode="no_checks")  # `check_rows` says what to do
        tables, note = tables_of(str(folder), builder.as_dataset())
    check_rows(folder, expected, tables)
    return tables, note


def rows_of_card(folder: Path, name: str) -> dict[str, int]:
    """Return how many rows a card says that each split of a task has; nothing where it says none, or cannot be read."""
    if not has_card(folder):
        return {}
    from datasets.info import DatasetInfo, DatasetInfosDict

    try:
        infos = DatasetInfosDict.from_directory(str(folder))
        return _rows_of(infos.get(name) or (DatasetInfo() if len(infos) > 1 else next(iter(infos.values()))))
    except Exception:  # the files are read without it
        return {}


def _rows_of(info: Any) -> dict[str, int]:
    return {str(name): split.num_examples for name, split in (info.splits or {}).items()}


def check_rows(folder: Path, expected: Mapping[str, int], tables: Mapping[str, Table]) -> None:
    """Raise ``DataError`` if the tables of a folder hold other numbers of rows than its card says."""
    there = {split: len({*table.numbers, *table.bad.numbers}) for split, table in tables.items()}
    for name, count in expected.items():
        split = split_of(name)
        if split and count and count != there.get(split, 0):
            raise DataError(
                f"{folder}: the card says that the {split} split has {count:,} rows, and {there.get(split, 0):,} are there. "
                "Download the files again; or, if they were changed on purpose, take dataset_info out of README.md, or "
                "dataset_infos.json away."
            )


# -- The hub ---------------------------------------------------------------------------------------------


def read_hub(task: TaskDefinition, hub: HubSource) -> dict[str, Table]:
    """Return the tables of a registered task, by split, from where the hub has them.

    Raises:
        NoDataError: they cannot be read, or one lacks a column.
    """
    from datasets import load_dataset

    tables = dict[str, Table]()
    for split, name in hub.splits.items():
        try:
            rows = load_dataset(hub.path, hub.name, split=name)
        except Exception as error:
            raise NoDataError(
                f"Task {task.name!r} cannot be read from the hub ({hub.path}, split {name}): "
                f"{first_line(error)}. Without a connection, give a directory with --data DIR, or "
                "--data demo."
            ) from error
        where = f"{hub.path}:{name}"
        needed = [name for column in hub.columns for name in slots(column) or [column]]
        missing = [column for column in (*needed, hub.label) if column not in rows.column_names]
        if missing:
            raise DataError(
                f"{where} has no column {missing[0]!r}; it has {', '.join(rows.column_names)}. The "
                "set has changed on the hub: give a directory with --data DIR."
            )
        labels = [(hub.labels or {}).get(label, label) for label in rows[hub.label]]
        keep = [i for i, label in enumerate(labels) if label != -1]  # SNLI's mark of undecided rows
        columns = {name: _hub_texts(rows, column) for name, column in zip(task.text_columns, hub.columns, strict=True)}
        whole = Table(where, columns | {"label": labels}, range(len(labels)))
        tables[split] = whole.take(keep)
    return tables


def _hub_texts(table: Any, column: str) -> list[Any]:
    """Return a column of the hub, or the texts that a template makes of several, without missing values."""
    names = slots(column)
    if not names:
        return list(table[column])
    rows = zip(*(table[name] for name in names), strict=True)
    filled = ({n: "" if v is None else str(v).strip() for n, v in zip(names, row, strict=True)} for row in rows)
    return [re.sub(" {2,}", " ", column.format_map(values)).strip() for values in filled]
