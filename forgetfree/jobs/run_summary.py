"""What results.json says of a run: of each unit, from its unit.json and scores.csv; and of its ledger and its models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.core.regions import distribution, kind_of, layer_of
from forgetfree.errors import ReportError, RunError
from forgetfree.jobs.diagnostics import read_floors
from forgetfree.jobs.predictions import agreement
from forgetfree.jobs.running.unit import Json, Unit
from forgetfree.json_file import read_json
from forgetfree.results.learning_matrix import summarize
from forgetfree.results.scores import SCORES_FILE, read_scores
from forgetfree.results.stored import run_of_scores
from forgetfree.results.unit_folder import MODELS
from forgetfree.results.unit_folder import described as described_file
from forgetfree.tasks import TaskDefinition

if TYPE_CHECKING:
    from forgetfree.ledger import Ledger


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
    told = {task.name: task.metric for task in definitions}
    for unit, record in units:
        if record and record["status"] == "done":
            runs.append(_entry(unit, record["details"], tasks, told))
        elif record:
            failed.append({**unit.key, "matrix": _rows_so_far(unit, tasks, told), "error": record["error"]})
        elif unit.is_begun:
            unfinished.append({**unit.key, "matrix": _rows_so_far(unit, tasks, told)})
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


def models_of(directory: Path, store: Path) -> Json:
    """Return under `MODELS` size and SHA-256 of the fine-tuned models that a unit's fine-tuned.json names in the store."""
    try:
        keys = read_json(directory / "fine-tuned.json", RunError, "")
    except RunError:
        return {}
    files = [store / f"{key}.safetensors" for key in keys.values()]
    return {MODELS: {path.name: described_file(path) for path in files if path.is_file()}}


def _entry(unit: Unit, details: Json, tasks: Sequence[str], metrics: Mapping[str, str]) -> Json:
    """Return an entry of ``runs`` in results.json."""
    return {
        **unit.key,
        "options": details["options"],
        **_scored(unit, tasks, metrics),
        "summary": {},
        "ledger": details["ledger"],
        "kept_bytes": details["kept_bytes"],
        **{name: [held.get(task) for task in tasks] for name, held in details.get("by_task", {}).items()},
        **details["extra"],
        "seconds": details["seconds"],
    }


def _floors(units: Sequence[Unit], tasks: Sequence[str]) -> Json:
    """Return the floors that units measured, also those that failed later: by name and seed, those of each task."""
    found: Json = {}
    for unit in units:
        for name, scores in read_floors(unit.directory).items():
            found.setdefault(name, {})[str(unit.key["seed"])] = [scores.get(task) for task in tasks]
    return found


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


def ledger_summary(ledger: Ledger | None) -> dict[str, Any] | None:
    """Return what results.json says of a ledger."""
    if ledger is None:
        return None
    return {
        "tasks": ledger.tasks,
        "composition": ledger.composition,
        **({"alone": [record.alone for record in ledger.records]} if ledger.composition == "auto" else {}),
        "region_size": [len(record.region) for record in ledger.records],
        "owned_size": [len(record.owned.region) for record in ledger.records],
        "bytes": ledger.size_in_bytes,
        "overlap": ledger.overlap(),
        "places": _places(ledger),
    }


def _places(ledger: Ledger) -> list[Json]:
    """Return how many entries of each layer and kind the space has, and how many of them each task owns."""
    regions = [record.owned.region for record in ledger.records]
    owned = [distribution(region, ledger.space, _place) for region in regions]
    sizes = Counter[tuple[str, str]]()
    for tensor in ledger.space.tensors:
        sizes[_place(tensor.name)] += tensor.size
    return [
        {"layer": layer, "kind": kind, "entries": size, "owned": [counts[layer, kind] for counts in owned]}
        for (layer, kind), size in sizes.items()
    ]


def _place(name: str) -> tuple[str, str]:
    return layer_of(name), kind_of(name)
