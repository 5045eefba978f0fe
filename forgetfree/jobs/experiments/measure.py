"""An experiment measured unit by unit; what is done is kept, and taken up."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree import __version__
from forgetfree.data.rows import TaskRows
from forgetfree.errors import DataError, UsageError
from forgetfree.files import write_json
from forgetfree.jobs.environment import make_directory, refuse_held, tell_shared_rows
from forgetfree.jobs.experiments.experiment import Experiment, load_experiment
from forgetfree.jobs.experiments.laboratory import Laboratory
from forgetfree.jobs.experiments.preset import Preset
from forgetfree.jobs.experiments.report import load_experiment_results, rows_of, write_outcome
from forgetfree.jobs.experiments.rows import Row, Unit
from forgetfree.jobs.experiments.workers import measure_side_by_side
from forgetfree.models.loading import LoadedModel, config_of, load_model
from forgetfree.models.state import StateStore
from forgetfree.results.schema import SCHEMA

if TYPE_CHECKING:
    from forgetfree.learning.monitor import Monitor

#: Lists of a preset, and the part of a unit that each gives: a longer list is more units of the same kind.
LISTS = {"tasks": "task", "shots": "shots", "seeds": "seed"}


def run_experiment(
    name: str,
    preset: Preset,
    *,
    preset_name: str,
    data: str,
    device: str,
    out: Path,
    cache: Path,
    monitor: Callable[[str], Monitor],
    resume: bool = False,
    jobs: int = 1,
    threads: int | None = None,
) -> dict[str, Any]:
    """Measure all units, keeping results.json up to date after each, then write report.md and the figure.

    Args:
        name: of the experiment.
        preset: the setting.
        preset_name: what it is called.
        data: as ``--data``.
        device: where to train.
        out: the directory to write.
        cache: directory of fine-tuned models.
        monitor: makes the monitor of a unit from a title.
        resume: keep the units that ``out`` holds already, and add those that it lacks.
        jobs: how many units are measured at a time; more than one by as many processes, which say themselves what they do.
        threads: of each of those processes; default: its share of the cores.

    Returns:
        The content of results.json.
    """
    experiment = load_experiment(name)
    for key in experiment.single:
        if len(getattr(preset, key)) > 1:
            raise UsageError(
                f"{name} looks at one of {key}, got {', '.join(map(str, getattr(preset, key)))}. Give one."
            )
    begin = time.perf_counter()
    held = make_directory(out)
    if resume and "results.json" not in held:
        raise UsageError(
            f"There is nothing to resume in {str(out)!r}. Give the --out that was begun, or leave --resume out."
        )
    if not resume:
        refuse_held(out, held, "Give another directory, or --resume to go on with what it holds.")
    lab = Laboratory(preset, data, device, StateStore(cache), cache, monitor)
    needed = experiment.tasks(preset)
    skipped = {names[0]: reason for names in needed if (reason := lab.missing(names))}
    planned = [unit for unit in experiment.units(preset) if unit.get("task") not in skipped]
    if not planned or ("task" not in planned[0] and skipped):
        raise DataError(next(iter(skipped.values())))
    results = _described(name, experiment, lab, preset_name, needed, skipped)
    tell_shared_rows(map(lab.rows, results["tasks"]), preset.evaluate_on)
    if held:
        results = _resumed(results, out, planned, own_data=needed == [(task,) for task in preset.tasks])
    before, done = results["seconds"], [unit["unit"] for unit in results["units"]]
    missing = [unit for unit in planned if unit not in done]
    if jobs > 1 and len(missing) > 1:
        measured = measure_side_by_side(name, preset, data, device, cache, missing, jobs, threads)
    else:
        measured = _one_by_one(experiment, lab, missing)
    with closing(measured):  # an error here stops the workers, too
        for unit, rows in measured:
            results["units"].append({"unit": unit, "rows": [{**unit, **row} for row in rows]})
            results["seconds"] = round(before + time.perf_counter() - begin, 1)
            write_json(out / "results.json", results)
    results["units"].sort(key=lambda unit: planned.index(unit["unit"]))
    results["complete"] = True
    results["claims"] = [asdict(claim) for claim in experiment.claims(rows_of(results))]
    write_json(out / "results.json", results)
    write_outcome(results, out)
    return results


def _one_by_one(experiment: Experiment, lab: Laboratory, units: Sequence[Unit]) -> Generator[tuple[Unit, list[Row]]]:
    for unit in units:
        yield unit, experiment.measure(lab, unit)


def _described(
    name: str,
    experiment: Experiment,
    lab: Laboratory,
    preset_name: str,
    needed: Sequence[tuple[str, ...]],
    skipped: Mapping[str, str],
) -> dict[str, Any]:
    """results.json before the first unit."""
    there = [lab.first_available(names) for names in needed if names[0] not in skipped]
    loaded = load_model(lab.preset.model, lab.preset.readout, max_length=lab.preset.max_length)
    described = {
        "schema": SCHEMA,
        "experiment": name,
        "paper": experiment.paper,
        "preset": preset_name,
        "setting": asdict(lab.preset),
        "model": loaded.fingerprint,
        "config": config_of(loaded.model.backbone),
        "data": {task: lab.rows(task).fingerprint() for task in there},
        "tasks": {task: lab.rows(task).task.fields for task in there},
        "encoded": {task: _encoded(loaded, lab.rows(task)) for task in there},
        "skipped": dict(skipped),
        "versions": {"forgetfree": __version__, **{key: version(key) for key in ("torch", "transformers")}},
        "device": lab.device,
        "complete": False,
        "units": [],
        "seconds": 0.0,
    }
    return dict(json.loads(json.dumps(described)))  # as a file gives it back


def _encoded(loaded: LoadedModel, rows: TaskRows) -> str:
    """SHA-256 of what the tokenizer makes of a task's first hundred test rows, in its prompt."""
    ids = loaded.encoder(rows.task)(rows.test.take(range(min(100, len(rows.test)))))
    return hashlib.sha256(json.dumps([list(map(int, row)) for row in ids]).encode()).hexdigest()


