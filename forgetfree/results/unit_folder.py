"""The folder of a unit: its files, and unit.json, which says size and SHA-256 of each; every reader of a file compares it.

unit.json says, too, which config.json the unit was made under: the SHA-256 of each version that the file had since then.
How the unit ended stands in outcome.json, one of its files; its scores in scores.csv, one measured number a row:

strategy,seed,task,after,metric,value,rows
grafting-continual,0,qnli,1,accuracy,0.8125,400
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from forgetfree.display import brief
from forgetfree.errors import ForgetfreeError, ReportError, RunError, first_line
from forgetfree.files import sha256, size_of, write_atomically
from forgetfree.json_file import check_fields, read_json

Json = dict[str, Any]
RECORD, OUTCOME, CONFIG = "unit.json", "outcome.json", "config.json"
#: The losses of a unit.
HISTORY = "history.jsonl"
#: What tells tasks apart, of a unit that does so by features.
FEATURES = "task-features.safetensors"
#: Which task owns which entry, and its value.
LEDGER = "ledger.safetensors"
#: The last answers on every task's test rows.
PREDICTIONS = "predictions.safetensors"
#: In the details of a unit: size and SHA-256 of the models that it answers with, where they lie outside its folder.
MODELS = "models"
_REMEDY = "Restore it from a copy, or run the stream again."


# ---- unit.json ------------------------------------------------------------------------------------------


def size_and_sha256(path: Path) -> Json:
    """Return size and SHA-256 of a file."""
    return {"bytes": size_of(path), "sha256": sha256(path)}


def described_files(directory: Path) -> Json:
    """Return size and SHA-256 of each of these files."""
    return {name: size_and_sha256(path) for name, path in files_of(directory).items()}


def files_of(directory: Path) -> dict[str, Path]:
    """Return the paths of a unit's files by name, but of unit.json, temporary files and checkpoints."""
    files = {path.relative_to(directory): path for path in sorted(directory.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path
        for name, path in files.items()
        if name.parts != (RECORD,) and not any(part.startswith(".") for part in name.parts)
    }


def read_record(directory: Path, error: type[ForgetfreeError] = RunError, remedy: str = _REMEDY) -> Json:
    """Return what unit.json and outcome.json say of a unit.

    Raises:
        ForgetfreeError: ``error``: one is missing or damaged.
    """
    record = read_unit_json(directory, error, remedy)
    _compare(directory / OUTCOME, record["files"].get(OUTCOME), directory / RECORD, error)
    outcome: Json = read_json(directory / OUTCOME, error, remedy, _check_outcome)
    return {**outcome, **record}


def read_unit_json(directory: Path, error: type[ForgetfreeError] = RunError, remedy: str = _REMEDY) -> Json:
    """Return what unit.json alone says; errors as those of `read_record`."""
    record: Json = read_json(directory / RECORD, error, remedy, _check_record)
    return record


def check_config(out: Path, error: type[ForgetfreeError] = RunError) -> None:
    """Raise ``error`` where config.json is not the one that a unit was made under; damaged records do not count."""
    digest = sha256(out / CONFIG)
    for path in sorted(out.glob(f"*/seed-*/{RECORD}")):
        try:
            known = read_unit_json(path.parent, error)["config"]
        except error:
            continue
        if known and digest not in known:
            raise error(
                f"{out / CONFIG} is not the one that {path.parent} was made under: it has changed since, or is another run's. "
                "Undo that, or restore it from a copy; other options are another run, with another --out."
            )


def check_own(path: Path, error: type[ForgetfreeError] = RunError, unit: Path | None = None) -> None:
    """Check that a file is the one that the unit made in whose folder it lies.

    A file passes where no unit.json lies beside it: its unit has not ended, or somebody took it out of its run.

    Args:
        path: the file.
        error: the error to raise.
        unit: the folder of the unit, if the file lies elsewhere: a fine-tuned model, which several units may use.

    Raises:
        ForgetfreeError: ``error``: the file is of another seed or run, has changed since, or nothing can be compared because
            unit.json is damaged or another unit's.
    """
    record, expected = _expected(path, error, unit)
    if record is not None:
        _compare(path, expected, record, error)


def _compare(path: Path, expected: Any, record: Path, error: type[ForgetfreeError]) -> None:
    """Raise ``error`` unless a file has the size and SHA-256 that a unit.json says."""
    try:
        got = size_and_sha256(path) if isinstance(expected, dict) and expected.get("bytes") == size_of(path) else None
        if got is None or got != expected:
            got = got or {"bytes": size_of(path)}
            where = f"{record.name} beside it" if record.parent == path.absolute().parent else record
            raise error(
                f"{path} is not the file that its unit made: {where} expects {_in_words(expected)}, got "
                f"{_in_words(got)}. It is that of another seed or run, or has changed since. {_REMEDY}"
            )
    except OSError as fault:
        raise error(f"{path} cannot be read: {first_line(fault)}. {_REMEDY}") from fault


def _expected(path: Path, error: type[ForgetfreeError], unit: Path | None) -> tuple[Path | None, Any]:
    """Return which file says size and SHA-256 of another, and these; ``None`` where none does."""
    folder = unit or path.absolute().parent
    file = folder / RECORD
    if not file.exists():
        return None, None
    record = read_record(folder, error)
    its, place = record["unit"], f"{folder.parent.name}/{folder.name}"
    named = f"{its.get('strategy', folder.parent.name)}/seed-{its.get('seed')}"
    if folder.name.startswith("seed-") and "seed" in its and named != place:
        raise error(f"{file} is another unit's: expected {place}, got {named}. {_REMEDY}")
    if unit is None:
        return file, record["files"].get(path.name)
    models = record["details"].get(MODELS, {})
    return (file, models[path.name]) if path.name in models else (None, None)


def _in_words(file: Any) -> str:
    if not isinstance(file, dict):
        return "no such file"
    text = f"{file.get('bytes'):,} bytes"
    return f"{text} with the SHA-256 {str(file['sha256'])[:12]}" if "sha256" in file else text


def _check_record(record: Any) -> None:
    check_fields("", record, {"unit": dict, "files": dict, "config": list})
    for name, file in record["files"].items():
        check_fields(f"files.{name}", file, {"bytes": int, "sha256": str})


def _check_outcome(outcome: Any) -> None:
    check_fields("", outcome, {"status": str, "details": dict, "floors": dict})


#: What the table of one unit is called, in the unit's directory.
SCORES_FILE = "scores.csv"


@dataclass(frozen=True)
class Score:
    """One measured number.

    Attributes:
        strategy: of the unit.
        seed: of the unit.
        task: on whose rows.
        after: how many tasks were learned before; 0 is before training.
        metric: such as ``accuracy``, ``f1``, ``ece`` or ``agreement``.
        value: the number, within the bounds of its metric.
        rows: how many rows were scored; 0 where it is not known.
    """

    strategy: str
    seed: int
    task: str
    after: int
    metric: str
    value: float
    rows: int


#: Of every table of scores.
COLUMNS = tuple(each.name for each in fields(Score))


def write_scores(path: Path, scores: Iterable[Score]) -> None:
    """Write a table of scores as a CSV file; values keep every bit."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerows(map(astuple, scores))
    write_atomically(path, text.getvalue())


def read_scores(path: Path) -> list[Score]:
    """Read a table of scores.

    Raises:
        ReportError: the file is missing or damaged.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file, strict=True)) or [[]]
            if tuple(header) != COLUMNS:
                raise ValueError(f"its columns must be {', '.join(COLUMNS)}, got {', '.join(header) or 'none'}")
            scores = [
                Score(strategy, int(seed), task, int(after), metric, float(value), int(count))
                for strategy, seed, task, after, metric, value, count in rows
            ]
            for each in scores:
                if not math.isfinite(each.value) or each.after < 0 or each.rows < 0:
                    raise ValueError(f"expected finite numbers, after and rows of at least 0, got {brief(each, 200)}")
            return scores
    except (OSError, ValueError, csv.Error) as error:
        raise ReportError(
            f"{path} is not a readable table of scores ({first_line(error)}). Restore it from a copy, or go on with --resume."
        ) from error
