"""Reading a task's rows: from a directory, a file, memory, the hub, or the embedded demo.

A directory holds ``NAME/{train,validation,test}.{parquet,jsonl,csv,tsv,json}`` with the columns ``text`` or
``text_a``, ``text_b``, and ``label``; other columns are named, or recognised by common names. ``NAME/source.json`` may give
``label_names``, ``label_words``, ``template``, ``causal_template``, ``metric``, ``text_column`` and ``label_column``; they
override the registry. For a task that is not registered, missing values are inferred. docs/data.md tells users all of it.
Where words are labelled, the columns are ``tokens`` and ``tags``: see `forgetfree.data.tagged`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forgetfree import registry
from forgetfree.data.columns import RECOGNISED, Columns
from forgetfree.data.in_memory import configurations, is_path, is_snapshot, tables_of
from forgetfree.data.labels import Labels
from forgetfree.data.reading import holds_a_task, is_one_task, read_folder, read_task
from forgetfree.data.rows import Rows, TaskRows, complete
from forgetfree.data.table_files import FORMATS, format_of, read_table
from forgetfree.data.tables import Table
from forgetfree.display import brief, is_text
from forgetfree.errors import DataError, NoDataError, UnknownNameError, UsageError, first_line
from forgetfree.tasks import EvaluatedOn, TaskDefinition, in_versions, slots, version_of

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


def load_tasks(
    stream: str | Sequence[str] | None,
    data: str | Mapping[str, Any],
    evaluate_on: EvaluatedOn = "test",
    columns: Columns = RECOGNISED,
) -> list[TaskRows]:
    """Load the tasks of a stream with their rows.

    Args:
        stream: a registered stream, or task names: separated by commas, or as a list; none: all tasks of ``data``, in order.
            One that is named again is its next version, such as ``sst2@2``: with rows of that name, or else those of the task.
        data: ``hub``, ``demo``, a directory, a file of rows; or the rows of each task, by name: see
            `forgetfree.data.in_memory.tables_of`, or the path of what holds them.
        evaluate_on: which rows to use as test rows, see `TaskRows.evaluated_on`.
        columns: where texts and labels are; what is not given is recognised.

    Raises:
        UsageError: the stream is empty or names a plug-in that is broken, or the directory does not exist.
        UnknownNameError: neither the registry nor ``data`` knows a name.
        DataError: a file does not hold what its task needs.
    """
    source = _open_source(data, columns)
    held = _held(stream, data, source)
    tasks = [_named(name, source.load(rows)).evaluated_on(evaluate_on) for name, rows in held.items()]
    check_versions([rows.task for rows in tasks])
    return tasks


def check_versions(tasks: Sequence[TaskDefinition]) -> None:
    """Raise ``DataError`` if a version of a task has other labels, whose readout it could not go on with."""
    first = {task.name: task for task in tasks}
    for task in tasks:
        known = first.get(version_of(task.name)[0], task)
        if task.labels != known.labels:
            raise DataError(
                f"Task {task.name!r} has the labels {', '.join(task.labels)}, and {known.name!r} has "
                f"{', '.join(known.labels)}: they are no versions of one task. Give rows with the same labels (label_names "
                "in source.json orders them), or another name."
            )


def check_stream(stream: str, data: str, columns: Columns) -> None:
    """Raise as `load_tasks` does where a stream names what ``data`` do not hold; no rows are read."""
    _held(stream, data, _open_source(data, columns))


def _held(stream: str | Sequence[str] | None, data: str | Mapping[str, Any], source: _Source) -> dict[str, str]:
    """Return the names under which a source holds the tasks of a stream, by their names in the stream."""
    streams = registry.streams()
    if stream is None:
        names = tuple(data) if isinstance(data, Mapping) else only_task(data)
    elif isinstance(stream, str):
        parts = [part.strip() for part in stream.split(",")]
        if any(parts) and not all(parts[:-1]):  # one comma at the end is no fault
            raise UsageError(
                f"The stream {brief(stream)} has a comma with no task before or after it. Write the task names with one comma "
                "between two of them."
            )
        names = streams.get(stream) or tuple(name.strip() for name in stream.split(",") if name.strip())
    else:
        names = tuple(stream)
    if not names:
        raise UsageError("The stream names no task. Give a registered stream or task names separated by commas.")
    names = tuple(in_versions(names))
    held = {name: name if source.holds(name) else version_of(name)[0] for name in names}
    _check_several(list(dict.fromkeys(held.values())), source)
    for name in held.values():
        _check_known(name, source, streams if len(names) == 1 else ())
    return held


def _named(name: str, rows: TaskRows) -> TaskRows:
    """Return rows as those of the version that a stream names."""
    return rows if rows.task.name == name else replace(rows, task=replace(rows.task, name=name))


def load_task(
    name: str,
    data: str,
    evaluate_on: EvaluatedOn = "test",
    columns: Columns = RECOGNISED,
) -> TaskRows:
    """Load one task with its rows.

    Args:
        name: the name of a task, registered or in ``data``.
        data: ``hub``, ``demo``, a directory, or a file of rows.
        evaluate_on: which rows to use as test rows, see `TaskRows.evaluated_on`.
        columns: where texts and labels are; what is not given is recognised.

    Raises:
        UsageError: the name is a stream's, or of a plug-in that is broken, or the directory does not exist.
        UnknownNameError: neither the registry nor ``data`` knows a name.
        DataError: a file does not hold what the task needs.
    """
    source = _open_source(data, columns)
    _check_one(name, source)
    return source.load(name).evaluated_on(evaluate_on)


def only_task(data: str) -> tuple[str, ...]:
    """Return the name of the task that a file of rows holds: the file's, without its endings; nothing for other data."""
    stem, format = format_of(Path(data).name)
    return (stem,) if format and Path(data).is_file() else ()


