"""Files of options, and what config.json says of a job: read back, checked, without places that nobody typed."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

from pydantic import Field

from forgetfree import registry
from forgetfree.data.sources import DATA_VARIABLE
from forgetfree.errors import ForgetfreeError, RunError, UnknownNameError, UsageError, first_line
from forgetfree.files import check, check_fields, is_number, read_bounded, read_json
from forgetfree.options import faults_in, option
from forgetfree.registry import DEFAULT_STRATEGIES
from forgetfree.results.unit_folder import CONFIG, check_config
from forgetfree.tasks import MAX_LENGTH, TaskDefinition

Seed = Annotated[int, Field(ge=0, lt=2**63)]
Readout = Literal["auto", "prompt", "linear", "mean", "causal", "generate"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request for a run. Flags, files of options and the ``run`` of config.json have its fields under their names."""

    model: str = option("minilm", "minilm (default), a directory, or a hub name", placeholder="NAME|DIR")
    data: str | tuple[str, ...] = option(
        "hub",
        "hub, demo (embedded), a directory or a file of rows; several times: each file is a task (default: $FORGETFREE_DATA, "
        "else hub)",
        placeholder="hub|demo|DIR|FILE",
    )
    text_column: tuple[str, ...] = option(
        (),
        "column of the texts, or TASK=COLUMN for one task; for pairs, give it twice (default: by common names)",
        placeholder="NAME",
    )
    label_column: tuple[str, ...] = option(
        (),
        "column of the labels, or TASK=COLUMN for one task (default: label, or by common names)",
        placeholder="NAME",
    )
    kind: tuple[str, ...] = option(
        (),
        "what a task asks for, such as generation, or TASK=KIND for one task (default: by its columns)",
        placeholder="KIND",
    )
    skip_bad_rows: bool = option(False, "leave out rows that cannot be used, and say how many; else they are refused")
    metric: tuple[str, ...] = option(
        (),
        "what answers are scored by, or TASK=NAME for one task (default: accuracy, of words' tags f1, of free texts rouge_l; "
        "see docs/data.md)",
        placeholder="NAME",
    )
    readout: Readout = option(
        "auto",
        "how answers are read; mean: by a linear layer on the mean of all tokens; generate: texts are written (default: auto)",
    )
    seed: tuple[Seed, ...] = option(
        (0,),
        "seed of sampling and training, may be given several times (default: 0)",
        group="How to learn",
    )
    set: Mapping[str, Any] = option(
        dict,
        "any option: see 'forgetfree list strategies --verbose'",
        group="How to learn",
        placeholder="KEY=VALUE",
    )
    device: str = option(
        "auto",
        "where to train: auto (default), cpu, cuda, cuda:1, mps, …; cuda:*: a unit on each GPU",
        group="How to run",
        placeholder="NAME",
    )
    stream: str = option("", "a registered stream, or task names joined by commas")
    shots: int | None = option(None, "training rows per label (default: all)", at_least=1, group="How to learn")

    strategy: tuple[str, ...] = option(
        DEFAULT_STRATEGIES,
        "name of 'forgetfree list strategies', or [NAME=]MODULE:CLASS of your own; may be given several times; all: every one "
        "of ours",
        placeholder="NAME",
    )

    fine_tuned: str | None = option(
        None,
        "a model fine-tuned from --model on the one task, in Hugging Face layout; none is trained then",
        placeholder="DIR",
    )
    held_out: str | None = option(
        None,
        "texts that no task trains, to tell their loss before and after the stream: a file with a text a line or a column "
        "text, or a task, of --data or in a folder (causal language models)",
        placeholder="TEXTS|TASK",
    )


#: The options of a run and their types.
TYPES: Mapping[str, Any] = get_type_hints(Request, include_extras=True)


def read_section(values: Any, more: Collection[str] = ()) -> dict[str, Any]:
    """Return the options of a file under their names on the command line; what may be given several times as a list.

    Args:
        values: what the file holds.
        more: names that it may have beside those of a run, whose values are not looked at.

    Raises:
        UnknownNameError: a name that is no option.
        ValueError: a value of another type, or out of range.
    """
    check("the options", values, isinstance(values, dict), "a table")
    for key in values:
        if key not in TYPES and key not in more:
            raise UnknownNameError("option in a file:", key, {*TYPES, *more})
    section = {
        key: [value] if get_origin(TYPES.get(key)) is tuple and not isinstance(value, list) else value
        for key, value in values.items()
    }
    own: dict[str, Any] = {key: value for key, value in section.items() if key in TYPES}
    own = {key: tuple(value) if isinstance(value, list) else value for key, value in own.items()}
    if faults := faults_in(Request(**own)):
        raise ValueError("; ".join(faults))
    return section


def read_options(path: Path, more: Collection[str] = ()) -> dict[str, Any]:
    """Return the options in a TOML or JSON file, or those that a config.json says its run was asked for.

    Args:
        path: the file, or a directory with a config.json.
        more: names of options that a file may have beside those of a run.

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
        section = read_section(values["run"] if begun else values, more)
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
    if missing := [key for key in TYPES if key not in section]:
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
