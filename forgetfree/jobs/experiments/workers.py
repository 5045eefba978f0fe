"""Units measured side by side, each worker a process of its own with its share of the cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import torch

from forgetfree.errors import RunError
from forgetfree.jobs.environment import quiet_libraries, set_threads
from forgetfree.jobs.experiments.experiment import Experiment, load_experiment
from forgetfree.jobs.experiments.laboratory import Laboratory
from forgetfree.jobs.experiments.preset import Preset
from forgetfree.jobs.experiments.rows import Row, Unit
from forgetfree.learning.monitor import PlainMonitor
from forgetfree.models.state import StateStore

#: Small models use two cores badly; more processes than this use much memory.
_USUAL = 2
#: What this process measures with, if it is a worker.
_bench: tuple[Experiment, Laboratory]


def usual_jobs(device: str) -> int:
    """How many units at a time by default: two where there are two cores, one on a GPU."""
    return 1 if device == "cuda" else min(_USUAL, _cores())


def measure_side_by_side(
    name: str,
    preset: Preset,
    data: str,
    device: str,
    cache: Path,
    units: Sequence[Unit],
    jobs: int,
    threads: int | None,
) -> Generator[tuple[Unit, list[Row]]]:
    """Units and their rows, in the order in which they are done.

    Args:
        name: of the experiment.
        preset: the setting.
        data: as ``--data``.
        device: where to train.
        cache: directory of fine-tuned models.
        units: which.
        jobs: how many at a time.
        threads: of each; default: its share of this process's.

    Raises:
        RunError: a worker was killed, or could not start.
    """
    jobs = min(jobs, len(units))
    settings = (name, preset, data, device, cache, threads or max(1, torch.get_num_threads() // jobs))
    others = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(jobs, spawn, _begin, settings) as workers:
        try:
            futures = {workers.submit(_measure, unit): unit for unit in units}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException as error:
            workers.shutdown(wait=False, cancel_futures=True)
            ours = set(multiprocessing.active_children()) - others
            for process in ours:
                process.terminate()
            for process in ours:
                process.join()
            if isinstance(error, BrokenProcessPool):
                raise RunError(
                    "A worker was stopped from outside, perhaps for want of memory, or could not start (then it says above "
                    "why). Run with --jobs 1, one unit at a time."
                ) from error
            raise


def _begin(name: str, preset: Preset, data: str, device: str, cache: Path, threads: int) -> None:
    """Make this process a worker."""
    global _bench
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent's to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    quiet_libraries()
    set_threads(threads)
    monitor = partial(_monitor, name)
    _bench = load_experiment(name), Laboratory(preset, data, device, StateStore(cache), cache, monitor)


def _end_with_parent() -> None:
    """However the parent ends, even killed: nobody would take what this worker measures."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # of a worker
    parent.join()
    os._exit(1)


def _measure(unit: Unit) -> list[Row]:
    experiment, laboratory = _bench
    return experiment.measure(laboratory, unit)


def _monitor(name: str, title: str) -> PlainMonitor:
    return PlainMonitor(f"{name} · {title}", sys.stderr)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