def check_data(data: str, columns: Columns) -> None:
    """Raise ``UsageError`` if ``data`` are not there, or are none whose columns can be named."""
    _open_source(data, columns)


def check_tasks(names: Sequence[str], data: str) -> None:
    """Raise ``UsageError`` if several tasks would be read from the rows of one, or ``data`` are not there."""
    _check_several(names, _open_source(data, RECOGNISED))


def check_task(name: str, data: str, streams: Collection[str] = ()) -> None:
    """Raise `UnknownNameError` unless the registry, or ``data``, knows a task of this name; nothing is downloaded.

    ``streams`` are names to suggest, too.
    """
    _check_known(name, _open_source(data, RECOGNISED), streams)


def check_one(name: str, data: str, columns: Columns) -> None:
    """Raise as `load_task` does where a name is not that of one task in ``data``; no rows are read."""
    _check_one(name, _open_source(data, columns))


def _check_one(name: str, source: _Source) -> None:
    members = registry.streams().get(name) or name.split(",")
    if len(members) > 1 and not source.holds(name):
        raise UsageError(
            f"Expected one task, got the {len(members)} of {name!r}: {', '.join(members)}. Give one of them."
        )
    _check_known(name, source)


def _check_several(names: Sequence[str], source: _Source) -> None:
    if isinstance(source, _OneTask) and not source.names() and len(names) > 1:
        raise UsageError(
            f"{source.path} holds the rows of one task, and {len(names)} are named: {', '.join(names)}. Name one, or give a "
            "directory with a folder for each task."
        )


def _check_known(name: str, source: _Source, streams: Collection[str] = ()) -> None:
    """Raise unless the registry or ``source`` has a task of this name; ``streams`` are names to suggest, too."""
    closed = isinstance(source, _OneTask | _InMemory)  # a directory may get the data of a registered task
    known = {*source.names(), *(() if closed else registry.tasks())}
    if name in known or source.holds(name):
        return
    if reason := registry.broken("streams").get(name):
        raise UsageError(reason)
    known |= set() if closed else {*streams}
    raise UnknownNameError("stream or task" if streams else "task", name, known, source.hint)


