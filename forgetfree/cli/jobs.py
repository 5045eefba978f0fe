"""``forgetfree run`` and ``graft``: how each job begins, and what is printed when it has ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import Parameter as Argument
from inspect import Signature
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from forgetfree import registry
from forgetfree.cli.flags import CommandFlags, arguments_of, execution_of, of_class, read_flags
from forgetfree.cli.hub import go_offline_if_cut_off, needs_hub
from forgetfree.cli.words import fail, recipe_of, silence
from forgetfree.data.places import tasks_of_files
from forgetfree.data.sources import check_one, check_stream
from forgetfree.display import escaped
from forgetfree.errors import ForgetfreeError, ReportError, RunError, UsageError
from forgetfree.jobs.run_config import RunConfig
from forgetfree.jobs.running.environment import quiet_libraries
from forgetfree.jobs.running.execution import Execution
from forgetfree.output import check_alone, check_out, free_directory, no_empty_directories
from forgetfree.terminal import stderr, tell

Json = dict[str, Any]
On = Annotated[
    Path | None,
    Parameter(
        name="--on",
        metavar="RUN",
        group="What to learn",
        help="a finished run: learn further tasks on top of it",
    ),
]
Without = Annotated[
    str | None,
    Parameter(
        name="--without",
        metavar="TASK",
        group="What to learn",
        help="with --on: write RUN as it would be, had the task never been learned",
    ),
]


@dataclass(frozen=True)
class ReadyJob:
    """A job that is checked, and announced.

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


def job_command(name: str, prepare: Callable[[RunConfig], ReadyJob]) -> Callable[..., int]:
    """Return a command whose flags are the options of a run.

    Args:
        name: ``run`` or ``graft``.
        prepare: checks the configuration as a whole, and then says what will be done.
    """
    arguments = [*arguments_of(name)]

    def command(*subjects: str, debug: bool = False, **flags: Any) -> int:
        config, execution, output = read_flags(name, subjects, flags)
        quiet_libraries()
        out = Path(config.out)
        check_alone(out)  # while another job runs there, nothing else need be told
        if output.check:
            from forgetfree.cli.plan import show_plan

            with silence(output.quiet or output.json):
                show_plan(config, execution, output.json)
            return 0
        used = os.path.lexists(out / "config.json")
        with silence(output.quiet):
            try:
                check_out(out, name, execution.resume)  # before anything is announced
                return _perform(prepare(config), config, replace(execution, debug=debug), output.quiet, output.verbose)
            except ForgetfreeError as error:
                if debug or execution.resume or os.path.lexists(out / "config.json") != used:  # or it has begun
                    raise
                from forgetfree.jobs.running.preflight import with_all_faults

                raise with_all_faults(error, config) from error

    command.__signature__ = Signature(arguments)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return command


def _perform(job: ReadyJob, config: RunConfig, execution: Execution, quiet: bool, verbose: bool) -> int:
    """Perform a job, show what it made, tell what failed and what is left of one that is cut short.

    Args:
        job: the job.
        config: its configuration.
        execution: how it is run.
        quiet: show no progress.
        verbose: show all tables, not only the first.

    Returns:
        The exit code.
    """
    from forgetfree.jobs.running.directory import failures, holdings, resumption
    from forgetfree.jobs.running.progress import make_progress

    if not quiet:
        execution = replace(execution, progress=make_progress(stderr()))
    if needs_hub(job.model, config.data):
        from forgetfree.models.location import locate

        locate(job.model)  # before data are downloaded
        go_offline_if_cut_off()
    from forgetfree.jobs.run import RunJob

    out, job_class = Path(config.out), RunJob
    tell(resumption(job_class, out) if execution.resume else "")
    try:
        with no_empty_directories(out, job.cache):
            results = job.perform(execution)
    except KeyboardInterrupt:
        return fail(f"Interrupted. {holdings(job_class, out)}".strip(), 1)
    except (UsageError, RunError, ReportError):  # of what cannot be begun or resumed: they say themselves what to do
        raise
    except (ForgetfreeError, OSError) as error:
        if execution.debug or not (remains := holdings(job_class, out)):
            raise
        raise RunError(f"{error} {remains}") from error
    job.show(results, out, verbose)
    messages = failures(results)
    for message in messages[:-1]:
        fail(message, 1)
    return fail(f"{messages[-1]} {holdings(job_class, out)}", 1) if messages else 0


# -- Run -------------------------------------------------------------------------------------------------


def _check_stream(config: RunConfig) -> None:
    """Raise unless the data hold the tasks of a stream; no rows are read."""
    check_stream(config.stream, config.data, config.read_options)


def _prepare_run(config: RunConfig) -> ReadyJob:
    from forgetfree.jobs.run import RunJob
    from forgetfree.jobs.running.engine import perform

    job = RunJob(config)
    _check_stream(config)
    tell(f"Running {config.stream} into {config.out}")
    for name, note in registry.shadowed("strategies").items():
        if name in config.strategies:
            tell(f"note: {note}")
    tell(recipe_of(config))
    return ReadyJob(partial(perform, job), _show_run, config.model, config.settings.get("cache"))


