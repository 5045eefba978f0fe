"""Progress of a job: how far all of it has come and the time that is left; rich's bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TextIO

from rich import progress as bars
from rich.console import Console
from rich.table import Column
from rich.text import Text

from forgetfree import registry
from forgetfree.display import counted, escaped
from forgetfree.results.metrics import scale_of
from forgetfree.results.unit_folder import Score
from forgetfree.training.monitor import PHASE_NAMES, Monitor, Phase

#: Seconds between two messages about the steps of a phase.
_OFTEN = 0.1
#: Seconds without a plain line, at most.
_INTERVAL = 60.0
#: As many units are shown at a time.
_SHOWN = 8
#: Width of a bar.
_BAR = 12


@dataclass(frozen=True)
class Step:
    """What a unit is doing; ``step`` 0 begins a phase. After its steps, texts may be written, of ``most`` tokens or fewer."""

    unit: str
    task: str
    phase: Phase
    step: int
    steps: int
    loss: float = math.nan
    tokens: int = 0
    most: int = 0

    def __str__(self) -> str:
        return escaped(f"{self.unit} · {self.task} · {PHASE_NAMES[self.phase]}")

    @property
    def done(self) -> tuple[float, int]:
        """How many steps are done, and of how many; to write texts counts as many as to read the rows did."""
        read = min(self.step, self.steps)
        return (read + self.steps * self.tokens / self.most, 2 * self.steps) if self.most else (read, self.steps)

    @property
    def count(self) -> str:
        """What is counted: tokens while texts are written, else steps."""
        return counted(self.tokens, "token") if self.most else f"{self.step}/{self.steps}"


@dataclass(frozen=True)
class TaskLearned:
    """That a unit has learned one more task of its stream, and how it scores."""

    unit: str
    after: int
    scores: Sequence[Score]

    def __str__(self) -> str:
        names = registry.metrics()
        known = [score for score in self.scores if score.metric in names][: self.after]
        if len(known) < self.after:
            return escaped(f"{self.unit} · {counted(self.after, 'task')} learned")
        average = sum(score.value for score in known) / self.after
        scale, last = scale_of(*(score.metric for score in known)), known[-1]
        of_all = f", average of {self.after} tasks {scale.with_unit(average)}" if self.after > 1 else ""
        return escaped(f"{self.unit} · {last.task} {scale_of(last.metric).with_unit(last.value)}{of_all}")


@dataclass(frozen=True)
class Ended:
    """That a unit has ended, well or not."""

    unit: str


Event = Step | TaskLearned | Ended


class Teller(Monitor):
    """Tells what one unit does, here or, from a worker, through a queue.

    Args:
        unit: its name.
        tell: hears it.
    """

    def __init__(self, unit: str, tell: Callable[[Event], None]) -> None:
        self._unit, self._tell = unit, tell
        self._now: Step | None = None
        self._last = 0.0

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Tell of a phase, and of its steps not more often than anyone can read."""
        begun, self._last = Step(self._unit, task, phase, 0, steps), -math.inf
        self._follow(begun)

        def on_step(step: int, loss: float) -> None:
            self._follow(Step(self._unit, task, phase, step, steps, loss))

        yield on_step
        now, self._now = self._now or begun, None
        self._tell(replace(now, step=max(steps, now.step), most=now.tokens))

    def log_tokens(self, tokens: int, most: int) -> None:
        """Tell of tokens, as often."""
        if self._now is not None:
            self._follow(replace(self._now, tokens=tokens, most=most))

    def _follow(self, step: Step) -> None:
        self._now, now = step, time.monotonic()
        if now - self._last >= _OFTEN:
            self._last = now
            self._tell(step)

    def log_scores(self, scores: Sequence[Score]) -> None:
        """Tell what a task that was learned came to."""
        if after := max((score.after for score in scores), default=0):
            self._tell(TaskLearned(self._unit, after, list(scores)))


class Progress:
    """Hears of all units of a job, and shows nothing."""

    @contextmanager
    def job(self, units: Sequence[str], tasks: int = 1) -> Iterator[None]:
        """Watch a job.

        Args:
            units: names of its units.
            tasks: that each of them learns.
        """
        yield

    def monitor(self, unit: str) -> Monitor:
        """Return the monitor of a unit in this process."""
        return Teller(unit, self.hear)

    def hear(self, event: Event) -> None:
        """Hear of a unit."""


@dataclass
class _UnitProgress:
    """How far one unit has come: tasks learned, and steps since the last of them, by phase; and its row."""

    row: bars.TaskID
    learned: int = 0
    steps: dict[tuple[str, Phase], tuple[float, int]] = field(default_factory=dict)
    has_ended: bool = False

    def share(self, tasks: int, usual: int) -> float:
        """Return the share that is done, where a task usually takes so many steps."""
        if self.has_ended:
            return 1.0
        done, known = (sum(pair[i] for pair in self.steps.values()) for i in (0, 1))
        expected = max(usual, known) if usual else 2 * known  # of the first task, nobody knows what is still to come
        return min(1.0, (self.learned + done / max(expected, 1)) / tasks)


