"""The folder of one task: files of its splits, or a data set of the ``datasets`` library; and its ``source.json``."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from forgetfree import registry
from forgetfree.data.bad_rows import DataFaults
from forgetfree.data.columns import ColumnNames
from forgetfree.data.table_files import check_size, format_of, read_table
from forgetfree.data.tables import Tables, split_of, tables_of
from forgetfree.display import brief, listed, nfc
from forgetfree.errors import DataError, UsageError
from forgetfree.json_file import read_json
from forgetfree.tasks import KIND_OF_FORM, SPLITS

#: Suffixes of files that may hold rows but are not read.
_UNREAD = (".arrow", ".feather", ".xls", ".xlsx")
#: The name of a file that is one of several parts.
_PART = re.compile(r"(.*?)(\d+)([-_]of[-_])(\d+)(.*)")
#: The name of a file in a data set of the hub, whose splits are stored in parts.
_SHARD = re.compile(
    r"(train|training|validation|valid|val|dev|eval|test)[-._].*\.(parquet|csv|tsv|jsonl?|arrow)(\.\w+)?"
)


# -- Forms of folders --------------------------------------------------------------------------------------


def tasks_at(place: Path) -> list[str] | None:
    """Return the names of the tasks in a file or task folder; ``None`` for a folder of task folders, or without rows.

    A file of rows, or a folder with the files of splits, is one task that may have any name: the list is empty. The same holds
    for a hub snapshot, unless it has several configurations: each is a task with its own name.
    """
    if not place.is_dir():
        return [] if place.is_file() and format_of(place.name)[1] else None
    form = _form_of(place)
    folders = [
        path for path in place.iterdir() if path.is_dir() and path.name != "data"
    ]  # a snapshot's files are in data
    if form != "saved" and any(_form_of(path) == "files" for path in folders):
        return None
    names = _configurations(place) if form == "snapshot" else []
    return (names if len(names) > 1 else []) if form else None


def holds_a_task(folder: Path) -> bool:
    """Return whether a folder holds rows in any form, whatever may be wrong with them."""
    return _form_of(folder) is not None


def _form_of(folder: Path) -> Literal["saved", "files", "snapshot"] | None:
    """Return the form of a folder's rows: from ``datasets.save_to_disk``, in one file per split, or a snapshot of the hub.

    A snapshot has its files in parts, or a card that describes them. A folder without read permission holds no rows.
    """
    if not os.access(folder, os.R_OK | os.X_OK):
        return None
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return "saved"
    names = [path.name for path in folder.iterdir() if path.is_file()]
    if any(format and split_of(stem) for stem, format in map(format_of, names)):
        return "files"
    data = folder / "data"
    parts = data.iterdir() if data.is_dir() and os.access(data, os.R_OK | os.X_OK) else []
    if any(_SHARD.fullmatch(name.lower()) for name in (*names, *(path.name for path in parts))):
        return "snapshot"
    head = (folder / "README.md").read_bytes()[: 2**16] if "README.md" in names else b""
    has_card = head.startswith(b"---") and re.search(rb"^(configs|dataset_info):", head, re.MULTILINE)
    return "snapshot" if has_card or "dataset_infos.json" in names else None


def _configurations(folder: Path) -> list[str]:
    """Return the names of the configurations of a hub snapshot."""
    with _datasets_errors(folder):
        from datasets import get_dataset_config_names

        return list(get_dataset_config_names(str(folder)))


# -- Tables ------------------------------------------------------------------------------------------------


def read_folder(name: str, folder: Path, faults: DataFaults) -> Tables:
    """Return the tables of a task's folder; a file that cannot be read is added to the faults."""
    form = _form_of(folder)
    if form == "saved":
        with _datasets_errors(folder):
            from datasets import load_from_disk

            dataset = load_from_disk(str(folder))
        return tables_of(str(folder), dataset)
    if form == "snapshot":
        return _read_snapshot(folder, name)
    paths = _files_of(name, folder)
    read = {split: faults.attempt(read_table, path) for split, path in paths.items()}
    tables = {split: table for split, table in read.items() if table is not None}
    if "train" not in tables:
        faults.report()
    others = [f"{path.name} is the {split} split" for split, path in paths.items() if format_of(path.name)[0] != split]
    return tables, "; ".join(others)


def _files_of(name: str, folder: Path) -> dict[str, Path]:
    """Return the files of a task's splits, in any of the formats."""
    every = sorted(folder.iterdir())
    found, files = ", ".join(path.name for path in every) or "nothing", dict[str, Path]()
    for split in SPLITS:
        named = [path for path in every if split_of(format_of(path.name)[0]) == split and format_of(path.name)[1]]
        named = [path for path in named if not path.name.endswith(".txt")] or named  # a .txt may hold anything
        if len(named) > 1:
            raise DataError(
                f"{folder} contains {' and '.join(path.name for path in named)}, but the {split} split must be one "
                "file. Remove the others."
            )
        if named:
            files[split] = named[0]
    parts = [match for path in every if (match := _PART.fullmatch(path.name)) and format_of(path.name)[1]]
    if files and (of_splits := [match[0] for match in parts if split_of(match[1].rstrip("-_."))]):
        raise DataError(
            f"{folder} contains {' and '.join(path.name for path in files.values())} and also {of_splits[0]}, which "
            "is one of several parts of a split. Remove the files that are not needed."
        )
    if "train" not in files:
        raise DataError(
            f"Task {name!r} has no train split: expected {folder}/train.parquet, .jsonl or .csv, found {found}. Add the file."
        )
    for path in every:
        split = split_of(path.stem) or ""
        if split and split not in files and path.suffix.lower() in _UNREAD:
            raise DataError(
                f"Task {name!r} has no {split} split, and {path} is not read. Write it as {split}.parquet, .jsonl or .csv, "
                "or move it elsewhere."
            )
    return files