# -- Sources ---------------------------------------------------------------------------------------------


class _Directory:
    """The source ``--data DIR``: a folder for each task."""

    def __init__(self, root: Path, asked: Columns) -> None:
        self.root, self._asked = root, asked
        self.hint = f"To add a task, put it under {root}/NAME as train, validation and test files."

    def names(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir() if path.is_dir() and holds_a_task(path))

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
        return read_folder(name, folder, self._asked)


class _OneTask:
    """The source ``--data FILE``, or a folder that is itself a task: of any name that the user gives it.

    A hub snapshot with several configurations is one task of each of their names.
    """

    def __init__(self, path: Path, asked: Columns) -> None:
        self.path, self._asked = path, asked
        found = configurations(path) if path.is_dir() and is_snapshot(path) else []
        self._names = found if len(found) > 1 else []
        held = ", ".join(self._names) or "one task, which may have any name without a comma or a slash"
        self.hint = f"{path} holds {held}."

    def names(self) -> list[str]:
        return self._names

    def holds(self, name: str) -> bool:
        return (
            name in self._names if self._names else bool(name) and name not in (".", "..") and not set(name) & set("/,")
        )

    def load(self, name: str) -> TaskRows:
        if self.path.is_dir():
            return read_folder(name, self.path, self._asked)
        table = read_table(self.path)
        return read_task(name, {"train": table}, {}, self.path.parent, self._asked)


class _InMemory:
    """The source ``data={"NAME": ROWS}`` of Python."""

    def __init__(self, rows: Mapping[str, Any], asked: Columns) -> None:
        self._rows, self._asked = rows, asked
        self.hint = f"The data given hold {', '.join(rows) or 'no task'}."

    def names(self) -> list[str]:
        return list(self._rows)

    def holds(self, name: str) -> bool:
        return name in self._rows

    def load(self, name: str) -> TaskRows:
        rows = self._rows[name]
        if is_path(rows):
            return _open_source(os.fspath(rows), self._asked).load(name)
        tables, said = tables_of(f"data[{name!r}]", rows)
        return read_task(name, tables, {}, Path(), self._asked, said)


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
            rows[ours] = read.rows(Columns(names, "label"), Labels.named(task.labels), name)
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
        return ["qnli", "ag_news", "sst2", "who_did_it", "was_it_kind", "ner_people_places", "ner_products"]

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


_Source = _Directory | _OneTask | _InMemory | _Hub | _Embedded


def check_form(data: object) -> None:
    """Raise ``UsageError`` for rows that lack the name of their task, and whatever else is no data."""
    if not isinstance(data, Mapping) and not is_path(data):
        raise UsageError(
            f"Rows are given by the name of their task, as data={{'NAME': ROWS}}; got a {type(data).__name__}. Give them "
            "so, or a directory, a file, 'hub' or 'demo'."
        )


def _open_source(data: str | Mapping[str, Any], asked: Columns) -> _Source:
    check_form(data)
    if isinstance(data, Mapping):
        return _InMemory(data, asked)
    if data == "hub" or data in registry.SOURCES:
        if asked != RECOGNISED:
            raise UsageError(
                f"The columns of the tasks of {data!r} are known. Leave --text-column and --label-column out."
            )
        return _Hub() if data == "hub" else _Embedded(data)
    path = Path(data)
    if path.is_dir():
        return _OneTask(path, asked) if is_one_task(path) else _Directory(path, asked)
    if path.is_file() and format_of(path.name)[1]:
        return _OneTask(path, asked)
    fault = f"is a file, and none of rows: expected {', '.join(FORMATS)}" if path.exists() else "does not exist"
    raise UsageError(
        f"The data directory {data!r} {fault}. Give an existing one, 'hub' or 'demo' to --data, or a file of rows."
    )
