"""What run, sweep, graft and experiment have in common as commands: how they begin and end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Signature
from pathlib import Path
from typing import Any, TypeVar

from forgetfree import registry
from forgetfree.cli.flags import arguments_of, values_of
from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub
from forgetfree.cli.usage import lacks
from forgetfree.cli.words import fail, free_directory, no_empty_directories, say, silence
from forgetfree.data.sources import check_headers, default_data, tasks_of_files
from forgetfree.errors import ForgetfreeError, ReportError, RunError, UsageError
from forgetfree.jobs.config import JobConfig
from forgetfree.jobs.running.environment import quiet_libraries
from forgetfree.jobs.running.execution import Execution
from forgetfree.jobs.running.torchrun import PARTS, launched
from forgetfree.options import build

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


def job_command(kind: type[Config], begin: Begin[Config]) -> Callable[..., int]:
    """Return a command whose flags are the options of a configuration.

    Args:
        kind: a dataclass; the first field that not every job has is the argument without a flag.
        begin: checks what is asked for as a whole, and then says what will be done.
    """
    subject = next(field.name for field in fields(kind)[len(fields(JobConfig)) :])

    def command(*subjects: str, debug: bool = False, **typed: Any) -> int:
        given: Json = {name: str(value) if isinstance(value, Path) else value for name, value in typed.items()}
        _check_flags(kind.command, subject, subjects, given)
        values = values_of(kind, given | dict(zip([subject], subjects, strict=False)))
        config = build(kind, _with_defaults(values, kind.command, subject, given), kind.command)
        check_headers(config.names, config.data, config.read_options)  # before torch is imported
        quiet, resume = bool(given.get("quiet")), bool(given.get("resume"))
        quiet_libraries()
        if given.get("check"):
            from forgetfree.cli.plan import show_plan

            with silence(quiet or bool(given.get("json"))):
                show_plan(config, resume, bool(given.get("json")))
            return 0
        begun = Path(config.out) / "config.json"
        new = not resume and not os.path.lexists(begun)
        with silence(quiet):
            try:
                return _perform(begin(config), config, _execution(given, debug), bool(given.get("verbose")))
            except ForgetfreeError as error:
                if debug or not new or os.path.lexists(begun):
                    raise
                from forgetfree.jobs.running.preflight import with_all_faults

                raise with_all_faults(error, config) from error

    command.__signature__ = Signature([*arguments_of(kind, subject)])  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return command


def _with_defaults(values: Json, command: str, subject: str, given: Json) -> Json:
    """Return what is asked for with what follows from it: the tasks that files hold, parts of a batch, a new directory.

    Raises:
        UsageError: nothing says what to learn, or a library of ``--log`` is not there.
    """
    tasks = tasks_of_files(values.get("data", default_data())) if subject != "name" else ()
    if len(tasks) == 1 or (tasks and subject == "stream"):
        values = {subject: ",".join(tasks), **values}
    if not values.get(subject):
        raise _lacks_subject(command, subject, given)
    if launched() or "processes" in given:
        values["settings"] = {"parts": str(PARTS)} | values.get("settings", {})
    from forgetfree.jobs.running.loggers import check_loggers

    check_loggers(given.get("log", ()))
    prefix = "" if command == "run" else f"{command}-"
    return {"data": default_data(), "out": free_directory(f"{prefix}{values[subject]}"), **values}


def _execution(given: Json, debug: bool) -> Execution:
    """Return how the job is to be run."""
    from forgetfree.jobs.running.progress import Progress, make_progress

    return Execution(
        resume=bool(given.get("resume")),
        allow_changed=bool(given.get("allow_changed")),
        jobs=given.get("jobs"),
        processes=launched() or given.get("processes"),
        cluster=given.get("cluster"),
        log=tuple(given.get("log", ())),
        progress=Progress() if given.get("quiet") else make_progress(sys.stderr),
        debug=debug,
    )


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