def _read_snapshot(folder: Path, name: str) -> Tables:
    """Read a hub snapshot: its only configuration, or the one called ``name``."""
    known = _configurations(folder)
    if len(known) > 1 and name not in known:
        raise UsageError(f"{folder} contains the configurations {', '.join(known)}. Name one of them as the task.")
    with _datasets_errors(folder), TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        from datasets import load_dataset_builder

        builder = load_dataset_builder(str(folder), known[0] if len(known) < 2 else name, cache_dir=cache)
        for files in (builder.config.data_files or {}).values():
            _check_parts(folder, files)
        builder.download_and_prepare()  # compares the numbers of rows with the card
        return tables_of(str(folder), builder.as_dataset())


@contextmanager
def _datasets_errors(folder: Path) -> Iterator[None]:
    """Raise errors of the library as ``DataError`` about the folder, and disable its progress bars."""
    import datasets

    check_size(folder, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        cause = error.__cause__ or error  # a DatasetGenerationError says only that there is an error
        what = f"{type(error).__name__}: {' '.join(str(cause).split())[:400].rstrip('. ')}"
        raise DataError(
            f"{folder} cannot be read by the datasets library: {what}. Save or download it again, or fix its "
            "card README.md."
        ) from error
    finally:
        if not silent:
            datasets.enable_progress_bars()


# -- Missing parts -----------------------------------------------------------------------------------------


def _check_parts(where: Path, files: Iterable[str | Path]) -> None:
    """Raise ``DataError`` if parts are missing from a series such as ``train-00000-of-00002.parquet``."""
    parts = dict[tuple[Path, str, str, str], set[int]]()
    for path in map(Path, files):
        if (match := _PART.fullmatch(path.name)) and int(match[2]) <= int(match[4]) and path.is_file():
            parts.setdefault((path.parent, match[1], match[3], match[4]), set()).add(int(match[2]))
    for (folder, begin, of, total), there in parts.items():
        first = int(int(total) in there)  # they are counted from 0, or else from 1
        if lacking := [f"{n:0{len(total)}}" for n in range(first, first + int(total)) if n not in there]:
            raise DataError(
                f"{where} contains {len(there)} of the {int(total)} files {folder.name}/{begin}*{of}{total}; "
                f"missing: number {listed(lacking, 5)}. Download the data set again."
            )


# -- source.json -------------------------------------------------------------------------------------------


def read_source(folder: Path) -> dict[str, Any]:
    """Read a task's ``source.json``; empty if there is none, and without keys with the value null.

    Raises:
        DataError: it is no JSON object, or a known key is misspelt or has a wrong value.
    """
    path = folder / "source.json"
    if not os.path.lexists(path):
        return {}
    source = read_json(path, DataError, "Fix or remove it.")
    if not isinstance(source, dict):
        raise DataError(f"{path} must hold a JSON object with label_names, got a {type(source).__name__}.")
    source, known = {key: value for key, value in source.items() if value is not None}, _keys(source.get("kind"))
    names = [key for key in ("label_names", "entities") if _are_names(source.get(key))]
    source |= {key: [nfc(str(name)) for name in source[key]] for key in names}
    for key, value in source.items():
        if key in known:
            expected, is_right = known[key]
            if not is_right(value):
                raise DataError(f"{path}: {key} must be {expected}, got {brief(value, 200)}.")
        elif meant := difflib.get_close_matches(key, [each for each in known if each not in source], 1, 0.8):
            raise DataError(f"{path}: {key!r} is not read. Did you mean {meant[0]!r}? Rename or remove it.")
    try:
        ColumnNames.of(source.get("text_column"), source.get("label_column"))
    except UsageError as error:
        raise DataError(f"{path}: {error}") from error
    return source


def _keys(kind: Any) -> dict[str, tuple[str, Callable[[Any], bool]]]:
    """Return the keys of source.json that are read, each with a phrase for the expected value and a check of the value."""
    kinds = list(dict.fromkeys([*KIND_OF_FORM, *registry.kinds()]))
    metrics = registry.metrics_of(kind) if isinstance(kind, str) and kind in kinds else list(registry.metrics())
    names = ("a list of names, all different", _are_names)
    text = ("a text", lambda value: isinstance(value, str))
    texts = (
        "a text, or a list of texts",
        lambda value: all(isinstance(each, str) for each in (value if isinstance(value, list) else [value])),
    )
    return {
        **dict.fromkeys(("label_names", "label_words", "closed_answers", "entities"), names),
        **dict.fromkeys(("text_column", "stop"), texts),
        **dict.fromkeys(("label_column", "instruction", "template", "causal_template"), text),
        "kind": (", ".join(kinds), kinds.__contains__),
        "max_new_tokens": ("a whole number", lambda value: type(value) is int),
        "metric": (" or ".join(map(repr, metrics)), lambda value: value in [*registry.metrics()]),
    }


def _are_names(names: Any) -> bool:
    """Return whether these are different texts that are not blank, or whole numbers used as names."""
    if not isinstance(names, list) or not all(type(name) in (str, int) for name in names):
        return False
    plain = {nfc(str(name)).strip() for name in names}
    return "" not in plain and len(plain) == len(names)
