"""What run, graft and experiment have in common: flags made from their configuration, and how they begin and end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from inspect import Parameter as Argument
from inspect import Signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

from forgetfree import registry
from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub
from forgetfree.cli.usage import Debug, lacks
from forgetfree.cli.words import fail, free_directory, no_empty_directories, say, unsaid
from forgetfree.data.sources import check_data, check_headers, default_data, tasks_of_files
from forgetfree.display import brief
from forgetfree.errors import ForgetfreeError, ReportError, RunError, UsageError
from forgetfree.jobs.config import ALSO_SETTINGS, LOGGERS, CommonOptions, JobConfig, SettingFlags, key_of, section_types
from forgetfree.jobs.run_config import RunConfig, left_behind
from forgetfree.jobs.running.environment import quiet_libraries
from forgetfree.jobs.running.execution import Execution
from forgetfree.jobs.running.torchrun import PARTS, launched
from forgetfree.options import FLAGGED, HelpGroup, build, option
from forgetfree.results.config_file import read_config

Config = TypeVar("Config", bound=JobConfig)
Json = dict[str, Any]


@dataclass(frozen=True)
class Begun:
    """A job that is checked, and said to begin.

    Attributes:
        perform: performs it, and returns the content of results.json.
        show: prints that, with the directory, and all tables or only the first.
        model: that is loaded.
        cache: a directory of fine-tuned models that it may make.
    """

    perform: Callable[[Execution], Json]
    show: Callable[[Json, Path, bool], None]
    model: str
    cache: object


#: Checks what is asked for as a whole, and then says what will be done.
Begin = Callable[[Config], Begun]


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


def job_command(config: type[Config], begin: Begin[Config]) -> Callable[..., int]:
    """Return a command whose flags are the options of a configuration.

    Args:
        config: a dataclass; the first field that not every job has is the argument without a flag.
        begin: checks what is asked for as a whole, and then says what will be done.
    """
    subject = next(field.name for field in fields(config)[len(fields(JobConfig)) :])

    def command(*subjects: str, debug: bool = False, **typed: Any) -> int:
        given: Json = {name: str(value) if isinstance(value, Path) else value for name, value in typed.items()}
        _check_flags(config.command, subject, subjects, given)
        values = _values(config, given | dict(zip([subject], subjects, strict=False)))
        held = tasks_of_files(values.get("data", default_data())) if subject != "name" else ()
        if len(held) == 1 or (held and subject == "stream"):
            values.setdefault(subject, ",".join(held))
        if not values.get(subject):
            raise _lacks_subject(config.command, subject, given)
        processes = launched() or given.get("processes")
        if processes is not None:
            values["settings"] = {"parts": str(PARTS)} | values.get("settings", {})
        values.setdefault("data", default_data())
        prefix = "" if config.command == "run" else f"{config.command}-"
        values.setdefault("out", free_directory(f"{prefix}{values[subject]}"))
        from forgetfree.jobs.running.loggers import check_loggers
        from forgetfree.jobs.running.progress import Progress, make_progress

        check_loggers(given.get("log", ()))
        asked = build(config, values, config.command)
        check_headers(asked.names, asked.data, asked.read_options)  # before torch is imported
        if given.get("check"):
            from forgetfree.cli.plan import show_plan

            quiet_libraries()
            with unsaid(bool(given.get("quiet") or given.get("json"))):
                show_plan(asked, bool(given.get("resume")), bool(given.get("json")))
            return 0
        execution = Execution(
            resume=bool(given.get("resume")),
            allow_changed=bool(given.get("allow_changed")),
            jobs=given.get("jobs"),
            processes=processes,
            cluster=given.get("cluster"),
            log=tuple(given.get("log", ())),
            progress=Progress() if given.get("quiet") else make_progress(sys.stderr),
            debug=debug,
        )
        quiet_libraries()
        begun = Path(str(values["out"])) / "config.json"
        new = not execution.resume and not os.path.lexists(begun)
        with unsaid(bool(given.get("quiet"))):
            try:
                check_data(asked.data, asked.read_options)  # before anything is said
                return _perform(begin(asked), asked, execution, bool(given.get("verbose")))
            except ForgetfreeError as error:
                if debug or not new or os.path.lexists(begun):
                    raise
                from forgetfree.jobs.running.preflight import with_all_faults

                raise with_all_faults(error, asked) from error

    command.__signature__ = Signature([*_arguments(config, subject)])  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return command


def _check_flags(command: str, subject: str, subjects: Sequence[str], given: Json) -> None:
    """Raise ``UsageError`` where flags do not go together, whatever the configuration is."""
    if len(subjects) > 1:
        hint = f"Join the tasks of a stream by commas: {','.join(subjects)}. " if subject == "stream" else ""
        more = " ".join(subjects[1:])
        raise UsageError(f"Unrecognized arguments: {more}. {hint}See 'forgetfree {command} --help'.")
    if given.get("resume") and "out" not in given:
        raise UsageError("--resume needs --out DIR. Give the directory to continue.")
    if given.get("allow_changed") and not given.get("resume"):
        raise UsageError("--allow-changed is about what is resumed. Add --resume, or leave it out.")
    if given.get("jobs", 1) < 1:
        raise UsageError(f"--jobs must be at least 1, got {given['jobs']}.")
    if given.get("json") and not given.get("check"):
        raise UsageError("--json prints the plan of --check. Give --check, too, or leave --json out.")
    if launched() and "processes" in given:
        raise UsageError(f"torchrun has started {launched()} processes already. Leave --processes out.")
    if "cluster" in given:
        from forgetfree.jobs.running.cluster import check_cluster

        check_cluster(given["cluster"], given.get("jobs", 1))


def _arguments(config: type[JobConfig], subject: str) -> Iterator[Argument]:
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


def _values(config: type[JobConfig], given: Mapping[str, Any]) -> Json:
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


def _lacks_subject(command: str, subject: str, given: Mapping[str, Any]) -> UsageError:
    begun = Path(given.get("out", "")) / "config.json"
    if given.get("resume") and begun.is_file():
        return UsageError(f"No {subject} is given. To continue that {command}, give --config {begun}, too.")
    if subject == "stream":
        return UsageError(f"No stream is given. Known: {', '.join(registry.streams())}, or task names with commas.")
    return lacks(f"forgetfree {command}", [subject.upper()])


def _perform(begun: Begun, config: JobConfig, execution: Execution, verbose: bool) -> int:
    """Perform a job, show what it made, tell what failed and what is left of one that is cut short.

    Args:
        begun: the job.
        config: what is asked for.
        execution: how it is run.
        verbose: show all tables, not only the first.

    Returns:
        The exit code.
    """
    from forgetfree.jobs.running.directory import failures, holdings, resumption

    if needs_hub(begun.model, config.data):
        from forgetfree.models.loading import locate

        locate(begun.model)  # before data are downloaded
        go_offline_if_cut_off()
    out, kind = Path(config.out), registry.JOBS[config.command].job.load()
    say(resumption(kind, out) if execution.resume else "")
    try:
        with no_empty_directories(out, begun.cache):
            results = begun.perform(execution)
    except KeyboardInterrupt:
        return fail(f"Interrupted. {holdings(kind, out)}".strip(), 1)
    except (UsageError, RunError, ReportError):  # of what cannot be begun or resumed: they say themselves what to do
        raise
    except (ForgetfreeError, OSError) as error:
        if execution.debug or not (held := holdings(kind, out)):
            raise
        raise RunError(f"{error} {held}") from error
    begun.show(results, out, verbose)
    failed = failures(results)
    for message in failed[:-1]:
        fail(message, 1)
    return fail(f"{failed[-1]} {holdings(kind, out)}", 1) if failed else 0
