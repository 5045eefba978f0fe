"""``forgetfree run`` and ``graft``: their flags, made from the fields of a configuration; how a run begins; what it prints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields
from inspect import Parameter as Argument
from inspect import Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

from forgetfree import recipes
from forgetfree.cli.arguments import Debug, check_there
from forgetfree.cli.calls import Job, plan, recipe_of
from forgetfree.cli.refusal import fail
from forgetfree.display import brief, escaped, stderr
from forgetfree.errors import ForgetfreeError, RunError, UsageError
from forgetfree.jobs.config import FLAGGED, OF_RUN, Execution, RunConfig, stream_of
from forgetfree.jobs.environment import quiet_libraries
from forgetfree.jobs.run_directory import refuse_used
from forgetfree.options import HelpGroup, option
from forgetfree.results.run_folder import CONFIG

if TYPE_CHECKING:
    from forgetfree.jobs.revision import Revision

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CommandLine(Execution):
    """The way in which a job is run, with what the command line alone has: files of options, and what is done with them."""

    config: str | None = option(
        None,
        "options in a TOML or JSON file, or a directory whose config.json has them",
        group="How to run",
        placeholder="FILE|DIR",
    )
    check: bool = option(
        False, "check all that can be checked, print what would be done and what it costs, and end", group="How to run"
    )
    on: Path | None = option(None, "a finished run: learn further tasks on top of it", placeholder="RUN")
    without: str | None = option(
        None, "with --on: write RUN as it would be, had the task never been learned", placeholder="TASK"
    )


def run(*subjects: str, command: str = "run", debug: bool = False, **flags: Any) -> int:
    """Check what is asked for, say what will be done, and do it; or print the plan."""
    from forgetfree.jobs.progress import make_progress

    quiet_libraries()
    how = CommandLine(
        **{name: flags.pop(name) for name in _OF_COMMAND if name in flags},
        debug=debug,
        progress=make_progress(stderr()),
    )
    if how.resume and "out" not in flags:
        raise UsageError("--resume needs --out DIR. Give the directory to continue.")
    if "set" in flags:
        flags["set"] = _settings(flags["set"])
    if how.on or how.without:
        job = _job_on(how, {**flags, "stream": ",".join(subjects)})
        if how.check:
            _show_plan(job.config, how.resume, job.revision)
            return 0
        with _remains_told(job, debug):
            results = job.announced(how)()
        return _shown(results, job.config, how)
    config = _config_of(how, command, subjects, flags)
    if how.check:
        _show_plan(config, how.resume)
        return 0
    out, loader = Path(config.out), None
    used = os.path.lexists(out / CONFIG)
    try:
        if not how.resume:
            refuse_used(out)
        job = Job.of(config, f" into {out}")
        loader = job.loader
        with _remains_told(job, debug):
            results = job.announced(how)()
    except ForgetfreeError as error:
        if debug or how.resume or os.path.lexists(out / CONFIG) != used:  # or it has begun
            raise
        from forgetfree.jobs.preflight import with_all_faults

        raise with_all_faults(error, config, loader) from error
    return _shown(results, config, how)


def graft(*subjects: str, **flags: Any) -> int:
    """Run the two strategies of a graft on one task."""
    return run(*subjects, command="graft", **flags)


def _job_on(how: CommandLine, flags: Json) -> Job:
    """Return the run on top of a finished one, with further tasks or without one of its own."""
    check_there(None, how.on)
    if how.config:
        raise UsageError("--config has the options of a whole run, and RUN has its own. Leave it out beside --on.")
    return Job.on(how.on, how.without, flags)


# -- From the fields to the flags ------------------------------------------------------------------------

_OF_COMMAND = {each.name: each for each in fields(CommandLine) if each.metadata}
_GROUPS = {name: Group(name, sort_key=number) for number, name in enumerate(get_args(HelpGroup))}
#: What one of the two commands has no flag for.
_WITHOUT = {"run": ("fine_tuned",), "graft": ("strategy", "held_out", "on", "without")}


def _arguments_of(command: str) -> Iterator[Argument]:
    """Yield the argument without a flag, and every flag, of ``run`` or ``graft``."""
    hints = get_type_hints(RunConfig)
    options = {**OF_RUN, **FLAGGED, **_OF_COMMAND}
    stream = options.pop("stream")
    help = "a registered task, or one under --data DIR" if command == "graft" else stream.metadata["help"]
    name = "task" if command == "graft" else stream.name
    yield Argument(name, Argument.VAR_POSITIONAL, annotation=Annotated[str, Parameter(help=help)])
    for name, field in options.items():
        if name not in _WITHOUT[command]:
            yield _flag(name, field, hints.get(name, type(field.default)))
    yield Argument("debug", Argument.KEYWORD_ONLY, default=False, annotation=Debug)


def _flag(name: str, field: Field[Any], hint: Any) -> Argument:
    """Return an option as an argument of the command, as which it is a text, if anything, that is read later."""
    several = any((get_origin(each) or each) in (tuple, Mapping) for each in (hint, *get_args(hint)))
    placeholder, default = field.metadata["placeholder"], field.default if name in FLAGGED else None
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    typed: Any = list[str] if several else bool if hint is bool else str
    if placeholder in ("DIR", "FILE", "RUN"):
        typed = Path  # which the shell completes
    parameter = Parameter(
        name=f"--{name.replace('_', '-')}",
        help=field.metadata["help"] + ("" if default is None else f" (default: the model's recipe, else {default})"),
        group=_GROUPS[field.metadata["group"]],
        metavar=None if choices else placeholder,
        choices=choices or None,
    )
    return Argument(name, Argument.KEYWORD_ONLY, default=None, annotation=Annotated[typed | None, parameter])


# -- From the flags to the configuration -----------------------------------------------------------------


def _config_of(how: CommandLine, command: str, subjects: Sequence[str], flags: Json) -> RunConfig:
    """Return the configuration that a command line asks for: the file's options, and the flags over them."""
    if len(subjects) > 1:
        hint = f"Join the tasks of a stream by commas: {','.join(subjects)}. " if command == "run" else ""
        more = " ".join(subjects[1:])
        raise UsageError(f"Unrecognized arguments: {more}. {hint}See 'forgetfree {command} --help'.")
    if command == "graft":
        flags = flags | {"strategy": recipes.GRAFT} | ({"stream": stream_of(subjects)} if subjects else {})
    elif subjects:
        flags = flags | {"stream": subjects[0]}
    file: Json = {}
    if how.config:
        from forgetfree.jobs.option_file import for_strategies, read_options

        file = read_options(Path(how.config))
        file = for_strategies(file, flags.get("strategy", ()))  # no flag could take these away
    config = RunConfig.of(file, flags).completed("graft-" if command == "graft" else "")
    if command == "graft":
        config.check_one_task()
    return config


