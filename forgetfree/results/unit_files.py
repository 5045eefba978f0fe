"""What lies in the folder of a unit beside its scores, for figures: answers and losses. What is not there is not shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forgetfree.errors import MetricError
from forgetfree.json_file import parse_json, read_bounded
from forgetfree.results.metrics import Predictions

Json = dict[str, Any]


def folder_of(run: Mapping[str, Any]) -> Path:
    """Return the folder of an entry of ``runs``, which says under ``source`` where it was read."""
    source = Path(run["source"])
    return (source.parent if source.suffix == ".json" else source) / str(run["strategy"]) / f"seed-{run['seed']}"


def answers_of(run: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Predictions]:
    """Return the last answers on every task; nothing where the file is missing, damaged, or not that of these scores."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        held = load_file(folder_of(run) / "predictions.safetensors")
        found = {task: Predictions(held[f"{task}/logits"], held[f"{task}/labels"]) for task in tasks}
        sound = all(
            math.isclose(found[task].ece, expected, abs_tol=1e-6)
            for task, expected in zip(tasks, run["ece"][-1], strict=True)
        )
    except (OSError, KeyError, ValueError, IndexError, SafetensorError, MetricError):
        return {}
    return found if sound else {}


def made_of(run: Mapping[str, Any]) -> Json:
    """Return what a unit was computed with, under ``made``; nothing where its unit.json is missing or damaged."""
    if "made" in run:  # it was read from a file that has it
        return {}
    made = _made(folder_of(run) / "unit.json")
    return {"made": made} if made else {}


def made_of_units(directory: Path) -> Json:
    """Return what the finished units in a directory were computed with, under ``made``: each way once; nothing if untold."""
    made: list[Json] = []
    for path in sorted(directory.glob("*/unit.json")):
        each = _made(path)
        made += [each] if each and each not in made else []
    return {"made": made} if made else {}


def _made(path: Path) -> Json:
    """Return versions, code, command and machine of a unit.json; nothing where it is missing, damaged or of a failure."""
    try:
        record = parse_json(read_bounded(path))
        if record["status"] != "done":
            return {}
        machine = {key: value for key, value in record["machine"].items() if key != "system"}  # no bit depends on that
        return {key: record.get(key) for key in ("versions", "code", "command")} | {"machine": machine}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def losses_of(run: Mapping[str, Any]) -> list[Json]:
    """Return the logged steps of a unit (``task``, ``phase``, ``step``, ``loss``); none where the file is damaged."""
    try:
        lines = read_bounded(folder_of(run) / "history.jsonl").splitlines()
        steps = [parse_json(line) for line in lines]
        named = all(isinstance(each["task"], str) and isinstance(each["phase"], str) for each in steps)
        sound = named and all(math.isfinite(each["loss"]) and each["step"] >= 0 for each in steps)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []
    return steps if sound else []
