"""How a job is run: what the flags under "How to run" say, or ``torchrun`` in their place."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from forgetfree.errors import UsageError
from forgetfree.options import option

if TYPE_CHECKING:
    from forgetfree.jobs.running.progress import Progress
    from forgetfree.jobs.running.workers import Executor


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a job is run; the outcome does not depend on it.

    Attributes:
        resume: go on in a directory that was begun: what is finished there is kept. Default: the directory must be empty.
        allow_changed: resume under other versions or on another device, too; config.json says so.
        jobs: how many units run at a time, more than one as worker processes. Default: 1, in this process.
        processes: how many train each unit together; the first unexpected exception then ends the job. Default: this one.
        cluster: runs units as tasks of Ray: ``ray`` or ``ray://HOST:PORT``, see `forgetfree.jobs.running.cluster`.
        log: also log losses, rates and scores there, see `forgetfree.jobs.running.loggers`.
        progress: hears of all units. Default: silence.
        debug: let an unexpected exception of a unit through, instead of going on with the others.
        executor: runs the units in place of this process or workers of its own.
    """

    resume: bool = option(False, "continue in --out; what is finished is kept", group="How to run")
    allow_changed: bool = option(
        False, "resume with other versions or on another device, too; config.json says so", group="How to run"
    )
    jobs: int | None = option(None, "how many units run at a time", group="How to run")
    processes: int | None = option(
        None, "how many processes train each unit together: the same bits for 1, 2 and 4", group="How to run"
    )
    cluster: str | None = option(
        None,
        "run units as tasks of Ray: ray (this machine, or $RAY_ADDRESS) or ray://HOST:PORT",
        group="How to run",
        placeholder="ray|ray://…",
    )
    log: tuple[str, ...] = option(
        (), "also log losses, rates and scores there, may be given several times", group="How to run"
    )
    progress: Progress | None = None
    debug: bool = False
    executor: Executor | None = None

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise UsageError(f"--jobs must be at least 1, got {self.jobs}.")
        if self.cluster is not None:
            from forgetfree.jobs.running.cluster import check_cluster

            check_cluster(self.cluster, self.jobs or 1)

    def check(self, settings: Mapping[str, Any], device: str, objects: Sequence[str]) -> None:
        """Raise ``UsageError`` where a job cannot be run like this.

        Args:
            settings: of the job.
            device: where this process computes.
            objects: what the job has in memory and no file can name.
        """
        jobs = self.jobs or 1
        if (jobs > 1 or self.executor or self.cluster) and objects:
            raise UsageError(
                f"Worker processes load all by name, and given are {', '.join(objects)}. Leave jobs at 1"
                f"{', and cluster out' if self.cluster else ''}."
            )
        if self.processes is not None:
            if self.cluster is not None:
                raise UsageError("--processes and --cluster are both given. Give one: a task of Ray is one process.")
            check_processes(self.processes, settings, device, jobs, objects)


#: From the start, in this process, in silence.
USUAL = Execution()


# -- Several processes for each unit ---------------------------------------------------------------------

#: The parts of a batch where several processes are asked for, and nobody says how many parts.
PARTS = 4


def check_processes(
    processes: int, settings: Mapping[str, Any], device: str, jobs: int, objects: Sequence[str]
) -> None:
    """Raise ``UsageError`` unless so many processes can share every batch of a job."""
    from forgetfree.device import devices, kind_of_device

    if processes < 1:
        raise UsageError(f"--processes must be at least 1, got {processes}.")
    if processes > 1 and jobs > 1:
        raise UsageError(
            f"--processes {processes} trains one unit at a time, got --jobs {jobs}, too. Leave one of them out."
        )
    if processes > 1 and objects:
        raise UsageError(f"Other processes load all by name, and given are {', '.join(objects)}. Leave processes at 1.")
    for key, parts in settings.items():
        if key.rpartition(".")[2] == "parts" and (number_of_parts(parts) or processes) % processes:
            remedy = "Give 1, 2 or 4 processes: parts are a power of two."
            if processes & (processes - 1) == 0:
                remedy = f"Give --set {key}={processes}, or fewer processes."
            raise UsageError(f"--processes {processes} cannot share {key}={parts} evenly. {remedy}")
    here = [each for each in devices() if kind_of_device(each) == kind_of_device(device)]
    if kind_of_device(device) != "cpu" and launched() is None and processes > len(here):
        raise UsageError(f"--processes {processes} takes a device each, and torch finds here: {', '.join(here)}.")


def number_of_parts(value: Any) -> int | None:
    """Return what the setting ``parts``, which has been checked, says as a number or a text; ``None`` for none."""
    return int(value) if str(value).isdigit() else None


# -- torchrun --------------------------------------------------------------------------------------------

#: What ``torchrun`` sets in each process that it has started.
_SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


def launched() -> int | None:
    """Return how many processes ``torchrun`` has started, of which this is one; ``None``: it has not."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _SET) else None


@contextmanager
def of_torchrun(follow: str) -> Iterator[bool]:
    """Say, inside, whether this process leads: any does but those that ``torchrun`` has started beside it; they follow it.

    Args:
        follow: what they do, as ``module:function``: it is imported in them alone.
    """
    if launched() is None:
        yield True
        return
    from forgetfree.device import find_device, give_device
    from forgetfree.errors import ForgetfreeError
    from forgetfree.parallel.exchange import ProcessLost, connected, from_first, joined

    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    give_device(int(os.environ["LOCAL_RANK"]))
    with connected(rank, processes, device=find_device("auto")):
        if rank:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which torchrun sends
            with suppress(ProcessLost, ForgetfreeError):
                resolve_name(follow)()
            yield False
            return
        try:
            yield True
        finally:
            with suppress(ProcessLost), joined():
                from_first(None)
