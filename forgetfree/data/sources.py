"""Reading a task's rows: from a directory, a file, memory, the hub, or the embedded demo.

A directory holds ``NAME/{train,validation,test}.{parquet,jsonl,csv,tsv,json}`` with the columns ``text`` or
``text_a``, ``text_b``, and ``label``; other columns are named, or recognised by common names. ``NAME/source.json`` may give
``label_names``, ``label_words``, ``template``, ``causal_template``, ``metric``, ``text_column`` and ``label_column``; they
override the registry. For a task that is not registered, missing values are inferred. docs/data.md tells users all of it.
Kinds of tasks read the tables: see `forgetfree.kinds`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from forgetfree import registry
from forgetfree.data.bad_rows import DataFaults
from forgetfree.data.columns import READ_DEFAULTS, ReadOptions
from forgetfree.data.library_tables import read_hub, tables_of
from forgetfree.data.places import FORMATS, files_by_name, format_of, holds_a_task, part_note, tasks_at, tasks_of_files
from forgetfree.data.reading import check_folder, check_header, read_folder, read_task, task_of
from forgetfree.data.rows import Rows, TaskRows, complete
from forgetfree.data.table_files import read_table
from forgetfree.display import brief, is_text
from forgetfree.errors import DataError, NoDataError, UnknownNameError, UsageError
from forgetfree.tasks import EvaluatedOn

#: The environment variable with the directory that ``--data`` is by default.
DATA_VARIABLE = "FORGETFREE_DATA"
#: What ``--data`` names: hub, demo, a directory or a file; or several of these.
Data = str | Sequence[str]


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
    data: Data | Mapping[str, Any],
    evaluate_on: EvaluatedOn = "test",
    options: ReadOptions = READ_DEFAULTS,
) -> list[TaskRows]:
    """Load the tasks of a stream with their rows.

    Args:
        stream: a registered stream, or task names: separated by commas, or as a list; none: all tasks of ``data``, in order.
        data: ``hub``, ``demo``, a directory, a file of rows, or several of these, each file a task of its name; or the rows of
            each task, by name: see `forgetfree.data.library_tables.tables_of`, or the path of what holds them.
        evaluate_on: which rows to use as test rows, see `TaskRows.evaluated_on`.
        options: where texts and labels are, which else are recognised; whether bad rows are left out; and metrics.

    Raises:
        UsageError: the stream is empty or names a plug-in that is broken, or the directory does not exist.
        UnknownNameError: neither the registry nor ``data`` knows a name.
        DataError: a file does not hold what its task needs.
        BadDataError: with all faults of all tasks, if there are several.
    """
    tasks, faults = read_tasks(stream, data, evaluate_on, options)
    faults.report()
    return tasks


def read_tasks(
    stream: str | Sequence[str] | None,
    data: Any,
    evaluate_on: EvaluatedOn = "test",
    options: ReadOptions = READ_DEFAULTS,
) -> tuple[list[TaskRows], DataFaults]:
    """Return the tasks of a stream that can be read, and what is wrong with the others; see `load_tasks`."""
    source, faults = _open_source(data, options), DataFaults()

    def load(name: str) -> TaskRows:
        return _scored_by(options.metric(name), source.load(name)).evaluated_on(evaluate_on)

    names = _names(stream, data, source)
    options.check_kinds(names)
    loaded = [faults.attempt(load, name) for name in names]
    tasks = [rows for rows in loaded if rows is not None]
    return tasks, faults


def check_stream(stream: str, data: Data, options: ReadOptions) -> None:
    """Raise as `load_tasks` does where a stream names what ``data`` do not hold; no rows are read."""
    _names(stream, data, _open_source(data, options))


def no_stream(data: Data) -> UsageError:
    """Return the error that no stream is given, with what there is in a directory, or else with the registered streams."""
    source = _open_source(data, READ_DEFAULTS)
    if isinstance(source, _OneTask) and not source.names():
        return UsageError(f"No stream is given. {source.hint} Give it one.")
    if isinstance(source, _Directory | _OneTask) and source.names():
        return UsageError(
            f"No stream is given. {data} holds {', '.join(source.names())}. Give task names with commas, or a registered "
            "stream."
        )
    return UsageError(f"No stream is given. Known: {', '.join(registry.streams())}, or task names with commas.")


def _names(stream: str | Sequence[str] | None, data: Any, source: _Source) -> tuple[str, ...]:
    """Return the tasks of a stream, all of which the source or the registry knows."""
    streams = registry.streams()
    if stream is None:
        names = tuple(data) if isinstance(data, Mapping) else tasks_of_files(data)
    elif isinstance(stream, str):
        parts = [part.strip() for part in stream.split(",")]
        if any(parts) and not all(parts[:-1]):  # one comma at the end is no fault
            raise UsageError(
                f"The stream {brief(stream)} has a comma with no task before or after it. Write the task names with one comma "
                "between two of them."
            )
        if stream in streams:
            _check_meaning(stream, streams[stream], source)
        names = streams.get(stream) or tuple(name.strip() for name in stream.split(",") if name.strip())
    else:
        names = tuple(stream)
    if not names:
        raise UsageError("The stream names no task. Give a registered stream or task names separated by commas.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(
            f"The stream names {twice[0]!r} twice. Name each task once; new rows of it are a task of another name, such as "
            f"{twice[0]}-2."
        )
    _check_several(names, source)
    for name in names:
        _check_known(name, source, streams if len(names) == 1 else ())
    return names


def _scored_by(metric: str | None, rows: TaskRows) -> TaskRows:
    """Return rows with the metric that a user names, if any.

    Raises:
        DataError: it is none of the task's kind.
    """
    if metric is None:
        return rows
    task = replace(rows.task, metric=metric)
    if faults := registry.faults_of(task):
        raise DataError(
            f"--metric {metric} does not fit task {task.name!r}: {faults[0]}. Name another, or TASK=NAME for one task."
        )
    return replace(rows, task=task)


def load_task(
    name: str,
    data: Data,
    evaluate_on: EvaluatedOn = "test",
    options: ReadOptions = READ_DEFAULTS,
) -> TaskRows:
    """Load one task with its rows.

    Args:
        name: the name of a task, registered or in ``data``.
        data: ``hub``, ``demo``, a directory, or a file of rows.
        evaluate_on: which rows to use as test rows, see `TaskRows.evaluated_on`.
        options: see `load_tasks`.

    Raises:
        UsageError: the name is a stream's, or of a plug-in that is broken, or the directory does not exist.
        UnknownNameError: neither the registry nor ``data`` knows a name.
        DataError: a file does not hold what the task needs.
    """
    source = _open_source(data, options)
    _check_one(name, source)
    return _scored_by(options.metric(name), source.load(name)).evaluated_on(evaluate_on)


def check_headers(names: Sequence[str], data: Data, options: ReadOptions) -> None:
    """Raise ``DataError`` for all that the headers of files say is wrong, quickly; what else is wrong is told later."""
    faults = DataFaults()
    try:
        source = _open_source(data, options)
        _check_several(names, source)
        for name in filter(source.holds, names):
            faults.attempt(source.check_header, name)
    except UsageError:
        return
    faults.report()


def check_task(name: str, data: Data, streams: Collection[str] = ()) -> None:
    """Raise `UnknownNameError` unless the registry, or ``data``, knows a task of this name; nothing is downloaded.

    ``streams`` are names to suggest, too.
    """
    _check_known(name, _open_source(data, READ_DEFAULTS), streams)


def check_one(name: str, data: Data, options: ReadOptions) -> None:
    """Raise as `load_task` does where a name is not that of one task in ``data``; no rows are read."""
    _check_one(name, _open_source(data, options))


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


def _check_meaning(stream: str, tasks: Sequence[str], source: _Source) -> None:
    """Raise ``UsageError`` if the name of a registered stream is that of a task in the data, too."""
    if stream in ([source.usual_name] if isinstance(source, _OneTask) and not source.names() else source.names()):
        raise UsageError(
            f"{stream!r} is both a task of the data and a registered stream: {', '.join(tasks)}. Write '{stream},' with a "
            "comma for the task, or these names for the stream."
        )


def _check_known(name: str, source: _Source, streams: Collection[str] = ()) -> None:
    """Raise unless the registry or ``source`` has a task of this name; ``streams`` are names to suggest, too."""
    closed = isinstance(source, _OneTask | _Named)  # a directory may get the data of a registered task
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

    def __init__(self, root: Path, options: ReadOptions) -> None:
        self.root, self._options = root, options
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
        return read_folder(name, folder, self._options.among(self.names()))

    def check_header(self, name: str) -> None:
        if (self.root / name).is_dir():
            check_folder(name, self.root / name, self._options.among(self.names()))


class _OneTask:
    """The source ``--data FILE``, or a folder that is itself a task: of any name that the user gives it.

    A hub snapshot with several configurations is one task of each of their names.
    """

    def __init__(self, path: Path, names: list[str], options: ReadOptions) -> None:
        self.path, self._names, self._options = path, names, options.among(names)
        tasks = ", ".join(self._names) or "one task, which may have any name without a comma or a slash"
        self.hint = f"{path} holds {tasks}."

    @property
    def usual_name(self) -> str:
        """The name that the path gives it."""
        return format_of(self.path.name)[0]

    def names(self) -> list[str]:
        return self._names

    def holds(self, name: str) -> bool:
        return (
            name in self._names if self._names else bool(name) and name not in (".", "..") and not set(name) & set("/,")
        )

    def load(self, name: str) -> TaskRows:
        rows, near = self._read(name), get_close_matches(name, registry.streams(), 1, cutoff=0.8)
        if not near or name in (self.usual_name, *self._names):
            return rows
        note = (
            f"Task {name!r} ({self.path}): these rows are one task of this name. If the registered stream {near[0]!r} is "
            "meant, give a directory with its tasks."
        )
        return replace(rows, notes=(*rows.notes, note))

    def _read(self, name: str) -> TaskRows:
        if self.path.is_dir():
            return read_folder(name, self.path, self._options)
        tables = {"train": read_table(self.path)}
        return read_task(task_of(name, tables, self._options, folder=self.path.parent, note=part_note(self.path)))

    def check_header(self, name: str) -> None:
        if self.path.is_dir():
            check_folder(name, self.path, self._options)
        else:
            check_header(name, {"train": self.path}, {}, self._options)


class _Named:
    """The source ``data={"NAME": ROWS}`` of Python; and several files."""

    def __init__(self, rows: Mapping[str, Any], options: ReadOptions) -> None:
        self._rows, self._options = rows, options.among(rows)
        self.hint = f"The data given hold {', '.join(rows) or 'no task'}."

    def names(self) -> list[str]:
        return list(self._rows)

    def holds(self, name: str) -> bool:
        return name in self._rows

    def load(self, name: str) -> TaskRows:
        rows = self._rows[name]
        if _is_path(rows):
            return self._place(name).load(name)
        tables, note = tables_of(f"data[{name!r}]", rows)
        return read_task(task_of(name, tables, self._options, note=note))

    def check_header(self, name: str) -> None:
        if _is_path(self._rows.get(name)):
            self._place(name).check_header(name)

    def _place(self, name: str) -> _Source:
        """Return the source of a task whose rows are given by a path."""
        return _open_source(os.fspath(self._rows[name]), self._options)


class _Several:
    """Several places, such as a file beside a directory: a task is read from the first that has it."""

    def __init__(self, places: Sequence[str], options: ReadOptions) -> None:
        self._sources: list[_Source] = []
        for place in places:
            if tasks_of_files(place):
                self._sources.append(_Named(files_by_name([place]), options))
            else:
                known = place == "hub" or place in registry.SOURCES  # whose columns are
                self._sources.append(_open_source(place, READ_DEFAULTS if known else options))
        self.hint: str = " ".join(source.hint for source in self._sources)

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for source in self._sources for name in source.names()))

    def holds(self, name: str) -> bool:
        return any(source.holds(name) for source in self._sources)

    def load(self, name: str) -> TaskRows:
        return self._source_of(name).load(name)

    def check_header(self, name: str) -> None:
        self._source_of(name).check_header(name)

    def _source_of(self, name: str) -> _Source:
        """Return the first source that has a task, else the last, which says what it lacks."""
        return next((source for source in self._sources if source.holds(name)), self._sources[-1])


class _Hub:
    """The source ``--data hub``, through the ``datasets`` library."""

    hint = "For data of your own, give --data DIR; the embedded tasks need --data demo."

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def names(self) -> list[str]:
        return [name for name, task in registry.tasks().items() if task.hub]

    def holds(self, name: str) -> bool:
        return name in self.names()

    def check_header(self, name: str) -> None:
        """The hub's columns are known."""

    def load(self, name: str) -> TaskRows:
        task = registry.tasks()[name]
        if task.hub is None:
            raise NoDataError(f"The hub does not hold task {name!r}. {self.hint}")
        return read_task(task_of(name, read_hub(task, task.hub), self._options))


