"""Reading a task's rows: from a directory, the hub, or the embedded demo.

A directory holds ``NAME/{train,validation,test}.{parquet,jsonl,csv}`` with the columns ``text`` or
``text_a``, ``text_b``, and an integer ``label``. ``NAME/source.json`` may give ``label_names``,
``label_words``, ``template``, ``causal_template`` and ``metric``; they go before what the registry says.
For a task that is not registered, what is not given is inferred.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forgetfree import registry
from forgetfree.errors import DataError, UnknownNameError, UsageError
from forgetfree.seeds import derive_seed
from forgetfree.tasks import (
    DEFAULT_CAUSAL_TEMPLATE,
    DEFAULT_TEMPLATE,
    SPLITS,
    EvaluatedOn,
    Kind,
    TaskDefinition,
    slots,
)

FORMATS = ("parquet", "jsonl", "csv")
_PAIR = ("text_a", "text_b")
#: A split that is missing is held out from the training rows: this share of them, at most this many.
_HELD_OUT_SHARE, _HELD_OUT_ROWS = 0.1, 1000
#: What is read of source.json; more may stand there.
_NOTES = ("label_names", "label_words", "template", "causal_template", "metric")


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

    def evaluated_on(self, split: EvaluatedOn) -> TaskRows:
        """The task as it is; or for ``validation`` without its test rows, to choose options by.

        Every other validation row of each label then stands in for the test rows, and the rest remain for what training
        itself needs validation rows for, such as choosing a mask.

        Raises:
            DataError: no label has two validation rows.
        """
        if split == "test":
            return self
        held = [
            [i for i, label in enumerate(self.validation.labels) if label == k] for k in range(len(self.task.labels))
        ]
        kept, scored = (sorted(i for rows in held for i in rows[start::2]) for start in (0, 1))
        if not scored:
            raise DataError(
                f"Task {self.task.name!r} has {len(self.validation)} validation rows: too few for evaluate_on=validation. "
                "Add some."
            )
        return replace(self, validation=self.validation.take(kept), test=self.validation.take(scored))


Source = Callable[[str], TaskRows]


def default_data() -> str:
    """What ``--data`` means when it is not given: ``FORGETFREE_DATA`` if set, else the hub."""
    return os.environ.get("FORGETFREE_DATA") or "hub"


def load_tasks(stream: str, data: str, evaluate_on: EvaluatedOn = "test") -> list[TaskRows]:
    """The tasks of a stream with their rows.

    Args:
        stream: a registered stream, or task names separated by commas.
        data: ``hub``, ``demo``, or a directory.
        evaluate_on: which rows to have as test rows, see `TaskRows.evaluated_on`.

    Raises:
        UsageError: the stream is empty, names a task twice or a plug-in that is broken, or the directory does not exist.
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
            f"The stream names {', '.join(map(repr, twice))} more than once. A task owns its parameters "
            "once and for all, so it can be learned once; to learn it again, give the data a second name."
        )
    source = _open_source(data)
    known = set(registry.tasks()) | set(source.names())
    for name in names:
        if name not in known and not source.holds(name):
            if reason := registry.broken("streams").get(name):
                raise UsageError(reason)
            kind = "task" if len(names) > 1 or not streams else "stream or task"
            raise UnknownNameError(kind, name, known | (set(streams) if len(names) == 1 else set()), source.hint)
    return [source.load(name).evaluated_on(evaluate_on) for name in names]


def load_task(name: str, data: str, evaluate_on: EvaluatedOn = "test") -> TaskRows:
    """One task with its rows.

    Args:
        name: of a task, registered or in ``data``.
        data: ``hub``, ``demo``, or a directory.
        evaluate_on: which rows to have as test rows, see `TaskRows.evaluated_on`.

    Raises:
        UsageError: the name is a stream's, or of a plug-in that is broken, or the directory does not exist.
        UnknownNameError: a name that neither the registry nor ``data`` knows.
        DataError: a file does not hold what the task needs.
    """
    source = _open_source(data)
    known = set(registry.tasks()) | set(source.names())
    if name in known or source.holds(name):
        return source.load(name).evaluated_on(evaluate_on)
    if reason := registry.broken("streams").get(name):
        raise UsageError(reason)
    members = registry.streams().get(name) or name.split(",")
    if len(members) > 1:
        raise UsageError(
            f"Expected one task, got the {len(members)} of {name!r}: {', '.join(members)}. Give one of them."
        )
    raise UnknownNameError("task", name, known, source.hint)


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
            path.name
            for path in self.root.iterdir()
            if any((path / f"{split}.{f}").is_file() for split in SPLITS for f in FORMATS)
        )

    def holds(self, name: str) -> bool:
        """Whether there is a folder, whatever is in it: `load` says what is missing."""
        return (self.root / name).is_dir()

    def load(self, name: str) -> TaskRows:
        folder = self.root / name
        if not folder.is_dir():
            raise DataError(
                f"There is no data for task {name!r}: expected the folder {folder}. It holds "
                f"{', '.join(self.names()) or 'no tasks'}. Add the folder, or give another directory to "
                "--data."
            )
        notes = _read_notes(folder)
        tables = {split: _read_table(folder, split) for split in SPLITS}
        train = tables["train"]
        if train is None or (tables["test"] is None and tables["validation"] is None):
            lacking = "train" if train is None else "test"
            raise DataError(
                f"Task {name!r} has no {lacking} split: expected {folder}/{lacking}.parquet, .jsonl or "
                f".csv, found {', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing'}. Add the "
                "file."
            )
        registered = registry.tasks().get(name)
        kind: Kind = registered.kind if registered else "pair" if set(_PAIR) <= set(train.columns) else "single"
        rows = {split: table.rows(kind) for split, table in tables.items() if table is not None}
        task = _described(registered or _infer(name, kind, notes, rows["train"], train), notes, folder)
        for split, split_rows in rows.items():
            table = tables[split]
            assert table is not None
            table.check_labels(split_rows, task)
        return complete(task, rows)


