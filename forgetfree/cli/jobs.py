"""``forgetfree run`` and ``graft``: how a run begins, and what is printed when it has ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
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
from forgetfree.data.sources import check_one, check_stream, tasks_of_files
from forgetfree.display import escaped, stderr, tell
from forgetfree.errors import ForgetfreeError, ReportError, RunError, UsageError
from forgetfree.files import check_alone, check_out, free_directory, no_empty_directories
from forgetfree.jobs.config import BESIDE_ON, Execution, RunConfig
from forgetfree.jobs.environment import quiet_libraries

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


def run(*subjects: str, on: Path | None = None, without: str | None = None, debug: bool = False, **flags: Any) -> int:
    """Train strategies on a stream of tasks."""
    if on is not None or without is not None:
        return _run_on(on, without, subjects, flags | {"debug": debug})
    return _train("run", subjects, flags, debug)


def graft(*subjects: str, debug: bool = False, **flags: Any) -> int:
    """Run the two strategies of a graft on one task."""
    return _train("graft", subjects, flags, debug)


def _train(command: str, subjects: Sequence[str], flags: Json, debug: bool) -> int:
    """Check what is asked for, say what will be done, and do it; or print the plan."""
    config, execution, output = read_flags(command, subjects, flags)
    quiet_libraries()
    out = Path(config.out)
    check_alone(out)  # while another run works there, nothing else need be told
    if output.check:
        from forgetfree.cli.plan import show_plan

        with silence(output.quiet or output.json):
            show_plan(config, execution, output.json)
        return 0
    used = os.path.lexists(out / "config.json")
    with silence(output.quiet):
        if command == "graft":
            check_one(config.stream.rstrip(","), config.data, config.read_options)
        try:
            check_out(out, execution.resume)  # before anything is announced
            from forgetfree.jobs.config import prepared
            from forgetfree.jobs.run import run as perform

            config = prepared(config)
            if command == "run":
                check_stream(config.stream, config.data, config.read_options)
            _announce(config, "Grafting" if command == "graft" else "Running")
            return _perform(partial(perform, config), config, replace(execution, debug=debug), output)
        except ForgetfreeError as error:
            if debug or execution.resume or os.path.lexists(out / "config.json") != used:  # or it has begun
                raise
            from forgetfree.jobs.preflight import with_all_faults

            raise with_all_faults(error, config) from error


def _announce(config: RunConfig, doing: str) -> None:
    tell(f"{doing} {config.stream} into {config.out}")
    for name, note in registry.shadowed("strategies").items():
        if name in config.strategies:
            tell(f"note: {note}")
    tell(recipe_of(config))


def _perform(
    perform: Callable[[Execution], Json], config: RunConfig, execution: Execution, output: CommandFlags
) -> int:
    """Perform a run, show what it made, tell what failed and what is left of one that is cut short.

    Args:
        perform: performs it, and returns the content of results.json.
        config: what is asked for.
        execution: how it is run.
        output: what is printed.

    Returns:
        The exit code.
    """
    from forgetfree.jobs.directory import failures, holdings, resumption
    from forgetfree.jobs.progress import make_progress

    if not output.quiet:
        execution = replace(execution, progress=make_progress(stderr()))
    if needs_hub(config.model, config.data):
        from forgetfree.models.location import locate

        locate(config.model)  # before data are downloaded
        go_offline_if_cut_off()
    out = Path(config.out)
    tell(resumption(out) if execution.resume else "")
    try:
        with no_empty_directories(out, config.settings.get("cache")):
            results = perform(execution)
    except KeyboardInterrupt:
        return fail(f"Interrupted. {holdings(out)}".strip(), 1)
    except (UsageError, RunError, ReportError):  # of what cannot be begun or resumed: they say themselves what to do
        raise
    except (ForgetfreeError, OSError) as error:
        if execution.debug or not (remains := holdings(out)):
            raise
        raise RunError(f"{error} {remains}") from error
    _show(results, out, output.verbose)
    messages = failures(results)
    for message in messages[:-1]:
        fail(message, 1)
    return fail(f"{messages[-1]} {holdings(out)}", 1) if messages else 0


def _show(results: Json, out: Path, verbose: bool) -> None:
    """Print the headline and the first table of a run, or all, and where the report and the grafts are."""
    if not results["runs"]:
        return
    from forgetfree.results.report.page import brief_page, render_page
    from forgetfree.results.report.run_report import lay_out
    from forgetfree.results.table import load_results

    page = lay_out(load_results(out))
    print(render_page(page if verbose else brief_page(page), "rich"))
    print(escaped(f"Report: {out / 'report.html'} (figures), {out / 'report.md'} (all tables)"))
    for path in sorted(out.glob("bare-graft/seed-*/graft.safetensors")):
        print(escaped(f"Graft: {path} ({path.stat().st_size:,} bytes)"))


# -- Run on top of another run -----------------------------------------------------------------------------


def _run_on(run: Path | None, task: str | None, subjects: Sequence[str], flags: Json) -> int:
    """Learn further tasks on top of a finished run, or write it without one of its tasks."""
    if run is None:
        raise UsageError("--without TASK needs the run that learned the task. Give it by --on RUN.")
    debug, output = flags.pop("debug"), CommandFlags(**of_class(CommandFlags, flags))
    if output.check or output.json:
        raise UsageError(
            "--check is of a whole run. Leave it out: beside --on all is checked before anything is written."
        )
    how = {field.name for field in (*fields(Execution), *fields(CommandFlags))} - {"config", "check", "json"}
    if wrong := [name for name in flags if name not in {*BESIDE_ON} | how | {"out"}]:
        raise UsageError(
            f"--{wrong[0].replace('_', '-')} cannot be given with --on: a run goes on with its own options, so that it equals "
            "one that had all tasks from the start. Leave it out, or run the whole stream."
        )
    execution = replace(execution_of(flags), debug=debug)
    options = {name: flags[name] for name in BESIDE_ON if name in flags}
    if len(options.get("data", ())) == 1:
        (options["data"],) = options["data"]
    quiet_libraries()
    from forgetfree.jobs.revision import revise
    from forgetfree.jobs.run import run_on

    tasks = [name.strip() for subject in subjects for name in subject.split(",") if name.strip()]
    if task is None and not tasks:
        tasks = [*tasks_of_files(options.get("data", ()))]
    out = Path(flags.get("out") or free_directory(run.resolve().name))
    with silence(output.quiet):
        revision = revise(run, tasks, task, out, options)
        tell(f"{revision}, into {out}")
        code = _perform(partial(run_on, revision), revision.config, execution, output)
    if task is not None:
        print(escaped(f"{run} still holds {task}. Delete that directory to have it gone."))
        if cache := revision.config.settings.get("cache"):
            print(escaped(f"The shared cache {cache} may hold its fine-tuned models. Delete them, too."))
    return code


def _with_signature(command: Callable[..., int], *more: Argument) -> None:
    """Give a command the flags of its options, as the parser of the command line reads them."""
    command.__signature__ = Signature([*arguments_of(command.__name__), *more])  # type: ignore[attr-defined]
    command.__annotations__ = {}


_with_signature(
    run,
    Argument("on", Argument.KEYWORD_ONLY, default=None, annotation=On),
    Argument("without", Argument.KEYWORD_ONLY, default=None, annotation=Without),
)
_with_signature(graft)
