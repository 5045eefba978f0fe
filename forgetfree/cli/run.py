"""``forgetfree run`` and ``graft``: their flags, the start of a run, and its output."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from pydantic_core import CoreSchema, core_schema

from forgetfree import recipes
from forgetfree.cli.arguments import Debug, check_there
from forgetfree.cli.calls import Job, plan, recipe_of
from forgetfree.cli.refusal import fail
from forgetfree.display import brief, escaped, stderr
from forgetfree.errors import ForgetfreeError, RunError, UsageError
from forgetfree.jobs.config import Execution, RunConfig, RunOptions, stream_of
from forgetfree.jobs.environment import quiet_libraries
from forgetfree.jobs.run_directory import refuse_used
from forgetfree.options import AnyOptions, Options, Place, option
from forgetfree.results.run_folder import CONFIG
from forgetfree.training.training_options import LocalizationOptions

if TYPE_CHECKING:
    from forgetfree.jobs.revision import Revision
    from forgetfree.results.table import Results

Json = dict[str, Any]


class _Unread:
    """Leaves flags as they were typed; they are parsed with the options of files, so that all faults are reported together."""

    @staticmethod
    def __get_pydantic_core_schema__(options: type[Options], _: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(lambda typed: options.model_construct(**typed))


#: The flags of a class of options; the values are still texts.
Flags = Annotated[AnyOptions, Parameter(name="*"), _Unread]


class CommandLine(Execution):
    """The way in which a job is run, with the flags that only the command line has."""

    config: Place | None = option(
        None,
        "TOML or JSON file with options, or a directory with a config.json",
        group="How to run",
        placeholder="FILE|DIR",
    )
    check: bool = option(
        False, "dry run: print every error at once, or an estimate of time and memory", group="How to run"
    )
    on: Place | None = option(None, "finished run to learn further tasks on", group="What to learn", placeholder="RUN")
    without: str | None = option(
        None,
        "with --on: write RUN as if the task had never been learned",
        group="What to learn",
        placeholder="TASK",
    )


class Asked(RunOptions, RunConfig):
    """Options of a run on the command line, where ``data`` and ``set`` have other types than in a configuration."""

    data: tuple[str, ...] = option(
        (),
        "where the data is: hub, demo (embedded), a directory, or a file; can be repeated for files, one per task "
        "(default: $FORGETFREE_DATA, else hub)",
        group="What to learn",
        placeholder="hub|demo|DIR|FILE",
    )
    set: tuple[str, ...] = option(  # type: ignore[assignment]
        (), "set any option; see 'forgetfree list strategies --verbose'", group="How to learn", placeholder="KEY=VALUE"
    )


Training = Annotated[
    Flags[LocalizationOptions], Parameter(show_default=lambda known: f"from the model's recipe, else {known}")
]
#: No flag is given.
NOTHING, UNTRAINED, USUAL = (
    Asked.model_construct(),
    LocalizationOptions.model_construct(),
    CommandLine.model_construct(),
)


def run(
    *stream: Annotated[str, Parameter(help="a registered stream, or task names joined by commas")],
    asked: Annotated[Flags[Asked], Parameter(parse="^(?!fine_tuned$)")] = NOTHING,
    training: Training = UNTRAINED,
    way: Flags[CommandLine] = USUAL,
    debug: Debug = False,
) -> int:
    """Check what is asked for, say what will be done, and do it; or print the plan."""
    how, flags = _typed(asked, training, way, debug)
    if not how.on and how.without is None:
        if len(stream) > 1:
            raise _too_many("run", stream, f"Join the tasks of a stream by commas: {','.join(stream)}. ")
        if how.resume and not (stream or how.config) and (begun := Path(flags["out"]) / CONFIG).is_file():
            how = how.model_copy(update={"config": str(begun)})
        return _learned(how, _config_of(how, flags | ({"stream": stream[0]} if stream else {})))
    check_there(None, Path(how.on) if how.on else None)
    if how.config:
        raise UsageError("--config cannot be given with --on, because RUN has its own options. Leave it out.")
    job = Job.on(how.on, how.without, {**flags, "stream": ",".join(stream)})
    if how.check:
        _show_plan(job.config, how.resume, job.revision)
        return 0
    with _remains_told(job, debug):
        results = job.announced(how)()
    code = _shown(results, job.config)
    if how.without is not None:
        print(escaped(f"{how.on} still contains {how.without}. Delete that directory to remove the task completely."))
        if cache := job.config.set.get("cache"):
            print(escaped(f"The shared cache {cache} may contain models fine-tuned on it. Delete them, too."))
    return code


def graft(
    *task: Annotated[str, Parameter(help="a registered task, or one in --data DIR")],
    asked: Annotated[Flags[Asked], Parameter(parse="^(?!strategy$|held_out$)")] = NOTHING,
    training: Training = UNTRAINED,
    way: Annotated[Flags[CommandLine], Parameter(parse="^(?!on$|without$)")] = USUAL,
    debug: Debug = False,
) -> int:
    """Run the two strategies of a graft on one task."""
    how, flags = _typed(asked, training, way, debug)
    if len(task) > 1:
        raise _too_many("graft", task)
    flags |= {"strategy": recipes.GRAFT} | ({"stream": stream_of(task)} if task else {})
    config = _config_of(how, flags, "graft-")
    config.check_one_task()
    return _learned(how, config)


def _learned(how: CommandLine, config: RunConfig) -> int:
    """Run a configuration, or print its plan; return the exit code."""
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
        with _remains_told(job, how.debug):
            results = job.announced(how)()
    except ForgetfreeError as error:
        if how.debug or how.resume or os.path.lexists(out / CONFIG) != used:  # or the run has begun
            raise
        from forgetfree.jobs.preflight import with_all_faults

        raise with_all_faults(error, config, loader) from error
    return _shown(results, config)


# -- From the flags to the configuration -----------------------------------------------------------------


def _typed(asked: Asked, training: LocalizationOptions, way: CommandLine, debug: bool) -> tuple[CommandLine, Json]:
    """Return the parsed `CommandLine`, and the given flags of options as texts."""
    from forgetfree.jobs.progress import make_progress

    quiet_libraries()
    options, trained, of_way = (
        {name: getattr(each, name) for name in each.model_fields_set} for each in (asked, training, way)
    )
    how, flags = CommandLine(**of_way, debug=debug, progress=make_progress(stderr())), options | trained
    if how.resume and "out" not in flags:
        raise UsageError("--resume needs --out DIR. Give the directory of the run to resume.")
    if "set" in flags:
        flags["set"] = _settings(flags["set"])
    return how, flags


def _too_many(command: str, subjects: Sequence[str], hint: str = "") -> UsageError:
    more = " ".join(subjects[1:])
    return UsageError(f"Unrecognized arguments: {more}. {hint}See 'forgetfree {command} --help'.")


def _config_of(how: CommandLine, flags: Json, prefix: str = "") -> RunConfig:
    """Return the configuration from the options of the file, overridden by the flags."""
    file: Json = {}
    if how.config:
        from forgetfree.jobs.option_file import for_strategies, read_options

        file = read_options(Path(how.config))
        file = for_strategies(file, flags.get("strategy", ()))  # no flag could remove options
    return RunConfig.of(file, flags).completed(prefix)


def _settings(texts: Sequence[str]) -> dict[str, str]:
    """Return the options of ``--set key=value`` by name."""
    pairs: dict[str, str] = {}
    for pair in texts:
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key or not value:
            raise UsageError(f"--set needs key=value, got {brief(pair)}. For example, write --set batch_size=16.")
        if key in pairs:
            raise UsageError(f"--set {key} is given twice, as {brief(pairs[key])} and {brief(value)}. Give it once.")
        pairs[key] = value
    return pairs


# -- The output ------------------------------------------------------------------------------------------


def _shown(results: Results, config: RunConfig) -> int:
    """Print the results and the failures of a run; return the exit code."""
    from forgetfree.jobs.run_directory import failures, holdings

    out = Path(config.out)
    if results.strategies:
        _print_results(results, out)
    for message in (messages := failures(results)):
        fail(f"{message} {holdings(out)}" if message is messages[-1] else message, 1)
    return 1 if messages else 0


@contextmanager
def _remains_told(job: Job, debug: bool) -> Iterator[None]:
    """Add to an error inside the block how many units are finished, and how to resume the run."""
    from forgetfree.jobs.run_directory import holdings

    out = Path(job.config.out)
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(holdings(out)) from error
    except (UsageError, RunError):  # the run cannot begin or go on: the message says what to do
        raise
    except (ForgetfreeError, OSError) as error:
        if debug or not (remains := holdings(out)):
            raise
        raise RunError(f"{error} {remains}") from error


def _print_results(results: Results, out: Path) -> None:
    """Print the headline and the first table of a run, and the paths of the report and the grafts."""
    from forgetfree.results.report.page import brief_page, render_page
    from forgetfree.results.report.run_report import lay_out

    print(render_page(brief_page(lay_out(results)), "rich"))
    print(escaped(f"Report: {out / 'report.html'} (figures), {out / 'report.md'} (all tables)"))
    for path in sorted(out.glob("bare-graft/seed-*/graft.safetensors")):
        print(escaped(f"Graft: {path} ({path.stat().st_size:,} bytes)"))


def _show_plan(config: RunConfig, resume: bool, revision: Revision | None = None) -> None:
    """Print the plan of a run, which may be based on another."""

    def about(seconds: float | None) -> str:
        if seconds is None:
            return "for an unknown time"
        return f"about {seconds:.1f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"

    found = plan(config, resume=resume, revision=revision)
    model, total = found["model"], found["total"]
    size = f"{model['parameters']:,} parameters, {model['graftable']:,} graftable, " if model["local"] else ""
    print(escaped(f"Model: {model['name']}, {size}readout {model['readout']}, on {found['device']}"))
    for task in found["tasks"]:
        rows = f"{task['train']:,} training, {task['validation']:,} validation, {task['test']:,} test examples"
        labels = f", labels {', '.join(task['labels'])}" if task["labels"] else ""
        print(escaped(f"Task: {task['task']}, {rows}{labels}"))
    for unit in found["units"]:
        known = [each for each in unit["updates"].values() if each is not None]
        updates = f"{sum(known):,} updates" if len(known) == len(unit["updates"]) else "an unknown number of updates"
        carried = f"; reused: {', '.join(unit['carried_over'])}" if unit["carried_over"] else ""
        print(escaped(f"Unit: {unit['unit']}, {updates}, {about(unit['seconds'])}{carried}"))
    span = f"{about(total['seconds'])} for one unit after the other"
    print(f"Training: {span}, estimated from a few steps of each, without the time for test predictions")
    if total["memory_bytes"] is not None:
        from forgetfree.results.report.page import size as in_units

        free = f"{in_units(total['free_bytes'])} " + (
            "here" if found["device"] == "cpu" else f"free on {found['device']}"
        )
        print(f"Memory: {in_units(total['memory_bytes'])} at most in these steps, of {free}")
    if recipe := recipe_of(config):
        print(escaped(recipe))
    if again := revision.trained_again() if revision else "":
        print(escaped(again))
    for note in found["notes"]:
        print(escaped(f"Note: {note}"))
    print("Nothing was written or downloaded.")
