"""Rows of pandas and of the ``datasets`` library, in memory, in a folder or on the hub, as the tables of a task's splits."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forgetfree.data.table_files import check_size, format_of, label_names_of, of_arrow
from forgetfree.data.tables import Columns, Table, check_names, of_records, plain, split_of
from forgetfree.errors import DataError, NoDataError, UsageError, first_line
from forgetfree.tasks import HubSource, TaskDefinition, slots

#: The name of a file that is one of several parts.
_PART = re.compile(r"(.*?)(\d+)([-_]of[-_])(\d+)(.*)")
#: A file of a data set of the hub, which has its splits in parts.
_SHARD = re.compile(
    r"(train|training|validation|valid|val|dev|eval|test)[-._].*\.(parquet|csv|tsv|jsonl?|arrow)(\.\w+)?"
)
#: The tables of a task by split, and what to say of them.
Tables = tuple[dict[str, Table], str]


def tables_of(where: str, rows: Any) -> Tables:
    """Tables of rows in one of the forms that users have them in.

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
    """Our name of each split by the given one, and the names of what is no split.

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
    pandas, datasets = sys.modules.get("pandas"), sys.modules.get("datasets")  # who has such rows has imported them
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


def _of_iterable(where: str, dataset: Any) -> Table:
    features = {name: getattr(each, "feature", each) for name, each in (dataset.features or {}).items()}
    # Pictures and sounds, which other libraries would have to read, are neither texts nor labels.
    unread = [name for name, each in features.items() if hasattr(each, "decode") and type(each).__name__ != "Json"]
    rows = _table_of_rows(where, dataset.with_format(None).remove_columns(unread))
    return replace(rows, label_names=label_names_of(features))


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
    """Table of the rows that a data set yields one after another."""
    try:
        return _of_records(where, [*dataset])
    except Exception as error:  # whatever it reads, or a user's function raises
        raise DataError(
            f"{where}: its rows cannot be read: {type(error).__name__}: {first_line(error)}. Mend what yields them."
        ) from error


# -- Folders ---------------------------------------------------------------------------------------------


def is_saved(folder: Path) -> bool:
    """True if ``datasets.save_to_disk`` wrote the folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def is_snapshot(folder: Path) -> bool:
    """True if the folder is a data set of the hub as it is downloaded: files in parts, or a card that describes them."""
    if is_saved(folder):
        return False
    places = [place for place in (folder, folder / "data") if place.is_dir() and os.access(place, os.R_OK | os.X_OK)]
    return any(_SHARD.fullmatch(path.name.lower()) for place in places for path in place.iterdir()) or has_card(folder)


def has_card(folder: Path) -> bool:
    """True if a ``README.md``, or ``dataset_infos.json``, describes the folder as a data set of the hub."""
    if (folder / "dataset_infos.json").is_file():
        return True
    card = folder / "README.md"
    if not card.is_file():
        return False
    with card.open("rb") as file:
        head = file.read(2**16)
    return head.startswith(b"---") and bool(re.search(rb"^(configs|dataset_info):", head, re.MULTILINE))


def configurations(folder: Path) -> list[str]:
    """Names of the configurations of a hub snapshot."""
    with datasets_errors(folder):
        from datasets import get_dataset_config_names

        return list(get_dataset_config_names(str(folder)))


def is_part(name: str) -> bool:
    """True if the name of a file is that of one of several parts of a split."""
    match = _PART.fullmatch(name)
    return bool(match and split_of(match[1].rstrip("-_.")) and format_of(name)[1])


def check_parts(where: Path, files: Iterable[str | Path]) -> None:
    """Raise ``DataError`` if files have names such as ``train-00000-of-00002.parquet``, and not all of these are there."""
    parts = dict[tuple[Path, str, str, str], dict[int, str]]()
    for path in map(Path, files):
        if (match := _PART.fullmatch(path.name)) and int(match[2]) <= int(match[4]) and path.is_file():
            parts.setdefault((path.parent, match[1], match[3], match[4]), {})[int(match[2])] = path.name
    for (folder, begin, of, total), names in parts.items():
        first = int(int(total) in names)  # they are counted from 0, or else from 1
        lacking = [number for number in range(first, first + int(total)) if number not in names]
        if lacking:
            raise DataError(
                f"{where} holds {len(names)} of the {int(total)} files {folder.name}/{begin}*{of}{total}: number "
                f"{', '.join(f'{number:0{len(total)}}' for number in lacking[:5])}{', …' * (len(lacking) > 5)} "
                f"{'is' if len(lacking) == 1 else 'are'} missing. Download the data set again."
            )


def part_note(path: Path) -> str:
    """Note on a file that is read alone, and has the name of one of several parts."""
    match = _PART.fullmatch(path.name)
    is_part = match and 1 < int(match[4]) >= int(match[2])
    return f"{path.name} is one of {int(match[4])} parts, and read alone" if match and is_part else ""


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
    """Number of rows of each split by a task's card; nothing where it says none, or cannot be read."""
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


@contextmanager
def datasets_errors(folder: Path) -> Iterator[None]:
    """Say what the library finds wrong as an error of the folder's, and nothing of how far it is."""
    import datasets

    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    check_size(folder, size)
    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        cause: BaseException = error
        if isinstance(error, datasets.exceptions.DatasetGenerationError):  # it says only that there is an error
            cause = error.__cause__ or error
            if not isinstance(cause, OSError):
                cause = ValueError(" ".join(str(cause).split())[:400])  # in several lines
        file = f"{cause.filename}: " if isinstance(cause, OSError) and cause.filename else ""
        raise DataError(
            f"{folder} cannot be read by the datasets library: {file}{first_line(cause)}. Save or download it again."
        ) from error
    finally:
        if not silent:
            datasets.enable_progress_bars()


# -- The hub ---------------------------------------------------------------------------------------------


def read_hub(task: TaskDefinition, hub: HubSource) -> dict[str, Table]:
    """Tables of a registered task, by split, from where the hub has them.

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
    """Column of the hub, or the texts that a template makes of several, without missing values."""
    names = slots(column)
    if not names:
        return list(table[column])
    rows = zip(*(table[name] for name in names), strict=True)
    filled = ({n: "" if v is None else str(v).strip() for n, v in zip(names, row, strict=True)} for row in rows)
    return [re.sub(" {2,}", " ", column.format_map(values)).strip() for values in filled]
