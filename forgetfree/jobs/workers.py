"""Where units run: one after the other in this process, or side by side in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Protocol

from forgetfree.jobs.environment import quiet_libraries, set_threads
from forgetfree.jobs.unit import MakeMonitor, Unit
from forgetfree.learning.monitor import PlainMonitor

#: Small models use two cores badly; more processes than this use much memory.
_USUAL = 2


class Work(Protocol):
    """What is done to each unit. It can be pickled, and leaves all that it makes in the unit's folder."""

    def __call__(self, unit: Unit, monitor: MakeMonitor) -> None:
        """Run the unit."""


class Executor(Protocol):
    """Runs units somewhere."""

    def run(self, work: Work, units: Sequence[Unit]) -> Generator[Unit]:
        """Yield each unit when it has ended, in whatever order. To close the generator stops those that are running."""


class ThisProcess:
    """Runs one unit after the other, here.

    Args:
        monitor: makes the monitor of a unit from a title.
    """

    def __init__(self, monitor: MakeMonitor) -> None:
        self._monitor = monitor

    def run(self, work: Work, units: Sequence[Unit]) -> Generator[Unit]:
        """Yield each unit when it has ended."""
        for unit in units:
            work(unit, self._monitor)
            yield unit


class WorkerProcesses:
    """Runs several units at a time, each worker a process that tells on stderr what it does.

    Args:
        jobs: how many at a time.
        threads: of each; default: its share of this process's.
    """

    def __init__(self, jobs: int, threads: int | None = None) -> None:
        self._jobs, self._threads = jobs, threads

    def run(self, work: Work, units: Sequence[Unit]) -> Generator[Unit]:
        """Yield each unit when it has ended.

        Raises:
            BrokenProcessPool: a worker was killed, or could not start.
        """
        import torch

        jobs = min(self._jobs, len(units))
        threads = self._threads or max(1, torch.get_num_threads() // jobs)
        others = set(multiprocessing.active_children())
        spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        with ProcessPoolExecutor(jobs, spawn, _begin, (work, threads)) as workers:
            try:
                futures = {workers.submit(_run, unit): unit for unit in units}
                for future in as_completed(futures):
                    future.result()
                    yield futures[future]
            except BaseException:
                workers.shutdown(wait=False, cancel_futures=True)
                ours = set(multiprocessing.active_children()) - others
                for process in ours:
                    process.kill()
                for process in ours:
                    process.join()
                raise


def usual_jobs(device: str) -> int:
    """Return how many units of an experiment run at a time by default: two where there are two cores, one on a GPU."""
    return 1 if device == "cuda" else min(_USUAL, _cores())


#: What this process does to units, if it is a worker.
_work: Work


def _begin(work: Work, threads: int) -> None:
    """Make this process a worker."""
    global _work
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it is the parent's to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    quiet_libraries()
    set_threads(threads)
    _work = work


def _end_with_parent() -> None:
    """End when the parent ends, even if it is killed: nobody would take what this worker measures."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # of a worker
    parent.join()
    os._exit(1)


def _run(unit: Unit) -> None:
    _work(unit, lambda title: PlainMonitor(title, sys.stderr))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
