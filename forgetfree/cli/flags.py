"""The flags of run, sweep, graft and experiment, made from the fields of their configurations, and read back into these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from inspect import Parameter as Argument
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

from forgetfree import registry
from forgetfree.cli.usage import Debug
from forgetfree.cli.words import say
from forgetfree.display import brief
from forgetfree.errors import UsageError
from forgetfree.jobs.config import ALSO_SETTINGS, LOGGERS, CommonOptions, JobConfig, SettingFlags, key_of, section_types
from forgetfree.jobs.run_config import RunConfig, left_behind
from forgetfree.jobs.running.execution import Execution
from forgetfree.options import FLAGGED, HelpGroup, option
from forgetfree.results.config_file import read_config

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CommandFlags:
    """What is said to the command line alone: where options are read from, and what is printed."""

    config: str | None = option(
        None,
        "options in a TOML or JSON file, or the config.json of a directory",
        group="How to run",
        placeholder="FILE",
    )
    check: bool = option(
        False, "check all that can be checked, print what would be done and what it costs, and end", group="How to run"
    )
    json: bool = option(False, "print that plan as JSON", group="How to run")
    verbose: bool = option(
        False,
        "print all tables at the end, not only the first; the report has them in any case",
        group="How to run",
    )
    quiet: bool = option(False, "say nothing but errors and the result", group="How to run")


#: Options of ``--set`` that have a flag of their own, too.
_SETTINGS: Mapping[str, Field[Any]] = {
    name: {**SettingFlags.__dataclass_fields__, **CommonOptions.__dataclass_fields__}[name] for name in FLAGGED
}
_GROUPS = {name: Group.create_ordered(name) for name in get_args(HelpGroup)}
#: What the shell completes.
_COMPLETED: Mapping[str, Callable[[], Any]] = {
    **{"strategies": registry.strategies, "tasks": registry.tasks, "streams": registry.streams},
    **{"experiments": lambda: registry.EXPERIMENTS, "models": lambda: registry.MODELS},
}


def arguments_of(config: type[JobConfig], subject: str) -> Iterator[Argument]:
    """Yield the argument without a flag, and every flag, as they are declared."""
    hints, options = get_type_hints(config), {field.name: field for field in fields(config)}
    of = options.pop(subject)
    what = Parameter(help=of.metadata["help"], completer=_completer(of))
    yield Argument(subject, Argument.VAR_POSITIONAL, annotation=Annotated[str, what])
    for name, field in options.items():
        several = any(get_origin(each) in (tuple, Mapping) for each in (hints[name], *get_args(hints[name])))
        kinds = [get_args(each) for each in (hints[name], *get_args(hints[name])) if get_origin(each) is Literal]
        yield _flag(key_of(field), field, list[str] if several else bool if hints[name] is bool else str, *kinds)
    for name, field in _SETTINGS.items():
        yield _flag(name, field, str)
    own = {field.name: field for field in (*fields(Execution), *fields(CommandFlags)) if field.metadata}
    config_file, log = own.pop("config"), own.pop("log")
    yield _flag("config", config_file, str)
    for name, field in own.items():
        yield _flag(name, field, bool if field.default is False else int if "int" in str(field.type) else str)
    yield _flag("log", log, list[str], LOGGERS)
    yield Argument("debug", Argument.KEYWORD_ONLY, default=False, annotation=Debug)


def _flag(name: str, field: Field[Any], hint: Any, choices: Sequence[str] = ()) -> Argument:
    """Return an option as an argument of the command, as which it is a text, if anything, that is read later."""
    placeholder = field.metadata["placeholder"]
    if placeholder in ("DIR", "FILE"):
        hint = Path  # which the shell completes
    how = Parameter(
        name=f"--{name.replace('_', '-')}",
        help=field.metadata["help"],
        group=_GROUPS[field.metadata["group"]],
        metavar=None if choices else placeholder,
        choices=choices or None,
        completer=_completer(field),
    )
    return Argument(name, Argument.KEYWORD_ONLY, default=None, annotation=Annotated[hint | None, how])


def _completer(field: Field[Any]) -> Callable[..., Any] | None:
    names = _COMPLETED.get(field.metadata["completion"])
    return None if names is None else lambda context: list(names())


def values_of(config: type[JobConfig], given: Mapping[str, Any]) -> Json:
    """Return what is asked for by the names of the fields: the file's first, then the command line over it."""
    plain, types = dict.fromkeys(_SETTINGS, Any), section_types(config)
    file = read_config(Path(given["config"]), config.command, types | plain) if "config" in given else {}
    if config is RunConfig and "strategy" in given and not given.get("resume"):
        file = _without_others(file, given)
    if "start" in given:
        given = {**given, "start": _pairs("start", given["start"], "TASK=DIR", "sst2=my-lora")}
    if len(given.get("data", ())) == 1:  # several files are a list of them
        given = {**given, "data": given["data"][0]}
    line = {**given, "set": _pairs("set", given.get("set", ()), "key=value", "batch_size=16")}
    for key in _SETTINGS:  # the others are compared when all is checked
        if key in given and key in line["set"]:
            flag = key.replace("_", "-")
            raise UsageError(f"--{flag} and --set {key}={line['set'][key]} are both given. Leave one of them out.")
        if file.get(key) is not None and key in file.get("set", {}):
            raise UsageError(f"{given['config']}: {key} and set.{key} are both given. Leave one of them out.")
    over = {key for key in (*_SETTINGS, *ALSO_SETTINGS) if key in given or key in line["set"]}
    file = {key: value for key, value in file.items() if key not in over}
    settings = {key: value for key, value in file.get("set", {}).items() if key not in over} | line["set"]
    own = {key: each[key] for each in (file, given) for key in _SETTINGS if key in each}
    values = {**file, **given, "set": settings | own}
    return {field.name: values[key] for field in fields(config) if (key := key_of(field)) in values}


def _without_others(file: Json, given: Mapping[str, Any]) -> Json:
    """Return a file's options without those that no strategy asked for has, and say so: no flag could take them away."""
    left = left_behind(file, given["strategy"])
    if left and not given.get("quiet"):
        say(f"note: {given['config']} has {', '.join(left.values())} for strategies that are not run here: left out.")
    kept = {key: value for key, value in file.items() if key not in left}
    return kept | {"set": {key: value for key, value in file.get("set", {}).items() if key not in left}}


def _pairs(flag: str, given: Sequence[str], form: str, example: str) -> dict[str, str]:
    """Return what ``--set key=value`` and flags like it say.

    Raises:
        UsageError: a key or a value is missing, or a key is given twice.
    """
    pairs: dict[str, str] = {}
    for pair in given:
        key, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or not key:
            raise UsageError(f"--{flag} needs {form}, got {brief(pair)}. Write, say, --{flag} {example}.")
        if not value:
            raise UsageError(f"--{flag} {key} needs a value, got an empty text. Give one, or leave --{flag} {key} out.")
        if key in pairs:
            raise UsageError(f"--{flag} {key} is given twice, as {brief(pairs[key])} and {brief(value)}. Give it once.")
        pairs[key] = value
    return pairs
