"""Files of options, and what config.json says of a job: read back, checked, without places that nobody typed."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from forgetfree import registry
from forgetfree.data.sources import DATA_VARIABLE
from forgetfree.errors import ForgetfreeError, RunError, UnknownNameError, UsageError, first_line
from forgetfree.json_file import check, check_fields, is_number, read_bounded, read_json
from forgetfree.options import fits, type_name
from forgetfree.recipes import StepsRule
from forgetfree.results.unit_folder import CONFIG, check_config
from forgetfree.tasks import MAX_LENGTH, TaskDefinition

#: What `RunConfig.section` holds.
_RUN_SECTION: Mapping[str, Any] = {
    **{**dict.fromkeys(("stream", "model", "readout", "device"), str), "data": str | tuple[str, ...]},
    **{"strategy": tuple[str, ...], "seed": tuple[int, ...], "set": Mapping[str, Any]},
    **{"shots": int | None, "steps": int | StepsRule | None, "sparsity": float | None},
}
#: What it holds where it was given: how the data are read, texts that no task trains.
_GIVEN: Mapping[str, Any] = {
    **dict.fromkeys(("text_column", "label_column", "kind", "metric"), tuple[str, ...]),
    **{"skip_bad_rows": bool, "fine_tuned": str, "held_out": str},
}


def read_section(values: Any, types: Mapping[str, Any] = {**_RUN_SECTION, **_GIVEN}) -> dict[str, Any]:
    """Return the options of a file under their names on the command line; what may be given several times as a list.

    Args:
        values: what the file holds.
        types: the names of options and their types; default: those of a run.

    Raises:
        UnknownNameError: a name that is no option.
        ValueError: a value of another type.
    """
    check("the options", values, isinstance(values, dict), "a table")
    section = {}
    for key, value in values.items():
        if key not in types:
            raise UnknownNameError("option in a file:", key, types)
        hint = types[key]
        several = next((each for each in (hint, *get_args(hint)) if get_origin(each) is tuple), None)
        listed = several is hint or (several is not None and isinstance(value, list))
        section[key] = [value] if listed and not isinstance(value, list) else value
        hint = get_args(several)[0] if listed else hint
        for item in section[key] if listed else [value]:
            check(key, item, fits(item, hint), type_name(hint))
    return section


def read_options(path: Path, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in a TOML or JSON file, or those that a config.json says its run was asked for.

    Args:
        path: the file, or a directory with a config.json.
        types: the names of options and their types.

    Raises:
        UsageError: the file cannot be read, or says something else.
    """
    remedy = "Give a TOML or JSON file of options, or the config.json of a run."
    if os.path.isdir(path):  # a Path raises where a name is too long
        path /= "config.json"
    if path.suffix == ".json":
        values = read_json(path, UsageError, remedy)
    else:
        try:
            values = tomllib.loads(read_bounded(path))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{path} cannot be read: {first_line(error)}. {remedy}") from error
    begun = isinstance(values, dict) and "run" in values
    if begun and values.get("objects"):
        raise UsageError(
            f"{path} cannot be repeated from this file alone: the run was called from Python with "
            f"{', '.join(map(str, values['objects']))}. Repeat it by that call."
        )
    try:
        section = read_section(values["run"] if begun else values, types)
    except ValueError as error:
        raise UsageError(f"{path}: {error}. {remedy}") from error
    if begun:
        section |= {key: of_each(located, section[key], path.parent) for key in PLACES if section.get(key)}
    return section


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
        RunError: the directory is a part of a run.
    """
    check_whole(directory)
    config: dict[str, Any] = read_json(directory / CONFIG, error, remedy, _check_run)
    check_config(directory, error)
    return config | {"run": read_section(config["run"])}


def check_whole(directory: Path) -> None:
    """Raise ``RunError`` where a directory is a strategy's folder in a run, or that of one of its seeds."""
    place = Path(os.path.abspath(directory))
    seed = place.name.removeprefix("seed-")
    strategy, chosen = (place, "") if seed == place.name else (place.parent, f" --seed {seed}")
    if os.path.isfile(strategy.parent / "config.json") and any(strategy.glob("seed-*")):
        raise RunError(
            f"{directory} is the folder of {strategy.name} in a run. Give the run itself, {os.path.relpath(strategy.parent)}, "
            f"and where the command has them, --strategy {strategy.name}{chosen}."
        )


def _check_run(config: Any) -> None:
    objects = dict.fromkeys(("run", "machine", "model", "data", "about", "units", "versions"), dict)
    check_fields("", config, {**objects, "tasks": list})
    check_fields("model", config["model"], {"name": str, "readout": str})
    check_fields("about", config["about"], {"data": dict})
    check(
        "data", config["data"], all(isinstance(each, dict) for each in config["data"].values()), "an object of objects"
    )
    for place, unit in config["units"].items():
        check_fields(f"units.{place}", unit, {"strategy": str, "seed": int})
    longest = config["model"].get("max_length", MAX_LENGTH)
    check(
        "model.max_length", longest, is_number(longest, 1) and isinstance(longest, int), "a whole number of at least 1"
    )
    try:
        section = read_section(config["run"])
    except UnknownNameError as error:
        raise ValueError(str(error)) from error
    if missing := [key for key in _RUN_SECTION if key not in section]:
        raise ValueError(f"run.{missing[0]} is missing")
    for number, fields in enumerate(config["tasks"]):
        try:
            task = TaskDefinition.of_fields(fields)
            registry.check_stored(task)
        except ValueError as error:
            raise ValueError(f"tasks[{number}]: {error}") from error
        if unknown := registry.unknown_names(task):
            raise ValueError(f"tasks[{number}]: {'; '.join(unknown)}. Install the package that has it")


# -- Places ----------------------------------------------------------------------------------------------

#: What of a section may be a file or a directory.
PLACES = ("model", "data", "fine_tuned", "held_out")
#: How a file names the data of the environment variable, which lie elsewhere on every machine.
_ENVIRONMENT = f"${DATA_VARIABLE}"


def of_each(change: Callable[[str, Path], str], place: Any, directory: Path) -> Any:
    """Return what `portable` or `located` makes of a place, or of several, which may have names."""
    if isinstance(place, Mapping):
        return {name: change(value, directory) for name, value in place.items()}
    if isinstance(place, list | tuple):
        return [change(value, directory) for value in place]
    return change(place, directory)


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
