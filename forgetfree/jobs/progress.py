"""Progress of a job: on a terminal, a bar for all tasks and one for each running phase; elsewhere, plain lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, TextIO

from rich import progress as bars
from rich.console import Console
from rich.table import Column
from rich.text import Text

from forgetfree import registry
from forgetfree.display import counted, escaped
from forgetfree.results.metrics import scale_of
from forgetfree.results.run_folder import Score
from forgetfree.training.monitor import Monitor, Phase

#: Minimum number of seconds between two messages about the steps of a phase.
_OFTEN = 0.1
#: Number of seconds without a plain line after which a step prints one.
_INTERVAL = 60.0


@dataclass(frozen=True)
class Step:
    """The current step of a unit; ``step`` 0 begins a phase. While texts are generated, tokens are counted instead of steps."""

    unit: str
    task: str
    phase: Phase
    step: int
    steps: int
    loss: float = math.nan

    def __str__(self) -> str:
        phase = self.phase.replace("_", "-")
        return escaped(f"{self.unit} · {self.task} · {phase}")

    @property
    def numbers(self) -> str:
        """The number of steps that are done, and the loss of the last one."""
        return f"{self.step}/{self.steps}" + ("" if math.isnan(self.loss) else f" loss {self.loss:.3f}")


@dataclass(frozen=True)
class TaskLearned:
    """The event that a unit has learned one more task of its stream, with the scores."""

    unit: str
    after: int
    scores: Sequence[Score]

    def __str__(self) -> str:
        names = registry.metrics()
        # The first score of a task is by its own metric.
        of_tasks = {score.task: score for score in reversed(self.scores) if score.metric in names}
        known = [of_tasks[task] for task in dict.fromkeys(score.task for score in self.scores) if task in of_tasks]
        known = known[: self.after]
        if len(known) < self.after:
            return escaped(f"{self.unit} · {counted(self.after, 'task')} learned")
        average = sum(score.value for score in known) / self.after
        scale, last = scale_of(*(score.metric for score in known)), known[-1]
        of_all = f", average of {self.after} tasks {scale.with_unit(average)}" if self.after > 1 else ""
        return escaped(f"{self.unit} · {last.task} {scale_of(last.metric).with_unit(last.value)}{of_all}")


@dataclass(frozen=True)
class Ended:
    """The event that a unit has ended, successfully or not."""

    unit: str


Event = Step | TaskLearned | Ended


class Teller(Monitor):
    """Reports the events of the named unit, directly or, in a worker, through a queue."""

    def __init__(self, unit: str, tell: Callable[[Event], None]) -> None:
        self._unit, self._tell = unit, tell
        self._now: Step | None = None
        self._last = 0.0

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Report a phase, and its steps at most every 0.1 seconds."""
        begun, self._last = Step(self._unit, task, phase, 0, steps), -math.inf
        self._follow(begun)
        yield lambda step, loss: self._follow(replace(begun, step=step, loss=loss))
        self._now = None

    def log_tokens(self, tokens: int, most: int) -> None:
        """Report generated tokens, at the same rate."""
        if self._now is not None:
            self._follow(replace(self._now, step=tokens, steps=most))

    def _follow(self, step: Step) -> None:
        self._now, now = step, time.monotonic()
        if now - self._last >= _OFTEN or step.step == step.steps:
            self._last = now
            self._tell(step)

    def log_scores(self, scores: Sequence[Score]) -> None:
        """Report a learned task with the scores."""
        if after := max((score.after for score in scores), default=0):
            self._tell(TaskLearned(self._unit, after, list(scores)))


class Progress:
    """Receives the events of all units of a job, and shows nothing."""

    @contextmanager
    def job(self, units: Sequence[str], tasks: int = 1) -> Iterator[None]:
        """Follow a job of units with these names, each of which learns ``tasks`` tasks."""
        yield

    def monitor(self, unit: str) -> Monitor:
        """Return the monitor of a unit in this process."""
        return Teller(unit, self.hear)

    def hear(self, event: Event) -> None:
        """Receive an event of a unit."""


class ShownProgress(Progress):
    """Shows a bar for all tasks of the job and one for each phase, if ``live``; else a line per learned task and per minute."""

    def __init__(self, console: Console, live: bool) -> None:
        self._console, self._live = console, live
        self._bars = bars.Progress(
            bars.TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            bars.BarColumn(12),
            bars.TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
            bars.TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            expand=True,
            disable=not live,
            get_time=time.monotonic,
            speed_estimate_period=math.inf,
        )
        self._all, self._rows, self._learned = bars.TaskID(0), dict[str, bars.TaskID](), dict[str, int]()
        self._tasks, self._spoken = 1, 0.0

    @contextmanager
    def job(self, units: Sequence[str], tasks: int = 1) -> Iterator[None]:
        """Show the job, and at the end its duration."""
        begin = self._spoken = time.monotonic()
        self._tasks, self._learned = tasks, dict.fromkeys(units, 0)
        self._all = self._bars.add_task("tasks learned", total=tasks * len(units), numbers="")
        self._rows = {unit: self._bars.add_task("", visible=False, numbers="") for unit in units}
        with self._bars:
            self._bars.update(self._all, completed=1e-9)  # rich measures the speed from here on
            self._count()
            yield
        self._say(f"done in {_clock(time.monotonic() - begin)}")

    def hear(self, event: Event) -> None:
        """Show the event; print a line about a learned task."""
        row = self._rows[event.unit]
        if isinstance(event, Step):
            if event.step == 0:
                self._bars.reset(row)
            about: dict[str, Any] = {"description": str(event), "numbers": event.numbers}
            self._bars.update(row, completed=event.step, total=event.steps, visible=True, **about)
            if time.monotonic() - self._spoken >= _INTERVAL:
                self._say(f"{event} {event.numbers}")
            return
        self._bars.update(row, visible=False)
        self._learned[event.unit] = event.after if isinstance(event, TaskLearned) else self._tasks
        self._count()
        if isinstance(event, TaskLearned):
            self._say(str(event))
            if self._live:
                self._console.print(Text(f"✓ {event}"), no_wrap=True, overflow="ellipsis", crop=True)

    def _count(self) -> None:
        done = sum(self._learned.values())
        self._bars.update(self._all, completed=done, numbers=f"{done}/{self._tasks * len(self._learned)}")

    def _say(self, text: str) -> None:
        """Print a plain line that begins with the number of tasks done and the time left, unless ``live``."""
        if self._live:
            return
        self._spoken = time.monotonic()
        job = next(row for row in self._bars.tasks if row.id == self._all)
        left = "" if job.time_remaining is None else f", {_clock(job.time_remaining)} left"
        print(f"{job.fields['numbers']} tasks{left} · {text}", file=self._console.file, flush=True)


def make_progress(stream: TextIO) -> Progress:
    """Return the progress that suits a stream: live on a terminal and in a notebook, plain lines elsewhere."""
    console = Console(file=stream)
    # In a notebook, rich's live display needs ipywidgets.
    notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    return ShownProgress(console, live=notebook or (stream.isatty() and not console.is_dumb_terminal))


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
