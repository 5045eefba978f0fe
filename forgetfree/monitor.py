"""What a strategy tells the world while it works. The silent monitor is the default; the command line shows it."""

from __future__ import annotations

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