def _settings(texts: Sequence[str]) -> dict[str, str]:
    """Return what ``--set key=value`` says."""
    pairs: dict[str, str] = {}
    for pair in texts:
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key or not value:
            raise UsageError(f"--set needs key=value, got {brief(pair)}. Write, say, --set batch_size=16.")
        if key in pairs:
            raise UsageError(f"--set {key} is given twice, as {brief(pairs[key])} and {brief(value)}. Give it once.")
        pairs[key] = value
    return pairs


# -- What is trained, and printed ------------------------------------------------------------------------


def _shown(results: Json, config: RunConfig, how: CommandLine) -> int:
    """Print what a run made, and what failed; return the exit code."""
    from forgetfree.jobs.run_directory import failures, holdings

    out = Path(config.out)
    if results["runs"]:
        _print_results(out)
    for message in (messages := failures(results)):
        fail(f"{message} {holdings(out)}" if message is messages[-1] else message, 1)
    if how.without is not None:
        print(escaped(f"{how.on} still holds {how.without}. Delete that directory to have it gone."))
        if cache := config.set.get("cache"):
            print(escaped(f"The shared cache {cache} may hold its fine-tuned models. Delete them, too."))
    return 1 if messages else 0


@contextmanager
def _remains_told(job: Job, debug: bool) -> Iterator[None]:
    """Add to an error inside what is left of a run that is cut short, and how it goes on."""
    from forgetfree.jobs.run_directory import holdings

    out = Path(job.config.out)
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(holdings(out)) from error
    except (UsageError, RunError):  # of what cannot be begun or resumed: they say themselves what to do
        raise
    except (ForgetfreeError, OSError) as error:
        if debug or not (remains := holdings(out)):
            raise
        raise RunError(f"{error} {remains}") from error


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


def _show_plan(config: RunConfig, resume: bool, revision: Revision | None = None) -> None:
    """Print the plan of a run, which may stand on top of another."""

    def about(seconds: float | None) -> str:
        if seconds is None:
            return "for an unknown time"
        return f"about {seconds:.1f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"

    found = plan(config, resume=resume, revision=revision)
    model, total = found["model"], found["total"]
    size = f"{model['parameters']:,} parameters, {model['graftable']:,} graftable, " if model["local"] else ""
    print(escaped(f"Model: {model['name']}, {size}readout {model['readout']}, on {found['device']}"))
    for task in found["tasks"]:
        rows = f"{task['train']:,} training, {task['validation']:,} validation, {task['test']:,} test rows"
        labels = f", labels {', '.join(task['labels'])}" if task["labels"] else ""
        print(escaped(f"Task: {task['task']}, {rows}{labels}"))
    for unit in found["units"]:
        known = [each for each in unit["updates"].values() if each is not None]
        updates = f"{sum(known):,} updates" if len(known) == len(unit["updates"]) else "an unknown number of updates"
        carried = f"; carried over: {', '.join(unit['carried_over'])}" if unit["carried_over"] else ""
        print(escaped(f"Unit: {unit['unit']}, {updates}, {about(unit['seconds'])}{carried}"))
    span = f"{about(total['seconds'])} for one unit after the other"
    print(f"Training: {span}, estimated from a few steps of each, without the time of answering test rows")
    if total["memory_bytes"] is not None:
        from forgetfree.results.report.page import size as in_units

        free = f"{in_units(total['free_bytes'])} " + (
            "here" if found["device"] == "cpu" else f"free on {found['device']}"
        )
        print(f"Memory: {in_units(total['memory_bytes'])} at most in these steps, of {free}")
    if recipe := recipe_of(config):
        print(escaped(recipe))
    for note in found["notes"]:
        print(escaped(f"Note: {note}"))
    print("Nothing was written or downloaded.")


# What the parser of the command line reads.
_COMMANDS: tuple[Any, ...] = (run, graft)
for _command in _COMMANDS:
    _command.__signature__ = Signature([*_arguments_of(_command.__name__)])
    _command.__annotations__ = {}
