"""What a place holds: tasks, splits and formats, by the names of its files and a snapshot's card, before any row is read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from forgetfree.errors import DataError, UsageError, first_line
from forgetfree.tasks import SPLITS

#: How the names of packed files end.
PACKED = (".gz", ".zst")
#: The largest file that is read, in bytes (unpacked).
MOST_BYTES = 4 * 2**30
#: The formats of files, those of tagged words last; those of text may be packed.
CONLL = ("conll", "bio", "iob", "iob2", "txt")
FORMATS = ("parquet", "jsonl", "csv", "tsv", "json", *CONLL)
#: The names of splits, ours first.
_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "dev", "eval", "val", "valid"),
    "test": ("test",),
}
#: The name of a file that is one of several parts.
_PART = re.compile(r"(.*?)(\d+)([-_]of[-_])(\d+)(.*)")
#: A file of a data set of the hub, which has its splits in parts.
_SHARD = re.compile(
    r"(train|training|validation|valid|val|dev|eval|test)[-._].*\.(parquet|csv|tsv|jsonl?|arrow)(\.\w+)?"
)


# -- Files -----------------------------------------------------------------------------------------------


def format_of(name: str) -> tuple[str, str]:
    """Return a file's name without its endings, and the format that they say; empty if it is none that is read.

    >>> format_of("mood.csv.gz")
    ('mood', 'csv')
    """
    packed = next((ending for ending in PACKED if name.lower().endswith(ending)), "")
    stem, _, ending = name.removesuffix(name[len(name) - len(packed) :] if packed else "").rpartition(".")
    known = ending.lower() in FORMATS[1 if packed else 0 :]
    return (stem, ending.lower()) if known and stem else (name, "")


def check_size(path: Path, size: int, unit: str = "bytes") -> None:
    """Raise ``DataError`` if ``path`` holds more bytes than are read."""
    if size > MOST_BYTES:
        raise DataError(f"{path} holds {size:,} {unit}, and at most {MOST_BYTES:,} are read. Take a part of its rows.")


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files of a folder's splits, in any of the formats.

    Raises:
        DataError: there are several of one split.
    """
    candidates: dict[str, list[tuple[bool, int, str]]] = {split: [] for split in SPLITS}
    for path in folder.iterdir():
        stem, format = format_of(path.name)
        if format and (split := split_of(stem)):
            candidates[split].append((stem.lower() != split, FORMATS.index(format), path.name))
    files = dict[str, Path]()
    for split, every in candidates.items():
        names = [name for *_, name in sorted(every) if not name.endswith(".txt")]
        names = names or [name for *_, name in sorted(every)]  # a .txt may hold anything
        if len(names) > 1:
            raise DataError(
                f"{folder} holds {' and '.join(names)}, and the {split} split is one file. Remove the others."
            )
        if names:
            files[split] = folder / names[0]
    parts = [path.name for path in folder.iterdir() if _is_part(path.name)] if files else []
    if parts:
        raise DataError(
            f"{folder} holds {' and '.join(path.name for path in files.values())}, and {min(parts)}, which is one of several "
            "parts of a split. Remove what is not meant."
        )
    return files


def _is_part(name: str) -> bool:
    """Return whether a file is one of several parts of a split."""
    match = _PART.fullmatch(name)
    return bool(match and split_of(match[1].rstrip("-_.")) and format_of(name)[1])


def split_of(name: str) -> str | None:
    """Return the split that is meant by a name such as ``dev``; ``None`` if it is none."""
    return next((split for split, names in _SPLIT_NAMES.items() if name.lower() in names), None)


# -- Tasks -----------------------------------------------------------------------------------------------


