"""Sources of the rows of tasks: a directory, a file, memory, the hub, or the embedded demo.

docs/data.md documents them for users; kinds of tasks read the tables, see `forgetfree.kinds`.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forgetfree import registry
from forgetfree.data.bad_rows import DataFaults
from forgetfree.data.columns import NO_COLUMN_NAMES, READ_DEFAULTS, ReadOptions, mapped_label, written_label
from forgetfree.data.folders import holds_a_task, read_folder, read_source, tasks_at
from forgetfree.data.rows import Rows, TaskRows, complete
from forgetfree.data.table_files import FORMATS, format_of, read_table
from forgetfree.data.tables import Table, TaskTables, tables_of
from forgetfree.display import brief, first_twice, is_text, nfc
from forgetfree.errors import DataError, NoDataError, UnknownNameError, UsageError, first_line, nearest
from forgetfree.files import as_there
from forgetfree.tasks import KIND_OF_FORM, EvaluatedOn, HubSource, TaskDefinition, slots

#: The environment variable with the default of ``--data``.
DATA_VARIABLE = "FORGETFREE_DATA"
#: The value of ``--data``: hub, demo, a directory or a file; or several of these.
Data = str | Sequence[str]
#: A note on rows that do not fit the registered task with their name.
_OTHER_COLUMNS = "the registered task {!r} has other columns, so these rows become a task of their own"


def default_data() -> str:
    """Return the value of ``--data`` when it is not given: ``FORGETFREE_DATA`` if set, else the hub.

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
        stream: a registered stream, or task names: separated by commas, or as a list; ``None``: all tasks of ``data``.
        data: ``hub``, ``demo``, a directory, a file of rows, or several of these, where each file is a task with its name; or
            the rows of each task, by name, see `forgetfree.data.tables.tables_of`, or their path.
        evaluate_on: which rows to use as test rows, see `TaskRows.evaluated_on`.
        options: the columns of texts and labels, which are recognised if not given, and the other options for reading rows.

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
    """Return the tasks of a stream that can be read, and the faults of the others; see `load_tasks`."""
    source, faults = _open(data, options), DataFaults()
    names = _names(stream, data, source)
    options.check(names)
    loaded = [faults.attempt(_rows_of_task, name, source, evaluate_on, options) for name in names]
    if not faults:
        faults.attempt(_check_mapped, options, [rows for rows in loaded if rows is not None])
    return [rows for rows in loaded if rows is not None], faults


def _check_mapped(options: ReadOptions, tasks: Sequence[TaskRows]) -> None:
    """Raise ``DataError`` if no row has a label that is to be read as another."""
    names, found = [rows.task.name for rows in tasks], {label for rows in tasks for label in rows.mapped}
    for each in options.label_map:
        if (label := written_label(mapped_label(each, names))) not in found:
            labels = list(dict.fromkeys(label for rows in tasks for label in rows.task.labels))
            if not labels:
                raise DataError(
                    f"--map-label {each}: expected tasks with labels, but no task has labels. Leave the flag out."
                )
            raise DataError(
                f"--map-label {each}: no row has the label {label!r}.{nearest(label, labels)} Name one as it is written in the "
                "data, or leave the flag out."
            )


def load_task(
    name: str,
    data: Data,
    evaluate_on: EvaluatedOn = "test",
    options: ReadOptions = READ_DEFAULTS,
) -> TaskRows:
    """Load one task with its rows; arguments and errors: see `load_tasks`."""
    (rows,) = load_tasks([name], data, evaluate_on, options)
    return rows


def _rows_of_task(name: str, source: _Source, evaluate_on: EvaluatedOn, options: ReadOptions) -> TaskRows:
    rows, metric = source.rows(name), options.metric(name)
    if metric is not None:
        task = replace(rows.task, metric=metric)
        if faults := registry.faults_of(task):
            raise DataError(
                f"--metric {metric} cannot be used for task {name!r}: {faults[0]}. Choose another, or TASK=NAME "
                "for one task."
            )
        rows = replace(rows, task=task)
    return rows.evaluated_on(evaluate_on)


# -- Names of tasks ----------------------------------------------------------------------------------------


def check_stream(stream: str | Sequence[str], data: Data, options: ReadOptions = READ_DEFAULTS) -> None:
    """Raise as `load_tasks` does if ``data`` lack a task of a stream; no rows are read, nothing is downloaded."""
    _names(stream, data, _open(data, options))


