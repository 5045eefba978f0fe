"""Progress of a job: how far all of it has come and the time that is left; live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forgetfree import registry
from forgetfree.display import counted, escaped
from forgetfree.results.metrics import scale_of
from forgetfree.results.scores import Score
from forgetfree.training.monitor import PHASE_NAMES, Monitor, Phase

#: Seconds between two messages about the steps of a phase.
_OFTEN = 0.1
#: Seconds without a plain line, at most.
_INTERVAL = 60.0
#: Seconds after which the speed says something.
_SOON = 2.0
#: As many units are shown at a time.
_SHOWN = 8
#: Width of the bar of a phase.
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

    def wrote(self, tokens: int, most: int) -> None:
        """Tell of tokens, as often."""
        if self._now is not None:
            self._follow(replace(self._now, tokens=tokens, most=most))

    def _follow(self, step: Step) -> None:
        self._now, now = step, time.monotonic()
        if now - self._last >= _OFTEN:
            self._last = now
            self._tell(step)

    def scored(self, scores: Sequence[Score]) -> None:
        """Tell what a task that was learned came to."""
        if after := max((score.after for score in scores), default=0):
            self._tell(TaskLearned(self._unit, after, list(scores)))


@dataclass
class _UnitProgress:
    """How far one unit has come: tasks learned, and steps since the last of them, by phase."""

    learned: int = 0
    steps: dict[tuple[str, Phase], tuple[float, int]] = field(default_factory=dict)
    now: Step | None = None
    has_ended: bool = False

    def share(self, tasks: int, usual: int) -> float:
        """Return the share that is done, where a task usually takes so many steps."""
        if self.has_ended:
            return 1.0
        done, known = (sum(pair[i] for pair in self.steps.values()) for i in (0, 1))
        expected = max(usual, known) if usual else 2 * known  # of the first task, nobody knows what is still to come
        return min(1.0, (self.learned + done / max(expected, 1)) / tasks)


class Progress:
    """Hears of all units of a job, and shows nothing.

    A job's share that is done is the mean of its units'; that of a unit counts learned tasks and, of the one at hand, steps.
    The time left follows from the time since the first of it.
    """

    def __init__(self) -> None:
        self._units: dict[str, _UnitProgress] = {}
        self._first: float | None = None
        self._tasks, self._usual, self._reached, self._begin = 1, 0, 0.0, time.monotonic()

    @contextmanager
    def job(self, units: Sequence[str], tasks: int = 1) -> Iterator[None]:
        """Watch a job.

        Args:
            units: names of its units.
            tasks: that each of them learns.
        """
        self._units, self._first = {unit: _UnitProgress() for unit in units}, None
        self._tasks, self._usual, self._reached, self._begin = tasks, 0, 0.0, time.monotonic()
        yield

    def monitor(self, unit: str) -> Monitor:
        """Return the monitor of a unit in this process."""
        return Teller(unit, self.hear)

    def hear(self, event: Event) -> None:
        """Hear of a unit."""
        self._first = self._first or time.monotonic()  # to load models and start workers takes time only once
        unit = self._units.setdefault(event.unit, _UnitProgress())
        if isinstance(event, Step):
            unit.now, unit.steps[event.task, event.phase] = event, event.done
            return
        if isinstance(event, TaskLearned):
            unit.learned = event.after
        unit.has_ended |= isinstance(event, Ended)
        self._usual = sum(steps for _, steps in unit.steps.values()) or self._usual
        unit.now, unit.steps = None, {}

    def news(self, event: Event) -> str:
        """Return what is worth a line of its own: a task learned, or of other jobs a unit done; else an empty text."""
        if isinstance(event, TaskLearned) and self._tasks > 1:
            return str(event)
        return escaped(f"{event.unit} done") if isinstance(event, Ended) and self._tasks == 1 else ""

    @property
    def share(self) -> float:
        """Return the share of the job that is done; it never falls."""
        shares = [unit.share(self._tasks, self._usual) for unit in list(self._units.values())]
        self._reached = max(self._reached, sum(shares) / len(shares) if shares else 1.0)
        return self._reached

    @property
    def left(self) -> float:
        """Return the seconds that are left; NaN where that is not known yet."""
        share, spent = self.share, time.monotonic() - (self._first or time.monotonic())
        known = share == 1 or (share > 0 and spent > _SOON)
        return spent * (1 - share) / share if known else math.nan

    def _clock(self) -> str:
        return f"{clock(left)} left" if math.isfinite(left := self.left) else "-:-- left"


class PlainProgress(Progress):
    """Prints a line for each task that was learned, and one a minute.

    Args:
        stream: to print to.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream, self._spoken = stream, time.monotonic()

    @contextmanager
    def job(self, units: Sequence[str], tasks: int = 1) -> Iterator[None]:
        """Say at the end how long it took."""
        self._spoken = time.monotonic()
        with super().job(units, tasks):
            yield
            self._say(f"100 % · done in {clock(time.monotonic() - self._begin)}")

    def hear(self, event: Event) -> None:
        """Print lines such as ``12 % (3:05 left) · fine-tune seed 0 · sst2 · train 40/800 loss 0.612``."""
        super().hear(event)
        text = self.news(event)
        if isinstance(event, Step) and time.monotonic() - self._spoken >= _INTERVAL:
            text = f"{event} {event.count}{_loss(event.loss)}"
        if text:
            self._say(f"{100 * self.share:.0f} % ({self._clock()}) · {text}")

    def _say(self, text: str) -> None:
        self._spoken = time.monotonic()
        print(text, file=self._stream, flush=True)


