"""Results of runs: reading and checking results.json, and bringing several together.

>>> merge([load_results(Path("runs/a")), load_results(Path("runs/b"))])  # doctest: +SKIP
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgetfree.errors import ReportError
from forgetfree.files import StrPath
from forgetfree.pages import NULL

__all__ = ["Comparison", "StrategyRuns", "load_results", "merge", "with_timings"]

SCHEMA = 1
Json = dict[str, Any]
#: What files that do not say it mean, and reports pass over.
USUAL: Json = {"scenario": "task", "evaluated_on": "test"}
#: In STRATEGY/seed-S/: how long each task took to learn.
SECONDS_PER_TASK = "seconds-per-task.json"


@dataclass(frozen=True)
class StrategyRuns:
    """One row of the comparison: the runs of one strategy in one configuration, one per seed.

    Attributes:
        label: the strategy's name, with the options in which it differs from its other rows.
        runs: entries of `runs` in results.json, by rising seed.
    """

    label: str
    runs: tuple[Json, ...]


@dataclass(frozen=True)
class Comparison:
    """Runs that may stand side by side: same tasks, model, readout, shots and data.

    Attributes:
        stream: name of the stream.
        tasks: task names in the order of learning.
        metric: what is measured on each task, `accuracy` or `f1`.
        settings: what the results say of the set-up, for display, e.g. `{"model": "minilm", "shots": 16}`.
        constant: per task, the best score of a constant answer; None where the results do not say it.
        strategies: one entry per row, in the order first seen.
        unfinished: runs cut short, as in results.json, each with its `source`.
        failed: runs that could not go on, likewise.
        sources: the directories read.
    """

    stream: str
    tasks: tuple[str, ...]
    metric: tuple[str, ...]
    settings: Json
    constant: tuple[float, ...] | None
    strategies: tuple[StrategyRuns, ...]
    unfinished: tuple[Json, ...]
    failed: tuple[Json, ...]
    sources: tuple[str, ...]


def load_results(path: StrPath) -> Json:
    """Reads and checks the results of a finished run.

    Args:
        path: a run directory, or the results.json in it.

    Returns:
        The content of results.json, and under `source` the path it was read from.

    Raises:
        ReportError: the file is missing, not JSON, or not of this schema; the message names file and key.
    """
    path = Path(path)
    file = path / "results.json" if path.is_dir() else path
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(
            f"{file} does not exist. A run writes it when its first strategy is done: give the directory of "
            "such a run, or finish this one with `forgetfree run ... --resume`."
        ) from None
    except OSError as error:
        raise ReportError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # JSON and UTF-8 alike
        raise ReportError(
            f"{file} is not valid JSON, perhaps it was cut short ({error}). "
            "Restore it from a copy, or run again with another --out."
        ) from error
    try:
        _validate(results)
    except ReportError as error:
        raise ReportError(f"{file}: {error}") from None
    return {**with_timings(results, file.parent), "source": str(path)}


def with_timings(results: Json, directory: Path) -> Json:
    """The results, with each run's ``seconds_per_task`` where a file beside them holds it."""
    runs = []
    for run in results["runs"]:
        path = directory / run["strategy"] / f"seed-{run['seed']}" / SECONDS_PER_TASK
        try:
            seconds = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # what can be said without it is said
            seconds = None
        right = _is_table([seconds], 1, len(results["tasks"]))
        runs.append(run | {"seconds_per_task": seconds} if right else run)
    return results | {"runs": runs}


