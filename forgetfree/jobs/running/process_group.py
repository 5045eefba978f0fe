"""Where a unit is trained by several processes as one: `forgetfree.parallel.exchange` says how they end with the bits of one.

Process 0 owns the directory, shows progress and writes. The others run the same unit in a temporary copy of its folder, in
silence, and end with it.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from forgetfree.device import give_device
from forgetfree.errors import ForgetfreeError
from forgetfree.jobs.running.environment import quiet_libraries, set_threads
from forgetfree.jobs.running.execution import PARTS, launched, number_of_parts
from forgetfree.jobs.running.progress import Ended, Progress
from forgetfree.jobs.running.unit import Unit, described_files
from forgetfree.jobs.running.workers import Work, cores, end_with_parent
from forgetfree.training.monitor import Monitor

_SAME_DIRECTORY = "Give a directory that all of them see, and start again."
_SAME_BITS = "Their machines compute differently: use machines, threads and versions that are alike."


def threads_each(settings: Mapping[str, Any]) -> int:
    """Return how many threads a process gets where nobody says it: as many whatever the number of processes, for equal bits."""
    return max(1, cores() // (number_of_parts(settings.get("parts")) or PARTS))


class Shared(Protocol):
    """A job as other processes take part in it: pickled by its configuration."""

    @property
    def device(self) -> str:
        """Where this process computes."""

    def __call__(self, unit: Unit, monitor: Monitor, debug: bool = False) -> None:
        """Run one unit."""


class ProcessGroup:
    """Runs one unit after the other, each in several processes, of which this is the first.

    Args:
        job: whose units.
        processes: how many, with this one; ``torchrun`` has started them, or they are started here.
        progress: hears of them, from this process.
    """

    def __init__(self, job: Shared, processes: int, progress: Progress) -> None:
        self._job, self._processes, self._progress = job, processes, progress

    def run(self, work: Work, units: Sequence[Unit]) -> Generator[Unit]:
        """Yield each unit when it has ended.

        Raises:
            ProcessLost: one of the other processes was killed.
            RunError: they do not see the same directory, or do not compute the same.
        """
        import torch

        from forgetfree.parallel.exchange import from_first, joined

        with ExitStack() as scope:
            if launched() is None:
                scope.enter_context(_others(self._processes, self._job.device))
            scope.enter_context(joined())
            from_first((self._job, list(units), torch.get_num_threads()))
            for unit in units:
                _in_step(work, unit, self._progress.monitor(str(unit)))
                self._progress.hear(Ended(str(unit)))
                yield unit


def _in_step(work: Work, unit: Unit, monitor: Monitor) -> None:
    """Run a unit at the same time as the other processes, and check that all have come to the same."""
    from forgetfree.parallel.exchange import check_alike

    check_alike(f"files of {unit}", described_files(unit.directory), _SAME_DIRECTORY)
    work(unit, monitor)
    learned = {name: each for name, each in described_files(unit.directory).items() if name.endswith(".safetensors")}
    check_alike(f"results of {unit}", learned, _SAME_BITS)


def follow() -> None:
    """Run what process 0 runs, until it has no more; what is written goes to temporary folders."""
    from forgetfree.parallel.exchange import from_first, joined

    quiet_libraries()
    with joined():
        while message := from_first(None):
            job, units, threads = message
            set_threads(threads)
            for unit in units:
                with tempfile.TemporaryDirectory(prefix="forgetfree-") as temporary:
                    own = Path(temporary) / "unit"
                    own.mkdir()
                    if unit.directory.is_dir():
                        shutil.copytree(unit.directory, own, dirs_exist_ok=True)
                    _in_step(_Following(job), Unit(unit.key, own), Monitor())


class _Following:
    """What another process than 0 does to a unit."""

    def __init__(self, job: Shared) -> None:
        self._job = job

    def __call__(self, unit: Unit, monitor: Monitor) -> None:
        self._job(unit, monitor, debug=True)


@contextmanager
def _others(processes: int, device: str) -> Iterator[None]:
    """Start the other processes, and end them."""
    from forgetfree.parallel.exchange import ProcessLost, connected, from_first, joined, meeting_point

    store = meeting_point(processes)
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    others = [
        spawn.Process(target=_follow, args=(rank, processes, store.port, device), daemon=True)
        for rank in range(1, processes)
    ]
    for process in others:
        process.start()
    try:
        while not store.check([_here(rank) for rank in range(1, processes)]):
            if not all(process.is_alive() for process in others):
                raise ProcessLost("A process has ended before it could begin.")
            time.sleep(0.1)
        with connected(0, processes, store, device):
            yield
            with joined():
                from_first(None)
            for process in others:
                process.join()
    finally:
        for process in others:
            process.kill()
            process.join()


def _here(rank: int) -> str:
    """Return the key under which a process says that it has begun."""
    return f"process {rank} is here"


def _follow(rank: int, processes: int, port: int, device: str) -> None:
    """Be one of the other processes."""
    from forgetfree.parallel.exchange import ProcessLost, connected, meeting_point

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it is the first process's to stop
    threading.Thread(target=end_with_parent, daemon=True).start()
    give_device(rank)
    store = meeting_point(processes, port)
    store.set(_here(rank), "")
    with suppress(ProcessLost, ForgetfreeError), connected(rank, processes, store, device):
        follow()
