"""How many bytes a job writes, and whether the disk has room for them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forgetfree.core.base_regions import tiny_region_note
from forgetfree.core.parameters import ParameterSpace
from forgetfree.display import tell_note
from forgetfree.errors import UsageError
from forgetfree.jobs.running.environment import existing
from forgetfree.jobs.running.unit import Json
from forgetfree.jobs.running.workload import Workload
from forgetfree.learning.cost import TaskSize, model_bytes
from forgetfree.tasks import TaskDefinition


def check_space(workload: Workload, out: str, found: Json, space: ParameterSpace) -> None:
    """Raise ``UsageError`` unless there is room for what a job writes; say, too, where its regions are tiny.

    Args:
        workload: of the job.
        out: its directory.
        found: its config.json.
        space: the graftable tensors of its model.
    """
    tell_note(tiny_region_note(len(space), workload.sparsities))
    definitions = {each["name"]: TaskDefinition.of_fields(each) for each in found["tasks"]}
    tests = {name: rows.get("test", 0) for name, rows in found["data"].items()}
    refuse_without(*needed_bytes(workload, tests, definitions, space), out, workload)


def needed_bytes(
    workload: Workload, tests: Mapping[str, int], definitions: Mapping[str, TaskDefinition], space: ParameterSpace
) -> tuple[int, int]:
    """Return about as many bytes as a job writes: of fine-tuned models; of ledgers or models, and predictions.

    Args:
        workload: of the job.
        tests: how many test rows each task answers, where it is known.
        definitions: the tasks, where they are known.
        space: the graftable tensors of the model.
    """
    models, kept = set[Any](), 0
    for unit in workload.units:
        cost = unit.cost([TaskSize()] * len(unit.tasks))
        models |= {
            (task, unit.seed, unit.shots, number)
            for task in unit.tasks
            if cost.fine_tunes
            for number in range(unit.repeats)
        }
        kept += cost.kept(space)
        for task in unit.tasks:
            labels = len(definitions[task].labels) if task in definitions else 2
            kept += tests.get(task, 0) * (4 * labels + 8)
    return model_bytes(space) * len(models), kept


def refuse_without(models: int, kept: int, out: str, workload: Workload) -> None:
    """Raise ``UsageError`` unless there is room for so many bytes, those that are there already included.

    Of a cache that others may use, only models of this job's tasks are there already.
    """
    cache = workload.common.cache
    places = [("--out", out, kept + (0 if cache else models), ["*"])]
    if cache:
        places.append(("--cache", cache, models, [f"{task}-*" for task in workload.tasks]))
    disks: dict[int, list[tuple[str, int, int]]] = {}
    for flag, place, needed, ours in places:
        try:
            disk, held = existing(Path(place)), _held(Path(place), ours)
            found = f"{flag} {place}", max(0, needed - held), shutil.disk_usage(disk).free
            disks.setdefault(disk.stat().st_dev, []).append(found)
        except OSError:  # a place that cannot be is told by who writes there
            continue
    for on_disk in disks.values():
        names, missing, free = zip(*on_disk, strict=True)
        if sum(missing) > free[0]:
            need = "need" if len(names) > 1 else "needs"
            raise UsageError(
                f"{' and '.join(names)} {need} about {sum(missing):,} more bytes, and {free[0]:,} are free there. "
                "Give a directory on another disk, or ask for fewer strategies or seeds."
            )


def _held(directory: Path, names: Sequence[str]) -> int:
    held = 0
    for path in {path for name in names for path in directory.rglob(name)}:
        with suppress(OSError):  # it has gone since
            held += path.stat().st_size if path.is_file() else 0
    return held
