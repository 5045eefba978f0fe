"""``forgetfree ledger remove`` and ``update``: take a task back, learn it again."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from forgetfree.cli.hub import reach_hub
from forgetfree.cli.usage import AsJson, Debug
from forgetfree.cli.words import fail, silence
from forgetfree.display import escaped, json_text
from forgetfree.errors import UsageError
from forgetfree.jobs.run_config import left_behind
from forgetfree.jobs.running.environment import quiet_libraries
from forgetfree.options import typed
from forgetfree.output import first_free, no_empty_directories
from forgetfree.results.config_file import load_run, located, of_each
from forgetfree.terminal import stderr

if TYPE_CHECKING:
    from forgetfree.jobs.revision import Revised


Run = Annotated[Path, Parameter(name="DIR", help="what forgetfree run wrote; it does not change")]
Out = Annotated[Path, Parameter(metavar="DIR", help="the directory to write; must be new or empty, unless --resume")]
RunModel = Annotated[str | None, Parameter(metavar="NAME|DIR", help="the run's model, if it lies elsewhere now")]
Resume = Annotated[bool, Parameter(help="continue in --out; what is finished is kept")]
Quiet = Annotated[bool, Parameter(help="say nothing but errors and the result")]


def remove(
    run: Run,
    /,
    *,
    task: Annotated[
        str, Parameter(metavar="NAME", help="the task to take back, with all its versions; or one: NAME@2")
    ],
    out: Out,
    data: Annotated[
        str | None,
        Parameter(metavar="hub|demo|DIR|FILE", help="the rows of the other tasks, if they lie elsewhere now"),
    ] = None,
    model: RunModel = None,
    resume: Resume = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Write the run that would have been, had a task never been learned."""
    output: dict[str, bool] = {"quiet": quiet, "as_json": as_json, "debug": debug}
    return _revise("remove", run, task, out, data=data, model=model, resume=resume, **output)


def update(
    run: Run,
    /,
    *,
    task: Annotated[str, Parameter(metavar="NAME", help="the task that is met again")],
    out: Out,
    data: Annotated[
        str | None, Parameter(metavar="hub|demo|DIR|FILE", help="its rows now (default: those of the run)")
    ] = None,
    model: RunModel = None,
    or_fewer: Annotated[bool, Parameter(help="take all rows of a label that has fewer than the run's --shots")] = False,
    skip_bad_rows: Annotated[bool, Parameter(help="leave out rows that cannot be used; else they are refused")] = False,
    resume: Resume = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Learn a task again, as its next version, on top of all that was learned since."""
    output: dict[str, bool] = {"quiet": quiet, "as_json": as_json, "debug": debug}
    read = {"or_fewer": or_fewer, "skip_bad_rows": skip_bad_rows}
    return _revise("update", run, task, out, data=data, model=model, resume=resume, **read, **output)


def _revise(
    action: Literal["remove", "update"],
    run: Path,
    task: str,
    out: Path,
    *,
    data: str | None,
    model: str | None,
    resume: bool,
    quiet: bool,
    as_json: bool,
    debug: bool,
    or_fewer: bool = False,
    skip_bad_rows: bool = False,
) -> int:
    """Take a task of a run back, or learn it again; 1 where a unit failed, or where it is interrupted."""
    if run.is_file():
        raise UsageError(
            f"{run} is a file. Give the directory that `forgetfree run --out` wrote: its ledgers lie there."
        )
    quiet_libraries()
    section = load_run(run)["run"]
    reach_hub(model or located(section["model"], run), data or of_each(located, section["data"], run))
    from forgetfree.jobs import revision
    from forgetfree.jobs.run import RunJob
    from forgetfree.jobs.running.directory import failures, holdings
    from forgetfree.jobs.running.execution import Execution
    from forgetfree.jobs.running.progress import Progress, make_progress

    learn_again = partial(revision.update, or_fewer=or_fewer, skip_bad_rows=skip_bad_rows)
    change = revision.remove if action == "remove" else learn_again
    with silence(quiet), no_empty_directories(out):
        progress = Progress() if quiet else make_progress(stderr())
        try:
            execution = Execution(resume=resume, progress=progress, debug=debug)
            made = change(run, task, out, data=data, model=model, execution=execution)
        except KeyboardInterrupt:
            return fail(f"Interrupted. {holdings(RunJob, out)}".strip(), 1)
    if as_json:
        print(json_text({"out": str(out), **asdict(made)}, indent=2), end="")
    else:
        _tell(action, run, out, made)
    failed = failures(made.results)
    for message in failed:
        fail(message, 1)
    return 1 if failed else 0


def _tell(action: str, run: Path, out: Path, made: Revised) -> None:
    lines = []
    if made.carried:
        lines.append(f"carried over without training: {', '.join(made.carried)}")
    if made.trained:
        what = "trained again where the task could have changed it" if action == "remove" else "trained"
        lines.append(f"{what}: {', '.join(made.trained)}")
    what = f"the run without {made.task}" if action == "remove" else f"the run with {made.task}"
    lines.append(f"{out}: {what}; audit.jsonl beside each ledger says what was done.")
    if made.left_out:
        lines.append(
            f"left out, for they keep no ledger: {', '.join(made.left_out)}. {_trains(run, out, made)} trains them."
        )
    if action == "remove":
        lines.append(f"{run} still holds {made.task}. Delete that directory to have it gone.")
        if made.shared:
            lines.append(f"The shared cache {made.shared} may hold its fine-tuned models. Delete them, too.")
    for line in lines:
        print(escaped(line))


def _trains(run: Path, out: Path, made: Revised) -> str:
    """Return the command that trains what is left out: beside the others, unless it has options that these have not."""
    kept, left_out = (
        list(dict.fromkeys(each.rpartition(" seed ")[0] for each in units))
        for units in ((*made.carried, *made.trained), made.left_out)
    )
    section, tasks = load_run(run)["run"], {each["name"] for each in load_run(out)["tasks"]}
    section["start"] = {task: at for task, at in section.get("start", {}).items() if task in tasks}
    own, whole = left_behind(section, kept), out.resolve()  # "." has no name
    place = [str(first_free(whole.with_name(f"{whole.name}-others")))] if own else [str(out), "--resume"]
    words = ["forgetfree", "run", "--config", str(out / "config.json"), "--out", *place]
    words += [word for each in (left_out if own else [*kept, *left_out]) for word in ("--strategy", each)]
    values = section["set"] | {key: section[key] for key in own if key not in section["set"]}
    for key, flag in own.items():
        if key == "start":
            words += [
                word for task, at in of_each(located, values[key], run).items() for word in (flag, f"{task}={at}")
            ]
        else:
            words += [flag, typed(values[key])] if flag == f"--{key}" else ["--set", f"{key}={typed(values[key])}"]
    return shlex.join(words)
