"""Reading a task's rows: from a directory, the hub, or the embedded demo.

A directory holds ``NAME/{train,validation,test}.{parquet,jsonl,csv}`` with the columns ``text`` or
``text_a``, ``text_b``, and an integer ``label``. ``NAME/source.json`` may give ``label_names``,
``label_words``, ``template``, ``causal_template`` and ``metric``; they override the registry.
For a task that is not registered, missing values are inferred.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from forgetfree import registry
from forgetfree.data.rows import Rows, TaskRows, complete
from forgetfree.data.source_json import described, infer, read_source
from forgetfree.data.tables import FORMATS, PAIR, Table, read_table
from forgetfree.display import is_text
from forgetfree.errors import DataError, NoDataError, UnknownNameError, UsageError, first_line
from forgetfree.tasks import SPLITS, EvaluatedOn, Kind, slots

#: Other common names for a split, and common suffixes of files with rows.
_ALIASES = {"validation": ("dev", "eval", "val", "valid")}
_TABLES = (".arrow", ".csv", ".json", ".jsonl", ".parquet", ".tsv", ".txt", ".xlsx")
#: The environment variable with the directory that ``--data`` is by default.
DATA_VARIABLE = "FORGETFREE_DATA"


def default_data() -> str:
    """Return what ``--data`` is when it is not given: ``FORGETFREE_DATA`` if set, else the hub.

    Raises:
        UsageError: its value has no UTF-8 form.
    """
    data = os.environ.get(DATA_VARIABLE) or "hub"
    if not is_text(data):
        raise UsageError(f"{DATA_VARIABLE} is {data!r}, which is not in UTF-8. Name the directory in UTF-8.")
    return data


def load_tasks(stream: str, data: str, evaluate_on: EvaluatedOn = "test") -> list[TaskRows]:
    """Load the tasks of a stream with their rows.

    Args:
        stream: a registered stream, or task names separated by commas.
        data: ``hub``, ``demo``, or a directory.
        evaluate_on: which rows to use as test rows, see `TaskRows.evaluated_on`.

    Raises:
        UsageError: the stream is empty, names a task twice or a plug-in that is broken, or the directory does not exist.
        UnknownNameError: neither the registry nor ``data`` knows a name.
        DataError: a file does not hold what its task needs.
    """
    streams = registry.streams()
    names = streams.get(stream) or tuple(name.strip() for name in stream.split(",") if name.strip())
    if not names:
        raise UsageError("The stream names no task. Give a registered stream or task names separated by commas.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"The stream names {', '.join(map(repr, twice))} more than once. A task owns its parameters "
            "once and for all, so it can be learned once; to learn it again, give the data a second name."
        )
    source = _open_source(data)
    for name in names:
        _check_known(name, source, streams if len(names) == 1 else ())
    return [source.load(name).evaluated_on(evaluate_on) for name in names]


def load_task(name: str, data: str, evaluate_on: EvaluatedOn = "test") -> TaskRows:
    """Load one task with its rows.

    Args:
        name: the name of a task, registered or in ``data``.
        data: ``hub``, ``demo``, or a directory.
        evaluate_on: which rows to use as test rows, see `TaskRows.evaluated_on`.

    Raises:
        UsageError: the name is a stream's, or of a plug-in that is broken, or the directory does not exist.
        UnknownNameError: neither the registry nor ``data`` knows a name.
        DataError: a file does not hold what the task needs.
    """
    source = _open_source(data)
    members = registry.streams().get(name) or name.split(",")
    if len(members) > 1 and not source.holds(name):
        raise UsageError(
            f"Expected one task, got the {len(members)} of {name!r}: {', '.join(members)}. Give one of them."
        )
    _check_known(name, source)
    return source.load(name).evaluated_on(evaluate_on)


def _check_known(name: str, source: _Source, streams: Collection[str] = ()) -> None:
    """Raise unless the registry or ``source`` has a task of this name; ``streams`` are names to suggest, too."""
    known = {*registry.tasks(), *source.names()}
    if name in known or source.holds(name):
        return
    if reason := registry.broken("streams").get(name):
        raise UsageError(reason)
    raise UnknownNameError("stream or task" if streams else "task", name, {*known, *streams}, source.hint)


# -- Sources ---------------------------------------------------------------------------------------------


class _Directory:
    """The source ``--data DIR``."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            fault = "is a file" if root.exists() else "does not exist"
            raise UsageError(
                f"The data directory {str(root)!r} {fault}. Give an existing one, 'hub' or 'demo' to --data."
            )
        self.root = root
        self.hint = f"To add a task, put it under {root}/NAME as train, validation and test files."

    def names(self) -> list[str]:
        return sorted(
            path.name
            for path in self.root.iterdir()
            if any((path / f"{split}.{f}").is_file() for split in SPLITS for f in FORMATS)
        )

    def holds(self, name: str) -> bool:
        """Return whether there is a folder, with any content: `load` says what is missing."""
        return any(path.name == name and path.is_dir() for path in self.root.iterdir())

    def load(self, name: str) -> TaskRows:
        folder = self.root / name
        if not folder.is_dir():
            raise NoDataError(
                f"There is no data for task {name!r}: expected the folder {folder}. It holds "
                f"{', '.join(self.names()) or 'no tasks'}. Add the folder, or give another directory to "
                "--data."
            )
        given = read_source(folder)
        tables = {split: read_table(folder, split) for split in SPLITS}
        train = tables["train"]
        if train is None or (tables["test"] is None and tables["validation"] is None):
            lacking = "train" if train is None else "test or validation"
            raise DataError(
                f"Task {name!r} has no {lacking} split: expected {folder}/{lacking.split()[0]}.parquet, .jsonl or "
                f".csv, found {', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing'}. Add the "
                "file."
            )
        for split, table in tables.items():
            if table is None:
                _check_left_out(name, folder, split)
        texts = {"text", *PAIR} & set(train.columns)
        if given.get("kind") == "tokens" or (not texts and {"tokens", "tags"} <= set(train.columns)):
            raise DataError(
                f"Task {name!r} is token classification: {folder} holds a tag for each word. This version reads tasks with "
                "one label a row; token classification comes later. Leave the task out."
            )
        registered = registry.tasks().get(name)
        kind: Kind = registered.kind if registered else "pair" if set(PAIR) <= set(train.columns) else "single"
        rows = {split: table.rows(kind) for split, table in tables.items() if table is not None}
        task = described(registered or infer(name, kind, given, rows["train"], train), given, folder)
        for split, split_rows in rows.items():
            table = tables[split]
            assert table is not None
            table.check_labels(split_rows, task)
        return complete(task, rows)