def _resumed(results: dict[str, Any], out: Path, planned: Sequence[Unit], own_data: bool) -> dict[str, Any]:
    """``results`` with the units that ``out`` holds already, if they were begun with the same and are all planned.

    Args:
        results: before the first unit.
        out: the directory.
        planned: all units.
        own_data: whether a unit reads the rows of its own task alone. Else it may lack what was skipped when it was done.

    Raises:
        UsageError: they were not, or are not.
    """
    earlier = load_experiment_results(out)
    lists = [name for name, part in LISTS.items() if part in planned[0]]
    before, now = earlier["setting"], results["setting"]
    differ = [
        "the weights of the model" if key == "model" else f"{key} (was {earlier[key]}, now {results[key]})"
        for key in ("experiment", "preset", "model", "versions", "device")
        if earlier[key] != results[key]
    ]
    # A fingerprint identifies the weights: a directory may be renamed.
    differ += _differences(*({k: v for k, v in each.items() if k not in (*lists, "model")} for each in (before, now)))
    differ += [
        f"{key} (give all there are: {', '.join(map(str, before[key]))})"
        for key in lists
        if not set(before[key]) <= set(now[key])
    ]
    differ += [f"data of {task!r}" for task, sha in earlier["data"].items() if results["data"].get(task) != sha]
    # Files of older versions do not say these.
    described, ids = earlier.get("tasks", {}), earlier.get("encoded", {})
    differ += [f"labels or prompts of {task!r}" for task in described if described[task] != results["tasks"].get(task)]
    if earlier["model"] == results["model"]:
        differ += ["the model's config.json"] if earlier.get("config", results["config"]) != results["config"] else []
        differ += ["the tokenizer or the prompts"] if any(results["encoded"].get(t) != ids[t] for t in ids) else []
    differ += [f"data of {task!r}" for task in earlier["skipped"] if not own_data and task not in results["skipped"]]
    if differ:
        raise UsageError(
            f"--resume needs what {out} was begun with, or more {', '.join(lists)}; different: {', '.join(differ)}. Give "
            "another --out, or the old options."
        )
    return results | {"units": earlier["units"], "seconds": earlier["seconds"]}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What has changed between two settings, options set by hand one by one."""
    found = []
    for key in dict.fromkeys((*before, *now)):
        was, is_now = before.get(key), now.get(key)
        if isinstance(was, dict) and isinstance(is_now, dict):
            found += _differences(was, is_now)
        elif was != is_now:
            found.append(f"{key} (was {was}, now {is_now})")
    return found
