"""A task's rows, for every source: its files, its ``source.json``, and the kind that reads its tables."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forgetfree import registry
from forgetfree.data.bad_rows import DataFaults
from forgetfree.data.columns import READ_DEFAULTS, ReadOptions
from forgetfree.data.library_tables import (
    check_rows,
    is_part,
    is_saved,
    is_snapshot,
    read_saved,
    read_snapshot,
    rows_of_card,
)
from forgetfree.data.rows import TaskRows
from forgetfree.data.table_files import format_of, read_table
from forgetfree.data.tables import Table, TaskTables, split_of
from forgetfree.display import brief
from forgetfree.errors import DataError
from forgetfree.json_file import read_json
from forgetfree.tasks import KIND_OF_FORM, SPLITS

#: Suffixes of files that may hold rows and are not read.
_UNREAD = (".arrow", ".feather", ".xls", ".xlsx")
#: Said of rows that are not those of the registered task of their name.
_OTHER_COLUMNS = "the registered task {!r} has other columns, and these rows are a task of their own"


def read_folder(name: str, folder: Path, options: ReadOptions) -> TaskRows:
    """Read a task's folder: its files, or what the ``datasets`` library wrote or downloaded.

    Raises:
        DataError: it does not hold what the task needs.
    """
    source, faults = read_source(folder), DataFaults()
    paths = {} if is_saved(folder) else _files_of(folder)
    if is_saved(folder):
        tables, note = read_saved(folder)
    elif not paths and is_snapshot(folder):
        tables, note = read_snapshot(folder, name)
    else:
        _check_files(name, folder, paths)
        read = {split: faults.attempt(read_table, path) for split, path in paths.items()}
        tables = {split: table for split, table in read.items() if table is not None}
        others = [(path.name, split) for split, path in paths.items() if format_of(path.name)[0] != split]
        note = "; ".join(f"{file} is the {split} split" for file, split in others)
        if len(tables) == len(paths):
            faults.attempt(check_rows, folder, rows_of_card(folder, name), tables)
    if "train" not in tables:
        faults.report()
    rows = faults.demand(read_task, task_of(name, tables, options, source, folder, note))
    faults.report()
    return rows


def _files_of(folder: Path) -> dict[str, Path]:
    """Files of a folder's splits, in any of the formats.

    Raises:
        DataError: there are several of one split.
    """
    every = sorted(folder.iterdir())
    files = dict[str, Path]()
    for split in SPLITS:
        named = [path for path in every if split_of(format_of(path.name)[0]) == split and format_of(path.name)[1]]
        named = [path for path in named if not path.name.endswith(".txt")] or named  # a .txt may hold anything
        if len(named) > 1:
            raise DataError(
                f"{folder} holds {' and '.join(path.name for path in named)}, and the {split} split is one file. Remove the "
                "others."
            )
        if named:
            files[split] = named[0]
    if files and (parts := [path.name for path in every if is_part(path.name)]):
        raise DataError(
            f"{folder} holds {' and '.join(path.name for path in files.values())}, and {parts[0]}, which is one of several "
            "parts of a split. Remove what is not meant."
        )
    return files


def _check_files(name: str, folder: Path, paths: Mapping[str, Path]) -> None:
    """Raise ``DataError`` if a folder has no training rows, or a file that is not read seems to be meant for a split."""
    every = sorted(folder.iterdir())
    if "train" not in paths:
        raise DataError(
            f"Task {name!r} has no train split: expected {folder}/train.parquet, .jsonl or .csv, found "
            f"{', '.join(path.name for path in every) or 'nothing'}. Add the file."
        )
    for path in every:
        split = split_of(path.stem)
        if split and split not in paths and path.suffix.lower() in _UNREAD:
            raise DataError(
                f"Task {name!r} has no {split} split, and {path} is not read. Write it as {split}.parquet, .jsonl or .csv, "
                "or move it elsewhere."
            )


def read_source(folder: Path) -> dict[str, Any]:
    """Read a task's ``source.json``; empty if there is none, and without the keys whose value is null.

    Raises:
        DataError: it is no JSON object, or a key that counts is misspelt or has a value that does not fit.
    """
    path = folder / "source.json"
    if not os.path.lexists(path):
        return {}
    source = read_json(path, DataError, "Fix or remove it.")
    if not isinstance(source, dict):
        raise DataError(f"{path} must hold a JSON object with label_names, got a {type(source).__name__}.")
    source, known = {key: value for key, value in source.items() if value is not None}, _keys(source.get("kind"))
    for key, value in source.items():
        if key in known:
            expected, is_right = known[key]
            if not is_right(value):
                raise DataError(f"{path}: {key} must be {expected}, got {brief(value, 200)}.")
        elif meant := difflib.get_close_matches(key, [each for each in known if each not in source], 1, 0.8):
            raise DataError(f"{path}: {key!r} is not read. Did you mean {meant[0]!r}? Rename or remove it.")
    return source


def _keys(kind: Any) -> dict[str, tuple[str, Callable[[Any], bool]]]:
    """Keys of source.json that are read, where more may stand: what each value must be, and whether it is."""
    names = ("a list of at least two names, all different", _are_names)
    kinds = list(dict.fromkeys([*KIND_OF_FORM, *registry.kinds()]))
    metrics = registry.metrics_of(kind) if isinstance(kind, str) and kind in kinds else list(registry.metrics())
    return {
        **dict.fromkeys(("label_names", "label_words", "closed_answers"), names),
        "text_column": ("the name of a column, or a list of two for pairs", lambda value: _are_columns(value, 2)),
        "label_column": ("the name of a column", lambda value: _are_columns(value, 1)),
        "kind": (", ".join(kinds), kinds.__contains__),
        "entities": (
            "a list of kinds, all different",
            lambda value: isinstance(value, list) and _are_names([*value, "O"]),
        ),
        **dict.fromkeys(
            ("instruction", "template", "causal_template"), ("a text", lambda value: isinstance(value, str))
        ),
        "max_new_tokens": ("a whole number", lambda value: type(value) is int),
        "stop": ("a text, or a list of texts", lambda value: all(isinstance(each, str) for each in _as_list(value))),
        "metric": (" or ".join(map(repr, metrics)), lambda value: value in [*registry.metrics()]),
    }


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _are_columns(value: Any, most: int) -> bool:
    return len(_as_list(value)) <= most and all(isinstance(each, str) and each for each in _as_list(value))


def _are_names(names: Any) -> bool:
    """True if these are different texts that are not blank, or whole numbers used as names."""
    if not isinstance(names, list) or not all(type(name) in (str, int) for name in names):
        return False
    plain = {str(name).strip() for name in names}
    return "" not in plain and len(plain) == len(names) > 1


def read_task(task: TaskTables) -> TaskRows:
    """Task with its rows, from the tables of its splits.

    Raises:
        DataError: the tables do not hold what the task needs.
    """
    faults, tables = DataFaults(), dict[str, Table]()
    for split, table in task.tables.items():
        if table.columns or table.numbers or table.bad:
            tables[split] = table
        else:
            faults.catch(
                DataError(f"{table.where} holds no rows, and every split needs some. Add rows, or remove the file.")
            )
    if "train" not in tables:
        faults.report()
    note = "; ".join(filter(None, [task.note, *(table.note for table in tables.values())]))
    task = _of_its_own_columns(replace(task, tables=tables, note=note))
    rows: TaskRows = faults.demand(_kind(task).read, task)
    if unknown := registry.faults_of(rows.task):
        raise DataError(f"{task.folder / 'source.json'}: {unknown[0]}.")
    faults.report()
    return rows


def task_of(
    name: str,
    tables: Mapping[str, Table],
    options: ReadOptions = READ_DEFAULTS,
    source: Mapping[str, Any] = MappingProxyType({}),
    folder: Path = Path(),
    note: str = "",
) -> TaskTables:
    """Task before its rows are read."""
    columns = options.columns(name).over(source)
    if kind := options.kind(name):
        source = {**source, "kind": kind}
    registered = registry.tasks().get(name)
    return TaskTables(name, tables, source, folder, registered, columns, note, options.skip_bad_rows)


def _of_its_own_columns(task: TaskTables) -> TaskTables:
    """Task without the definition that is registered under its name, where its rows are another task's."""
    if task.registered is None:
        return task
    own = replace(task, registered=None, note="; ".join(filter(None, [task.note, _OTHER_COLUMNS.format(task.name)])))
    named, kind = (KIND_OF_FORM.get(each, each) for each in (task.source.get("kind", ""), task.registered.kind))
    if named == kind or (not named and (_has_columns(task) or not _has_columns(own))):
        return task
    return own


def _has_columns(task: TaskTables) -> bool:
    try:
        _kind(task).check_header(task)
    except DataError:
        return False
    return True


def _kind(task: TaskTables) -> Any:
    """Kind of a task: by ``source.json``, else as it is registered, else by its columns."""
    named = task.source.get("kind") or (task.registered.kind if task.registered else None)
    if named:
        return registry.kind(named)
    ours = {name: registry.kind(name) for name in registry.KINDS}
    alike = (kind for kind in ours.values() if kind.recognises(task))
    return next(alike, ours["classification"])
