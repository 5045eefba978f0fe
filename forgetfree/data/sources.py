"""Reading a task's rows: from a directory, the hub, or the embedded demo.

A directory holds ``NAME/{train,validation,test}.{parquet,jsonl,csv}`` with the columns ``text`` or
``text_a``, ``text_b``, and an integer ``label``. ``NAME/source.json`` may give ``label_names``, and for tasks
that are not registered also ``template``, ``label_words``, ``causal_template`` and ``metric``. Kind and
labels of such a task are inferred.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forgetfree import registry
from forgetfree.errors import DataError, UnknownNameError, UsageError
from forgetfree.seeds import derive_seed
from forgetfree.tasks import DEFAULT_CAUSAL_TEMPLATE, DEFAULT_TEMPLATE, SPLITS, Kind, TaskDefinition

FORMATS = ("parquet", "jsonl", "csv")
_PAIR = ("text_a", "text_b")
#: A split that is missing is held out from the training rows: this share of them, at most this many.
_HELD_OUT_SHARE, _HELD_OUT_ROWS = 0.1, 1000


@dataclass(frozen=True)
class Rows:
    """The rows of one split: first texts, second texts (empty for single-text tasks), labels."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Sequence[int]) -> Rows:
        """The rows at ``indices``, in that order."""
        return Rows(
            tuple(self.first[i] for i in indices),
            tuple(self.second[i] for i in indices) if self.second else (),
            tuple(self.labels[i] for i in indices),
        )


@dataclass(frozen=True)
class TaskRows:
    """A task with all its rows."""

    task: TaskDefinition
    train: Rows
    validation: Rows
    test: Rows

    def fingerprint(self) -> str:
        """SHA-256 over every row of every split: two data sets are equal if theirs are."""
        digest = hashlib.sha256()
        for split in SPLITS:
            rows: Rows = getattr(self, split)
            digest.update(json.dumps([split, rows.first, rows.second, rows.labels]).encode())
        return digest.hexdigest()


Source = Callable[[str], TaskRows]


def default_data() -> str:
    """What ``--data`` means when it is not given: ``FORGETFREE_DATA`` if set, else the hub."""
    return os.environ.get("FORGETFREE_DATA") or "hub"


def load_tasks(stream: str, data: str) -> list[TaskRows]:
    """The tasks of a stream with their rows.

    Args:
        stream: a registered stream, or task names separated by commas.
        data: ``hub``, ``demo``, or a directory.

    Raises:
        UsageError: the stream is empty or names a task twice, or the directory does not exist.
        UnknownNameError: a name that neither the registry nor ``data`` knows.
        DataError: a file does not hold what its task needs.
    """
    streams = registry.streams()
    names = streams.get(stream) or tuple(name.strip() for name in stream.split(",") if name.strip())
    if not names:
        raise UsageError("The stream names no task. Give a registered stream or task names separated by commas.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"The stream names {', '.join(map(repr, twice))} more than once. A task owns its parameters once and for "
            "all, so it can be learned once; to learn it again, give the data a second name."
        )
    source = _open_source(data)
    known = set(registry.tasks()) | set(source.names())
    for name in names:
        if name not in known:
            kind = "task" if len(names) > 1 or not streams else "stream or task"
            raise UnknownNameError(kind, name, known | (set(streams) if len(names) == 1 else set()), source.hint)
    return [source.load(name) for name in names]


# -- Sources ---------------------------------------------------------------------------------------------


