"""floors.json in a unit's folder: the floors of its seed, by name and task. It is there also where the unit failed later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forgetfree.errors import RunError
from forgetfree.files import write_json
from forgetfree.json_file import read_json

_FILE = "floors.json"


def write_floors(directory: Path, floors: dict[str, Any]) -> None:
    """Write the file, if there are any."""
    if floors:
        write_json(directory / _FILE, floors)


def read_floors(directory: Path) -> dict[str, Any]:
    """Return the floors; none where the file is missing or damaged."""
    try:
        floors: dict[str, Any] = read_json(directory / _FILE, RunError, "")
    except RunError:
        return {}
    return floors