def _check_left_out(name: str, folder: Path, split: str) -> None:
    """Raise ``DataError`` if a split is missing and there is a file that may be meant for it."""
    for path in sorted(folder.iterdir()):
        if path.stem.lower() in (split, *_ALIASES.get(split, ())) and path.suffix.lower() in _TABLES:
            raise DataError(
                f"Task {name!r} has no {split} split, and {path} is not read. Write it as {split}.parquet, .jsonl or .csv, or "
                "move it elsewhere."
            )


class _Hub:
    """The source ``--data hub``, through the ``datasets`` library."""

    hint = "For data of your own, give --data DIR; the embedded tasks need --data demo."

    def names(self) -> list[str]:
        return [name for name, task in registry.tasks().items() if task.hub]

    def holds(self, name: str) -> bool:
        return name in self.names()

    def load(self, name: str) -> TaskRows:
        from datasets import load_dataset

        task = registry.tasks()[name]
        if task.hub is None:
            raise NoDataError(f"The hub does not hold task {name!r}. {self.hint}")
        hub, rows = task.hub, {}
        for ours, theirs in hub.splits.items():
            try:
                table = load_dataset(hub.path, hub.name, split=theirs)
            except Exception as error:
                raise NoDataError(
                    f"Task {name!r} cannot be read from the hub ({hub.path}, split {theirs}): "
                    f"{first_line(error)}. Without a connection, give a directory with --data DIR, or "
                    "--data demo."
                ) from error
            where = f"{hub.path}:{theirs}"
            needed = [name for column in hub.columns for name in slots(column) or [column]]
            missing = [column for column in (*needed, hub.label) if column not in table.column_names]
            if missing:
                raise DataError(
                    f"{where} has no column {missing[0]!r}; it has {', '.join(table.column_names)}. The "
                    "set has changed on the hub: give a directory with --data DIR."
                )
            labels = list(table[hub.label])
            if hub.labels:
                labels = [hub.labels.get(label, label) for label in labels]
            keep = [i for i, label in enumerate(labels) if label != -1]  # SNLI's mark of undecided rows
            names = task.text_columns
            columns = {ours: _hub_texts(table, theirs) for ours, theirs in zip(names, hub.columns, strict=True)}
            columns["label"] = labels
            kept = {name: [values[i] for i in keep] for name, values in columns.items()}
            read = Table(where, kept, keep)
            rows[ours] = read.rows(task.kind)
            read.check_labels(rows[ours], task)
        return complete(task, rows)


def _hub_texts(table: Any, column: str) -> list[Any]:
    """Return a column of the hub, or the texts that a template makes of several, without missing values."""
    names = slots(column)
    if not names:
        return list(table[column])
    rows = zip(*(table[name] for name in names), strict=True)
    filled = ({n: "" if v is None else str(v).strip() for n, v in zip(names, row, strict=True)} for row in rows)
    return [re.sub(" {2,}", " ", column.format_map(values)).strip() for values in filled]


class _Embedded:
    """A source that the registry lists, such as ``--data demo``."""

    def __init__(self, name: str) -> None:
        self._load = registry.SOURCES[name].load()
        self.hint = f"The source {name!r} holds {', '.join(self.names())}; for others give --data DIR."

    def names(self) -> list[str]:
        return ["qnli", "ag_news", "sst2", "who_did_it"]

    def holds(self, name: str) -> bool:
        return name in self.names()

    def load(self, name: str) -> TaskRows:
        if name not in self.names():
            raise NoDataError(f"There is no data for task {name!r}. {self.hint}")
        task = registry.tasks()[name]
        rows = {}
        for split, table in self._load(name).items():
            first, second, labels = zip(*table, strict=True)
            rows[split] = Rows(first, second if task.kind == "pair" else (), labels)
        return complete(task, rows)


_Source = _Directory | _Hub | _Embedded


def _open_source(data: str) -> _Source:
    if data == "hub":
        return _Hub()
    if data in registry.SOURCES:
        return _Embedded(data)
    return _Directory(Path(data))
