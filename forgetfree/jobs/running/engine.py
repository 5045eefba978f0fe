"""The one engine of run, graft and experiment: a job is units in an order, a directory, and what is made of them.

OUT/config.json     what was asked for and found, and all that is needed to repeat it
OUT/…/unit.json     one folder for each unit, see `forgetfree.jobs.running.unit`
OUT/results.json    made from the units, whenever one has ended
OUT/report.md       the tables
OUT/report.html     of a run, figures and tables: made when it ends, however it ends
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, TypedDict, TypeVar

from forgetfree.device import find_device, spread
from forgetfree.display import counted
from forgetfree.errors import RunError, UsageError
from forgetfree.files import is_left, locked, sweep, write_json
from forgetfree.jobs.config import CommonOptions, JobConfig
from forgetfree.jobs.in_memory import InMemory
from forgetfree.jobs.running.checkpoints import CHECKPOINT, in_a_phase
from forgetfree.jobs.running.cluster import Place, RayTasks, check_cluster
from forgetfree.jobs.running.environment import (
    check_precision,
    environment,
    make_directory,
    refuse_held,
    set_threads,
    threads_as_before,
    threads_of_each,
)
from forgetfree.jobs.running.loggers import Subject, check_loggers, logged
from forgetfree.jobs.running.process_group import ProcessGroup, check_processes, threads_each
from forgetfree.jobs.running.progress import Progress
from forgetfree.jobs.running.resume import as_json, continued, grown, read_config
from forgetfree.jobs.running.signals import STOP, terminable
from forgetfree.jobs.running.unit import Json, Unit, named, remove_checkpoints
from forgetfree.jobs.running.workers import Executor, ThisProcess, WorkerProcesses
from forgetfree.jobs.stream_checkpoint import tasks_learned
from forgetfree.json_file import sign
from forgetfree.learning.monitor import Monitor
from forgetfree.parallel.exchange import ProcessLost
from forgetfree.results.unit_record import signatures

Config = TypeVar("Config", bound=JobConfig)
SCHEMA = 1
#: In a directory while a process works in it.
LOCK = ".lock"
_JOBS = {
    "run": "run:RunJob",
    "graft": "graft:GraftJob",
    "experiment": "experiments.job:ExperimentJob",
    "sweep": "sweep:SweepJob",
}
#: As many units as a message names.
_NAMED = 8


class Execution(TypedDict, total=False):
    """How a job is run; the outcome does not depend on it.

    Attributes:
        resume: go on in a directory that was begun: what is finished there is kept. Default: the directory must be empty.
        allow_changed: resume under other versions or on another device, too; config.json says so.
        jobs: how many units run at a time, more than one as worker processes. Default: 1, in this process.
        processes: how many train each unit together; the first unexpected exception then ends the job. Default: this one.
        progress: hears of all units. Default: silence.
        log: also log losses, rates and scores there, see `forgetfree.jobs.running.loggers`.
        debug: let an unexpected exception of a unit through, instead of going on with the others.
        executor: runs the units in place of this process or workers of its own.
        cluster: runs them as tasks of Ray: ``ray`` or ``ray://HOST:PORT``, see `forgetfree.jobs.running.cluster`.
    """

    resume: bool
    allow_changed: bool
    jobs: int
    processes: int | None
    progress: Progress
    log: Sequence[str]
    debug: bool
    executor: Executor
    cluster: str | None


class Job(ABC, Generic[Config]):
    """What one command asks for. It is pickled as its configuration alone, and loads in each process what it needs there.

    Args:
        config: what was asked for.
        common: its threads and its cache of fine-tuned models; default: inside the directory.
        precisions: that it computes in.
    """

    #: Where in config.json that stands which must be the same when the job is resumed; default: what was asked for.
    compared: ClassVar[str] = ""
    #: Lists in it that may grow.
    growing: Collection[str] = ("seed",)
    #: Whether those lists must name what is there already, too.
    names_all: ClassVar[bool] = False
    #: Objects in the place of names.
    in_memory: InMemory = InMemory()
    #: Whether each unit learns all tasks, one after the other.
    learns_stream: ClassVar[bool] = False

    def __init__(self, config: Config, common: CommonOptions, precisions: Sequence[str]) -> None:
        self.config, self.out, self.threads = config, Path(config.out), common.threads
        check_precision(precisions, self.device)
        self.cache, self._cache_is_given = Path(common.cache or self.out / "fine-tuned"), bool(common.cache)

    @property
    def device(self) -> str:
        """Return where this process computes."""
        return find_device(self.config.device)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config,)

    def asked(self) -> Json:
        """Return what was asked for, under the names of the command line: it must be the same when the job is resumed."""
        return self.config.section()

    @abstractmethod
    def describe(self) -> Json:
        """Load and check what the units need, before anything is trained, and return what config.json says of it.

        When the job is resumed, ``model``, ``tasks`` and ``data`` are compared; ``about`` begins results.json.
        """

    @abstractmethod
    def keys(self) -> Json:
        """Return the units in order, by the names of their folders; called after `describe`."""

    @abstractmethod
    def measure(self, key: Mapping[str, Any], directory: Path, monitor: Monitor) -> Json:
        """Measure one unit; see `forgetfree.jobs.running.unit.Measure`."""

    @classmethod
    @abstractmethod
    def gather(cls, out: Path, about: Json, units: Sequence[tuple[Unit, Json | None]]) -> Json:
        """Return the content of results.json.

        Args:
            out: the directory.
            about: how it begins.
            units: all in order, and what their unit.json says; ``None`` where they have not ended.
        """

    @classmethod
    @abstractmethod
    def report(cls, out: Path, results: Json, ended: bool) -> None:
        """Write report.md, if anything is measured; figures only where nothing more is run."""

    # -- What the engine does --------------------------------------------------------------------------------

    @property
    def objects(self) -> list[str]:
        """List what was given that no file can name."""
        return self.in_memory.objects(self.config.settings)

    def __call__(self, unit: Unit, monitor: Monitor, debug: bool = False, log: Sequence[str] = ()) -> None:
        """Run one unit."""
        subject = Subject(str(unit), unit.directory, self.out, self.config.section())
        unit.run(self.measure, monitor, self.device, debug, partial(logged, log, subject))

    def perform(
        self,
        *,
        resume: bool = False,
        allow_changed: bool = False,
        jobs: int = 1,
        processes: int | None = None,
        progress: Progress | None = None,
        log: Sequence[str] = (),
        debug: bool = False,
        executor: Executor | None = None,
        cluster: str | None = None,
    ) -> Json:
        """Run all units that are not done, and return the content of results.json; see `Execution`.

        Raises:
            UsageError: the directory is not empty, was begun with another configuration, or there is nothing to resume.
            RunError: another process works in the directory, it was begun with other data, models or versions, it was
                deleted, or a worker was killed.
            ForgetfreeError: data or model cannot be loaded.
        """
        if jobs < 1:
            raise UsageError(f"--jobs must be at least 1, got {jobs}.")
        if (jobs > 1 or executor or cluster) and self.objects:
            raise UsageError(
                f"Worker processes load all by name, and given are {', '.join(self.objects)}. Leave jobs at 1"
                f"{', and cluster out' if cluster else ''}."
            )
        if cluster is not None:
            check_cluster(cluster, jobs)
        if processes is not None:
            if cluster is not None:
                raise UsageError("--processes and --cluster are both given. Give one: a task of Ray is one process.")
            check_processes(processes, self.config.settings, self.device, jobs, self.objects)
        if resume:
            check_begun(self.out)
        if jobs == 1 and processes is None and not self.objects:
            jobs = max(1, len(spread(self.config.device)))  # a unit on each device
        check_loggers(log)
        make_directory(self.out)
        with terminable(), _claimed(self.out), threads_as_before():
            before = self._begun(resume and os.path.lexists(self.out / "config.json"), allow_changed)
            if self._cache_is_given or os.path.lexists(self.cache):
                make_directory(self.cache, "--cache" if self._cache_is_given else "--out")
            set_threads(self.threads or (processes and threads_each(self.config.settings)))
            config = self._config(before, allow_changed, jobs)
            remove_checkpoints(_units(self.out, config["units"]))
            missing = [unit for unit in _units(self.out, self.keys()) if not unit.is_done()]
            if missing:  # room knows all kinds of jobs
                import_module("forgetfree.jobs.running.disk_space").check_room(self.config, self.in_memory, config)
            for unit in missing:
                make_directory(unit.directory)
                unit.forget()
            write_json(self.out / "config.json", sign(config))
            progress = progress or Progress()
            with progress.job([str(unit) for unit in missing], len(config["tasks"]) if self.learns_stream else 1):
                if cluster is not None:
                    executor = RayTasks(cluster, self._place(), progress)
                if processes is not None and processes > 1 and missing:
                    return self._run(ProcessGroup(self, processes, progress), missing, True, log)
                if executor is None and (jobs == 1 or len(missing) < 2):
                    return self._run(ThisProcess(progress), missing, debug, log)
                fresh, arguments = self.__reduce__()
                self.__dict__ = fresh(*arguments).__dict__  # workers load for themselves: what was loaded here goes
                workers = WorkerProcesses(jobs, config["machine"]["threads"], progress, spread(self.config.device))
                return self._run(executor or workers, missing, debug, log)

    def _place(self) -> Place:
        """Return what a unit needs on a node of a cluster."""
        import torch

        seen = None if self.config.settings.get("cache") else (self.out / LOCK).absolute()
        return Place(self.device, torch.get_num_threads(), seen, Path.cwd())

    def _run(self, executor: Executor, units: Sequence[Unit], debug: bool, log: Sequence[str]) -> Json:
        assemble(self.out)
        try:
            with closing(
                executor.run(partial(self, debug=debug, log=log), units)
            ) as ended:  # an error here stops them, too
                for _ in ended:
                    assemble(self.out)
        except BaseException as error:
            if not os.path.lexists(self.out / "config.json") and not isinstance(error, KeyboardInterrupt):
                raise RunError(
                    f"{self.out} was deleted, or what is in it, while {self.config.command} worked there. Start again, and "
                    "leave the directory alone until it has ended."
                ) from error
            with suppress(Exception):  # what is cut short stands in the results, too
                assemble(self.out, ended=not STOP.asked)  # figures take longer than a scheduler waits
            if isinstance(error, ProcessLost):
                raise RunError(
                    "A process was stopped from outside, perhaps for want of memory, or could not start (then it says above "
                    f"why). {holdings(self.out)}"
                ) from error
            if isinstance(error, BrokenProcessPool):
                raise RunError(
                    "A worker was stopped from outside, perhaps for want of memory, or could not start (then it says above "
                    f"why). {holdings(self.out)} Add --jobs 1 to run one unit at a time."
                ) from error
            raise
        return assemble(self.out, ended=True)

    def _begun(self, resume: bool, allow_changed: bool) -> Json:
        """Return the config.json that the directory was begun with; an empty one where nothing was."""
        held = [name for name in make_directory(self.out) if name != LOCK]
        if resume or hardly_begun(self.out):
            for folder in [self.out, *(path for path in self.out.rglob("*") if path.is_dir())]:
                if folder != self.cache:  # which others may use now
                    sweep(folder)
        if resume:
            place = self.compared or self.config.command
            before = read_config(self.out, self.config.command, place, allow_changed=allow_changed)
            if lacking := [each for each in before.get("objects", ()) if each not in self.objects]:
                raise UsageError(
                    f"{self.out} was begun from Python with {', '.join(lacking)}, which no file can name. Go on by the "
                    "same call in Python, with resume=True."
                )
            return before
        if not hardly_begun(self.out):
            refuse_held(self.out, held, f"Give another directory, or --resume to continue that {self.config.command}.")
        return {}

    def _config(self, before: Json, allow_changed: bool, jobs: int) -> Json:
        """Return config.json with all that was asked for in this directory, now and before."""
        asked, place = as_json(self.asked()), self.compared or self.config.command
        if before:  # before anything is loaded
            asked = grown(self.out, before[place], asked, self.growing, self.names_all)
        found, held = self.describe(), before.get("machine", {}).get("threads")
        # On them depends the order in which numbers are added, so all units of a directory have as many.
        set_threads(self.threads or (held if isinstance(held, int) else threads_of_each(min(jobs, len(self.keys())))))
        config = {"schema": SCHEMA, place: asked, **environment(self.device), **found, "units": self.keys()}
        if self.in_memory.call:
            config["command"] = self.in_memory.call
        if self.objects:  # it cannot be repeated from this file alone
            config["objects"] = self.objects
        return continued(self.out, before, as_json(config), allow_changed) if before else as_json(config)


def assemble(out: Path, ended: bool = False) -> Json:
    """Make results.json and report.md of the units that a directory holds, and return the content of results.json.

    Args:
        out: what a job wrote.
        ended: nothing more is run now: draw figures, too.

    Raises:
        RunError: there is no config.json of a job, or it is damaged.
    """
    config = read_config(out)
    module, _, name = _JOBS[next(kind for kind in _JOBS if kind in config)].partition(":")
    job: type[Job[Any]] = getattr(import_module(f"forgetfree.jobs.{module}"), name)
    units = [(unit, unit.record()) for unit in _units(out, config["units"])]
    failed = [
        {**unit.key, "error": record["error"]} for unit, record in units if record and record["status"] == "failed"
    ]
    results = job.gather(out, {"schema": SCHEMA, **config["about"], "failed": failed}, units)
    results = sign(results | signatures(out, config["units"]))
    write_json(out / "results.json", results)
    job.report(out, results, ended)
    return results


def holdings(out: Path) -> str:
    """Say what a job that was cut short has left behind, and how to go on; an empty text where it left nothing."""
    if not (units := _by_standing(out)):
        return ""
    parts = [f"finished: {_listed(units['finished'])}"]
    parts += [f"{what}: {_listed(units[what])}" for what in ("goes on", "will start again") if units[what]]
    return f"{out} holds what was computed ({'; '.join(parts)}); the same command with --resume --out {out} goes on."


def resumption(out: Path) -> str:
    """Say where a job that is resumed goes on; an empty text where nothing was begun."""
    parts = [f"{what}: {_listed(names)}" for what, names in _by_standing(out).items() if names]
    return f"Going on in {out}; {'; '.join(parts)}" if parts else ""


def _by_standing(out: Path) -> dict[str, list[str]]:
    """Return the names of a directory's units by how they stand; nothing where there is no job."""
    try:
        config = read_config(out)
    except RunError:
        return {}
    units: dict[str, list[str]] = {
        what: [] for what in ("finished", "goes on", "will start again", "failed, begins again", "not begun")
    }
    for unit in _units(out, config["units"]):
        if record := unit.record():
            units["finished" if record["status"] == "done" else "failed, begins again"].append(str(unit))
        elif unit.is_begun:
            where = _standing(unit, config)
            units["goes on" if where else "will start again"].append(f"{unit}{where}")
        else:
            units["not begun"].append(str(unit))
    return units


