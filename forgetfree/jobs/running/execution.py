"""How a job is run: what the flags under "How to run" say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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
        jobs: how many units run at a time, more than one as worker processes; ``auto``: on a CPU as many as there are cores,
            with one thread each, so that the bits do not depend on their number. Default: 1, in this process.
        cluster: runs units as tasks of Ray: ``ray`` or ``ray://HOST:PORT``, see `forgetfree.jobs.running.cluster`.
        log: also log losses, rates and scores there, see `forgetfree.jobs.running.trackers`.
        progress: hears of all units. Default: silence.
        debug: let an unexpected exception of a unit through, instead of going on with the others.
        executor: runs the units in place of this process or workers of its own.
    """

    resume: bool = option(False, "continue in --out; what is finished is kept", group="How to run")
    allow_changed: bool = option(
        False, "resume with other versions or on another device, too; config.json says so", group="How to run"
    )
    jobs: int | Literal["auto"] | None = option(
        None,
        "how many units run at a time; auto: as many as there are cores, with one thread each",
        group="How to run",
        placeholder="N|auto",
    )
    cluster: str | None = option(
        None,
        "run units as tasks of Ray: ray (this machine, or $RAY_ADDRESS) or ray://HOST:PORT",
        group="How to run",
        placeholder="ray|ray://…",
    )
    log: tuple[str, ...] = option(
        (),
        "also log losses, rates and scores there: tensorboard, wandb, mlflow, trackio or another tracker of accelerate; may be "
        "given several times",
        group="How to run",
    )
    progress: Progress | None = None
    debug: bool = False
    executor: Executor | None = None

    def __post_init__(self) -> None:
        if not (self.jobs in (None, "auto") or (isinstance(self.jobs, int) and self.jobs >= 1)):
            raise UsageError(f"--jobs must be auto or at least 1, got {self.jobs}.")
        if self.cluster is not None:
            from forgetfree.jobs.running.cluster import check_cluster

            check_cluster(self.cluster, self.at_a_time)

    @property
    def at_a_time(self) -> int:
        """How many units are asked for at a time; 1 where ``auto`` decides."""
        return self.jobs if isinstance(self.jobs, int) else 1

    def check(self, objects: Sequence[str]) -> None:
        """Raise ``UsageError`` where a job cannot be run like this that has such objects in memory, which no file can name."""
        if (self.at_a_time > 1 or self.executor or self.cluster) and objects:
            raise UsageError(
                f"Worker processes load all by name, and given are {', '.join(objects)}. Leave jobs at 1"
                f"{', and cluster out' if self.cluster else ''}."
            )


#: From the start, in this process, in silence.
USUAL = Execution()