def no_stream(data: Data) -> UsageError:
    """Return the error that no stream is given, with the tasks of a directory, or else with the registered streams."""
    source = _open(data, READ_DEFAULTS)
    if source.path is None:
        return UsageError(f"No stream was given. Known: {', '.join(registry.streams())}, or task names with commas.")
    there = f"{data} contains {', '.join(source.names)}." if source.names else source.hint
    return UsageError(f"No stream was given. {there} Give task names with commas, or a registered stream.")


def _names(stream: str | Sequence[str] | None, data: Any, source: _Source) -> tuple[str, ...]:
    streams = registry.streams()
    if stream is None:
        names = tuple(map(nfc, data)) if isinstance(data, Mapping) else tasks_of_files(data)
    elif isinstance(stream, str):
        own = tasks_of_files(os.fspath(source.path)) if source.is_nameless and source.path else source.names
        if stream in streams and stream in own:
            raise UsageError(
                f"{stream!r} is both a task of the data and a registered stream: {', '.join(streams[stream])}. Write "
                f"'{stream},' with a comma for the task, or these names for the stream."
            )
        names = streams.get(stream) or tuple(filter(None, map(str.strip, nfc(stream).split(","))))
    else:
        names = tuple(map(nfc, stream))
    if not names:
        raise UsageError("The stream contains no task. Give a registered stream or task names separated by commas.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(
            f"The stream names {twice[0]!r} twice. Name each task only once; to learn new rows for it, give the task "
            f"another name, such as {twice[0]}-2."
        )
    if source.is_nameless and len(names) > 1:
        raise UsageError(
            f"{source.path} contains the rows of one task, but {len(names)} are named: {', '.join(names)}. Name one, "
            "or give a directory with a folder for each task."
        )
    for name in names:
        _check_known(name, source, streams if len(names) == 1 else ())
    return names


def _check_known(name: str, source: _Source, streams: Collection[str] = ()) -> None:
    """Raise unless the registry or ``source`` has a task of this name; ``streams`` are names to suggest, too."""
    known = {*source.names, *(() if source.is_closed else registry.tasks())}
    if name in known or source.holds(name):
        return
    if reason := registry.broken("streams").get(name):
        raise UsageError(reason)
    if os.path.exists(name):
        raise UsageError(f"{brief(name)} is a file or a directory, not a task. To read its rows, give --data {name}.")
    files = sorted(source.path.glob(f"{glob.escape(name)}.*")) if source.path else []
    if file := next((file for file in files if format_of(file.name)), None):
        raise UsageError(f"{source.path} has no folder of task {name!r}, but the file {file.name}. Give --data {file}.")
    known |= set() if source.is_closed else {*streams}
    raise UnknownNameError("stream or task" if streams else "task", name, known, source.hint)


# -- Sources ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """A source of tasks."""

    names: Sequence[str]
    hint: str  # a sentence on how to get another task, or on the tasks there
    read: Callable[[str], TaskRows]
    holds: Callable[[str], bool]  # whether it has a task with a name, even with faults
    path: Path | None = None  # the directory of tasks, or the file or folder of one task
    is_nameless: bool = False  # whether it is one task, which may have any name
    is_closed: bool = False  # whether no registered task can be added to it

    def rows(self, name: str) -> TaskRows:
        """Return a task with its rows; raise ``NoDataError`` if there is nothing with its name."""
        if not self.holds(name):
            raise NoDataError(f"There is no data for task {name!r}. {self.hint}")
        return self.read(name)


def _open(data: Any, options: ReadOptions) -> _Source:
    check_form(data)
    if isinstance(data, Mapping):
        return _by_name(data, options)
    if isinstance(data, list | tuple):
        return _several([os.fspath(path) for path in data], options)
    name = as_there(os.fspath(data))
    path = Path(name)
    if _is_known(name):
        if options.texts or options.labels or options.kinds:
            raise UsageError(
                f"The columns of the tasks of {name!r} are known. Leave --text-column, --label-column and --kind out."
            )
        return _hub(options) if name == "hub" else _embedded(name)
    if (names := tasks_at(path)) is not None:
        return _one_task(path, names, options)
    if path.is_dir():
        return _directory(path, options)
    if path.exists():
        fault = (
            f"is a file in an unknown format: expected {', '.join(FORMATS)}.{nearest(path.suffix[1:], FORMATS, 0.6)}"
        )
    else:
        fault = f"does not exist.{_nearest_to(path)}"
    raise UsageError(f"The data directory {name!r} {fault} Give --data an existing directory or file, 'hub' or 'demo'.")


def _nearest_to(path: Path) -> str:
    """Return a sentence that suggests a file or a folder beside a path that is not there; empty if none is near."""
    beside = os.listdir(path.parent) if os.access(path.parent, os.R_OK | os.X_OK) else []
    return nearest(path.name, [*beside, "hub", *registry.SOURCES], 0.7)