class _Hub:
    """``--data hub``: through the ``datasets`` library."""

    hint = "For data of your own, give --data DIR; the embedded tasks need --data demo."

    def names(self) -> list[str]:
        return [name for name, task in registry.tasks().items() if task.hub]

    def holds(self, name: str) -> bool:
        return name in self.names()

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
                    f"{_first_line(error)}. Without a connection, give a directory with --data DIR, or "
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
            read = _Table(where, kept, keep)
            rows[ours] = read.rows(task.kind)
            read.check_labels(rows[ours], task)
        return complete(task, rows)


def _hub_texts(table: Any, column: str) -> list[Any]:
    """A column of the hub, or the texts that a template makes of several; what a row lacks is left out of its text."""
    names = slots(column)
    if not names:
        return list(table[column])
    rows = zip(*(table[name] for name in names), strict=True)
    filled = ({n: "" if v is None else str(v).strip() for n, v in zip(names, row, strict=True)} for row in rows)
    return [re.sub(" {2,}", " ", column.format_map(values)).strip() for values in filled]


class _Embedded:
    """``--data demo`` and whatever else the registry lists as a source."""

    def __init__(self, name: str) -> None:
        self._load = registry.SOURCES[name].load()
        self.hint = f"The source {name!r} holds {', '.join(self.names())}; for others give --data DIR."

    def names(self) -> list[str]:
        return ["qnli", "ag_news", "sst2"]

    def holds(self, name: str) -> bool:
        return name in self.names()

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
    """A task with all three splits.

    A missing test split is the validation split; a missing validation split is held out from the training
    rows.

    Raises:
        DataError: a split is empty, or a label has no training row.
    """
    train = rows["train"]
    validation = rows.get("validation") if "test" in rows else None
    test = rows["test"] if "test" in rows else rows["validation"]
    remedy = "Add rows of that label, or number the labels from 0 without gaps."
    if len(set(train.labels)) < 2:
        remedy = "A task needs rows of two labels at least."
    elif validation is None and len(set(train.labels)) == len(task.labels):
        remedy = "Some went to the missing validation split: add one, or more rows of that label."
    if validation is None:
        if len(train) == 1:
            raise DataError(
                f"Task {task.name!r} has one training row and no validation split to spare it. Add rows of every label."
            )
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
            f"Task {task.name!r} has no training row of label {empty} ({task.labels[empty]!r}); rows per "
            f"label: {counts}. {remedy}"
        )
    return TaskRows(task, train, validation, test)


# -- Files -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
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
        names = ("text",) if kind == "single" else _PAIR
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
                    f"{count} labels 0 to {count - 1} ({', '.join(task.labels)}). Mend the row, or the "
                    "label_names in source.json."
                )

    def _row(self, i: int) -> str:
        return f"{self.where}, row {self.numbers[i]}"

    def _text(self, column: str, i: int) -> str:
        value = self.columns[column][i]
        if not isinstance(value, str):
            raise DataError(
                f"{self._row(i)}, column {column!r}: expected a text, got {_shown(value)}. Mend or remove the row."
            )
        return value

    def _label(self, i: int) -> int:
        value = self.columns["label"][i]
        text = value.strip() if isinstance(value, str) else str(value)
        if isinstance(value, bool) or not (text.isascii() and text.isdecimal()):
            raise DataError(
                f"{self._row(i)}, column 'label': expected an integer from 0, got {_shown(value)}. "
                "Mend or remove the row; names of labels go into source.json as label_names, in the order of their numbers."
            )
        return int(text)


def _read_table(folder: Path, split: str) -> _Table | None:
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
            f"{path} cannot be read as {path.suffix[1:]}: {_first_line(error)}. Write the file again."
        ) from error


def _read_parquet(path: Path) -> _Table:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    return _Table(str(path), table.to_pydict(), range(table.num_rows))