class _Embedded:
    """A source that the registry lists, such as ``--data demo``."""

    def __init__(self, name: str) -> None:
        self._load = registry.SOURCES[name].load()
        self.hint = f"The source {name!r} holds {', '.join(self.names())}; for others give --data DIR."

    def names(self) -> list[str]:
        return [
            *("qnli", "ag_news", "sst2", "who_did_it", "was_it_kind", "ner_people_places", "ner_products"),
            *("when_is_it", "who_and_where", "in_one_line"),
        ]

    def holds(self, name: str) -> bool:
        return name in self.names()

    def check_header(self, name: str) -> None:
        """Its columns are known."""

    def load(self, name: str) -> TaskRows:
        if name not in self.names():
            raise NoDataError(f"There is no data for task {name!r}. {self.hint}")
        task = registry.tasks()[name]
        rows = {}
        for split, table in self._load(name).items():
            first, second, labels = zip(*table, strict=True)
            rows[split] = Rows(first, second if any(second) else (), labels)
        return complete(task, rows)


_Source = _Directory | _OneTask | _Named | _Several | _Hub | _Embedded


def _is_path(value: Any) -> bool:
    """Return whether rows are given by the path of what holds them."""
    return isinstance(value, str | os.PathLike)


def check_form(data: object) -> None:
    """Raise ``UsageError`` for rows that lack the name of their task, and whatever else is no data."""
    are_paths = isinstance(data, list | tuple) and bool(data) and all(map(_is_path, data))
    if not isinstance(data, Mapping) and not _is_path(data) and not are_paths:
        raise UsageError(
            f"Rows are given by the name of their task, as data={{'NAME': ROWS}}; got a {type(data).__name__}. Give them "
            "so, or a directory, a file or a list of files, 'hub' or 'demo'."
        )


def _open_source(data: Any, options: ReadOptions) -> _Source:
    check_form(data)
    name = os.fspath(data) if _is_path(data) else ""
    if name == "hub" or name in registry.SOURCES:
        if options.texts or options.labels or options.kinds:
            raise UsageError(
                f"The columns of the tasks of {name!r} are known. Leave --text-column, --label-column and --kind out."
            )
        return _Hub(options) if name == "hub" else _Embedded(name)
    if isinstance(data, Mapping):
        return _Named(data, options)
    if isinstance(data, list | tuple):
        places = [os.fspath(path) for path in data]
        return _Named(files_by_name(places), options) if tasks_of_files(places) else _Several(places, options)
    path = Path(data)
    names = tasks_at(path)
    if names is not None:
        return _OneTask(path, names, options)
    if path.is_dir():
        return _Directory(path, options)
    fault = f"is a file, and none of rows: expected {', '.join(FORMATS)}" if path.exists() else "does not exist"
    raise UsageError(
        f"The data directory {name!r} {fault}. Give an existing one, 'hub' or 'demo' to --data, or a file of rows."
    )