def merge(results: Sequence[Json]) -> Comparison:
    """Brings the runs of several directories and seeds together.

    Runs of one strategy stand in one row, unless their `options` differ: then each configuration has its own.

    Args:
        results: what `load_results` returned, at least one.

    Raises:
        ReportError: the results must not be compared, or hold one strategy and seed twice with different
            outcomes; the message names both directories.
    """
    if not results:
        raise ReportError("There are no results to report on. Give at least one run directory.")
    sources = tuple(result.get("source", f"results {number}") for number, result in enumerate(results, start=1))
    first = results[0]
    for result, source in zip(results, sources, strict=True):
        for key in ("tasks", "scenario", "evaluated_on", "model", "readout", "shots", "data"):
            ours, theirs = (each.get(key, USUAL.get(key)) for each in (first, result))
            if key == "model" and first["model"].get("fingerprint"):  # which tells a model wherever it lies
                ours, theirs = ({**each["model"], "name": ""} for each in (first, result))
            _require_same(key, ours, theirs, sources[0], source)
    # strategy → its options as JSON → seed → (run, where it was found)
    found: dict[str, dict[str, dict[int, tuple[Json, str]]]] = {}
    metric: tuple[list[str], str] | None = None
    for result, source in zip(results, sources, strict=True):
        for run in result["runs"]:
            metric = metric or (run["metric"], source)
            _require_same("metric", metric[0], run["metric"], metric[1], source)
            options = json.dumps(run.get("options") or {}, sort_keys=True)
            seeds = found.setdefault(run["strategy"], {}).setdefault(options, {})
            earlier, place = seeds.setdefault(run["seed"], (run, source))
            if _apart_from_seconds(run) != _apart_from_seconds(earlier):
                raise ReportError(
                    f"{run['strategy']} with seed {run['seed']} is in {place} and in {source}, with "
                    "different outcomes. Leave one of them out, or run with another seed."
                )
    return Comparison(
        stream=first["stream"],
        tasks=tuple(first["tasks"]),
        metric=tuple(metric[0]) if metric else ("accuracy",) * len(first["tasks"]),
        settings=_settings(first),
        constant=next((tuple(result["floors"]["constant"]) for result in results if result.get("floors")), None),
        strategies=tuple(
            StrategyRuns(
                label=_label(strategy, json.loads(options), [json.loads(other) for other in variants]),
                runs=tuple(seeds[seed][0] for seed in sorted(seeds)),
            )
            for strategy, variants in found.items()
            for options, seeds in variants.items()
        ),
        unfinished=tuple(
            {**run, "source": source}
            for result, source in zip(results, sources, strict=True)
            for run in result.get("unfinished", [])
        ),
        failed=tuple(
            {**run, "source": source}
            for result, source in zip(results, sources, strict=True)
            for run in result.get("failed", [])
        ),
        sources=sources,
    )


# ---- merging --------------------------------------------------------------------------------------------


def _require_same(key: str, ours: Any, theirs: Any, our_source: str, their_source: str) -> None:
    difference = _first_difference(key, ours, theirs)
    if difference:
        raise ReportError(
            f"{our_source} and {their_source} cannot be compared: {difference}. Report on them separately."
        )


def _first_difference(key: str, ours: Any, theirs: Any) -> str | None:
    """Where two JSON values first differ, as a dotted key and both values; None if they are equal."""
    if ours == theirs:
        return None
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = {**ours, **theirs}
        inner = (_first_difference(f"{key}.{name}", ours.get(name), theirs.get(name)) for name in names)
        return next(filter(None, inner), f"{key} differs")
    return f"{key} is {_brief(ours)} in one and {_brief(theirs)} in the other"


def _apart_from_seconds(run: Json) -> Json:
    return {key: value for key, value in run.items() if key not in ("seconds", "seconds_per_task")}


def _label(strategy: str, options: Json, variants: Sequence[Json]) -> str:
    """The strategy's name, with those of its options that are not the same in all of its variants."""
    keys = dict.fromkeys(key for variant in variants for key in variant)
    telling = [key for key in keys if any(other.get(key) != options.get(key) for other in variants)]
    if not telling:
        return strategy
    return f"{strategy} ({', '.join(f'{key}={options.get(key, NULL)}' for key in telling)})"


def _settings(results: Json) -> Json:
    """What the results say of the set-up, wherever they say it."""
    settings = {"model": results["model"].get("name")}
    for key in ("scenario", "evaluated_on", "readout", "shots", "steps", "sparsity"):
        places = (results, results["data"], results["model"])
        settings[key] = next((place[key] for place in places if place.get(key) is not None), None)
    return {
        key: value
        for key, value in settings.items()
        if isinstance(value, str | int | float) and value != USUAL.get(key)
    }


# ---- the schema of results.json -------------------------------------------------------------------------

_KIND_NAMES = {str: "a string", int: "an integer", list: "a list", dict: "an object"}
_Fields = Mapping[str, type]
_RESULTS: _Fields = {"stream": str, "tasks": list, "model": dict, "data": dict, "runs": list}
_RUN: _Fields = {
    "strategy": str,
    "seed": int,
    "metric": list,
    "matrix": list,
    "ece": list,
    "summary": dict,
    "seconds": dict,
}
_SUMMARY = ("average", "forgetting", "bwt", "fwt", "intransigence", "ece")
_LEDGER: _Fields = {"tasks": list, "region_size": list, "owned_size": list, "bytes": int, "overlap": list}
_FLOORS: _Fields = {"constant": list}
_UNION: _Fields = {"accuracy": list, "ece": list}
_UNFINISHED: _Fields = {"strategy": str, "seed": int, "matrix": list}
_FAILED: _Fields = {"strategy": str, "seed": int, "error": str}