def _is_known(place: str) -> bool:
    return place == "hub" or place in registry.SOURCES


def check_form(data: object) -> None:
    """Raise ``UsageError`` for rows without the name of their task, and for any other value that is no data."""
    are_paths = isinstance(data, list | tuple) and bool(data) and all(map(_is_path, data))
    if not isinstance(data, Mapping) and not _is_path(data) and not are_paths:
        raise UsageError(
            f"Rows must be given with the name of their task, as data={{'NAME': ROWS}}, got a {type(data).__name__}. "
            "Give such a dict, a directory, a file, a list of files, 'hub' or 'demo'."
        )


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _directory(root: Path, options: ReadOptions) -> _Source:
    places = sorted(path for path in root.iterdir() if path.is_dir())
    folders = {nfc(path.name): path for path in places}
    if (twice := first_twice(nfc(path.name) for path in places)) is not None:
        raise UsageError(
            f"{root} contains two folders {twice!r}, whose names differ only in their Unicode encoding. "
            "Rename one of them."
        )
    names = sorted(name for name, path in folders.items() if holds_a_task(path))

    hint = f"To add a task, put it under {root}/NAME as train, validation and test files."
    return _Source(names, hint, lambda name: _read_folder(name, folders[name], options), folders.__contains__, root)


def _one_task(path: Path, names: list[str], options: ReadOptions) -> _Source:
    """Return the source ``--data FILE``, or a folder that is itself a task, whose name the user may choose."""

    def read(name: str) -> TaskRows:
        if path.is_dir():
            return _read_folder(name, path, options)
        return _read_task(name, {"train": read_table(path)}, options, folder=path.parent)

    def holds(name: str) -> bool:
        return name in names if names else bool(name) and name not in (".", "..") and not set(name) & set("/,")

    tasks = ", ".join(names) or "one task, which may have any name without a comma or a slash"
    return _Source(names, f"{path} contains {tasks}.", read, holds, path, is_nameless=not names, is_closed=True)


def _by_name(rows: Mapping[str, Any], options: ReadOptions) -> _Source:
    """Return the source ``data={"NAME": ROWS}`` of Python."""
    rows = {nfc(name): each for name, each in rows.items()}

    def read(name: str) -> TaskRows:
        if _is_path(rows[name]):
            return _open(os.fspath(rows[name]), options).rows(name)
        tables, note = tables_of(f"data[{name!r}]", rows[name])
        return _read_task(name, tables, options, note=note)

    return _Source(
        [*rows], f"The given data contains {', '.join(rows) or 'no task'}.", read, rows.__contains__, is_closed=True
    )


def _several(places: Sequence[str], options: ReadOptions) -> _Source:
    """Return the source of several places, such as a file and a directory: a task is read from the first that has it."""
    files = [name for place in places for name in tasks_of_files(place)]
    if (twice := first_twice(files)) is not None:
        raise UsageError(
            f"--data names two files with the same name, which would both be the task {twice!r}. Rename one of them."
        )
    if comma := next((name for name in files if "," in name), None):
        raise UsageError(
            f"--data names a file for the task {comma!r}, but names of tasks cannot contain a comma. Rename the file."
        )
    sources = [
        _one_task(Path(as_there(place)), [*named], options)
        if (named := tasks_of_files(place)) and os.path.isfile(as_there(place))
        else _open(place, READ_DEFAULTS if _is_known(place) else options)
        for place in places
    ]
    names = list(dict.fromkeys(name for source in sources for name in source.names))

    def read(name: str) -> TaskRows:
        return next(source for source in sources if source.holds(name)).read(name)

    def holds(name: str) -> bool:
        return any(source.holds(name) for source in sources)

    hint, is_closed = " ".join(source.hint for source in sources), all(source.is_closed for source in sources)
    return _Source(names, hint, read, holds, is_closed=is_closed)


def _hub(options: ReadOptions) -> _Source:
    hubs = {name: (task, task.hub) for name, task in registry.tasks().items() if task.hub}
    hint = "For data of your own, give --data DIR; the embedded tasks need --data demo."

    return _Source([*hubs], hint, lambda name: _read_task(name, _read_hub(*hubs[name]), options), hubs.__contains__)


def _embedded(source: str) -> _Source:
    from forgetfree.data import demo

    names = [*demo.TASKS, *demo.TAGGED, *demo.TEXTS]
    hint = f"The source {source!r} contains {', '.join(names)}; for other tasks, give --data DIR."
    load = registry.SOURCES[source].load()

    def read(name: str) -> TaskRows:
        rows = {}
        for split, table in load(name).items():
            first, second, labels = zip(*table, strict=True)
            rows[split] = Rows(first, second if any(second) else (), labels)
        return complete(registry.tasks()[name], rows)

    return _Source(names, hint, read, names.__contains__)


