"""What a strategy tells of its progress, phase by phase and step by step; `Monitor` itself hears it and shows nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from forgetfree.checkpoint import Checkpoint
from forgetfree.results.scores import Score

Phase = Literal["fine_tune", "localize", "train", "evaluate"]
PHASES: tuple[Phase, ...] = ("fine_tune", "localize", "train", "evaluate")

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

    def wrote(self, tokens: int, most: int) -> None:
        """Hear how many tokens of texts were written so far in the phase that has begun, of ``most`` that there may be."""

    def scored(self, scores: Sequence[Score]) -> None:
        """Hear what was measured: of a stream, on every task before the first is learned, and after each."""

    def checkpoint(self) -> Checkpoint:
        """Return what keeps where a phase stands."""
        return Checkpoint()


class Relay(Monitor):
    """Passes everything on to another monitor."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Pass on a phase of a task."""
        with self._monitor.phase(task, phase, steps) as on_step:
            yield on_step

    def learning_rate(self, of_step: Callable[[int], float]) -> None:
        """Pass it on."""
        self._monitor.learning_rate(of_step)

    def wrote(self, tokens: int, most: int) -> None:
        """Pass it on."""
        self._monitor.wrote(tokens, most)

    def scored(self, scores: Sequence[Score]) -> None:
        """Pass them on."""
        self._monitor.scored(scores)

    def checkpoint(self) -> Checkpoint:
        """Return that of the other monitor."""
        return self._monitor.checkpoint()


class Follower(Relay):
    """Passes everything on to another monitor, and meets every step with its learning rate."""

    def __init__(self, monitor: Monitor) -> None:
        super().__init__(monitor)
        self._rate: Callable[[int], float] = lambda step: math.nan

    def met(self, task: str, phase: Phase, step: int, steps: int, loss: float, rate: float) -> None:
        """Meet a step of a phase of a task; loss or rate may be NaN."""

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Meet the steps of a phase."""
        self._rate = lambda step: math.nan  # until it is told
        with super().phase(task, phase, steps) as pass_on:

            def on_step(step: int, loss: float) -> None:
                pass_on(step, loss)
                self.met(task, phase, step, steps, loss, self._rate(step))

            yield on_step

    def learning_rate(self, of_step: Callable[[int], float]) -> None:
        """Remember it; pass it on."""
        self._rate = of_step
        super().learning_rate(of_step)


class Stopwatch(Relay):
    """Passes everything on to another monitor, and sums up the seconds of each phase.

    Attributes:
        seconds: the seconds of each phase so far.
    """

    def __init__(self, monitor: Monitor) -> None:
        super().__init__(monitor)
        self.seconds: dict[Phase, float] = {}

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Measure one phase of one task."""
        begin = time.perf_counter()
        try:
            with super().phase(task, phase, steps) as on_step:
                yield on_step
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