def _show_run(results: Json, out: Path, verbose: bool) -> None:
    """Print the headline and the first table of a run, or all, and where the report is."""
    from forgetfree.results.report.page import brief_page, render_page
    from forgetfree.results.report.run_report import lay_out
    from forgetfree.results.table import load_results

    if results["runs"]:
        page = lay_out(load_results(out))
        print(render_page(page if verbose else brief_page(page), "rich"))
        print(escaped(f"Report: {out / 'report.html'} (figures), {out / 'report.md'} (all tables)"))


# -- Graft -----------------------------------------------------------------------------------------------


def _prepare_graft(config: RunConfig) -> ReadyJob:
    from forgetfree.jobs.run import RunJob
    from forgetfree.jobs.running.engine import perform

    check_one(config.stream.rstrip(","), config.data, config.read_options)
    job = RunJob(config)
    tell(f"Grafting {config.stream} into {config.out}")
    tell(recipe_of(config))
    return ReadyJob(partial(perform, job), _show_graft, config.model, config.settings.get("cache"))


def _show_graft(results: Json, out: Path, verbose: bool) -> None:
    """Print what a run prints, and the files of the grafts."""
    _show_run(results, out, verbose)
    for path in sorted(out.glob("bare-graft/seed-*/graft.safetensors")):
        print(escaped(f"Graft: {path} ({path.stat().st_size:,} bytes)"))


# -- Run on top of another run -----------------------------------------------------------------------------

#: What may be given beside ``--on``: where rows and model are, what is trained again, and how.
_BESIDE_ON = {"data", "model", "strategy", "seed", "text_column", "label_column", "kind", "metric", "skip_bad_rows"}


def _run_command() -> Callable[..., int]:
    """Return the command ``run``, which may stand on a finished run."""
    trains = job_command("run", _prepare_run)
    own = [
        Argument("on", Argument.KEYWORD_ONLY, default=None, annotation=On),
        Argument("without", Argument.KEYWORD_ONLY, default=None, annotation=Without),
    ]

    def command(*subjects: str, on: Path | None = None, without: str | None = None, **flags: Any) -> int:
        if on is None and without is None:
            return trains(*subjects, **flags)
        return _run_on(on, without, subjects, flags)

    signature = trains.__signature__  # type: ignore[attr-defined]
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *own])  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return command


def _run_on(run: Path | None, task: str | None, subjects: Sequence[str], flags: Json) -> int:
    """Learn further tasks on top of a finished run, or write it without one of its tasks."""
    if run is None:
        raise UsageError("--without TASK needs the run that learned the task. Give it by --on RUN.")
    debug, output = flags.pop("debug", False), CommandFlags(**of_class(CommandFlags, flags))
    if output.check or output.json:
        raise UsageError(
            "--check is of a whole run. Leave it out: beside --on all is checked before anything is written."
        )
    how = {field.name for field in (*fields(Execution), *fields(CommandFlags))} - {"config", "check", "json"}
    if wrong := [name for name in flags if name not in _BESIDE_ON | how | {"out"}]:
        raise UsageError(
            f"--{wrong[0].replace('_', '-')} cannot be given with --on: a run goes on with its own options, so that it equals "
            "one that had all tasks from the start. Leave it out, or run the whole stream."
        )
    execution = replace(execution_of(flags), debug=debug)
    options = {name: flags[name] for name in _BESIDE_ON if name in flags}
    if len(options.get("data", ())) == 1:
        (options["data"],) = options["data"]
    quiet_libraries()
    from forgetfree.jobs import revision

    tasks = [name.strip() for subject in subjects for name in subject.split(",") if name.strip()]
    if task is not None and tasks:
        raise UsageError(
            f"--without {task} takes a task away, and {', '.join(tasks)} would be learned. Do one after the other."
        )
    tasks = tasks or ([] if task else [*tasks_of_files(options.get("data", ()))])
    if task is None and not tasks:
        raise UsageError(f"Nothing says what to learn on top of {run}. Name a task, or give its file by --data.")
    out = Path(flags.get("out") or free_directory(run.resolve().name))
    with silence(output.quiet):
        if task is None:
            job, what = revision.extension(run, tasks, out, options), f"Learning {', '.join(tasks)} on top of {run}"
        else:
            job, what = revision.removal(run, task, out, options), f"Writing {run} without {task}"
        tell(f"{what}, into {out}")
        ready = ReadyJob(job.write, _show_run, job.config.model, job.config.settings.get("cache"))
        code = _perform(ready, job.config, execution, output.quiet, output.verbose)
    if task is not None:
        print(escaped(f"{run} still holds {task}. Delete that directory to have it gone."))
        if cache := job.config.settings.get("cache"):
            print(escaped(f"The shared cache {cache} may hold its fine-tuned models. Delete them, too."))
    return code


run = _run_command()
graft = job_command("graft", _prepare_graft)
