"""A task's rows from a folder, or from tables: the columns, the labels and the splits are settled here, for every source."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forgetfree import registry
from forgetfree.data.bad_rows import DataFaults, left_out
from forgetfree.data.columns import Columns, choose
from forgetfree.data.forms import other_form
from forgetfree.data.in_memory import is_saved, is_snapshot, read_saved, read_snapshot
from forgetfree.data.labels import learn_labels
from forgetfree.data.row_notes import notes_of_labels, notes_of_rows
from forgetfree.data.rows import Rows, TaskRows, complete
from forgetfree.data.source_json import described, infer, read_source
from forgetfree.data.table_files import find_table, format_of, head_of, read_table, split_of
from forgetfree.data.tables import Table
from forgetfree.data.tagged import check_tagged, is_tagged, read_tagged
from forgetfree.display import counted
from forgetfree.errors import DataError
from forgetfree.tasks import SPLITS, Kind, version_of

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


def read_folder(name: str, folder: Path, asked: Columns, skip_bad_rows: bool = False) -> TaskRows:
    """Read a task's folder: its files, or what the ``datasets`` library wrote or downloaded."""
    given = _given(folder)
    if is_saved(folder):
        tables, note = read_saved(folder)
        return read_task(name, tables, given, folder, asked, note, skip_bad_rows)
    paths = {split: path for split in SPLITS if (path := find_table(folder, split))}
    if not paths and is_snapshot(folder):
        tables, note = read_snapshot(folder, name)
        return read_task(name, tables, given, folder, asked, note, skip_bad_rows)
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
    arguments = (name, tables, given, folder, asked, "; ".join(others), skip_bad_rows)
    if len(tables) < len(paths):
        if "train" in tables:
            faults.attempt(read_task, *arguments)
        faults.report()
    return read_task(*arguments)


def check_folder(name: str, folder: Path, asked: Columns) -> None:
    """Raise as `check_header` does for the files of a task's folder."""
    if not is_saved(folder):
        check_header(
            name, {split: path for split in SPLITS if (path := find_table(folder, split))}, _given(folder), asked
        )


def _given(folder: Path) -> dict[str, Any]:
    """Return what ``source.json`` says of a task; of a version without one, that of the task."""
    base, version = version_of(folder.name)
    return read_source(folder) or (read_source(folder.with_name(base)) if version > 1 else {})


def check_header(name: str, paths: Mapping[str, Path], given: Mapping[str, Any], asked: Columns) -> None:
    """Raise ``DataError`` for what the first lines of a task's files say is wrong, before all rows are read.

    Args:
        name: of the task.
        paths: its files, by split.
        given: what its ``source.json`` says.
        asked: the columns that the user named.
    """
    faults = DataFaults()
    found = {split: faults.attempt(head_of, path) for split, path in paths.items()}
    heads = {split: head for split, head in found.items() if head is not None}
    if (train := heads.get("train")) is not None:
        registered = registry.tasks().get(version_of(name)[0])
        asked = asked.over(given)
        if is_tagged(given, train, registered, asked):
            for head in heads.values():
                faults.attempt(check_tagged, head, asked)
        elif chosen := faults.attempt(_chosen, train, asked, registered.kind if registered else None):
            for head in heads.values():
                faults.attempt(head.check_columns, chosen[0])
    faults.report()


