"""Reports of a strategy's progress. The silent monitor is the default; the command line shows a visible one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

from forgetfree.display import escaped

Phase = Literal["fine_tune", "localize", "train", "evaluate"]
PHASES: tuple[Phase, ...] = ("fine_tune", "localize", "train", "evaluate")

#: Seconds between plain lines of one phase.
_INTERVAL = 20.0
PHASE_NAMES: dict[Phase, str] = {
    "fine_tune": "fine-tune",
    "localize": "localize",
    "train": "train",
    "evaluate": "evaluate",
}


class Monitor:
    """Is told of every phase and step, and shows nothing."""

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Give a callback for the steps of one phase of one task.

        Args:
            task: its name.
            phase: the phase.
            steps: the number of steps it will take.

        Yields:
            A callback for each step, with its number and its loss (NaN if there is none).
        """
        yield lambda step, loss: None

    def learning_rate(self, of_step: Callable[[int], float]) -> None:
        """Hear how to tell the learning rate of a step of the phase that has begun, by its number."""


class Stopwatch(Monitor):
    """Passes everything on to another monitor, and sums up the seconds of each phase.

    Attributes:
        seconds: the seconds of each phase so far.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self.seconds: dict[Phase, float] = {}

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Measure one phase of one task."""
        begin = time.perf_counter()
        try:
            with self._monitor.phase(task, phase, steps) as on_step:
                yield on_step
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def learning_rate(self, of_step: Callable[[int], float]) -> None:
        """Pass it on."""
        self._monitor.learning_rate(of_step)


class PlainMonitor(Monitor):
    """Prints a line when a phase ends, and at most one every 20 seconds before."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title, self._stream = title, stream

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Print lines such as ``… · fine-tune · seed 0 · qnli · train 40/800 loss 0.61 (2:31 left)``."""
        start = spoken = time.monotonic()
        done, last = 0, math.nan

        def on_step(step: int, loss: float) -> None:
            nonlocal spoken, done, last
            done, last = step, loss
            now = time.monotonic()
            if now - spoken >= _INTERVAL:
                spoken = now
                left = (now - start) / step * (steps - step)
                self._say(task, phase, f"{step}/{steps}{shown_loss(loss)} ({_clock(left)} left)")

        yield on_step
        self._say(task, phase, f"{done}/{steps}{shown_loss(last)} done in {_clock(time.monotonic() - start)}")

    def _say(self, task: str, phase: Phase, text: str) -> None:
        print(escaped(f"{self._title} · {task} · {PHASE_NAMES[phase]} {text}"), file=self._stream, flush=True)


def shown_loss(loss: float) -> str:
    """Return the text of a loss; empty for NaN."""
    return "" if math.isnan(loss) else f" loss {loss:.3f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
