"""A run: one stream, learned by each strategy with each seed. A unit is one strategy with one seed, and has its own folder.

config.json describes the run and contains everything needed to repeat it; results.json and the reports are written from
the units, whenever one has ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from forgetfree.device import device_type, find_device, spread
from forgetfree.errors import RunError, UsageError
from forgetfree.files import make_directory, remove_unfinished, sha256
from forgetfree.jobs.config import USUAL, Execution, RunConfig
from forgetfree.jobs.continuation import REMEDY, as_json, merged_config
from forgetfree.jobs.environment import (
    environment,
    set_threads,
    terminable,
    threads_as_before,
    threads_of_each,
)
from forgetfree.jobs.learn import UnitWork, learn
from forgetfree.jobs.progress import Ended, Progress
from forgetfree.jobs.run_directory import (
    LOCK,
    Json,
    begin,
    check_begun,
    exclusive,
    holdings,
    is_unused,
    refuse_used,
)
from forgetfree.jobs.stream_loading import StreamLoader, describe
from forgetfree.results.run_folder import CONFIG, load_run

if TYPE_CHECKING:
    from forgetfree.jobs.cluster import RayTasks
    from forgetfree.jobs.revision import Revision
    from forgetfree.jobs.workers import WorkerProcesses
    from forgetfree.results.runs import RunReader
    from forgetfree.results.table import Results

SCHEMA = 1


def run(
    config: RunConfig,
    execution: Execution = USUAL,
    revision: Revision | None = None,
    loader: StreamLoader | None = None,
) -> Results:
    """Run all units that are not finished, and return the results of the run.

    Args:
        config: the configuration, `prepared`.
        execution: jobs, resumption and progress.
        revision: the finished run that it is based on, from which its units take over the equal part.
        loader: loads the stream; a caller that gives it can use the loaded data even if the run cannot start.

    Raises:
        UsageError: the directory is not empty, was started with another configuration, or there is nothing to resume.
        RunError: another process is working in the directory, data or model differ from the directory's or the finished
            run's, or a worker was killed.
        ForgetfreeError: data or model cannot be loaded.
    """
    execution.check_objects(config.unnamed)
    if execution.log:
        from forgetfree.jobs.trackers import check_trackers

        check_trackers(execution.log)
    out, work = Path(config.out), UnitWork(config, execution, revision, loader)
    if execution.resume:
        check_begun(out)
    with terminable(), exclusive(out), threads_as_before():
        begun = _begun(config, execution, work.loader.store)
        content = _config_json(work.loader, execution, begun, revision)  # reports every fault of data and model
        missing = begin(out, content, begun, config.units)
        work.config_json = sha256(out / CONFIG)
        if revision and missing:
            revision.take_models()
        progress, report = execution.progress or Progress(), Report(out)
        with progress.job([str(unit) for unit in missing], len(content["tasks"])), _cut_short(report):
            workers = _workers(work, execution, len(missing), progress)
            if begun:
                report.write()
            if workers is None:
                for unit in missing:
                    learn(work, unit, progress.monitor(str(unit)))
                    progress.hear(Ended(str(unit)))
                    report.write()
            else:
                with closing(workers.run(partial(learn, work), missing)) as ended:  # an error stops the workers
                    for _ in ended:
                        report.write()
            return report.write(ended=True)


def check_base(config: RunConfig, execution: Execution, revision: Revision | None = None) -> None:
    """Raise the errors of `run` if a run cannot be resumed or cannot extend another one, without writing anything."""
    execution.check_objects(config.unnamed)
    if execution.resume:
        check_begun(Path(config.out))
    begun = _config_before(config, execution)
    if begun or revision:
        with threads_as_before():
            _config_json(StreamLoader(config), execution, begun, revision)


# -- Before the first unit -------------------------------------------------------------------------------


def _begun(config: RunConfig, execution: Execution, store: Path) -> Json:
    """Return the previous config.json, empty if the run is new, and remove temporary files of killed processes."""
    out, begun = Path(config.out), _config_before(config, execution)
    if begun or is_unused(out):
        for folder in [out, *(path for path in out.rglob("*") if path.is_dir())]:
            if folder != store:  # other runs may use it now
                remove_unfinished(folder)
    if not begun:
        refuse_used(out)
    if config.common.cache or os.path.lexists(store):
        make_directory(store, "--cache" if config.common.cache else "--out")
    return begun


def _config_before(config: RunConfig, execution: Execution) -> Json:
    """Return the config.json of a run that is resumed, after comparing it with the request; empty if nothing is resumed."""
    out = Path(config.out)
    if not execution.resume or not os.path.lexists(out / "config.json"):
        return {}
    begun = load_run(out, REMEDY)
    if lacking := [each for each in begun.get("objects", ()) if each not in config.unnamed]:
        raise UsageError(
            f"{out} was started from Python with {', '.join(lacking)}, which a file cannot express. Resume it with "
            "the same call in Python and resume=True."
        )
    merged_config(out, begun, {"run": as_json(config.section())})  # before anything is loaded
    return begun


def _config_json(loader: StreamLoader, execution: Execution, begun: Json, revision: Revision | None = None) -> Json:
    """Load data and model, and return the content of config.json: this request merged with earlier ones."""
    config, units, base = loader.config, loader.config.units, revision.base.config if revision else begun
    set_threads(config.common.threads)
    each = 1 if _is_auto(config, execution) else threads_of_each(min(_at_a_time(config, execution), len(units)))
    description, threads = describe(loader), base.get("machine", {}).get("threads")
    # The number of threads decides the order of additions, so all units of a directory and of its base use the same.
    set_threads(config.common.threads or (threads if isinstance(threads, int) else each))
    section, here = as_json(config.section()), environment(loader.device)
    content = {"schema": SCHEMA, "run": section, **here, **description, "units": units}
    if config.unnamed:  # it cannot be repeated from this file alone
        content["objects"] = config.unnamed
    whole: Json = as_json(content)
    if revision:
        revision.compare(whole)
    if not begun:
        return whole
    merged = merged_config(Path(config.out), begun, whole)
    # If nothing else is new, config.json stays as it is.
    circumstances_then = {key: begun[key] for key in (*here, "command") if key in begun}
    return begun if merged | circumstances_then == begun else merged


# -- Where units run -------------------------------------------------------------------------------------


def _is_auto(config: RunConfig, execution: Execution) -> bool:
    return execution.jobs == "auto" and device_type(find_device(config.device)) == "cpu"


def _at_a_time(config: RunConfig, execution: Execution) -> int:
    """Return the requested number of units at a time; default: one on each device."""
    jobs = execution.at_a_time
    return max(1, len(spread(config.device))) if jobs == 1 and not config.unnamed else jobs


def _workers(work: UnitWork, execution: Execution, units: int, progress: Progress) -> WorkerProcesses | RayTasks | None:
    """Return the worker processes or the cluster for ``units`` units; ``None``: the units run in this process."""
    import torch

    config, loader = work.loader.config, work.loader
    if execution.cluster is not None:
        from forgetfree.jobs.cluster import Place, RayTasks

        seen = None if config.common.cache else (Path(config.out) / LOCK).absolute()
        place = Place(loader.device, torch.get_num_threads(), seen, Path.cwd())
        return RayTasks(execution.cluster, place, progress)
    jobs = _at_a_time(config, execution)
    if units < 2 or (jobs == 1 and (config.unnamed or not _is_auto(config, execution))):
        return None
    from forgetfree.jobs.workers import WorkerProcesses, units_at_a_time

    if _is_auto(config, execution):
        jobs = units_at_a_time(units, len(loader.stream(config.seed[0]).model.space()))
        if jobs == 1:
            return None
    loader.unload()  # workers load their own
    return WorkerProcesses(jobs, torch.get_num_threads(), progress, spread(config.device))


# -- Reports ---------------------------------------------------------------------------------------------


class Report:
    """Writes the report of a run whenever a unit has ended, reading new units only; at the end it reads all files again."""

    def __init__(self, out: Path) -> None:
        self.out = out

    @cached_property
    def _reader(self) -> RunReader:
        from forgetfree.results.runs import RunReader  # imports pandas: not before the first step

        return RunReader(self.out, running=True)

    def write(self, *, ended: bool = False) -> Results:
        """Write the report, and return the results in it."""
        from forgetfree.results.report.run_report import write_report
        from forgetfree.results.runs import read_run
        from forgetfree.results.table import Results

        results = Results([read_run(self.out) if ended else self._reader.read()])
        write_report(self.out, results, ended=ended)
        return results


@contextmanager
def _cut_short(report: Report) -> Iterator[None]:
    """On an error inside, write the report of the finished units, and explain the error if its message does not."""
    try:
        yield
    except BaseException as error:
        with suppress(Exception):
            report.write(ended=not isinstance(error, KeyboardInterrupt))  # figures take longer than a scheduler waits
        if isinstance(error, BrokenProcessPool):
            raise RunError(
                "A worker process was killed, perhaps because it ran out of memory, or could not start (see the "
                f"messages above). {holdings(report.out)} Add --jobs 1 to run one unit at a time."
            ) from error
        raise
