"""floors.json in a unit's folder: the floors of its seed, by name and task. It is there also where the unit failed later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forgetfree.errors import RunError
from forgetfree.files import write_json
from forgetfree.json_file import check, is_number, read_json
from forgetfree.results.records import LEARNED_FLOORS

_FILE = "floors.json"


def write_floors(directory: Path, floors: dict[str, Any]) -> None:
    """Write the file, if there are any."""
    if floors:
        write_json(directory / _FILE, floors)


def read_floors(directory: Path) -> dict[str, Any]:
    """Return the floors; none where the file is missing or damaged."""
    try:
        floors: dict[str, Any] = read_json(directory / _FILE, RunError, "", _check)
    except RunError:
        return {}
    return floors


def _check(floors: Any) -> None:
    check("floors", floors, isinstance(floors, dict) and floors.keys() <= LEARNED_FLOORS.keys(), "an object of floors")
    for name, of_tasks in floors.items():
        check(name, of_tasks, isinstance(of_tasks, dict), "an object of tasks")
        for task, score in of_tasks.items():
            check(f"{name}.{task}", score, score is None or is_number(score, 0.0, 1.0), "a share, or null")