def tasks_of_files(data: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the tasks in files of rows: the file names without their endings; nothing for other data."""
    files = [Path(data)] if isinstance(data, str) else [Path(each) for each in data]
    names = [format_of(file.name) for file in files if not file.is_dir()]
    holds_rows = len(names) == len(files) and all(form for _, form in names)
    return tuple(stem for stem, _ in names) if holds_rows else ()


# -- The tables of a task ------------------------------------------------------------------------------------


def _read_folder(name: str, folder: Path, options: ReadOptions) -> TaskRows:
    source, faults = read_source(folder), DataFaults()
    tables, note = read_folder(name, folder, faults)
    rows = faults.demand(_read_task, name, tables, options, source, folder, note)
    faults.report()
    return rows


def _read_task(
    name: str,
    tables: Mapping[str, Table],
    options: ReadOptions,
    source: Mapping[str, Any] = MappingProxyType({}),
    folder: Path = Path(),
    note: str = "",
) -> TaskRows:
    """Return the task with its rows, from the tables of its splits, its ``source.json`` and its folder."""
    columns, faults, read = options.columns(name).over(source), DataFaults(), dict[str, Table]()
    for split, table in tables.items():
        if table.columns or table.numbers or table.bad:
            read[split] = table
        else:
            faults.catch(
                DataError(f"{table.where} contains no rows, but every split needs rows. Add rows, or remove the file.")
            )
    if "train" not in read:
        faults.report()
    if kind := options.kind(name):
        source = {**source, "kind": kind}
    note = "; ".join(filter(None, [note, *(table.note for table in read.values())]))
    registered = registry.tasks().get(name)
    how: dict[str, Any] = {"skip_bad_rows": options.skip_bad_rows, "new_labels": options.new_labels(name)}
    task = _of_its_own_columns(TaskTables(name, read, source, folder, registered, columns, note, **how))
    rows: TaskRows = faults.demand(_kind(task).read, task)
    if unknown := registry.faults_of(rows.task):
        raise DataError(f"{folder / 'source.json'}: {unknown[0]}.")
    faults.report()
    return rows


def _of_its_own_columns(task: TaskTables) -> TaskTables:
    """Return the task, without the definition registered under its name if its rows are another task's."""
    if task.registered is None:
        return task
    own = replace(task, registered=None, note="; ".join(filter(None, [task.note, _OTHER_COLUMNS.format(task.name)])))
    named, kind = (KIND_OF_FORM.get(each, each) for each in (task.source.get("kind", ""), task.registered.kind))
    if named:
        return task if named == kind else own
    is_named = kind != "classification" and task.columns != NO_COLUMN_NAMES
    if kind not in registry.KINDS or is_named or _kind(task).recognises(task):
        return task
    return own if _kind(own).recognises(own) else task


def _kind(task: TaskTables) -> Any:
    """Return the kind of a task: from ``source.json``, else from its registration, else from its columns."""
    if named := task.source.get("kind") or (task.registered.kind if task.registered else None):
        return registry.kind(named)
    others = [registry.kind(name) for name in registry.KINDS if name != "classification"]
    return next((kind for kind in others if kind.recognises(task)), registry.kind("classification"))


def _read_hub(task: TaskDefinition, hub: HubSource) -> dict[str, Table]:
    """Return the tables of a registered task from the hub, by split."""
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
                f"{where} has no column {missing[0]!r}; it has {', '.join(rows.column_names)}. The dataset has "
                "changed on the hub: give a directory with --data DIR."
            )
        labels = [(hub.labels or {}).get(label, label) for label in rows[hub.label]]
        keep = [i for i, label in enumerate(labels) if label != -1]  # SNLI's mark of undecided rows
        columns = {name: _hub_texts(rows, column) for name, column in zip(task.text_columns, hub.columns, strict=True)}
        whole = Table(where, columns | {"label": labels}, range(len(labels)))
        tables[split] = whole.take(keep)
    return tables


def _hub_texts(table: Any, column: str) -> list[Any]:
    """Return a column of the hub, or the texts of a template with several columns; missing values become empty there."""
    names = slots(column)
    if not names:
        return list(table[column])
    rows = zip(*(table[name] for name in names), strict=True)
    filled = ({n: "" if v is None else str(v).strip() for n, v in zip(names, row, strict=True)} for row in rows)
    return [re.sub(" {2,}", " ", column.format_map(values)).strip() for values in filled]
