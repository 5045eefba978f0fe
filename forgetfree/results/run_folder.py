"""Reads the directory of a run and checks that its files belong together. `jobs/run_directory.py` writes it.

config.json describes the run. Each unit has a folder ``STRATEGY/seed-S``, where unit.json is written last: it has the size and
SHA-256 of every file in the folder, which readers compare, and the SHA-256 of the config.json of the run and of its later
versions. outcome.json describes how the unit ended. scores.csv has one measured number per row:

strategy,seed,task,after,metric,value,rows
grafting-continual,0,qnli,1,accuracy,0.8125,400
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from itertools import dropwhile
from pathlib import Path
from typing import Any

from forgetfree import registry
from forgetfree.data.sources import DATA_VARIABLE
from forgetfree.display import brief
from forgetfree.errors import RunError, first_line
from forgetfree.files import sha256, size_of, write_atomically
from forgetfree.json_file import check, check_fields, read_json
from forgetfree.tasks import TaskDefinition

Json = dict[str, Any]
#: config.json describes a run; the others belong to a unit: its files, how it ended, its scores and its losses.
CONFIG, RECORD, OUTCOME, SCORES_FILE, HISTORY = (
    "config.json",
    "unit.json",
    "outcome.json",
    "scores.csv",
    "history.jsonl",
)
#: The folder of checkpoints, until the unit has ended.
CHECKPOINT = ".checkpoint"
#: Features for task inference, if the unit infers tasks.
FEATURES = "task-features.safetensors"
#: The ledger.
LEDGER = "ledger.safetensors"
#: The last answers on every task's test rows.
PREDICTIONS = "predictions.safetensors"
#: Key in the details of a unit: size and SHA-256 of its models outside the folder.
MODELS = "models"
_REMEDY = "Restore it from a copy, or run the stream again."


# ---- config.json ----------------------------------------------------------------------------------------


def load_run(directory: Path, remedy: str = "Give the directory that `forgetfree run --out` wrote.") -> Json:
    """Return the checked content of config.json.

    Args:
        directory: a run directory.
        remedy: the last sentence of an error.

    Raises:
        RunError: the file is missing or damaged, or a unit was made under another config.json; damaged records of units
            are skipped.
    """
    config: Json = read_json(directory / CONFIG, RunError, remedy, _check_config)
    digest = sha256(directory / CONFIG)
    for path in sorted(directory.glob(f"*/seed-*/{RECORD}")):
        try:
            known = read_unit_json(path.parent)["config"]
        except RunError:
            continue
        if known and digest not in known:
            raise RunError(
                f"{directory / CONFIG} is not the configuration that {path.parent} was made with: it was changed, or "
                "belongs to another run. Undo the change, or restore it from a copy; to use other options, start "
                "another run with another --out."
            )
    return config


def _check_config(config: Any) -> None:
    objects = ("run", "machine", "model", "data", "about", "units", "versions")
    check_fields("", config, {**dict.fromkeys(objects, dict), "tasks": list})
    check_fields("model", config["model"], {"name": str, "readout": str})
    check_fields("about", config["about"], {"data": dict})
    check_fields("run", config["run"], {"set": dict, "strategy": list})
    for task, rows in config["data"].items():
        check(f"data.{task}", rows, isinstance(rows, dict), "an object")
    for place, unit in config["units"].items():
        check_fields(f"units.{place}", unit, {"strategy": str, "seed": int})
    for number, fields_ in enumerate(config["tasks"]):
        try:
            task = TaskDefinition.of_fields(fields_)
            registry.check_stored(task)
        except ValueError as error:
            raise ValueError(f"tasks[{number}]: {error}") from error
        if unknown := registry.unknown_names(task):
            raise ValueError(f"tasks[{number}]: {'; '.join(unknown)}. Install the package that provides it")


# ---- unit.json ------------------------------------------------------------------------------------------


def size_and_sha256(path: Path) -> Json:
    """Return size and SHA-256 of a file."""
    return {"bytes": size_of(path), "sha256": sha256(path)}


def described_files(directory: Path) -> Json:
    """Return size and SHA-256 of each file of a unit by name, without unit.json, temporary files and checkpoints."""
    paths = {path.relative_to(directory): path for path in sorted(directory.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): size_and_sha256(path)
        for name, path in paths.items()
        if name.parts != (RECORD,) and not any(part.startswith(".") for part in name.parts)
    }


def read_record(directory: Path, remedy: str = _REMEDY) -> Json:
    """Return the content of unit.json and outcome.json together.

    Raises:
        RunError: one of the files is missing or damaged.
    """
    record = read_unit_json(directory, remedy)
    check_described(directory / OUTCOME, record)
    outcome: Json = read_json(directory / OUTCOME, RunError, remedy, _check_outcome)
    return {**outcome, **record}


def read_unit_json(directory: Path, remedy: str = _REMEDY) -> Json:
    """Return the content of unit.json; see `read_record` for errors."""
    record: Json = read_json(directory / RECORD, RunError, remedy, _check_record)
    return record


def check_own(path: Path, unit: Path | None = None) -> None:
    """Check that a file is the one that its unit wrote.

    A file without a unit.json next to it passes: its unit has not ended, or the file was copied out of its run.

    Args:
        path: the file.
        unit: the folder of the unit, for a file outside of it: a fine-tuned model, which units may share.

    Raises:
        RunError: the file belongs to another seed or run or has changed, or unit.json is damaged or belongs to another unit.
    """
    folder = unit or path.absolute().parent
    if not (file := folder / RECORD).exists():
        return
    record = read_record(folder)
    its, place = record["unit"], f"{folder.parent.name}/{folder.name}"
    named = f"{its.get('strategy', folder.parent.name)}/seed-{its.get('seed')}"
    if folder.name.startswith("seed-") and "seed" in its and named != place:
        raise RunError(f"{file} belongs to another unit: expected {place}, got {named}. {_REMEDY}")
    if unit is None:
        check_described(path, record)
    elif path.name in (models := record["details"].get(MODELS, {})):
        _compare(path, models[path.name], file)


def check_described(path: Path, record: Json) -> None:
    """Raise ``RunError`` unless a file in a unit's folder has the size and SHA-256 in the unit's record."""
    _compare(path, record["files"].get(path.name), path.with_name(RECORD))


def _compare(path: Path, expected: Any, record: Path) -> None:
    """Raise ``RunError`` unless a file has the expected size and SHA-256, which come from the file ``record``."""
    try:
        got = size_and_sha256(path) if isinstance(expected, dict) and expected.get("bytes") == size_of(path) else None
        if got is None or got != expected:
            got = got or {"bytes": size_of(path)}
            where = f"{record.name} beside it" if record.parent == path.parent else record
            raise RunError(
                f"{path} is not the file that its unit wrote: {where} expects {_in_words(expected)}, got "
                f"{_in_words(got)}. It belongs to another seed or run, or was changed. {_REMEDY}"
            )
    except OSError as fault:
        raise RunError(f"{path} cannot be read: {first_line(fault)}. {_REMEDY}") from fault


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


# ---- scores.csv -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """One measured number.

    Attributes:
        strategy: the strategy of the unit.
        seed: the seed of the unit.
        task: the task whose rows were scored.
        after: the number of tasks learned before; 0 is before training.
        metric: ``accuracy``, ``f1``, ``ece``, ``agreement`` and so on.
        value: the number, within the bounds of its metric.
        rows: the number of rows scored; 0 if unknown.
    """

    strategy: str
    seed: int
    task: str
    after: int
    metric: str
    value: float
    rows: int


#: The columns of every table of scores.
COLUMNS = tuple(each.name for each in fields(Score))


def write_scores(path: Path, scores: Iterable[Score]) -> None:
    """Write scores as a CSV file; values keep every bit."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerows(map(astuple, scores))
    write_atomically(path, text.getvalue())