class _Directory:
    """``--data DIR``."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UsageError(
                f"The data directory {str(root)!r} does not exist. Give an existing one, 'hub' or 'demo' to --data."
            )
        self.root = root
        self.hint = f"To add a task, put it under {root}/NAME as train, validation and test files."

    def names(self) -> list[str]:
        return sorted(
            path.name for path in self.root.iterdir() if any((path / f"train.{f}").is_file() for f in FORMATS)
        )

    def load(self, name: str) -> TaskRows:
        folder = self.root / name
        if not folder.is_dir():
            raise DataError(
                f"There is no data for task {name!r}: expected the folder {folder}. It holds "
                f"{', '.join(self.names()) or 'no tasks'}. Add the folder, or give another directory to --data."
            )
        notes = _read_notes(folder)
        tables = {split: _read_table(folder, split) for split in SPLITS}
        train = tables["train"]
        if train is None or (tables["test"] is None and tables["validation"] is None):
            lacking = "train" if train is None else "test"
            raise DataError(
                f"Task {name!r} has no {lacking} split: expected {folder}/{lacking}.parquet, .jsonl or .csv, found "
                f"{', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing'}. Add the file."
            )
        task = registry.tasks().get(name)
        kind: Kind = task.kind if task else ("pair" if set(_PAIR) <= set(train.columns) else "single")
        rows = {split: table.rows(kind) for split, table in tables.items() if table is not None}
        if task is None:
            task = _infer(name, kind, notes, rows["train"], folder)
        elif notes.get("label_names"):
            task = _renamed(task, tuple(map(str, notes["label_names"])), folder)
        for split, split_rows in rows.items():
            table = tables[split]
            assert table is not None
            _check_labels(split_rows, task, str(table.path), first_row=table.first_row)
        return complete(task, rows)


class _Hub:
    """``--data hub``: through the ``datasets`` library."""

    hint = "For data of your own, give --data DIR; the embedded tasks need --data demo."

    def names(self) -> list[str]:
        return [name for name, task in registry.tasks().items() if task.hub]

    def load(self, name: str) -> TaskRows:
        from datasets import load_dataset

        task = registry.tasks()[name]
        if task.hub is None:
            raise DataError(f"The hub does not hold task {name!r}. {self.hint}")
        hub, rows = task.hub, {}
        for ours, theirs in hub.splits.items():
            try:
                table = load_dataset(hub.path, hub.name, split=theirs)
            except Exception as error:
                raise DataError(
                    f"Task {name!r} cannot be read from the hub ({hub.path}, split {theirs}): "
                    f"{_first_line(error)}. Without a connection, give a directory with --data DIR, or --data demo."
                ) from error
            where = f"{hub.path}:{theirs}"
            missing = [column for column in (*hub.columns, hub.label) if column not in table.column_names]
            if missing:
                raise DataError(
                    f"{where} has no column {missing[0]!r}; it has {', '.join(table.column_names)}. The set has "
                    "changed on the hub: give a directory with --data DIR."
                )
            labels = [hub.labels[label] if hub.labels else label for label in table[hub.label]]
            keep = [i for i, label in enumerate(labels) if label >= 0]  # SNLI marks undecided rows by -1
            texts = [list(table[column]) for column in hub.columns]
            rows[ours] = Rows(
                tuple(texts[0][i] for i in keep),
                tuple(texts[1][i] for i in keep) if len(texts) > 1 else (),
                tuple(int(labels[i]) for i in keep),
            )
            _check_labels(rows[ours], task, where, first_row=0)
        return complete(task, rows)


class _Embedded:
    """``--data demo`` and whatever else the registry lists as a source."""

    def __init__(self, name: str) -> None:
        self._load = registry.SOURCES[name].load()
        self.hint = f"The source {name!r} holds {', '.join(self.names())}; for others give --data DIR."

    def names(self) -> list[str]:
        return ["qnli", "ag_news", "sst2"]

    def load(self, name: str) -> TaskRows:
        if name not in self.names():
            raise DataError(f"There is no data for task {name!r}. {self.hint}")
        task = registry.tasks()[name]
        rows = {}
        for split, table in self._load(name).items():
            first, second, labels = zip(*table, strict=True)
            rows[split] = Rows(first, second if task.kind == "pair" else (), labels)
        return complete(task, rows)


def _open_source(data: str) -> _Directory | _Hub | _Embedded:
    if data == "hub":
        return _Hub()
    if data in registry.SOURCES:
        return _Embedded(data)
    return _Directory(Path(data))


def complete(task: TaskDefinition, rows: dict[str, Rows]) -> TaskRows:
    """A task with all three splits: a missing test split is the validation split, and a missing validation split is held out from the training rows."""
    train = rows["train"]
    validation = rows.get("validation") if "test" in rows else None
    test = rows.get("test") or rows["validation"]
    if validation is None:
        order = list(range(len(train)))
        random.Random(derive_seed(0, "held out", task.name)).shuffle(order)
        held_out = min(_HELD_OUT_ROWS, max(1, round(len(train) * _HELD_OUT_SHARE)))
        validation, train = train.take(sorted(order[:held_out])), train.take(sorted(order[held_out:]))
    for split, split_rows in (("train", train), ("validation", validation), ("test", test)):
        if len(split_rows) == 0:
            raise DataError(f"Task {task.name!r} has no rows in its {split} split. Add some.")
    counts = [train.labels.count(label) for label in range(len(task.labels))]
    if 0 in counts:
        empty = counts.index(0)
        raise DataError(
            f"Task {task.name!r} has no training row of label {empty} ({task.labels[empty]!r}); rows per label: "
            f"{counts}. Add rows of that label, or number the labels from 0 without gaps."
        )
    return TaskRows(task, train, validation, test)


# -- Files -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    path: Path
    columns: list[str]
    records: list[dict[str, Any]]
    first_row: int  # how the file itself numbers its first record

    def rows(self, kind: Kind) -> Rows:
        texts = ("text",) if kind == "single" else _PAIR
        for column in (*texts, "label"):
            if column not in self.columns:
                expected = "text_a and text_b, and label" if kind == "pair" else "text (or text_a and text_b), and label"
                raise DataError(
                    f"{self.path} has no column {column!r}: expected {expected}; found "
                    f"{', '.join(map(repr, self.columns)) or 'none'}. Rename or add the column."
                )
        parts: list[tuple[str, ...]] = []
        for column in texts:
            parts.append(tuple(self._text(column, i, record) for i, record in enumerate(self.records)))
        labels = tuple(self._label(i, record) for i, record in enumerate(self.records))
        return Rows(parts[0], parts[1] if kind == "pair" else (), labels)

    def _text(self, column: str, i: int, record: dict[str, Any]) -> str:
        value = record.get(column)
        if not isinstance(value, str):
            raise DataError(
                f"{self.path}, row {self.first_row + i}, column {column!r}: expected a text, got {value!r}. "
                "Mend or remove the row."
            )
        return value

    def _label(self, i: int, record: dict[str, Any]) -> int:
        value = record.get("label")
        try:
            label = int(str(value))
        except ValueError:
            label = -1
        if label < 0 or isinstance(value, bool):
            raise DataError(
                f"{self.path}, row {self.first_row + i}, column 'label': expected an integer from 0, got {value!r}. "
                "Number the labels from 0 and put their names into source.json as label_names."
            )
        return label


def _read_table(folder: Path, split: str) -> _Table | None:
    path = next((p for f in FORMATS if (p := folder / f"{split}.{f}").is_file()), None)
    if path is None:
        return None
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            table = pyarrow.parquet.read_table(path)
            return _Table(path, table.column_names, table.to_pylist(), 0)
        with path.open(encoding="utf-8", newline="" if path.suffix == ".csv" else None) as file:
            if path.suffix == ".csv":
                reader = csv.DictReader(file)
                records = list(reader)
                return _Table(path, list(reader.fieldnames or ()), records, 1)
            records = []
            for number, line in enumerate(file, 1):
                if line.strip():
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise DataError(f"{path}, row {number}: expected a JSON object, got {line.strip()[:60]!r}.")
                    records.append(record)
            return _Table(path, sorted({key for record in records for key in record}), records, 1)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{path} cannot be read as {path.suffix[1:]}: {_first_line(error)}. Write the file again, in UTF-8."
        ) from error


def _read_notes(folder: Path) -> dict[str, Any]:
    path = folder / "source.json"
    if not path.is_file():
        return {}
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {_first_line(error)}. Mend or remove it.") from error
    if not isinstance(notes, dict):
        raise DataError(f"{path} must hold a JSON object with label_names, got a {type(notes).__name__}.")
    names = notes.get("label_names")
    if names is not None and (not isinstance(names, list) or len(names) < 2):
        raise DataError(f"{path}: label_names must be a list of at least two names, got {names!r}.")
    return notes


def _infer(name: str, kind: Kind, notes: dict[str, Any], train: Rows, folder: Path) -> TaskDefinition:
    count = max(train.labels, default=0) + 1
    labels = tuple(map(str, notes.get("label_names") or range(max(count, 2))))
    words = tuple(map(str, notes.get("label_words") or labels))
    metric = notes.get("metric", "accuracy")
    if metric not in ("accuracy", "f1"):
        raise DataError(f"{folder}/source.json: metric must be 'accuracy' or 'f1', got {metric!r}.")
    if len(words) != len(labels):
        raise DataError(
            f"{folder}/source.json: expected one of label_words for each of the {len(labels)} labels, got {len(words)}."
        )
    return TaskDefinition(
        name,
        kind,
        labels,
        template=str(notes.get("template") or DEFAULT_TEMPLATE[kind]),
        label_words=words,
        causal_template=str(notes.get("causal_template") or DEFAULT_CAUSAL_TEMPLATE[kind]),
        metric=metric,
    )


def _renamed(task: TaskDefinition, labels: tuple[str, ...], folder: Path) -> TaskDefinition:
    """The registered task with its labels in the data's own order; label words follow their labels."""
    if set(labels) != set(task.labels):
        if len(labels) != len(task.labels):
            raise DataError(
                f"{folder}/source.json names {len(labels)} labels, but task {task.name!r} has {len(task.labels)}: "
                f"{', '.join(task.labels)}. Rename the folder to make it a task of its own."
            )
        return replace(task, labels=labels)
    order = [task.labels.index(label) for label in labels]
    return replace(task, labels=labels, label_words=tuple(task.label_words[i] for i in order))


def _check_labels(rows: Rows, task: TaskDefinition, where: str, *, first_row: int) -> None:
    for i, label in enumerate(rows.labels):
        if label >= len(task.labels):
            raise DataError(
                f"{where}, row {first_row + i}, column 'label': {label} is out of range, task {task.name!r} has the "
                f"{len(task.labels)} labels 0 to {len(task.labels) - 1} ({', '.join(task.labels)}). Mend the row, or "
                "the label_names in source.json."
            )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
