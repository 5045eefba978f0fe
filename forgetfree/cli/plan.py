"""``--check``: what a job would do and cost, printed; and the same as a function."""

from __future__ import annotations

import json
from typing import Any

from forgetfree import registry
from forgetfree.cli.hub import reach_hub
from forgetfree.cli.words import recipe_of, silence
from forgetfree.display import counted, escaped
from forgetfree.jobs.config import InMemory, JobConfig
from forgetfree.jobs.running.execution import Execution
from forgetfree.results.report.page import size

#: The most units that are printed.
_SHOWN = 12


def plan(
    config: JobConfig, in_memory: InMemory | None = None, *, resume: bool = False, allow_changed: bool = False
) -> dict[str, Any]:
    """Return what a job would do and cost, as `forgetfree.jobs.running.preflight` says; nothing is written or trained.

    Args:
        config: of the job.
        in_memory: objects in the place of names.
        resume: whether the job goes on in its directory.
        allow_changed: whether it may go on with other versions or on another device.

    Raises:
        UsageError: naming all that is wrong.
        RunError: it cannot go on in its directory.
    """
    return _plan(config, in_memory, Execution(resume=resume, allow_changed=allow_changed))


def _plan(config: JobConfig, in_memory: InMemory | None, execution: Execution) -> dict[str, Any]:
    reach_hub(config.model if in_memory is None or in_memory.model is None else None)
    from forgetfree.jobs.running.preflight import plan_of

    if execution.resume:
        from forgetfree.jobs.running.engine import check_resumption

        with silence(True):  # the plan has the same notes
            job_class = registry.JOBS[config.command].job.load()
            check_resumption(job_class(config, *filter(None, [in_memory])), execution)
    return plan_of(config, in_memory, resume=execution.resume)


def show_plan(config: JobConfig, execution: Execution, as_json: bool) -> None:
    """Print the plan of a job."""
    job_plan = _plan(config, None, execution)
    if as_json:
        print(json.dumps(job_plan, ensure_ascii=False))
        return
    model, total = job_plan["model"], job_plan["total"]
    print(
        escaped(
            f"Model: {model['name']}, {model['parameters']:,} parameters, {model['graftable']:,} graftable, readout "
            f"{model['readout']}, on {job_plan['device']}"
        )
    )
    for task in job_plan["tasks"]:
        rows = f"{task['train']:,} training, {task['validation']:,} validation, {task['test']:,} test rows"
        print(escaped(f"Task: {task['task']}, {rows}, about {task['tokens_a_row']} tokens a row"))
    for unit in job_plan["units"][:_SHOWN]:
        print(escaped(f"Unit: {unit['unit']}"))
        for phase in unit["phases"]:
            print(escaped(f"  {phase['task']}: {phase['phase'].replace('_', '-')}, {_amount(phase)}"))
    if len(job_plan["units"]) > _SHOWN:
        print(f"… and {counted(len(job_plan['units']) - _SHOWN, 'more unit')}")
    seconds = "unknown" if total["seconds"] is None else f"about {_time(total['seconds'])}"
    print(f"Time: {seconds}, one unit at a time; an estimate {job_plan['estimated']}")
    phases = [f"{name.replace('_', '-')} {size(each)}" for name, each in total["memory_bytes_by_phase"].items()]
    print(f"Memory: about {size(total['memory_bytes'])}, an estimate by sizes ({', '.join(phases)})")
    print(
        escaped(
            f"Disk: about {size(total['disk_bytes'])} of {size(total['disk_free_bytes'])} free at {job_plan['out']}"
        )
    )
    if recipe := recipe_of(config):
        print(escaped(recipe))
    for note in job_plan["notes"]:
        print(escaped(f"Note: {note}"))
    print("Nothing was written, downloaded or trained.")


def _amount(phase: dict[str, Any]) -> str:
    """Return how much work a phase is, or which unit does it already."""
    if "shared" in phase:
        return f"shared with {phase['shared'].partition('/seed-')[0]}"  # of the same seed
    what = "rows" if phase["phase"] == "evaluate" else "steps"
    many = "an unknown number of" if phase["steps"] is None else f"{phase['steps']:,}"
    return f"{many} {what}" + ("" if phase["seconds"] is None else f", {_time(phase['seconds'])}")


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
