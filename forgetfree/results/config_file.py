"""config.json of a run: read back and checked; places in it, without what nobody typed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forgetfree import registry
from forgetfree.data.sources import DATA_VARIABLE
from forgetfree.errors import ForgetfreeError, RunError
from forgetfree.json_file import check, check_fields, read_json
from forgetfree.results.unit_folder import CONFIG, check_config
from forgetfree.tasks import TaskDefinition


def load_run(
    directory: Path,
    remedy: str = "Give the directory that `forgetfree run --out` wrote.",
    error: type[ForgetfreeError] = RunError,
) -> dict[str, Any]:
    """Return the config.json of a run directory, checked.

    Args:
        directory: what ``forgetfree run --out`` wrote.
        remedy: the last sentence of an error.
        error: the error to raise.

    Raises:
        ForgetfreeError: ``error``: it is missing or damaged, or not the one that the units of the run were made under.
    """
    config: dict[str, Any] = read_json(directory / CONFIG, error, remedy, _check_run)
    check_config(directory, error)
    return config


def _check_run(config: Any) -> None:
    objects = ("run", "machine", "model", "data", "about", "units", "versions")
    check_fields("", config, {**dict.fromkeys(objects, dict), "tasks": list})
    check_fields("model", config["model"], {"name": str, "readout": str})
    check_fields("about", config["about"], {"data": dict})
    check_fields("run", config["run"], {"set": dict, "strategy": list})
    for task, rows in config["data"].items():
        check(f"data.{task}", rows, isinstance(rows, dict), "an object")
    for place, unit in config["units"].items():
        check_fields(f"units.{place}", unit, {"strategy": str, "seed": int})
    for number, fields in enumerate(config["tasks"]):
        try:
            task = TaskDefinition.of_fields(fields)
            registry.check_stored(task)
        except ValueError as error:
            raise ValueError(f"tasks[{number}]: {error}") from error
        if unknown := registry.unknown_names(task):
            raise ValueError(f"tasks[{number}]: {'; '.join(unknown)}. Install the package that has it")


# -- Places ----------------------------------------------------------------------------------------------

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
