"""The folder of a run as it is read: its files, and which of them must fit one another. `jobs/run_directory.py` writes it.

config.json says what was asked for. Each unit has a folder ``STRATEGY/seed-S`` of its own, in which unit.json is written last:
size and SHA-256 of each file beside it, which every reader compares, and the SHA-256 of the config.json that it was made under,
of each version that the file had since then. How the unit ended stands in outcome.json, its scores in scores.csv, one measured
number a row:

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
#: Of a run, and of each unit: what was asked for, the files, how the unit ended, its scores, and its losses.
CONFIG, RECORD, OUTCOME, SCORES_FILE, HISTORY = (
    "config.json",
    "unit.json",
    "outcome.json",
    "scores.csv",
    "history.jsonl",
)
#: Where a unit stands, until it has ended.
CHECKPOINT = ".checkpoint"
#: What tells tasks apart, of a unit that does so by features.
FEATURES = "task-features.safetensors"
#: Which task owns which entry, and its value.
LEDGER = "ledger.safetensors"
#: The last answers on every task's test rows.
PREDICTIONS = "predictions.safetensors"
#: In the details of a unit: size and SHA-256 of the models that it answers with, where they lie outside its folder.
MODELS = "models"
_REMEDY = "Restore it from a copy, or run the stream again."


# ---- config.json ----------------------------------------------------------------------------------------


def load_run(directory: Path, remedy: str = "Give the directory that `forgetfree run --out` wrote.") -> Json:
    """Return the config.json of a run directory, checked.

    Args:
        directory: what ``forgetfree run --out`` wrote.
        remedy: the last sentence of an error.

    Raises:
        RunError: it is missing or damaged, or not the one that the units of the run were made under; damaged records of
            units do not count.
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
                f"{directory / CONFIG} is not the one that {path.parent} was made under: it has changed since, or is another "
                "run's. Undo that, or restore it from a copy; other options are another run, with another --out."
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
            raise ValueError(f"tasks[{number}]: {'; '.join(unknown)}. Install the package that has it")


# ---- unit.json ------------------------------------------------------------------------------------------


def size_and_sha256(path: Path) -> Json:
    """Return size and SHA-256 of a file."""
    return {"bytes": size_of(path), "sha256": sha256(path)}


def described_files(directory: Path) -> Json:
    """Return size and SHA-256 of each file of a unit by its name, but of unit.json, temporary files and checkpoints."""
    paths = {path.relative_to(directory): path for path in sorted(directory.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): size_and_sha256(path)
        for name, path in paths.items()
        if name.parts != (RECORD,) and not any(part.startswith(".") for part in name.parts)
    }


def read_record(directory: Path, remedy: str = _REMEDY) -> Json:
    """Return what unit.json and outcome.json say of a unit.

    Raises:
        RunError: one is missing or damaged.
    """
    record = read_unit_json(directory, remedy)
    check_described(directory / OUTCOME, record)
    outcome: Json = read_json(directory / OUTCOME, RunError, remedy, _check_outcome)
    return {**outcome, **record}


def read_unit_json(directory: Path, remedy: str = _REMEDY) -> Json:
    """Return what unit.json alone says; errors as those of `read_record`."""
    record: Json = read_json(directory / RECORD, RunError, remedy, _check_record)
    return record


def check_own(path: Path, unit: Path | None = None) -> None:
    """Check that a file is the one that the unit made in whose folder it lies.

    A file passes where no unit.json lies beside it: its unit has not ended, or somebody took it out of its run.

    Args:
        path: the file.
        unit: the folder of the unit, if the file lies elsewhere: a fine-tuned model, which several units may use.

    Raises:
        RunError: the file is of another seed or run, has changed since, or nothing can be compared because unit.json is
            damaged or another unit's.
    """
    folder = unit or path.absolute().parent
    if not (file := folder / RECORD).exists():
        return
    record = read_record(folder)
    its, place = record["unit"], f"{folder.parent.name}/{folder.name}"
    named = f"{its.get('strategy', folder.parent.name)}/seed-{its.get('seed')}"
    if folder.name.startswith("seed-") and "seed" in its and named != place:
        raise RunError(f"{file} is another unit's: expected {place}, got {named}. {_REMEDY}")
    if unit is None:
        check_described(path, record)
    elif path.name in (models := record["details"].get(MODELS, {})):
        _compare(path, models[path.name], file)


def check_described(path: Path, record: Json) -> None:
    """Raise ``RunError`` unless a file in a unit's folder has the size and SHA-256 that the unit's record says."""
    _compare(path, record["files"].get(path.name), path.with_name(RECORD))


def _compare(path: Path, expected: Any, record: Path) -> None:
    """Raise ``RunError`` unless a file has the size and SHA-256 that a unit.json says."""
    try:
        got = size_and_sha256(path) if isinstance(expected, dict) and expected.get("bytes") == size_of(path) else None
        if got is None or got != expected:
            got = got or {"bytes": size_of(path)}
            where = f"{record.name} beside it" if record.parent == path.parent else record
            raise RunError(
                f"{path} is not the file that its unit made: {where} expects {_in_words(expected)}, got "
                f"{_in_words(got)}. It is that of another seed or run, or has changed since. {_REMEDY}"
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


def is_header(line: str) -> bool:
    """Say whether a line before a table of scores tells, as JSON, what is known beside them."""
    return line.startswith("# ")


def read_scores(path: Path, remedy: str = "Restore it from a copy, or go on with --resume.") -> list[Score]:
    """Read a table of scores; what stands before it, see `is_header`, is left aside.

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
                got = brief(", ".join(header) or "none", 200)
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
#: How a file names the data of the environment variable, which lie elsewhere on every machine.
_ENVIRONMENT = f"${DATA_VARIABLE}"


def with_places(section: Mapping[str, Any], directory: Path, change: Callable[[str, Path], str]) -> dict[str, Any]:
    """Return options with their places as ``change``, which is `portable` or `located`, names them."""
    changed = dict(section)
    for key in _PLACES:
        if isinstance(place := section.get(key), str):
            changed[key] = change(place, directory)
        elif place:  # several
            changed[key] = [change(each, directory) for each in place]
    return changed


def portable(name: str, directory: Path) -> str:
    """The name of a model or of data in a file in ``directory``, so that it says nothing of this machine that nobody typed.

    What is typed relative to the working directory is written relative to ``directory``, if both have a folder in common:
    then they are found from everywhere, and may be moved together. Anything else is written as it was typed.
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
    """The model or data that a file in ``directory`` names, as the command line names it from here: undoes `portable`."""
    if name == _ENVIRONMENT:
        return os.environ.get(DATA_VARIABLE) or name
    if name.startswith(os.curdir):
        path = os.path.relpath(os.path.join(os.path.realpath(directory), name))
        return path if os.path.exists(path) or not os.path.exists(name) else name
    return name
