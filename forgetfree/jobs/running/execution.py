"""How a job is run: what the flags under "How to run" say, from the command line, from Python, and in tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forgetfree.errors import UsageError
from forgetfree.options import option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

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
        from forgetfree.jobs.running.process_group import check_processes

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
