"""results.json of a run, made from its units: names and numbers of a model that need not be loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from forgetfree.errors import ReportError, RunError
from forgetfree.jobs.diagnostics import read_floors
from forgetfree.jobs.predictions import agreement
from forgetfree.jobs.unit import Json, Unit
from forgetfree.json_file import read_json
from forgetfree.results.learning_matrix import summarize
from forgetfree.results.scores import SCORES_FILE, read_scores
from forgetfree.results.stored import run_of_scores
from forgetfree.tasks import TaskDefinition

_REMEDY = "Restore it from a copy, or start again with another --out."


def summary_of_units(out: Path, about: Json, units: Sequence[tuple[Unit, Json | None]]) -> Json:
    """Return the content of results.json: ``runs``, ``unfinished`` and ``failed``.

    Runs of one seed are compared with its fine-tuned models.

    Args:
        out: the directory of the run.
        about: how results.json begins.
        units: all in order, and what their unit.json says; ``None`` where they have not ended.
    """
    tasks, definitions = about["tasks"], _definitions(out)
    runs, unfinished, failed = list[Json](), list[Json](), list[Json]()
    metric_of_task = {task.name: task.metric for task in definitions}
    for unit, record in units:
        if record and record["status"] == "done":
            runs.append(_entry(unit, record["details"], tasks, metric_of_task))
        elif record:
            failed.append({**unit.key, "matrix": _rows_so_far(unit, tasks, metric_of_task), "error": record["error"]})
        elif unit.is_begun:
            unfinished.append({**unit.key, "matrix": _rows_so_far(unit, tasks, metric_of_task)})
    about = about | {"floors": about["floors"] | _floors([unit for unit, record in units if record], tasks)}
    references = {run["seed"]: run for run in runs if run["strategy"] == "fine-tune"}
    for run in runs:
        reference = references.get(run["seed"])
        learned = [row[task] for task, row in enumerate(reference["matrix"][1:])] if reference else None
        run["summary"] = summarize(run["matrix"], run["ece"], learned, run["metric"])
        if reference:
            own, its = (out / name / f"seed-{run['seed']}" for name in (run["strategy"], "fine-tune"))
            run["agreement"] = agreement(own, its, definitions, about["data"]["test_rows"])
    return about | {"runs": runs, "unfinished": unfinished, "failed": failed}


def _definitions(out: Path) -> list[TaskDefinition]:
    """Return the tasks as config.json says them."""
    config = read_json(out / "config.json", RunError, _REMEDY, signed=True)
    try:
        return [TaskDefinition.of_fields(each) for each in config["tasks"]]
    except ValueError as error:
        raise RunError(f"{out / 'config.json'}: {error}. {_REMEDY}") from error


def _entry(unit: Unit, details: Json, tasks: Sequence[str], metrics: Mapping[str, str]) -> Json:
    """Return an entry of ``runs`` in results.json."""
    return {
        **unit.key,
        "options": details["options"],
        **_scored(unit, tasks, metrics),
        "summary": {},
        "ledger": details["ledger"],
        "kept_bytes": details["kept_bytes"],
        **{name: [numbers.get(task) for task in tasks] for name, numbers in details.get("by_task", {}).items()},
        **({"held_aside": details["held_aside"]} if "held_aside" in details else {}),
        **details["extra"],
        "seconds": details["seconds"],
    }


def _floors(units: Sequence[Unit], tasks: Sequence[str]) -> Json:
    """Return the floors that units measured, also those that failed later: by name and seed, those of each task."""
    floors: Json = {}
    for unit in units:
        for name, scores in read_floors(unit.directory).items():
            floors.setdefault(name, {})[str(unit.key["seed"])] = [scores.get(task) for task in tasks]
    return floors


def _scored(unit: Unit, tasks: Sequence[str], metrics: Mapping[str, str]) -> Json:
    """Return ``metric``, ``matrix`` and ``ece`` of a unit, as far as it has come."""
    path = unit.directory / SCORES_FILE
    try:
        return run_of_scores(read_scores(path), tasks, metrics)
    except KeyError as error:
        raise ReportError(
            f"{path} lacks scores of a task, expected {', '.join(tasks)}. Go on with --resume."
        ) from error


def _rows_so_far(unit: Unit, tasks: Sequence[str], metrics: Mapping[str, str]) -> list[list[float]]:
    """Return the matrix of a unit that did not end well."""
    try:
        matrix: list[list[float]] = _scored(unit, tasks, metrics)["matrix"]
    except ReportError:
        return []
    return matrix