def is_header(line: str) -> bool:
    """Return whether a line belongs to the header of a table of scores: JSON about the run or about one unit."""
    return line.startswith("# ")


def read_scores(path: Path, remedy: str = "Restore it from a copy, or continue with --resume.") -> list[Score]:
    """Read a table of scores without its header, see `is_header`.

    Args:
        path: the file.
        remedy: the last sentence of an error.

    Raises:
        RunError: the file is missing or damaged.
    """
    try:
        size_of(path)
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(dropwhile(is_header, file), strict=True)) or [[]]
            if tuple(header) != COLUMNS:
                got = brief(", ".join(header), 200) if header else "none"
                raise ValueError(f"its columns must be {', '.join(COLUMNS)}, got {got}")
            scores = [
                Score(strategy, int(seed), task, int(after), metric, float(value), int(count))
                for strategy, seed, task, after, metric, value, count in rows
            ]
            for each in scores:
                if not math.isfinite(each.value) or each.after < 0 or each.rows < 0:
                    raise ValueError(f"expected finite numbers, after and rows of at least 0, got {brief(each, 200)}")
            return scores
    except (OSError, ValueError, csv.Error) as error:
        raise RunError(f"{path} is not a readable table of scores ({first_line(error)}). {remedy}") from error


# ---- places in config.json ------------------------------------------------------------------------------

#: Options that may name a file or a directory.
_PLACES = ("model", "data", "fine_tuned", "held_out")
#: The name in files of the data directory from the environment variable, which differs between machines.
_ENVIRONMENT = f"${DATA_VARIABLE}"


def with_places(section: Mapping[str, Any], directory: Path, change: Callable[[str, Path], str]) -> dict[str, Any]:
    """Return options with every path replaced by ``change(path, directory)``: `portable` or `located`."""
    changed = dict(section)
    for key in _PLACES:
        if isinstance(place := section.get(key), str):
            changed[key] = change(place, directory)
        elif place:  # several
            changed[key] = [change(each, directory) for each in place]
    return changed


def portable(name: str, directory: Path) -> str:
    """Return the name of a model or of data as a file in ``directory`` stores it, without paths that the user did not type.

    A path relative to the working directory becomes relative to ``directory`` if both share a folder: it can then be found
    from everywhere, and both can be moved together. Anything else is stored as it was typed.
    """
    if name in ("minilm", "hub", *registry.SOURCES):
        return name
    if name == os.environ.get(DATA_VARIABLE):
        return _ENVIRONMENT
    if os.path.isabs(name) or not os.path.exists(name):
        return name
    place, start = os.path.abspath(name), os.path.realpath(directory)
    if os.path.commonpath((place, start)) == os.path.abspath(os.sep):
        return name
    path = os.path.relpath(place, start)
    return path if path.startswith(os.curdir) else os.path.join(os.curdir, path)


def located(name: str, directory: Path) -> str:
    """Return a stored name as the command line would give it here: the inverse of `portable`."""
    if name == _ENVIRONMENT:
        return os.environ.get(DATA_VARIABLE) or name
    if name.startswith(os.curdir):
        path = os.path.relpath(os.path.join(os.path.realpath(directory), name))
        return path if os.path.exists(path) or not os.path.exists(name) else name
    return name