class LiveProgress(Progress):
    """One bar for the whole job, and beneath it a line for each unit at hand; tasks that were learned scroll up.

    Args:
        console: a terminal or a notebook.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    @contextmanager
    def job(self, units: Sequence[str], tasks: int = 1) -> Iterator[None]:
        """Show it, redrawn by a clock: a step costs no drawing."""
        with super().job(units, tasks), Live(console=self._console, get_renderable=self.drawn, refresh_per_second=8):
            yield

    def hear(self, event: Event) -> None:
        """Take it down; let a task that was learned scroll up."""
        super().hear(event)
        if text := self.news(event):
            self._console.print(Text(f"✓ {text}"), no_wrap=True, overflow="ellipsis", crop=True)

    def drawn(self) -> Group:
        """Return what is shown, at most as wide as the terminal."""
        units = list(self._units.values())
        ended, at_hand = sum(unit.has_ended for unit in units), [unit.now for unit in units if unit.now is not None]
        where = f"{ended} of {len(units)} done"
        if len(at_hand) == 1 and self._tasks > 1:
            learned = next(unit.learned for unit in units if unit.now is at_hand[0])
            where += f" · task {min(learned + 1, self._tasks)} of {self._tasks}"
        took = clock(time.monotonic() - self._begin)
        end = f"took {took}" if ended == len(units) else self._clock()
        lines = [_line(where, None, self.share, f"{100 * self.share:.0f} %", end)]
        for now in at_hand[:_SHOWN]:
            done, of = now.done
            lines.append(_line(str(now), _BAR, done / max(of, 1), now.count, _loss(now.loss).strip()))
        more = [Text(f"and {len(at_hand) - _SHOWN} more")] if len(at_hand) > _SHOWN else []
        return Group(*lines, *more)


def _line(what: str, width: int | None, done: float, *numbers: str) -> Table:
    """Return a line: what it is, cut where it is too long, a bar, and numbers that are never cut.

    Args:
        what: is done.
        width: of the bar; default: all that is left.
        done: the share that is done.
        numbers: behind the bar.
    """
    line = Table.grid(expand=True, padding=(0, 1, 0, 0))
    line.add_column(ratio=None if width is None else 1, no_wrap=True, overflow="ellipsis")
    line.add_column(ratio=1 if width is None else None, width=width)
    for _ in numbers:
        line.add_column(no_wrap=True, justify="right")
    line.add_row(Text(what), ProgressBar(total=1.0, completed=done), *map(Text, numbers))
    return line


def make_progress(stream: TextIO) -> Progress:
    """Return the progress that suits a stream: live on a terminal and in a notebook, plain lines elsewhere."""
    console = Console(file=stream)
    # In a notebook, rich's live display needs ipywidgets.
    if (console.is_jupyter and find_spec("ipywidgets")) or (stream.isatty() and not console.is_dumb_terminal):
        return LiveProgress(console)
    return PlainProgress(stream)


def clock(seconds: float) -> str:
    """Return seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _loss(loss: float) -> str:
    return "" if math.isnan(loss) else f" loss {loss:.3f}"