class ShownProgress(Progress):
    """A bar for the whole job and one for each unit at hand; or a line for each task that was learned, and one a minute.

    A job's share that is done is the mean of its units'; that of a unit counts learned tasks and, of the one at hand, steps.

    Args:
        console: to print to.
        live: whether it is a terminal or a notebook, which shows bars.
    """

    def __init__(self, console: Console, live: bool) -> None:
        self._console, self._live = console, live
        name = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        numbers = Column(no_wrap=True, justify="right")
        self._bars = bars.Progress(
            bars.TextColumn("{task.description}", markup=False, table_column=name),
            bars.BarColumn(_BAR),
            bars.TextColumn("{task.fields[numbers]}", markup=False, table_column=numbers),
            console=console,
            expand=True,
            disable=not live,
            get_time=time.monotonic,
            speed_estimate_period=math.inf,
        )
        self._units: dict[str, _UnitProgress] = {}
        self._all, self._tasks, self._usual, self._spoken = bars.TaskID(0), 1, 0, time.monotonic()

    @contextmanager
    def job(self, units: Sequence[str], tasks: int = 1) -> Iterator[None]:
        """Show it, and at the end how long it took."""
        self._all = self._bars.add_task("", total=1.0, numbers="")
        self._units = {unit: self._begun() for unit in units}
        self._tasks, self._usual, self._spoken = tasks, 0, time.monotonic()
        with self._bars:
            self._show()
            yield
            took = clock(self._job.elapsed or 0.0)
            self._bars.update(self._all, completed=1.0, numbers=f"100 % took {took}")
        if not self._live:
            self._say(f"100 % · done in {took}")

    def hear(self, event: Event) -> None:
        """Show it; print a line of a task that was learned."""
        unit = self._units.get(event.unit) or self._units.setdefault(event.unit, self._begun())
        text = ""
        if isinstance(event, Step):
            done, of = unit.steps[event.task, event.phase] = event.done
            loss = "" if math.isnan(event.loss) else f" loss {event.loss:.3f}"
            visible = sum(row.visible for row in self._bars.tasks) <= _SHOWN or self._row(unit.row).visible
            self._bars.update(
                unit.row,
                description=str(event),
                completed=done,
                total=max(of, 1),
                numbers=f"{event.count}{loss}",
                visible=visible,
            )
            if time.monotonic() - self._spoken >= _INTERVAL:
                text = f"{event} {event.count}{loss}"
        else:
            self._usual = sum(steps for _, steps in unit.steps.values()) or self._usual
            unit.steps = {}
            self._bars.update(unit.row, visible=False)
            if isinstance(event, TaskLearned):
                unit.learned = event.after
                text = str(event) if self._tasks > 1 else ""
            else:
                unit.has_ended = True
                text = escaped(f"{event.unit} done") if self._tasks == 1 else ""
            if text and self._live:
                self._console.print(Text(f"✓ {text}"), no_wrap=True, overflow="ellipsis", crop=True)
        self._show()
        if text and not self._live:
            self._say(f"{100 * self.share:.0f} % ({self._left}) · {text}")

    @property
    def share(self) -> float:
        """Return the share of the job that is done; it never falls."""
        return self._job.completed

    @property
    def _left(self) -> str:
        left = self._job.time_remaining
        return f"{'-:--' if left is None else clock(left)} left"

    @property
    def _job(self) -> bars.Task:
        return self._row(self._all)

    def _row(self, number: bars.TaskID) -> bars.Task:
        return next(row for row in self._bars.tasks if row.id == number)

    def _begun(self) -> _UnitProgress:
        return _UnitProgress(self._bars.add_task("", visible=False, numbers=""))

    def _show(self) -> None:
        """Bring the row of the job up to date."""
        units = list(self._units.values())
        shares = [unit.share(self._tasks, self._usual) for unit in units]
        self._bars.update(self._all, completed=max(self.share, sum(shares) / max(len(shares), 1)))
        at_hand = [unit for unit in units if unit.steps]
        where = f"{sum(unit.has_ended for unit in units)} of {len(units)} done"
        if len(at_hand) == 1 and self._tasks > 1:
            where += f" · task {min(at_hand[0].learned + 1, self._tasks)} of {self._tasks}"
        self._bars.update(self._all, description=where, numbers=f"{100 * self.share:.0f} % {self._left}")

    def _say(self, text: str) -> None:
        self._spoken = time.monotonic()
        print(text, file=self._console.file, flush=True)


def make_progress(stream: TextIO) -> Progress:
    """Return the progress that suits a stream: live on a terminal and in a notebook, plain lines elsewhere."""
    console = Console(file=stream)
    # In a notebook, rich's live display needs ipywidgets.
    notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    return ShownProgress(console, live=notebook or (stream.isatty() and not console.is_dumb_terminal))


def clock(seconds: float) -> str:
    """Return seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