def read_task(
    name: str,
    tables: Mapping[str, Table],
    given: Mapping[str, Any],
    folder: Path,
    asked: Columns,
    note: str = "",
    skip_bad_rows: bool = False,
) -> TaskRows:
    """Return a task with its rows, from the tables of its splits.

    Args:
        name: of the task.
        tables: by split; the training rows at least.
        given: what ``source.json`` says.
        folder: where that is.
        asked: the columns that the user named.
        note: what the user should know of the tables.
        skip_bad_rows: whether rows that cannot be used are left out, and not refused.

    Raises:
        DataError: the tables do not hold what the task needs.
    """
    for table in tables.values():
        if not table.columns and not table.numbers and not table.bad:
            raise DataError(f"{table.where} holds no rows, and every split needs some. Add rows, or remove the file.")
    train = tables["train"]
    note = "; ".join(filter(None, [note, *(table.note for table in tables.values())]))
    registered = registry.tasks().get(version_of(name)[0])
    asked = asked.over(given)
    if is_tagged(given, train, registered, asked):
        return read_tagged(name, tables, given, registered, asked, note, skip_bad_rows)
    faults = DataFaults()
    if not train.columns:  # of all rows none could be read
        faults.add(train.bad, 0)
        faults.report()
    columns, recognised = _chosen(train, asked, registered.kind if registered else None)
    assert columns.label is not None
    kind: Kind = "pair" if len(columns.texts) == 2 else "single"
    read = {split: table.labelled(columns.label) for split, table in tables.items()}
    unlabelled = {split: len(tables[split].numbers) - len(table.numbers) for split, table in read.items()}
    numbered = train.label_names.get(columns.label, ())
    for table in tables.values():
        if (theirs := table.label_names.get(columns.label, numbered)) != numbered:
            raise DataError(
                f"{table.where} has its labels in the order {', '.join(map(str, theirs))}, and {train.where} in the order "
                f"{', '.join(map(str, numbered)) or 'of its rows'}: one number would mean two labels. Write both alike."
            )
    if not given.get("label_names") and numbered:
        given = {**given, "label_names": numbered}
    names = [str(label) for label in given.get("label_names") or (registered.labels if registered else ())]
    written = zip(read["train"].cells(columns.label, names), read["train"].numbers, strict=True)
    good = [(cell, number) for cell, number in written if cell is not None]
    cells, numbers = [cell for cell, _ in good], [number for _, number in good]
    labels = None
    if len(set(cells)) > 1 or not train.bad:  # else it is bad rows that lack the other labels
        labels = faults.attempt(learn_labels, train.where, cells, names, numbers, bool(numbered))
    rows, row_numbers = dict[str, Rows](), dict[str, Sequence[int]]()
    for split, table in read.items():
        if labels is None:
            faults.attempt(table.check_texts, columns)
        elif unlabelled[split] and not len(table.numbers):
            continue
        elif found := faults.attempt(table.rows, columns, labels, name):
            rows[split], row_numbers[split] = found
    for split, table in tables.items():
        left = len(rows[split]) if split in rows else len(table.good().numbers)
        faults.add(table.bad, left, skip_bad_rows)
    faults.report()
    assert labels is not None
    task = described(registered or infer(name, kind, labels.names), given, folder)
    whole = complete(task, rows)
    pieces = [note, recognised, labels.said]
    pieces += notes_of_labels(cells, labels, numbers) + notes_of_rows(rows["train"], row_numbers["train"])
    pieces += [
        f"{counted(count, f'{split} row')} without a label (-1) left out"
        for split, count in unlabelled.items()
        if count
    ]
    bad = {split: table.bad for split, table in tables.items() if table.bad}
    pieces.append(left_out(bad.items()))
    if rows.keys() == {"train"}:
        pieces.append(whole.cut)
    told = "; ".join(filter(None, pieces))
    counts = {split: each.summary for split, each in bad.items()}
    return replace(whole, notes=(f"Task {name!r} ({train.where}): {told}.",) if told else (), left_out=counts)


def _chosen(train: Table, asked: Columns, kind: Kind | None) -> tuple[Columns, str]:
    """Return what `choose` does; a table without our columns may be of another form, which is then said."""
    try:
        return choose(train.where, train.columns, asked, kind)
    except DataError as error:
        are_there = {*asked.texts, asked.label} <= {*train.columns, None}
        if are_there and (form := other_form(train.columns)):
            raise DataError(f"{error} {form}") from error
        raise


def _check_left_out(name: str, folder: Path, split: str) -> None:
    """Raise ``DataError`` if a split is missing and there is a file that may be meant for it."""
    for path in sorted(folder.iterdir()):
        if split_of(path.stem) == split and path.suffix.lower() in _UNREAD:
            raise DataError(
                f"Task {name!r} has no {split} split, and {path} is not read. Write it as {split}.parquet, .jsonl or .csv, or "
                "move it elsewhere."
            )