def _validate(results: Any) -> None:
    """Checks everything that a report reads; keys that it does not know are left alone."""
    _check("the content", results, isinstance(results, dict), "an object")
    if results.get("schema") != SCHEMA:
        raise ReportError(
            f"schema must be {SCHEMA}, got {_brief(results.get('schema'))}. Another version of forgetfree "
            "wrote it: report with that one, or repeat the run with this one."
        )
    _check_fields("", results, _RESULTS)
    tasks = results["tasks"]
    named = all(isinstance(task, str) for task in tasks) and 0 < len(tasks) == len(set(tasks))
    _check("tasks", tasks, named, "a list of different task names")
    if results.get("floors") is not None:
        _check_fields("floors", results["floors"], _FLOORS)
        constant = results["floors"]["constant"]
        right = _is_table([constant], 1, len(tasks), most=1.0)
        _check("floors.constant", constant, right, f"{len(tasks)} numbers in [0, 1]")
    for number, run in enumerate(results["runs"]):
        _validate_run(f"runs[{number}]", run, tasks)
    for key, fields in (("unfinished", _UNFINISHED), ("failed", _FAILED)):
        cut_short = results.get(key, [])
        _check(key, cut_short, isinstance(cut_short, list), "a list")
        for number, run in enumerate(cut_short):
            _check_fields(f"{key}[{number}]", run, fields)


def _validate_run(key: str, run: Any, tasks: list[str]) -> None:
    n = len(tasks)
    _check_fields(key, run, _RUN)
    named = len(run["metric"]) == n and all(isinstance(name, str) for name in run["metric"])
    _check(f"{key}.metric", run["metric"], named, f"{n} names of metrics")
    for name in ("matrix", "ece"):
        right = _is_table(run[name], n + 1, n, most=1.0)
        _check(f"{key}.{name}", run[name], right, f"{n + 1} rows of {n} numbers in [0, 1]")
    for name in _SUMMARY:
        value = run["summary"].get(name, "nothing")
        _check(f"{key}.summary.{name}", value, value is None or _is_number(value), "a number or null")
    for phase, seconds in run["seconds"].items():
        _check(f"{key}.seconds.{phase}", seconds, _is_number(seconds, least=0.0), "a number of seconds")
    if run.get("options") is not None:
        _check(f"{key}.options", run["options"], isinstance(run["options"], dict), "an object")
    if "ledger" not in run:
        raise ReportError(f"{key}.ledger is missing. It is null for a strategy that keeps none.")
    if run["ledger"] is not None:
        _validate_ledger(f"{key}.ledger", run["ledger"], tasks)
    for name in ("kept_bytes", "seconds_per_task"):
        if run.get(name) is not None:
            _check(f"{key}.{name}", run[name], _is_table([run[name]], 1, n), f"{n} numbers of at least 0")
    if run.get("union") is not None:
        _check_fields(f"{key}.union", run["union"], _UNION)
        for name in _UNION:
            values = run["union"][name]
            right = _is_table([values], 1, n, most=1.0)
            _check(f"{key}.union.{name}", values, right, f"{n} numbers in [0, 1]")


def _validate_ledger(key: str, ledger: Any, tasks: list[str]) -> None:
    n = len(tasks)
    _check_fields(key, ledger, _LEDGER)
    _check(f"{key}.tasks", ledger["tasks"], ledger["tasks"] == tasks, f"the tasks of the stream, {tasks}")
    _check(f"{key}.bytes", ledger["bytes"], ledger["bytes"] >= 0, "at least 0")
    for name in ("region_size", "owned_size"):
        _check(f"{key}.{name}", ledger[name], _is_table([ledger[name]], 1, n), f"{n} sizes")
    overlap = ledger["overlap"]
    _check(f"{key}.overlap", overlap, _is_table(overlap, n, n), f"{n} rows of {n} numbers")


def _check_fields(key: str, value: Any, fields: _Fields) -> None:
    _check(key, value, isinstance(value, dict), "an object")
    for name, kind in fields.items():
        inner = f"{key}.{name}" if key else name
        if name not in value:
            raise ReportError(f"{inner} is missing. It must be {_KIND_NAMES[kind]}.")
        # In Python, unlike in JSON, true and false are integers.
        right = isinstance(value[name], kind) and not isinstance(value[name], bool)
        _check(inner, value[name], right, _KIND_NAMES[kind])


def _check(key: str, value: Any, right: bool, expected: str) -> None:
    if not right:
        raise ReportError(f"{key} must be {expected}, got {_brief(value)}.")


def _is_table(value: Any, rows: int, columns: int, most: float = math.inf) -> bool:
    """Whether the JSON value has that shape and holds numbers in [0, most]."""
    return (
        isinstance(value, list)
        and len(value) == rows
        and all(isinstance(row, list) and len(row) == columns for row in value)
        and all(_is_number(number, 0.0, most) for row in value for number in row)
    )


def _is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and least <= value <= most


def _brief(value: Any) -> str:
    return reprlib.repr(value)
