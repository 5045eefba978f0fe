"""Commands that are killed and resumed, and compared with an uninterrupted run.

A command runs in a forked child of a process that has imported all modules, so that a kill hits the command, not the
imports. The child reports its activity (`PLACES`) through shared memory, so that kills can be spread over it.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import multiprocessing
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
import torch

from forgetfree import cli, files
from forgetfree.jobs import checkpoints, run, workers
from forgetfree.jobs.history import History
from forgetfree.results.report import run_report
from forgetfree.serve.inference import Predictor
from forgetfree.strategies import continual_ft, fine_tune, grafting_continual

Json = dict[str, Any]
#: Activities of a run.
PLACES = ("else", "fine_tune", "localize", "train", "evaluate", "reports")
STRATEGIES = ("fine-tune", "grafting-continual", "continual-ft")
_IMPORTED = run, Predictor, fine_tune, grafting_continual, continual_ft
#: The longest time of a child, in seconds.
_PATIENCE = 300.0


@dataclass
class World:
    """A tiny model, tiny data, and a folder for runs of these strategies, with ``jobs`` workers."""

    folder: Path
    strategies: Sequence[str] = STRATEGIES
    jobs: int = 1
    settings: Sequence[str] = ("steps=10", "mask_steps=4", "mask_batch_size=8", "optimizer=adamw", "threads=1")

    def __post_init__(self) -> None:
        self.model, self.data = self.folder / "model", self.folder / "data"
        if not self.data.exists():
            tiny.write_model("bert", self.model)
            tiny.write_data(self.data)

    def words(self, out: Path, *more: str) -> list[str]:
        """Return the command line of a run."""
        strategies = [word for name in self.strategies for word in ("--strategy", name)]
        settings = [word for text in self.settings for word in ("--set", text)]
        given = ["--data", str(self.data), "--model", str(self.model), "--shots", "4", "--readout", "linear"]
        given += ["--jobs", str(self.jobs), "--sparsity", "0.05", "--out", str(out)]
        return ["run", "sst2,qnli", *strategies, *given, *settings, *more]


@dataclass
class Revision(World):
    """A run on top of another: a task is taken back (``without``), so that the next one is learned again; or one is added."""

    strategies: Sequence[str] = ("grafting-continual",)
    action: str = "without"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.whole = self.folder / "whole"
        run_to_end(super().words(self.whole), self.whole)

    def words(self, out: Path, *more: str) -> list[str]:
        """Return the command line of the revision."""
        change = ["--without", "sst2"] if self.action == "without" else ["ag_news"]
        return ["run", *change, "--on", str(self.whole), "--out", str(out), *more]


@dataclass
class Watch:
    """The reports of a child: the number of events, and the activity of the last one."""

    shared: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 16))

    def tell(self, place: str) -> None:
        """Report an event."""
        count, _ = self.read()
        self.shared[:16] = struct.pack("qq", count + 1, PLACES.index(place))

    def read(self) -> tuple[int, str]:
        """Return the number of events, and the last activity."""
        count, place = struct.unpack("qq", self.shared[:16])
        return count, PLACES[place]


@contextmanager
def told(watch: Watch, log: int) -> Iterator[None]:
    """Let phases and reports send events inside the block, and write them into an open file shared with other processes."""
    phase, assemble = History.phase, run_report.write_report

    def tell(place: str) -> None:
        watch.tell(place)
        os.write(log, f"{place}\n".encode())

    @contextmanager
    def telling(self: Any, task: str, name: str, steps: int) -> Iterator[Callable[[int, float], None]]:
        with phase(self, task, name, steps) as on_step:  # type: ignore[arg-type]

            def after(step: int, loss: float) -> None:
                on_step(step, loss)
                tell(name)

            tell(name)
            yield after
        tell("else")

    def assembling(*args: Any, **how: Any) -> Json:
        tell("reports")
        made = assemble(*args, **how)
        tell("else")
        return made

    History.phase, run_report.write_report = telling, assembling  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        History.phase, run_report.write_report = phase, assemble  # type: ignore[method-assign]


class Child:
    """A command in a forked process with its own process group.

    Args:
        words: the command line.
        out: its directory; OUT.output, OUT.log and OUT.events beside it get its stdout, its stderr and its events.
        watch: its events in shared memory.
        before: a function that the child calls before the command.
        often: write a checkpoint after every step.
    """

    def __init__(
        self,
        words: Sequence[str],
        out: Path,
        watch: Watch,
        before: Callable[[], None] = lambda: None,
        *,
        often: bool = True,
    ) -> None:
        self.output, self.log, self.events = (Path(f"{out}.{name}") for name in ("output", "log", "events"))
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self.code: int | None = None
        if self.pid == 0:
            code = 70
            try:
                code = self._run(words, watch, before, often)
            finally:
                os._exit(code)

    def _run(self, words: Sequence[str], watch: Watch, before: Callable[[], None], often: bool) -> int:
        os.setsid()
        tempfile.tempdir = str(self.log.parent)
        kept = (self.output, self.log, self.events)
        output, log, events = (os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in kept)
        os.dup2(output, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        random.seed(os.getpid())  # has no influence on results
        # Workers are forked, too: a spawned process would import everything again.
        fork = multiprocessing.get_context("fork")
        workers._context = lambda: fork
        if often:
            checkpoints.INTERVAL, checkpoints.SHARE = 0.0, math.inf
        with told(watch, events):
            before()
            code = int(cli.main(list(words)))
        sys.stdout.flush()
        return code

    def end(self) -> None:
        """Wait for the end of the command.

        Raises:
            AssertionError: the command failed.
        """
        code = self.wait()
        assert code == 0, f"exit code {code}: {self.log.read_text()[-2000:]}"

    def running(self) -> bool:
        """Return whether the command is running."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def wait(self) -> int:
        """Wait for the end of the command, and return its exit code."""
        deadline = time.monotonic() + _PATIENCE
        while self.running():
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"it did not end: {self.log.read_text()[-2000:]}")
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def signal(self, number: int) -> None:
        """Send a signal to the command and its workers."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def run_to_end(words: Sequence[str], out: Path) -> Child:
    """Run a command without a kill."""
    child = Child(words, out, Watch(), often=False)
    child.end()
    return child


def digest(out: Path, *, shared: bool = False) -> Json:
    """Return all that must be equal: the SHA-256 of every file, where needed without seconds."""
    found = {}
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        name = path.relative_to(out).as_posix()
        if path.name in ("report.html", "report.md", "outcome.json", "unit.json", "config.json"):
            found[name] = "made of the others"
        elif path.suffix in (".json", ".jsonl"):
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            parsed = [timeless(json.loads(line)) for line in lines]
            # If two workers need one model, the first to come fine-tunes it.
            raced = [isinstance(each, dict) and each.get("phase") == "fine_tune" for each in parsed]
            content = json.dumps([each for each, other in zip(parsed, raced, strict=True) if not (shared and other)])
            found[name] = hashlib.sha256(content.encode()).hexdigest()
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def timeless(value: Any) -> Any:
    """Return a JSON value without seconds."""
    if isinstance(value, dict):
        return {key: timeless(each) for key, each in value.items() if key not in ("seconds", "seconds_per_task")}
    return [timeless(each) for each in value] if isinstance(value, list) else value


class Harness:
    """One uninterrupted run, and many that are killed."""

    def __init__(self, world: World) -> None:
        assert torch.get_num_threads() == 1, "a process with threads cannot be forked: set OMP_NUM_THREADS=1"
        self.world, self.count = world, 0
        out = self.out()
        self.events = run_to_end(world.words(out), out).events.read_text().split()
        self.expected = digest(out, shared=self.world.jobs > 1)

    def out(self) -> Path:
        """Return a new directory."""
        self.count += 1
        out = self.world.folder / f"jobs-{self.world.jobs}-{self.count}"
        return self.out() if out.exists() else out

    def resume(self, out: Path, *more: str) -> None:
        """Resume a run, and compare it with the uninterrupted one.

        Raises:
            AssertionError: the command failed, or its files differ.
        """
        resuming = ["--resume"] if out.exists() else []
        run_to_end(self.world.words(out, *resuming, *more), out)
        got = digest(out, shared=self.world.jobs > 1)
        differ = [name for name in {**got, **self.expected} if got.get(name) != self.expected.get(name)]
        assert not differ, f"{out} differs in {differ}"
        assert not [path for path in out.rglob(".*") if path.name != ".gitignore"], "leftovers"

    def killed_at_replace(self, number: int, *, after: bool, often: bool = True) -> bool:
        """Kill a run before or after its rename of this number, and resume it; return False if it ended before that.

        With ``often``, a checkpoint is written after every step, which adds renames.
        """
        out, replace, done = self.out(), os.replace, 0

        def kill() -> None:
            def replacing(*names: Any, **how: Any) -> None:
                nonlocal done
                done += 1
                if done == number and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                replace(*names, **how)
                if done == number:
                    os.kill(os.getpid(), signal.SIGKILL)

            files.os.replace = replacing  # type: ignore[assignment]

        child = Child(self.world.words(out), out, Watch(), kill, often=often)
        if child.wait() == 0:
            return False
        assert child.code == -signal.SIGKILL, child.log.read_text()
        self.resume(out)
        return True

    def killed_at(self, moment: int, delay: float, number: int = signal.SIGKILL) -> str:
        """Kill a run by a signal, ``delay`` seconds after its event of this number; resume it, and return its activity then."""
        out, watch = self.out(), Watch()
        child = Child(self.world.words(out), out, watch)
        while child.running() and watch.read()[0] < moment:
            time.sleep(0.0005)
        time.sleep(delay)
        place = watch.read()[1] if watch.read()[0] else "else"
        asked = time.monotonic()
        child.signal(number)
        child.wait()
        took = time.monotonic() - asked
        assert took < 10, f"it ended {took:.1f} s after signal {number}"
        if number != signal.SIGKILL and child.code not in (0, 1):
            raise AssertionError(f"exit code {child.code}: {child.log.read_text()[-2000:]}")
        self.resume(out)
        return place

    def moments(self, count: int, seed: int) -> Iterator[tuple[int, float]]:
        """Yield random moments: an event, with all activities equally often, and a short time after it."""
        draw = random.Random(seed)
        by_place = {place: [n for n, each in enumerate(self.events, 1) if each == place] for place in PLACES}
        places = [place for place in PLACES if by_place[place]]
        for number in range(count):
            yield draw.choice(by_place[places[number % len(places)]]), draw.expovariate(200)
