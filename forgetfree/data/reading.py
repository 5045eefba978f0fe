"""A task's rows from a folder, or from tables, for every source: which files are its splits, and which kind reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgetfree import registry
from forgetfree.data.bad_rows import DataFaults
from forgetfree.data.columns import Columns
from forgetfree.data.library_tables import is_saved, is_snapshot, read_saved, read_snapshot
from forgetfree.data.rows import RowKind, TaskRows
from forgetfree.data.source_json import read_source
from forgetfree.data.table_files import find_table, format_of, head_of, read_table
from forgetfree.data.tables import Table, TaskTables, split_of
from forgetfree.errors import DataError
from forgetfree.tasks import SPLITS, version_of

#: Suffixes of files that may hold rows and are not read.
_UNREAD = (".arrow", ".feather", ".xls", ".xlsx")


def is_one_task(root: Path) -> bool:
    """Return whether a folder is itself a task, and not a folder of tasks."""
    if is_saved(root):
        return True
    if any(_has_files(path) for path in root.iterdir() if path.is_dir() and path.name != "data"):
        return False  # of a snapshot, it is the folder of files
    return is_snapshot(root) or _has_files(root)


def holds_a_task(folder: Path) -> bool:
    """Return whether a folder holds rows in any form, whatever may be wrong with them."""
    return _has_files(folder) or is_saved(folder) or is_snapshot(folder)


def _has_files(folder: Path) -> bool:
    """Return whether a folder holds the file of a split; one that may not be read holds none."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return False
    named = (format_of(path.name) for path in folder.iterdir() if path.is_file())
    return any(format and split_of(stem) for stem, format in named)


def read_folder(name: str, folder: Path, columns: Columns, skip_bad_rows: bool = False) -> TaskRows:
    """Read a task's folder: its files, or what the ``datasets`` library wrote or downloaded."""
    source = _source_of(folder)
    if is_saved(folder):
        tables, note = read_saved(folder)
        return read_task(name, tables, source, folder, columns, note, skip_bad_rows)
    paths = {split: path for split in SPLITS if (path := find_table(folder, split))}
    if not paths and is_snapshot(folder):
        tables, note = read_snapshot(folder, name)
        return read_task(name, tables, source, folder, columns, note, skip_bad_rows)
    if "train" not in paths:
        raise DataError(
            f"Task {name!r} has no train split: expected {folder}/train.parquet, .jsonl or .csv, found "
            f"{', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing'}. Add the file."
        )
    for split in SPLITS:
        if split not in paths:
            _check_left_out(name, folder, split)
    faults = DataFaults()
    found = {split: faults.attempt(read_table, path) for split, path in paths.items()}
    tables = {split: table for split, table in found.items() if table is not None}
    others = [f"{path.name} is the {split} split" for split, path in paths.items() if format_of(path.name)[0] != split]
    arguments = (name, tables, source, folder, columns, "; ".join(others), skip_bad_rows)
    if len(tables) < len(paths):
        if "train" in tables:
            faults.attempt(read_task, *arguments)
        faults.report()
    return read_task(*arguments)


def check_folder(name: str, folder: Path, columns: Columns) -> None:
    """Raise as `check_header` does for the files of a task's folder."""
    if not is_saved(folder):
        check_header(
            name, {split: path for split in SPLITS if (path := find_table(folder, split))}, _source_of(folder), columns
        )


def _source_of(folder: Path) -> dict[str, Any]:
    """Return what ``source.json`` says of a task; of a version without one, that of the task."""
    base, version = version_of(folder.name)
    return read_source(folder) or (read_source(folder.with_name(base)) if version > 1 else {})


def check_header(name: str, paths: Mapping[str, Path], source: Mapping[str, Any], columns: Columns) -> None:
    """Raise ``DataError`` for what the first lines of a task's files say is wrong, before all rows are read.

    Args:
        name: of the task.
        paths: its files, by split.
        source: what its ``source.json`` says.
        columns: the columns that the user named.
    """
    faults = DataFaults()
    found = {split: faults.attempt(head_of, path) for split, path in paths.items()}
    heads = {split: head for split, head in found.items() if head is not None}
    if "train" in heads:
        task = _task(name, heads, source, Path(), columns)
        faults.attempt(_kind(task).check_header, task)
    faults.report()


def read_task(
    name: str,
    tables: Mapping[str, Table],
    source: Mapping[str, Any],
    folder: Path,
    columns: Columns,
    note: str = "",
    skip_bad_rows: bool = False,
) -> TaskRows:
    """Return a task with its rows, from the tables of its splits; see `TaskTables`.

    Raises:
        DataError: the tables do not hold what the task needs.
    """
    for table in tables.values():
        if not table.columns and not table.numbers and not table.bad:
            raise DataError(f"{table.where} holds no rows, and every split needs some. Add rows, or remove the file.")
    told = "; ".join(filter(None, [note, *(table.note for table in tables.values())]))
    task = _task(name, tables, source, folder, columns, told, skip_bad_rows)
    return _kind(task).read(task)


def _task(
    name: str,
    tables: Mapping[str, Table],
    source: Mapping[str, Any],
    folder: Path,
    columns: Columns,
    note: str = "",
    skip_bad_rows: bool = False,
) -> TaskTables:
    registered = registry.tasks().get(version_of(name)[0])
    return TaskTables(name, tables, source, folder, registered, columns.over(source), note, skip_bad_rows)


def _kind(task: TaskTables) -> RowKind:
    """Return the kind of a task: by ``source.json``, else as it is registered, else by its columns."""
    named = task.source.get("kind") or (task.registered.kind if task.registered else None)
    if named:
        found: RowKind = registry.kind(named)
        return found
    ours: dict[str, RowKind] = {name: registry.kind(name) for name in registry.KINDS}
    alike = (kind for kind in ours.values() if kind.recognises(task))
    return next(alike, ours["classification"])


def _check_left_out(name: str, folder: Path, split: str) -> None:
    """Raise ``DataError`` if a split is missing and there is a file that may be meant for it."""
    for path in sorted(folder.iterdir()):
        if split_of(path.stem) == split and path.suffix.lower() in _UNREAD:
            raise DataError(
                f"Task {name!r} has no {split} split, and {path} is not read. Write it as {split}.parquet, .jsonl or .csv, or "
                "move it elsewhere."
            )
