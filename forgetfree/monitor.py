"""What a strategy tells the world while it works. The silent monitor is the default; the command line shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Phase = Literal["fine_tune", "localize", "train", "evaluate"]
PHASES: tuple[Phase, ...] = ("fine_tune", "localize", "train", "evaluate")


class Monitor:
    """Hears of every phase and step, and shows nothing."""

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """One phase of one task.

        Args:
            task: its name.
            phase: which.
            steps: how many steps it will take.

        Yields:
            What to call after each step, with its number and its loss (NaN where there is none).
        """
        yield lambda step, loss: None


class Stopwatch(Monitor):
    """Passes everything on to another monitor, and adds up the seconds of each phase.

    Attributes:
        seconds: by phase, of those that took place.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self.seconds: dict[Phase, float] = {}

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """One phase of one task."""
        begin = time.perf_counter()
        try:
            with self._monitor.phase(task, phase, steps) as on_step:
                yield on_step
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