def _read_csv(path: Path) -> _Table:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            records = list(reader)
        except csv.Error as error:
            raise DataError(
                f"{path}, line {reader.line_num + 1}: {_first_line(error)}. Quote texts that hold commas, "
                "quotes or line breaks, and double the quotes inside."
            ) from error
        return _columns(path, records, reader.fieldnames or (), range(1, len(records) + 1))


def _read_jsonl(path: Path) -> _Table:
    records, numbers = [], []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise DataError(
                    f"{path}, row {number}: expected a JSON object, got {_shown(line.strip())}. Mend or remove the row."
                )
            records.append(record)
            numbers.append(number)
    return _columns(path, records, sorted({key for record in records for key in record}), numbers)


def _columns(path: Path, records: Sequence[Mapping[str, Any]], names: Sequence[str], numbers: Sequence[int]) -> _Table:
    return _Table(str(path), {name: [record.get(name) for record in records] for name in names}, numbers)


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
    for key in notes.keys() - set(_NOTES):
        if meant := difflib.get_close_matches(key, [known for known in _NOTES if known not in notes], 1, 0.8):
            raise DataError(f"{path}: {key!r} is not read. Did you mean {meant[0]!r}? Rename or remove it.")
    for key in ("label_names", "label_words"):
        names = notes.get(key)
        if names is not None and not (isinstance(names, list) and len(set(map(str, names))) == len(names) > 1):
            raise DataError(f"{path}: {key} must be a list of at least two names, all different, got {names!r}.")
    if notes.get("metric", "accuracy") not in ("accuracy", "f1"):
        raise DataError(f"{path}: metric must be 'accuracy' or 'f1', got {notes['metric']!r}.")
    return notes


def _infer(name: str, kind: Kind, notes: Mapping[str, Any], train: Rows, table: _Table) -> TaskDefinition:
    """A task that is not registered; its labels are those of the rows, unless ``notes`` name them."""
    present = sorted(set(train.labels))
    if not notes.get("label_names") and present != list(range(len(present))):
        gap = next(label for label in range(len(present)) if label not in present)
        raise DataError(
            f"{table.where}: the labels go up to {present[-1]}, and no row has label {gap}. "
            "Number the labels from 0 without gaps, or put their names into source.json as label_names."
        )
    labels = tuple(map(str, notes.get("label_names") or range(max(len(present), 2))))
    return TaskDefinition(
        name,
        kind,
        labels,
        template=DEFAULT_TEMPLATE[kind],
        label_words=labels,
        causal_template=DEFAULT_CAUSAL_TEMPLATE[kind],
    )


def _described(task: TaskDefinition, notes: Mapping[str, Any], folder: Path) -> TaskDefinition:
    """``task`` as ``source.json`` has it: labels in the data's own order, and what else is given."""
    path = folder / "source.json"
    if notes.get("label_names"):
        task = _renamed(task, tuple(map(str, notes["label_names"])), path)
    words = tuple(map(str, notes.get("label_words") or task.label_words))
    if len(words) != len(task.labels):
        raise DataError(
            f"{path}: expected one of label_words for each of the {len(task.labels)} labels, got {len(words)}."
        )
    metric = notes.get("metric", task.metric)
    if metric == "f1" and len(task.labels) != 2:
        raise DataError(
            f"{path}: metric 'f1' is that of label 1 of two, and there are {len(task.labels)} labels. Give 'accuracy'."
        )
    return replace(
        task,
        label_words=words,
        template=_template(notes, "template", task.template, [*task.text_columns, "mask"], path),
        causal_template=_template(notes, "causal_template", task.causal_template, task.text_columns, path),
        metric=metric,
    )


def _template(notes: Mapping[str, Any], key: str, default: str, expected: Sequence[str], path: Path) -> str:
    template = notes.get(key)
    if template is None:
        return default
    if not isinstance(template, str) or sorted(slots(template)) != sorted(expected):
        each = ", ".join(f"{{{slot}}}" for slot in expected)
        raise DataError(f"{path}: {key} must hold each of {each} once and no other slot, got {template!r}.")
    return template


def _renamed(task: TaskDefinition, labels: tuple[str, ...], path: Path) -> TaskDefinition:
    """The registered task with its labels in the data's own order; label words follow their labels."""
    if len(labels) != len(task.labels):
        raise DataError(
            f"{path} names {len(labels)} labels, but task {task.name!r} has {len(task.labels)}: "
            f"{', '.join(task.labels)}. Rename the folder to make it a task of its own."
        )
    known = {_plain(label): word for label, word in zip(task.labels, task.label_words, strict=True)}
    if sorted(known) != sorted(map(_plain, labels)):  # names of the data's own: by position
        return replace(task, labels=labels)
    return replace(task, labels=labels, label_words=tuple(known[_plain(label)] for label in labels))


def _plain(label: str) -> str:
    """A label name without case and punctuation: "Sci/Tech" and "sci_tech" are one."""
    return re.sub(r"[\W_]+", "", label).lower()


def _shown(value: Any) -> str:
    """A value as a reader of the file sees it, shortened."""
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
