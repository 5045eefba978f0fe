"""The one engine of run and graft: units in an order, a directory, and what is made of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from forgetfree.core.base_regions import tiny_region_note
from forgetfree.device import kind_of_device, spread
from forgetfree.errors import Faults, RunError, UsageError
from forgetfree.files import sweep, write_json
from forgetfree.jobs.config import keys_of
from forgetfree.jobs.job import Job
from forgetfree.jobs.running.cluster import Place, RayTasks
from forgetfree.jobs.running.directory import (
    as_json,
    holdings,
    merged_config,
    merged_request,
    read_job_config,
    units_in,
)
from forgetfree.jobs.running.environment import (
    environment,
    set_threads,
    threads_as_before,
    threads_of_each,
)
from forgetfree.jobs.running.execution import USUAL, Execution
from forgetfree.jobs.running.progress import Progress
from forgetfree.jobs.running.signals import STOP, terminable
from forgetfree.jobs.running.trackers import check_trackers
from forgetfree.jobs.running.unit import Json, Unit, remove_checkpoints
from forgetfree.jobs.running.workers import Executor, ThisProcess, WorkerProcesses, units_at_a_time
from forgetfree.json_file import sign
from forgetfree.output import LOCK, check_begun, exclusive, is_unused, make_directory, refuse_used
from forgetfree.results.report.run_report import write_report
from forgetfree.terminal import tell_note

SCHEMA = 1


def perform(job: Job[Any], execution: Execution = USUAL) -> Json:
    """Run all units of a job that are not done, and return the content of results.json.

    Args:
        job: what is asked for.
        execution: how it is run.

    Raises:
        UsageError: the directory is not empty, was begun with another configuration, or there is nothing to resume.
        RunError: another process works in the directory, it was begun with other data, models or versions, it was
            deleted, or a worker was killed.
        ForgetfreeError: data or model cannot be loaded.
    """
    execution.check(job.objects)
    if execution.resume:
        check_begun(job.out)
    jobs, auto = execution.at_a_time, execution.jobs == "auto" and kind_of_device(job.device) == "cpu"
    if jobs == 1 and not job.objects:
        jobs = max(1, len(spread(job.config.device)))  # a unit on each device
    check_trackers(execution.log)
    make_directory(job.out)
    with terminable(), exclusive(job.out), threads_as_before():
        begun = _begun(job, execution)
        if job.cache_is_given or os.path.lexists(job.cache):
            make_directory(job.cache, "--cache" if job.cache_is_given else "--out")
        set_threads(job.threads)
        config = _config(job, begun, execution.allow_changed, 1 if auto else _threads_each(job, jobs))
        remove_checkpoints(units_in(job.out, config["units"]))
        missing = [unit for unit in units_in(job.out, job.keys()) if not unit.is_done()]
        if missing:
            tell_note(tiny_region_note(len(job.space()), job.workload(job.config, job.checked, Faults()).sparsities))
        if auto and not job.objects:
            jobs = units_at_a_time(len(missing), len(job.space()))
        for unit in missing:
            make_directory(unit.directory)
            unit.forget()
        write_json(job.out / "config.json", sign(config))
        progress = execution.progress or Progress()
        with progress.job([str(unit) for unit in missing], len(config["tasks"]) if job.learns_stream else 1):
            executor = execution.executor
            if execution.cluster is not None:
                executor = RayTasks(execution.cluster, _place(job), progress)
            elif executor is None and (jobs == 1 or len(missing) < 2):
                executor = ThisProcess(progress)
            else:
                job.unload()  # workers load for themselves
                threads = config["machine"]["threads"]
                executor = executor or WorkerProcesses(jobs, threads, progress, spread(job.config.device))
            return _run(job, executor, missing, execution.debug, execution.log)


def check_resumption(job: Job[Any], execution: Execution) -> None:
    """Raise what `perform` raises where a job cannot go on in its directory; nothing is written."""
    execution.check(job.objects)
    check_begun(job.out)
    if begun := _config_before(job, execution):
        with threads_as_before():
            _config(job, begun, execution.allow_changed, _threads_each(job, execution.at_a_time))


def assemble(out: Path, ended: bool = False) -> Json:
    """Make results.json and report.md of the units that a directory holds, and return the content of results.json.

    Args:
        out: the directory.
        ended: nothing more is run now: draw figures, too.

    Raises:
        ReportError: it is no directory of a run, or damaged.
    """
    return write_report(out, ended=ended)


def _begun(job: Job[Any], execution: Execution) -> Json:
    """Return the config.json that the directory was begun with; an empty one where nothing was."""
    out, begun = job.out, _config_before(job, execution)
    make_directory(out)
    if begun or is_unused(out):
        for folder in [out, *(path for path in out.rglob("*") if path.is_dir())]:
            if folder != job.cache:  # which others may use now
                sweep(folder)
    if not begun:
        refuse_used(out, job.config.command)
    return begun


def _config_before(job: Job[Any], execution: Execution) -> Json:
    """Return the config.json of the directory in which a job goes on; an empty one where nothing was begun."""
    out, command = job.out, job.config.command
    if not execution.resume or not os.path.lexists(out / "config.json"):
        return {}
    config = read_job_config(out, command, allow_changed=execution.allow_changed)
    if lacking := [each for each in config.get("objects", ()) if each not in job.objects]:
        raise UsageError(
            f"{out} was begun from Python with {', '.join(lacking)}, which no file can name. Go on by the "
            "same call in Python, with resume=True."
        )
    return config


def _threads_each(job: Job[Any], jobs: int) -> int:
    return threads_of_each(min(jobs, len(job.keys())))


def _config(job: Job[Any], begun: Json, allow_changed: bool, usual_threads: int) -> Json:
    """Return config.json with all that was asked for in this directory, now and before."""
    request, command = as_json(job.request()), job.config.command
    if begun:  # before anything is loaded
        request = merged_request(job.out, begun[command], request, job.growing, keys_of(job.config))
    description, threads = job.describe(), begun.get("machine", {}).get("threads")
    # On them depends the order in which numbers are added, so all units of a directory have as many.
    set_threads(job.threads or (threads if isinstance(threads, int) else usual_threads))
    config = {"schema": SCHEMA, command: request, **environment(job.device), **description, "units": job.keys()}
    if job.in_memory.call:
        config["command"] = job.in_memory.call
    if job.objects:  # it cannot be repeated from this file alone
        config["objects"] = job.objects
    return merged_config(job.out, begun, as_json(config), allow_changed) if begun else as_json(config)


def _place(job: Job[Any]) -> Place:
    """Return what a unit needs on a node of a cluster."""
    import torch

    seen = None if job.config.settings.get("cache") else (job.out / LOCK).absolute()
    return Place(job.device, torch.get_num_threads(), seen, Path.cwd())


def _run(job: Job[Any], executor: Executor, units: Sequence[Unit], debug: bool, log: Sequence[str]) -> Json:
    """Run units, and put together what has ended whenever one has."""
    out, kind = job.out, type(job)
    assemble(out)
    try:
        with closing(executor.run(partial(job, debug=debug, log=log), units)) as ended:  # an error here stops them, too
            for _ in ended:
                assemble(out)
    except BaseException as error:
        if not os.path.lexists(out / "config.json") and not isinstance(error, KeyboardInterrupt):
            raise RunError(
                f"{out} was deleted, or what is in it, while {job.config.command} worked there. Start again, and "
                "leave the directory alone until it has ended."
            ) from error
        with suppress(Exception):  # what is cut short stands in the results, too
            assemble(out, ended=not STOP.requested)  # figures take longer than a scheduler waits
        if isinstance(error, BrokenProcessPool):
            raise RunError(
                "A worker was stopped from outside, perhaps for want of memory, or could not start (then it says above "
                f"why). {holdings(kind, out)} Add --jobs 1 to run one unit at a time."
            ) from error
        raise
    return assemble(out, ended=True)
