"""Units as tasks of a Ray cluster: each runs in a directory of its node, and its files come back to its folder.

Results therefore need no shared file system. The store of fine-tuned models needs one, for its files and their locks.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from warnings import catch_warnings

from forgetfree.device import device_type
from forgetfree.display import brief
from forgetfree.errors import RunError, UsageError, first_line
from forgetfree.files import write_atomically
from forgetfree.jobs.environment import quiet_libraries, set_threads
from forgetfree.jobs.progress import Ended, Event, Progress, Teller
from forgetfree.jobs.run_directory import Unit
from forgetfree.jobs.workers import Work
from forgetfree.results.run_folder import RECORD

#: Maximum number of attempts at a unit whose node or process dies.
_ATTEMPTS = 4
#: Seconds between two polls of the units' events, and seconds to wait for a cluster's answer.
_OFTEN, _PATIENCE = 0.2, 5.0
#: Environment variables that affect the results: all nodes get the values from this process.
_SHARED = re.compile(
    r"(ATEN|CUBLAS|DNNL|FORGETFREE|KMP|MKL|NVIDIA|OMP|ONEDNN)_\w+|HF_HUB_OFFLINE|TOKENIZERS_PARALLELISM"
)
#: The files of a unit, by their paths in its folder.
Files = dict[str, bytes]


def check_cluster(cluster: str) -> None:
    """Raise ``UsageError`` unless the name of the cluster is valid and Ray is installed; nothing is loaded or written."""
    if cluster != "ray" and not re.fullmatch(r"ray://[^\s/]+:\d+", cluster):
        raise UsageError(
            f"--jobs must be a number, auto, ray or ray://HOST:PORT, got {brief(cluster)}. RAY_ADDRESS can name the "
            "cluster; without it, a cluster is started on this machine."
        )
    if find_spec("ray") is None:
        raise UsageError(
            "--jobs ray needs Ray, which is not installed. Install it with: pip install 'forgetfree[ray]'."
        )


@dataclass(frozen=True)
class Place:
    """The device, threads and folders of a unit, wherever it runs.

    Attributes:
        device: the device of each unit; if it is a GPU, each unit has its own.
        threads: the number of CPU threads of each unit, and of the CPUs reserved for it.
        seen: a file that the node must have access to: the store of fine-tuned models lies beside it; ``None``: no file.
        directory: the working directory for relative paths, if the node has it.
        kept: seconds between two copies of a unit's files; if its node dies, only the work since the last copy is lost.
    """

    device: str
    threads: int
    seen: Path | None = None
    directory: Path = Path()
    kept: float = 60.0

    @property
    def resources(self) -> dict[str, float]:
        """Return the resources that a Ray task requests."""
        return {"num_cpus": self.threads, "num_gpus": float(device_type(self.device) == "cuda")}

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment of a unit. Ray shows a task only its own GPU; here, a unit on CPUs sees no GPU."""
        shared = {name: value for name, value in os.environ.items() if _SHARED.fullmatch(name)}
        hidden = {} if self.resources["num_gpus"] else {"CUDA_VISIBLE_DEVICES": ""}
        return shared | hidden | {"OMP_NUM_THREADS": str(self.threads)}


