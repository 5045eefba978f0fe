"""``forgetfree run`` and ``graft``: how a run begins, and what is printed when it has ended."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from inspect import Signature
from pathlib import Path
from typing import Any

from forgetfree.cli.flags import CommandFlags, arguments_of, execution_of, of_class, read_flags
from forgetfree.cli.job import Job, plan, recipe_of
from forgetfree.cli.usage import check_there, fail, silence
from forgetfree.data.sources import check_one, check_stream, tasks_of_files
from forgetfree.display import counted, escaped
from forgetfree.errors import ForgetfreeError, ReportError, RunError, UsageError
from forgetfree.files import check_begun, check_place, free_directory, refuse_used
from forgetfree.jobs.config import Execution, RunConfig
from forgetfree.jobs.environment import quiet_libraries

Json = dict[str, Any]
#: The most units of a plan that are printed.
_SHOWN = 12


def run(
    *subjects: str,
    debug: bool = False,
    command: str = "run",
    **flags: Any,
) -> int:
    """Check what is asked for, say what will be done, and do it; or print the plan."""
    if {"on", "without"} & flags.keys():
        return _run_on(flags.get("on"), flags.get("without"), subjects, flags, debug)
    config, execution, output = read_flags(command, subjects, flags)
    quiet_libraries()
    out = Path(config.out)
    if output.check:
        with silence(output.quiet):
            _show_plan(config, execution)
        return 0
    used, job = os.path.lexists(out / "config.json"), None
    with silence(output.quiet):
        try:
            if command == "graft":
                check_one(config.stream.rstrip(","), config.data, config.read_options)
            else:
                check_stream(config.stream, config.data, config.read_options)
            if execution.resume:  # before anything is announced
                check_begun(out)
            else:
                check_place(out)
                refuse_used(out)
            doing = "Grafting" if command == "graft" else "Running"
            job = Job.of_config(config, f"{doing} {config.stream} into {config.out}")
            with _remains_told(out, debug):
                how = job.announced(execution, watched=not output.quiet)
                results = job.train(replace(how, debug=debug))
            return _show(results, out)
        except ForgetfreeError as error:
            if debug or execution.resume or os.path.lexists(out / "config.json") != used:  # or it has begun
                raise
            from forgetfree.jobs.preflight import with_all_faults

            raise with_all_faults(error, config, job.loader if job else None) from error


def graft(*subjects: str, **flags: Any) -> int:
    """Run the two strategies of a graft on one task."""
    return run(*subjects, command="graft", **flags)


def _run_on(run: Path | None, task: str | None, subjects: Sequence[str], flags: Json, debug: bool) -> int:
    """Learn further tasks on top of a finished run, or write it without one of its tasks."""
    check_there(None, run)
    output = CommandFlags(**of_class(CommandFlags, flags))
    if output.check:
        raise UsageError(
            "--check is of a whole run. Leave it out: beside --on all is checked before anything is written."
        )
    execution = replace(execution_of(flags), debug=debug)
    others = {"out", *(field.name for field in (*fields(Execution), *fields(CommandFlags)))} - {"config"}
    options = {name: value for name, value in flags.items() if name not in others}
    if len(options.get("data", ())) == 1:
        (options["data"],) = options["data"]
    quiet_libraries()
    stream = ",".join(subjects)
    if task is None and not stream:
        stream = ",".join(tasks_of_files(options.get("data", ())))
    out = Path(flags.get("out") or free_directory(run.resolve().name if run else ""))
    with silence(output.quiet):
        job = Job.on_run(run, task, stream, out, options)
        with _remains_told(out, debug):
            results = job.train(job.announced(execution, watched=not output.quiet))
        code = _show(results, out)
    if task is not None:
        print(escaped(f"{run} still holds {task}. Delete that directory to have it gone."))
        if cache := job.config.set.get("cache"):
            print(escaped(f"The shared cache {cache} may hold its fine-tuned models. Delete them, too."))
    return code


@contextmanager
def _remains_told(out: Path, debug: bool) -> Iterator[None]:
    """Add to an error inside what is left of a run that is cut short, and how it goes on."""
    from forgetfree.jobs.directory import holdings

    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(holdings(out)) from error
    except (UsageError, RunError, ReportError):  # of what cannot be begun or resumed: they say themselves what to do
        raise
    except (ForgetfreeError, OSError) as error:
        if debug or not (remains := holdings(out)):
            raise
        raise RunError(f"{error} {remains}") from error


def _show(results: Json, out: Path) -> int:
    """Print what a run made, and what failed; return the exit code."""
    from forgetfree.jobs.directory import failures, holdings

    if results["runs"]:
        _print_results(out)
    messages = failures(results)
    for message in messages[:-1]:
        fail(message, 1)
    return fail(f"{messages[-1]} {holdings(out)}", 1) if messages else 0


def _print_results(out: Path) -> None:
    """Print the headline and the first table of a run, and where the report and the grafts are."""
    from forgetfree.results.report.page import brief_page, render_page
    from forgetfree.results.report.run_report import lay_out
    from forgetfree.results.table import load_results

    page = lay_out(load_results(out))
    print(render_page(brief_page(page), "rich"))
    print(escaped(f"Report: {out / 'report.html'} (figures), {out / 'report.md'} (all tables)"))
    for path in sorted(out.glob("bare-graft/seed-*/graft.safetensors")):
        print(escaped(f"Graft: {path} ({path.stat().st_size:,} bytes)"))


def _show_plan(config: RunConfig, execution: Execution) -> None:
    """Print the plan of a run."""
    found = plan(config, resume=execution.resume)
    model, total = found["model"], found["total"]
    size = f"{model['parameters']:,} parameters, {model['graftable']:,} graftable, " if model["local"] else ""
    print(escaped(f"Model: {model['name']}, {size}readout {model['readout']}, on {found['device']}"))
    for task in found["tasks"]:
        rows = f"{task['train']:,} training, {task['validation']:,} validation, {task['test']:,} test rows"
        labels = f", labels {', '.join(task['labels'])}" if task["labels"] else ""
        print(escaped(f"Task: {task['task']}, {rows}{labels}"))
    for unit in found["units"][:_SHOWN]:
        known = [each for each in unit["updates"].values() if each is not None]
        updates = f"{sum(known):,} updates" if len(known) == len(unit["updates"]) else "an unknown number of updates"
        print(escaped(f"Unit: {unit['unit']}, {updates}" + _about(unit["seconds"], ", ")))
    if len(found["units"]) > _SHOWN:
        print(f"… and {counted(len(found['units']) - _SHOWN, 'more unit')}")
    training = _about(total["seconds"]) or "for an unknown time"
    print(f"Training: {training}, one unit at a time, by a few steps of each; answers come on top")
    if total["memory_bytes"] is not None:
        from forgetfree.results.report.page import size as in_units

        print(f"Memory: {in_units(total['memory_bytes'])} at most in these steps")
    if recipe := recipe_of(config):
        print(escaped(recipe))
    for note in found["notes"]:
        print(escaped(f"Note: {note}"))
    print("Nothing was written or downloaded.")


def _about(seconds: float | None, before: str = "") -> str:
    """Return how long something takes, if that is known."""
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{before}about {seconds:.1f} s"
    return f"{before}about {seconds / 60:.0f} min" if seconds < 6000 else f"{before}about {seconds / 3600:.1f} h"


# What the parser of the command line reads.
_COMMANDS: tuple[Any, ...] = (run, graft)
for _command in _COMMANDS:
    _command.__signature__ = Signature([*arguments_of(_command.__name__)])
    _command.__annotations__ = {}
