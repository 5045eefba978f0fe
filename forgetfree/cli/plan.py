"""``--check``: what a run would do, printed; and the same as a function."""

from __future__ import annotations

import json
from typing import Any

from forgetfree.cli.hub import reach_hub
from forgetfree.cli.words import recipe_of, silence
from forgetfree.display import counted, escaped
from forgetfree.jobs.config import Execution, RunConfig
from forgetfree.results.report.page import size

#: The most units that are printed.
_SHOWN = 12


def plan(config: RunConfig, *, resume: bool = False, allow_changed: bool = False) -> dict[str, Any]:
    """Return what a run would do, as `forgetfree.jobs.preflight` says; nothing is written.

    Args:
        config: of the run.
        resume: whether it goes on in its directory.
        allow_changed: whether it may go on with other versions or on another device.

    Raises:
        UsageError: naming all that is wrong.
        RunError: it cannot go on in its directory.
    """
    return _plan(config, Execution(resume=resume, allow_changed=allow_changed))


def _plan(config: RunConfig, execution: Execution) -> dict[str, Any]:
    reach_hub(config.model if config.objects.model is None else None)
    from forgetfree.jobs.preflight import plan_of

    if execution.resume:
        from forgetfree.jobs.config import prepared
        from forgetfree.jobs.run import check_resumption

        with silence(True):  # the plan has the same notes
            check_resumption(prepared(config), execution)
    return plan_of(config, resume=execution.resume)


def show_plan(config: RunConfig, execution: Execution, as_json: bool) -> None:
    """Print the plan of a run."""
    job_plan = _plan(config, execution)
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
        labels = f", labels {', '.join(task['labels'])}" if task["labels"] else ""
        print(escaped(f"Task: {task['task']}, {rows}{labels}"))
    for unit in job_plan["units"][:_SHOWN]:
        known = [each for each in unit["updates"].values() if each is not None]
        updates = f"{sum(known):,} updates" if len(known) == len(unit["updates"]) else "an unknown number of updates"
        print(escaped(f"Unit: {unit['unit']}, {updates}" + _about(unit["seconds"], ", ")))
    if len(job_plan["units"]) > _SHOWN:
        print(f"… and {counted(len(job_plan['units']) - _SHOWN, 'more unit')}")
    training = _about(total["seconds"]) or "for an unknown time"
    print(f"Training: {training}, one unit at a time, by a few steps of each; answers come on top")
    if total["memory_bytes"] is not None:
        print(f"Memory: {size(total['memory_bytes'])} at most in these steps")
    if recipe := recipe_of(config):
        print(escaped(recipe))
    for note in job_plan["notes"]:
        print(escaped(f"Note: {note}"))
    print("Nothing was written or downloaded.")


def _about(seconds: float | None, before: str = "") -> str:
    """Return how long something takes, if that is known."""
    return "" if seconds is None else f"{before}about {_time(seconds)}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
