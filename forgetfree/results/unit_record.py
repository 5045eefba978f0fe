"""unit.json: how a unit ended, with the size and SHA-256 of each file beside it, by which every reader compares them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forgetfree.display import brief
from forgetfree.errors import ForgetfreeError, ReportError, RunError, first_line
from forgetfree.files import size_of
from forgetfree.json_file import check_fields, check_signature, read_json

Json = dict[str, Any]
RECORD, CONFIG = "unit.json", "config.json"
#: In results.json: the checksums of config.json and of the units.
MADE_OF = "made_of"
#: In the details of a unit: size and SHA-256 of the models that it answers with, where they lie outside its folder.
MODELS = "models"
_REMEDY = "Restore it from a copy, or run the stream again."


def described(path: Path) -> Json:
    """Return size and SHA-256 of a file."""
    return {"bytes": size_of(path), "sha256": sha256(path)}


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_record(directory: Path, error: type[ForgetfreeError] = RunError, remedy: str = _REMEDY) -> Json:
    """Return the unit.json of a folder.

    Raises:
        ForgetfreeError: ``error``: it is missing or damaged.
    """
    record: Json = read_json(directory / RECORD, error, remedy, _check_record)
    return record


def signatures(directory: Path, units: Iterable[str]) -> Json:
    """Return what results say that they are made of: config.json and each unit.json that is there, with its checksum."""
    found = {path: _signature(directory / path) for path in (CONFIG, *(f"{unit}/{RECORD}" for unit in units))}
    return {MADE_OF: {path: checksum for path, checksum in found.items() if checksum}}


def check_made_of(directory: Path, made: Any) -> None:
    """Check that results are those of config.json and the units beside them, as far as these are there and sound.

    Args:
        directory: of the results.
        made: what `signatures` returned under `MADE_OF`; nothing where an older version wrote the results.

    Raises:
        ReportError: they are those of others.
    """
    for path, checksum in made.items() if isinstance(made, dict) else ():
        if _signature(directory / path) not in (None, checksum):
            raise ReportError(
                f"{directory / 'results.json'} is not made of the {path} beside it, but of another. Restore both from one "
                "copy, or go on with --resume, which makes results.json again."
            )


def _signature(path: Path) -> str | None:
    """Return the checksum that a file says; ``None`` where it is missing or damaged, or says none."""
    try:
        return str(read_json(path, RunError, "", check_signature)["checksum"])
    except (RunError, LookupError, TypeError):
        return None


def check_own(path: Path, error: type[ForgetfreeError] = RunError, unit: Path | None = None) -> None:
    """Check that a file is the one that the unit made in whose folder it lies.

    A file passes where no unit.json lies beside it: its unit has not ended, or somebody took it out of its run. A graft beside
    the results of ``graft`` is compared with these.

    Args:
        path: the file.
        error: the error to raise.
        unit: the folder of the unit, if the file lies elsewhere: a fine-tuned model, which several units may use.

    Raises:
        ForgetfreeError: ``error``: the file is of another seed or run, has changed since, or nothing can be compared because
            unit.json is damaged or another unit's.
    """
    teller, expected = _told_of(path, error, unit)
    if teller is None:
        return
    try:
        got = described(path) if isinstance(expected, dict) and expected.get("bytes") == size_of(path) else None
        if got is None or got != expected:
            got = got or {"bytes": size_of(path)}
            where = f"{teller.name} beside it" if teller.parent == path.absolute().parent else teller
            raise error(
                f"{path} is not the file that its unit made: {where} expects {_shown(expected)}, got {_shown(got)}. It is that "
                f"of another seed or run, or has changed since. {_REMEDY}"
            )
    except OSError as fault:
        raise error(f"{path} cannot be read: {first_line(fault)}. {_REMEDY}") from fault


def _told_of(path: Path, error: type[ForgetfreeError], unit: Path | None) -> tuple[Path | None, Any]:
    """Return which file tells size and SHA-256 of another, and these; ``None`` where none does."""
    folder = unit or path.absolute().parent
    teller = folder / RECORD
    if not teller.exists():
        held = _grafts(folder / "results.json")
        return (folder / "results.json", held[path.name]) if path.name in held else (None, None)
    record = read_record(folder, error)
    if differ := _other_unit(record["unit"], folder):
        raise error(f"{teller} is another unit's: {differ}. {_REMEDY}")
    if unit is None:
        return teller, record["files"].get(path.name)
    models = record.get("details", {}).get(MODELS, {})
    return (teller, models[path.name]) if path.name in models else (None, None)


def _grafts(results: Path) -> Json:
    """Return size and SHA-256 of the grafts beside the results of ``graft``; nothing where there are none that are sound."""
    if not results.exists():
        return {}
    try:
        held = read_json(results, ReportError, "", signed=True)["grafts"]
        return {each["file"]: {key: each[key] for key in ("bytes", "sha256")} for each in held}
    except (ReportError, LookupError, TypeError):
        return {}


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


def _check_record(record: Any) -> None:
    check_fields("", record, {"unit": dict, "files": dict, "checksum": str})
    check_signature(record)
