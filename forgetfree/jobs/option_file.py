"""Options in a file: TOML or JSON written by a user, or the config.json of a run."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forgetfree.display import brief
from forgetfree.errors import ForgetfreeError, UsageError, first_line
from forgetfree.jobs.config import OF_RUN, RunConfig
from forgetfree.json_file import read_bounded, read_json
from forgetfree.registry import DEFAULT_STRATEGIES
from forgetfree.results.run_folder import CONFIG, located, with_places


def read_options(path: Path) -> dict[str, Any]:
    """Return the options in a TOML or JSON file, or the requested options of the run in a config.json.

    Args:
        path: the file, or a directory with a config.json.

    Raises:
        UsageError: the file cannot be read, or does not contain options.
    """
    remedy = "Give a TOML or JSON file of options, or the config.json of a run."
    if os.path.isdir(path):  # a Path raises an error if a name is too long
        path /= CONFIG
    if path.suffix == ".json":
        values = read_json(path, UsageError, remedy)
    else:
        try:
            values = tomllib.loads(read_bounded(path))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{path} cannot be read: {first_line(error)}. {remedy}") from error
    if begun := isinstance(values, dict) and "run" in values:
        if values.get("objects"):
            raise UsageError(
                f"The run of {path} cannot be repeated from this file alone, because it was started from Python with "
                f"{', '.join(map(str, values['objects']))}. Repeat it with the same call."
            )
        values = values["run"]
    if not isinstance(values, dict) or not isinstance(values.get("set", {}), dict):
        raise UsageError(f"{path}: the options and their set must be tables, got {brief(values)}. {remedy}")
    config = RunConfig.of(values)
    if wrong := config.wrong_values():
        raise UsageError(f"{path}: {'; '.join(wrong)}. {remedy}")
    named = [name for name in OF_RUN if begun or name in values]
    section = {key: getattr(config, key) for key in named} | {"set": config.set}
    return with_places(section, path.parent, located) if begun else section


def for_strategies(section: Mapping[str, Any], strategies: Sequence[str]) -> dict[str, Any]:
    """Return the options of a file; if ``strategies`` are given, without the options that only the file's strategies have."""
    if not strategies:
        return dict(section)
    try:
        gone = _names_of(section.get("strategy") or DEFAULT_STRATEGIES) - _names_of(strategies)
    except ForgetfreeError:  # one is unknown, which the run reports
        return dict(section)
    return {**section, "set": {key: value for key, value in section["set"].items() if key not in gone}}


def _names_of(strategies: Sequence[str]) -> set[str]:
    """Return the names of all options of strategies, with and without the strategy as prefix."""
    classes = RunConfig(strategy=tuple(strategies)).classes
    names = {name: {*cls.Options.model_fields} for name, cls in classes.items()}
    return {f"{name}.{key}" for name, keys in names.items() for key in keys}.union(*names.values())