def _standing(unit: Unit, config: Json) -> str:
    """Say from where a unit that was cut short goes on; an empty text where it starts again."""
    folder, tasks = unit.directory / CHECKPOINT, len(config["tasks"])
    midst = in_a_phase(unit.directory)
    if "run" not in config and "sweep" not in config:  # each of its units is about one task
        return " in the midst of its training" if midst else ""
    learned = max(map(tasks_learned, folder.iterdir()), default=0) if folder.is_dir() else 0
    if midst:
        return f" in the midst of task {learned + 1} of {tasks}"
    return f" after {learned} of {counted(tasks, 'task')}" if learned else ""


def failures(results: Json) -> list[str]:
    """Return a message for each unit that failed."""
    return [
        f"{named({key: value for key, value in unit.items() if key not in ('error', 'matrix')}, ', ')}: {unit['error']}"
        for unit in results["failed"]
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing" if len(names) <= _NAMED else f"{len(names)} units"


def check_begun(out: Path) -> None:
    """Raise ``UsageError`` unless there is something to resume in a directory, or it was killed before there was."""
    if not os.path.lexists(out / "config.json") and not hardly_begun(out):
        raise UsageError(
            f"There is nothing to resume in {str(out)!r}. Give the --out that was begun, or leave --resume out."
        )


def hardly_begun(out: Path) -> bool:
    """Say whether a directory holds nothing but what is left of a job that was killed before it wrote config.json."""
    return out.is_dir() and all(is_left(path.name) or path.name == LOCK for path in out.rglob("*") if not path.is_dir())


def _units(out: Path, keys: Mapping[str, Json]) -> list[Unit]:
    return [Unit(key, out / folder) for folder, key in keys.items()]


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Keep other processes out of a directory, inside."""
    try:
        with locked(out / LOCK, wait=False):
            yield
    except BlockingIOError as error:
        raise RunError(f"Another process works in {out}. Wait until it has ended, or give another --out.") from error