def tasks_of_files(data: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the tasks that files of rows hold: the files', without their endings; nothing for other data."""
    files = [Path(data)] if isinstance(data, str) else [Path(each) for each in data]
    names = [format_of(file.name) for file in files if not file.is_dir()]
    holds_rows = len(names) == len(files) and all(form for _, form in names)
    return tuple(stem for stem, _ in names) if holds_rows else ()


def files_by_name(paths: Sequence[str]) -> dict[str, str]:
    """Return files of rows by the names of their tasks.

    Raises:
        UsageError: one of several is missing or no file of rows, or two have one name.
    """
    if missing := [path for path in paths if not os.path.exists(path)]:
        raise UsageError(
            f"--data names {' and '.join(map(repr, missing))}, and there {'is' if len(missing) == 1 else 'are'} no such "
            f"{'file' if len(missing) == 1 else 'files'}. Give files that are there."
        )
    by_name = dict[str, str]()
    for path in paths:
        stem, format = format_of(Path(path).name)
        if not (format and Path(path).is_file()):
            raise UsageError(
                f"--data is given {len(paths)} times, and {path!r} is no file of rows ({', '.join(FORMATS)}). Give files, each "
                "a task of its name, or one directory with a folder for each task."
            )
        if stem in by_name:
            raise UsageError(
                f"--data names {by_name[stem]!r} and {path!r}, and both would be the task {stem!r}. Rename one of the files."
            )
        if "," in stem:
            raise UsageError(f"--data names {path!r}, and a task has no comma in its name. Rename the file.")
        by_name[stem] = path
    return by_name


def tasks_at(place: Path) -> list[str] | None:
    """Return the tasks that a place itself is; ``None`` where it is a folder of tasks, or holds no rows.

    A file of rows, or a folder with the files of splits, is one task of any name: the list is empty. So is a hub snapshot,
    unless it has several configurations: each is a task of its own name.
    """
    if not place.is_dir():
        return [] if place.is_file() and format_of(place.name)[1] else None
    if is_saved(place):
        return []
    if any(_has_files(path) for path in place.iterdir() if path.is_dir() and path.name != "data"):
        return None  # of a snapshot, it is the folder of files
    if not is_snapshot(place):
        return [] if _has_files(place) else None
    names = configurations(place)
    return names if len(names) > 1 else []


def holds_a_task(folder: Path) -> bool:
    """Return whether a folder holds rows in any form, whatever may be wrong with them."""
    return _has_files(folder) or is_saved(folder) or is_snapshot(folder)


def _has_files(folder: Path) -> bool:
    """Return whether a folder holds the file of a split; one that may not be read holds none."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return False
    named = (format_of(path.name) for path in folder.iterdir() if path.is_file())
    return any(format and split_of(stem) for stem, format in named)


def is_saved(folder: Path) -> bool:
    """Return whether ``datasets.save_to_disk`` wrote the folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def is_snapshot(folder: Path) -> bool:
    """Return whether the folder is a data set of the hub as it is downloaded: files in parts, or a card that describes them."""
    if is_saved(folder):
        return False
    places = [place for place in (folder, folder / "data") if place.is_dir() and os.access(place, os.R_OK | os.X_OK)]
    return any(_SHARD.fullmatch(path.name.lower()) for place in places for path in place.iterdir()) or has_card(folder)


def has_card(folder: Path) -> bool:
    """Return whether a ``README.md``, or ``dataset_infos.json``, describes the folder as a data set of the hub."""
    if (folder / "dataset_infos.json").is_file():
        return True
    card = folder / "README.md"
    if not card.is_file():
        return False
    with card.open("rb") as file:
        head = file.read(2**16)
    return head.startswith(b"---") and bool(re.search(rb"^(configs|dataset_info):", head, re.MULTILINE))


def configurations(folder: Path) -> list[str]:
    """Return the names of the configurations of a hub snapshot."""
    with datasets_errors(folder):
        from datasets import get_dataset_config_names

        return list(get_dataset_config_names(str(folder)))


def check_parts(where: Path, files: Iterable[str | Path]) -> None:
    """Raise ``DataError`` if files have names such as ``train-00000-of-00002.parquet``, and not all of these are there."""
    parts = dict[tuple[Path, str, str, str], dict[int, str]]()
    for path in map(Path, files):
        if (match := _PART.fullmatch(path.name)) and int(match[2]) <= int(match[4]) and path.is_file():
            parts.setdefault((path.parent, match[1], match[3], match[4]), {})[int(match[2])] = path.name
    for (folder, begin, of, total), names in parts.items():
        first = int(int(total) in names)  # they are counted from 0, or else from 1
        lacking = [number for number in range(first, first + int(total)) if number not in names]
        if lacking:
            raise DataError(
                f"{where} holds {len(names)} of the {int(total)} files {folder.name}/{begin}*{of}{total}: number "
                f"{', '.join(f'{number:0{len(total)}}' for number in lacking[:5])}{', …' * (len(lacking) > 5)} "
                f"{'is' if len(lacking) == 1 else 'are'} missing. Download the data set again."
            )


def part_note(path: Path) -> str:
    """Return what to say of a file that is read alone, and has the name of one of several parts."""
    match = _PART.fullmatch(path.name)
    is_part = match and 1 < int(match[4]) >= int(match[2])
    return f"{path.name} is one of {int(match[4])} parts, and read alone" if match and is_part else ""


@contextmanager
def datasets_errors(folder: Path) -> Iterator[None]:
    """Say what the library finds wrong as an error of the folder's, and nothing of how far it is."""
    import datasets

    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    check_size(folder, size)
    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        cause: BaseException = error
        if isinstance(error, datasets.exceptions.DatasetGenerationError):  # it says only that there is an error
            cause = error.__cause__ or error
            if not isinstance(cause, OSError):
                cause = ValueError(" ".join(str(cause).split())[:400])  # in several lines
        file = f"{cause.filename}: " if isinstance(cause, OSError) and cause.filename else ""
        raise DataError(
            f"{folder} cannot be read by the datasets library: {file}{first_line(cause)}. Save or download it again."
        ) from error
    finally:
        if not silent:
            datasets.enable_progress_bars()
