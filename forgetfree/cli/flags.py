"""The flags of run and graft, made from the fields of a configuration, and read back into one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from inspect import Parameter as Argument
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

from forgetfree import recipes
from forgetfree.cli.usage import Debug, lacks
from forgetfree.data.sources import default_data, no_stream, tasks_of_files
from forgetfree.display import brief, tell
from forgetfree.errors import UsageError
from forgetfree.files import free_directory
from forgetfree.jobs.config import FLAGGED, Execution, RunConfig, flag_of, for_strategies, stream_of
from forgetfree.options import HelpGroup, build, option
from forgetfree.results.config_file import read_options

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CommandFlags:
    """What the command line alone has: where options are read from, and what is printed."""

    config: str | None = option(
        None,
        "options in a TOML or JSON file, or a directory whose config.json has them",
        group="How to run",
        placeholder="FILE|DIR",
    )
    check: bool = option(
        False, "check all that can be checked, print what would be done and what it costs, and end", group="How to run"
    )
    on: str | None = option(None, "a finished run: learn further tasks on top of it", placeholder="RUN")
    without: str | None = option(
        None, "with --on: write RUN as it would be, had the task never been learned", placeholder="TASK"
    )
    quiet: bool = option(False, "say nothing but errors and the result", group="How to run")


_GROUPS = {name: Group(name, sort_key=number) for number, name in enumerate(get_args(HelpGroup))}


# -- From the fields to the flags ------------------------------------------------------------------------


#: What one of the two commands has no flag for.
_WITHOUT = {"run": ("fine_tuned",), "graft": ("strategy", "held_out", "on", "without")}


def arguments_of(command: str) -> Iterator[Argument]:
    """Yield the argument without a flag, and every flag, of ``run`` or ``graft``, as they are declared."""
    hints = get_type_hints(RunConfig)
    options = {each.name: each for each in fields(RunConfig) if each.metadata and each.name not in _WITHOUT[command]}
    stream = options.pop("stream")
    help = "a registered task, or one under --data DIR" if command == "graft" else stream.metadata["help"]
    name = "task" if command == "graft" else stream.name
    yield Argument(name, Argument.VAR_POSITIONAL, annotation=Annotated[str, Parameter(help=help)])
    for name, field in options.items():
        several = any(get_origin(each) in (tuple, Mapping) for each in (hints[name], *get_args(hints[name])))
        kinds = [get_args(each) for each in (hints[name], *get_args(hints[name])) if get_origin(each) is Literal]
        kinds = [] if int in get_args(hints[name]) else kinds  # a number, or one of these words
        yield _flag(name, field, list[str] if several else bool if hints[name] is bool else str, *kinds)
    for name, field in FLAGGED.items():
        yield _flag(name, field, str, default=field.default)
    own = {each.name: each for each in (*fields(Execution), *fields(CommandFlags)) if each.metadata}
    own = {name: field for name, field in own.items() if name not in _WITHOUT[command]}
    config_file, log = own.pop("config"), own.pop("log")
    yield _flag("config", config_file, str)
    for name, field in own.items():
        yield _flag(name, field, bool if field.default is False else str)
    yield _flag("log", log, list[str])
    yield Argument("debug", Argument.KEYWORD_ONLY, default=False, annotation=Debug)


def _flag(name: str, field: Field[Any], hint: Any, choices: Sequence[str] = (), default: Any = None) -> Argument:
    """Return an option as an argument of the command, as which it is a text, if anything, that is read later."""
    placeholder = field.metadata["placeholder"]
    if placeholder in ("DIR", "FILE", "RUN"):
        hint = Path  # which the shell completes
    parameter = Parameter(
        name=f"--{name.replace('_', '-')}",
        help=field.metadata["help"] + ("" if default is None else f" (default: the model's recipe, else {default})"),
        group=_GROUPS[field.metadata["group"]],
        metavar=None if choices else placeholder,
        choices=choices or None,
    )
    return Argument(name, Argument.KEYWORD_ONLY, default=None, annotation=Annotated[hint | None, parameter])


# -- From the flags to the fields ------------------------------------------------------------------------


def read_flags(
    command: str, subjects: Sequence[str], flags: Mapping[str, Any]
) -> tuple[RunConfig, Execution, CommandFlags]:
    """Return the configuration that a command line asks for, how it is run, and what is printed.

    Args:
        command: ``run`` or ``graft``.
        subjects: the arguments without a flag, of which there is to be one.
        flags: the others that were typed, by their names.

    Raises:
        UsageError: flags do not go together, a value is wrong, or nothing says what to learn.
    """
    flags = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    if len(subjects) > 1:
        hint = f"Join the tasks of a stream by commas: {','.join(subjects)}. " if command == "run" else ""
        more = " ".join(subjects[1:])
        raise UsageError(f"Unrecognized arguments: {more}. {hint}See 'forgetfree {command} --help'.")
    execution, output = execution_of(flags), CommandFlags(**of_class(CommandFlags, flags))
    values = values_of({**flags, **dict(zip(["stream"], subjects, strict=False))})
    data = values.get("data", default_data())
    if (tasks := tasks_of_files(data)) and (len(tasks) == 1 or command == "run"):
        values = {"stream": stream_of(tasks), **values}
    if not values.get("stream"):
        raise _lacks_stream(command, flags, data)
    prefix = "" if command == "run" else "graft-"
    values = {"data": default_data(), "out": free_directory(f"{prefix}{values['stream']}"), **values}
    if command == "graft":
        values["strategy"] = list(recipes.GRAFT)
    return build(RunConfig, values, command), execution, output


def execution_of(flags: Mapping[str, Any]) -> Execution:
    """Return how the job is to be run.

    Raises:
        UsageError: flags do not go together, or a library of ``--log`` is not there.
    """
    if flags.get("resume") and "out" not in flags:
        raise UsageError("--resume needs --out DIR. Give the directory to continue.")
    if "log" in flags:
        from forgetfree.jobs.trackers import check_trackers

        check_trackers(flags["log"])
    values = of_class(Execution, flags) | {"log": tuple(flags.get("log", ()))}
    if str(values.get("jobs")).isdigit():
        values["jobs"] = int(values["jobs"])
    return Execution(**values)


def of_class(cls: type[Any], flags: Mapping[str, Any]) -> Json:
    """Return those flags that are fields of a class."""
    return {field.name: flags[field.name] for field in fields(cls) if field.name in flags}


def _lacks_stream(command: str, flags: Mapping[str, Any], data: Any) -> UsageError:
    config = Path(flags.get("out", "")) / "config.json"
    if flags.get("resume") and config.is_file():
        return UsageError(f"No stream is given. To continue that run, give --config {config}, too.")
    return no_stream(data) if command == "run" else lacks("forgetfree graft", ["TASK"])


def values_of(flags: Mapping[str, Any]) -> Json:
    """Return the values of a configuration's fields: the file's first, then the command line's over them."""
    file: Json = {"set": {}}
    if "config" in flags:
        file = _in_set(read_options(Path(flags["config"]), FLAGGED), f"{flags['config']}: {{0}} and set.{{0}}")
        if "strategy" in flags and not flags.get("resume"):
            file, left = for_strategies(file, flags["strategy"])  # no flag could take these away
            if left and not flags.get("quiet"):
                tell(f"note: {flags['config']} has {', '.join(left)} for strategies that are not run here: left out.")
    if len(flags.get("data", ())) == 1:  # several files are a list of them
        flags = {**flags, "data": flags["data"][0]}
    flags = _in_set({**flags, "set": _settings(flags.get("set", ()))}, "{1} and --set {0}={2}")
    values = {**file, **flags, "set": file["set"] | flags["set"]}
    return of_class(RunConfig, values)


def _in_set(given: Mapping[str, Any], both: str) -> Json:
    """Return options with those that ``--set`` could give in ``set``; ``both`` says of one that it is given both ways.

    Raises:
        UsageError: one is.
    """
    settings = given.get("set", {})
    own = {key: given[key] for key in FLAGGED if given.get(key) is not None}
    for key in own.keys() & settings.keys():
        raise UsageError(f"{both.format(key, flag_of(key), settings[key])} are both given. Leave one of them out.")
    return {key: value for key, value in given.items() if key not in FLAGGED} | {"set": {**settings, **own}}


def _settings(texts: Sequence[str]) -> dict[str, str]:
    """Return what ``--set key=value`` says.

    Raises:
        UsageError: a key or a value is missing, or a key is given twice.
    """
    pairs: dict[str, str] = {}
    for pair in texts:
        key, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or not key:
            raise UsageError(f"--set needs key=value, got {brief(pair)}. Write, say, --set batch_size=16.")
        if not value:
            raise UsageError(f"--set {key} needs a value, got an empty text. Give one, or leave --set {key} out.")
        if key in pairs:
            raise UsageError(f"--set {key} is given twice, as {brief(pairs[key])} and {brief(value)}. Give it once.")
        pairs[key] = value
    return pairs
