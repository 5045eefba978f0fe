"""unit.json: how a unit ended, with the size and SHA-256 of each file beside it, by which every reader compares them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgetfree.display import brief
from forgetfree.errors import ForgetfreeError, RunError, first_line
from forgetfree.files import size_of
from forgetfree.json_file import check, check_fields, read_json

Json = dict[str, Any]
RECORD = "unit.json"
_REMEDY = "Restore it from a copy, or run the stream again."


def described(path: Path) -> Json:
    """Return size and SHA-256 of a file."""
    return {"bytes": size_of(path), "sha256": sha256(path)}


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def signed_record(record: Json) -> Json:
    """Return a record with the checksum of its content."""
    return record | {"checksum": _checksum(record)}


def read_record(directory: Path, error: type[ForgetfreeError] = RunError, remedy: str = _REMEDY) -> Json:
    """Return the unit.json of a folder.

    Raises:
        ForgetfreeError: ``error``: it is missing or damaged.
    """
    record: Json = read_json(directory / RECORD, error, remedy, _check_record)
    return record


def check_own(path: Path, error: type[ForgetfreeError] = RunError) -> None:
    """Check that a file is the one that the unit made in whose folder it lies.

    A file passes where no unit.json lies beside it: its unit has not ended, or somebody took it out of its run.

    Args:
        path: the file.
        error: the error to raise.

    Raises:
        ForgetfreeError: ``error``: the file is of another seed or run, has changed since, or nothing can be compared because
            unit.json is damaged or another unit's.
    """
    folder = path.absolute().parent
    if not (folder / RECORD).exists():
        return
    record = read_record(folder, error)
    if differ := _other_unit(record["unit"], folder):
        raise error(f"{folder / RECORD} is another unit's: {differ}. {_REMEDY}")
    expected = record["files"].get(path.name)
    try:
        got = described(path) if isinstance(expected, dict) and expected.get("bytes") == size_of(path) else None
        if got is None or got != expected:
            got = got or {"bytes": size_of(path)}
            raise error(
                f"{path} is not the file that its unit made: {RECORD} beside it expects {_shown(expected)}, got "
                f"{_shown(got)}. It is that of another seed or run, or has changed since. {_REMEDY}"
            )
    except OSError as fault:
        raise error(f"{path} cannot be read: {first_line(fault)}. {_REMEDY}") from fault


def is_own(path: Path) -> bool:
    """Say whether `check_own` lets a file pass."""
    try:
        check_own(path)
    except RunError:
        return False
    return True


def _other_unit(unit: Mapping[str, Any], folder: Path) -> str:
    """Say what of a unit's key is not that of its folder, STRATEGY/seed-S; nothing where the folder has another name."""
    if "seed" not in unit or not folder.name.startswith("seed-"):
        return ""
    places = {"seed": folder.name.removeprefix("seed-"), "strategy": folder.parent.name}
    differ = [key for key, place in places.items() if key in unit and str(unit[key]) != place]
    return f"expected the {differ[0]} {places[differ[0]]}, got {brief(unit[differ[0]])}" if differ else ""


def _shown(described: Any) -> str:
    if not isinstance(described, dict):
        return "no such file"
    text = f"{described.get('bytes'):,} bytes"
    return f"{text} with the SHA-256 {str(described['sha256'])[:12]}" if "sha256" in described else text


def _checksum(record: Json) -> str:
    content = {key: value for key, value in record.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_record(record: Any) -> None:
    check_fields("", record, {"unit": dict, "files": dict, "checksum": str})
    check("checksum", record["checksum"], record["checksum"] == _checksum(record), "that of the content")
