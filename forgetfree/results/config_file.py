"""What config.json says of a run: read back and checked, without places of this machine that nobody typed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgetfree import registry
from forgetfree.data.sources import DATA_VARIABLE
from forgetfree.errors import RunError, UnknownNameError
from forgetfree.json_file import check, check_fields, is_number, read_json
from forgetfree.options import type_name
from forgetfree.tasks import MAX_LENGTH, TaskDefinition

#: What `RunConfig.section` holds.
_SECTION: Mapping[str, Any] = {
    **dict.fromkeys(("stream", "strategy", "model", "data", "readout", "device"), str),
    **{"shots": int | None, "steps": int | None, "seed": int, "sparsity": int | float | None, "set": dict},
}


def read_section(values: Any) -> dict[str, Any]:
    """Options of a file under their names on the command line, ``strategy`` and ``seed`` as lists.

    Raises:
        UnknownNameError: a name that is no option.
        ValueError: a value of another type.
    """
    check("the options", values, isinstance(values, dict), "a table")
    section = {}
    for key, value in values.items():
        if key not in _SECTION:
            raise UnknownNameError("option in a file:", key, _SECTION)
        listed = key in ("strategy", "seed")
        section[key] = [value] if listed and not isinstance(value, list) else value
        for item in section[key] if listed else [value]:
            right = isinstance(item, _SECTION[key]) and not isinstance(item, bool)
            check(key, item, right, "a table" if key == "set" else type_name(_SECTION[key]))
    return section


def load_run(directory: Path, remedy: str = "Give the directory that `forgetfree run --out` wrote.") -> dict[str, Any]:
    """The config.json of a run directory, checked.

    Args:
        directory: what ``forgetfree run --out`` wrote.
        remedy: the last sentence of an error.

    Raises:
        RunError: it is missing or damaged.
    """
    config: dict[str, Any] = read_json(directory / "config.json", RunError, remedy, _check_run)
    return config | {"run": read_section(config["run"])}


def _check_run(config: Any) -> None:
    check_fields("", config, {"run": dict, "model": dict, "tasks": list})
    check_fields("model", config["model"], {"name": str, "readout": str})
    rows = config.get("data", {})
    held = isinstance(rows, dict) and all(isinstance(each, dict) for each in rows.values())
    check("data", rows, held, "an object of objects")
    versions = config.get("versions", {})
    check("versions", versions, isinstance(versions, dict), "an object")
    longest = config["model"].get("max_length", MAX_LENGTH)
    check(
        "model.max_length", longest, is_number(longest, 1) and isinstance(longest, int), "a whole number of at least 1"
    )
    try:
        section = read_section(config["run"])
    except UnknownNameError as error:
        raise ValueError(str(error)) from error
    if missing := [key for key in _SECTION if key not in section]:
        raise ValueError(f"run.{missing[0]} is missing")
    for number, fields in enumerate(config["tasks"]):
        try:
            TaskDefinition.of_fields(fields)
        except ValueError as error:
            raise ValueError(f"tasks[{number}]: {error}") from error


# -- Places ----------------------------------------------------------------------------------------------

#: What of a section may be a directory.
PLACES = ("model", "data")
#: How a file names the data of the environment variable, which lie elsewhere on every machine.
_ENVIRONMENT = f"${DATA_VARIABLE}"


def portable(name: str, directory: Path) -> str:
    """How a file in ``directory`` names a model or data, so that it says nothing of this machine that nobody typed.

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