class RayTasks:
    """Runs units on any node with free resources, and again on another node if one dies.

    Args:
        cluster: ``ray`` or ``ray://HOST:PORT``.
        place: the device, threads and folders of each unit.
        progress: receives the events of all units.
    """

    def __init__(self, cluster: str, place: Place, progress: Progress) -> None:
        self._cluster, self._place, self._progress = cluster, place, progress

    def run(self, work: Work, units: Sequence[Unit]) -> Generator[Unit]:
        """Yield each unit when it has ended and its files are here.

        Raises:
            RunError: the cluster cannot be reached, or the process of a unit died in every attempt.
        """
        if not units:
            return
        with self._connected():
            import ray
            from ray.exceptions import RayError, RayTaskError
            from ray.util.queue import Queue

            queue, attempts = Queue(actor_options={"num_cpus": 0}), Counter[str]()
            task = ray.remote(_run).options(max_retries=0, **self._place.resources)

            def begun(unit: Unit) -> Any:
                attempts[str(unit)] += 1
                return task.remote(work, unit.key, read_files(unit.directory), self._place, queue)

            running = {begun(unit): unit for unit in units}
            try:
                while running:
                    ended, _ = ray.wait(list(running), timeout=_OFTEN)
                    with suppress(RayError):  # from the queue: lost events must not stop units
                        for name, event in queue.get_nowait_batch(queue.qsize()):
                            self._hear(event, next((unit for unit in running.values() if str(unit) == name), None))
                    for each in ended:
                        unit = running.pop(each)
                        try:
                            files = ray.get(each)
                        except RayTaskError as error:
                            raise error.cause from error
                        except RayError as error:  # the node or the process has died
                            if attempts[str(unit)] == _ATTEMPTS:
                                raise RunError(
                                    f"The process of {unit} died {_ATTEMPTS} times, perhaps because it ran out of "
                                    f"memory: {first_line(error)}. Resume with --resume on a larger node."
                                ) from error
                            running[begun(unit)] = unit
                            continue
                        replace_files(unit.directory, files)
                        self._progress.hear(Ended(str(unit)))
                        yield unit
            finally:
                for each in running:
                    with suppress(RayError):
                        ray.cancel(each, force=True)

    def _hear(self, news: Event | Files, unit: Unit | None) -> None:
        """Pass on an event, or store the files of a running unit; the files of an ended unit are here already."""
        if isinstance(news, Event):
            self._progress.hear(news)
        elif unit is not None:
            replace_files(unit.directory, news)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Connect to the cluster, or start one on this machine, inside the block."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        if ray.is_initialized():  # by the calling program
            yield
            return
        address = (os.environ.get("RAY_ADDRESS") or "local") if self._cluster == "ray" else self._cluster
        environment: dict[str, Any] = {"env_vars": self._place.variables}
        if address != "local":  # other nodes run the code of this one
            environment["py_modules"] = [str(Path(__file__).parents[2])]
        handler = signal.getsignal(signal.SIGTERM)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if port.isdigit():  # Ray would retry for minutes
                socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
            with catch_warnings(action="ignore"):  # errors have the message
                ray.init(address, runtime_env=environment, include_dashboard=False, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise RunError(
                f"Cannot connect to the Ray cluster {address}: {first_line(error)}. Check the address, whether the "
                "cluster is running, and its token (RAY_AUTH_MODE=token, see docs/scaling.md)."
            ) from error
        try:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray has installed its own
            yield
        finally:
            ray.shutdown()


def read_files(directory: Path) -> Files:
    """Return the files of a unit's folder."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def replace_files(directory: Path, files: Files) -> None:
    """Replace the files of a unit's folder by these; unit.json, which marks the unit as ended, is written last."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_dir():
            with suppress(OSError):  # it has files that stay
                path.rmdir()
        elif path.relative_to(directory).as_posix() not in files:
            path.unlink()
    for name in sorted(files, key=lambda name: name == RECORD):
        write_atomically(directory / name, files[name])


# -- On a node -------------------------------------------------------------------------------------------

#: The work of this process, by the queue of the job; it keeps the loaded model and data for further units.
_works: dict[str, Work] = {}


def _run(work: Work, key: Mapping[str, Any], files: Files, place: Place, queue: Any) -> Files:
    """Run a unit in a directory of this node, and return its files; from time to time, send its files so far."""
    with suppress(OSError):
        os.chdir(place.directory)
    if place.seen and not place.seen.exists():
        raise UsageError(
            f"The node {platform.node()} cannot access {place.seen.parent}, where fine-tuned models are shared. Give "
            "--cache DIR, a directory that exists on every node; if the nodes do not share it, each node trains its "
            "own models."
        )
    quiet_libraries()
    set_threads(place.threads)
    if str(queue.actor) not in _works:
        _works.clear()
    with TemporaryDirectory(prefix="forgetfree-") as temporary:
        unit = Unit(key, Path(temporary) / "unit")
        replace_files(unit.directory, files)
        sent = time.monotonic()

        def tell(event: Event) -> None:
            nonlocal sent
            queue.actor.put_nowait.remote((str(unit), event))
            if time.monotonic() - sent >= place.kept:  # the unit itself calls this, so no file is half written
                queue.actor.put_nowait.remote((str(unit), read_files(unit.directory)))
                sent = time.monotonic()

        _works.setdefault(str(queue.actor), work)(unit, Teller(str(unit), tell))
        return read_files(unit.directory)
