"""Runs units side by side in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from multiprocessing.queues import SimpleQueue

from forgetfree.device import give_device
from forgetfree.display import open_closed_streams
from forgetfree.jobs.environment import machine_memory, quiet_libraries, set_threads
from forgetfree.jobs.progress import Ended, Event, Progress, Teller
from forgetfree.jobs.run_directory import Unit
from forgetfree.training.monitor import Monitor

#: Bytes that a process takes for libraries, rows and activations of a small model.
_LIBRARIES = 2_000_000_000


#: The work on one unit. It can be pickled, and writes all its results into the unit's folder.
Work = Callable[[Unit, Monitor], None]


class WorkerProcesses:
    """Runs several units at a time, each in a worker process that reports its progress to this one.

    Args:
        jobs: the number of workers.
        threads: the CPU threads of each worker.
        progress: receives the events of all units; default: nothing is shown.
        devices: numbers of the devices that workers take in turn; default: the device of the work.
    """

    def __init__(
        self, jobs: int, threads: int = 1, progress: Progress | None = None, devices: Sequence[int] = ()
    ) -> None:
        self._jobs, self._threads, self._progress, self._devices = jobs, threads, progress or Progress(), devices

    def run(self, work: Work, units: Sequence[Unit]) -> Generator[Unit]:
        """Yield each unit when it has ended.

        Raises:
            BrokenProcessPool: a worker was killed, or could not start.
        """
        jobs = min(self._jobs, len(units))
        others = set(multiprocessing.active_children())
        context = _context()
        events: SimpleQueue[Event | None] = context.SimpleQueue()
        # A daemon, because a killed worker may leave it waiting.
        listener = threading.Thread(target=self._listen, args=(events,), daemon=True)
        listener.start()
        numbers: SimpleQueue[int | None] = context.SimpleQueue()
        for i in range(jobs):  # spread evenly over the devices
            numbers.put(self._devices[i % len(self._devices)] if self._devices else None)
        with ProcessPoolExecutor(
            jobs, context, _begin, (work, self._threads, events, numbers, dict(os.environ))
        ) as workers:
            try:
                futures = {workers.submit(_run, unit): unit for unit in units}
                for future in as_completed(futures):
                    future.result()
                    self._progress.hear(Ended(str(futures[future])))
                    yield futures[future]
                events.put(None)
                listener.join()
            except BaseException:
                workers.shutdown(wait=False, cancel_futures=True)
                for process in set(multiprocessing.active_children()) - others:  # their files stay
                    process.kill()
                    process.join()
                raise

    def _listen(self, events: SimpleQueue[Event | None]) -> None:
        while (event := events.get()) is not None:
            self._progress.hear(event)


def _context() -> BaseContext:
    """Return the start method of workers.

    Workers are forked from a server process that has only imported libraries: threads of torch, which this process may have
    started, do not survive a fork.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    streams = ["forgetfree.continual.stream"] if "forgetfree.continual.strategy" in sys.modules else []
    context.set_forkserver_preload(["transformers.modeling_utils", *streams])
    before = dict(os.environ)
    # The server imports modules before it has our sys.path, and the working directory may contain any module.
    os.environ["PYTHONSAFEPATH"] = "1"
    os.environ.setdefault("TORCH_LOGS", "-torch.utils._pytree")  # as `quiet_libraries` does, which is called later
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def units_at_a_time(units: int, entries: int) -> int:
    """Return how many of the units the cores and the memory of this machine can run at a time.

    A unit holds θ_pre, θ and AdamW's state, at most 20 bytes per entry of the parameter space, besides libraries.
    """
    return max(1, min(units, cores(), machine_memory() // (_LIBRARIES + 20 * entries)))


#: The work and the queue of events, if this process is a worker.
_work: Work
_events: SimpleQueue[Event | None]


def _begin(
    work: Work,
    threads: int,
    events: SimpleQueue[Event | None],
    numbers: SimpleQueue[int | None],
    environment: dict[str, str],
) -> None:
    """Make this process a worker."""
    global _work, _events
    open_closed_streams()
    os.environ.clear()  # the environment of the fork server may be older
    os.environ.update(environment)
    for each in (signal.SIGINT, signal.SIGTERM):  # only the parent stops a worker
        signal.signal(each, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    quiet_libraries()
    set_threads(threads)
    if (number := numbers.get()) is not None:
        give_device(number)
    _work, _events = work, events


def end_with_parent() -> None:
    """End this process when its parent ends, even if the parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # a worker has one
    parent.join()
    os._exit(1)


def _run(unit: Unit) -> None:
    _work(unit, Teller(str(unit), _events.put))


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
