"""What processes that train one unit together send to each other, phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forgetfree.learning.monitor import Monitor, Phase, Relay
from forgetfree.parallel.exchange import bytes_sent


class Traffic(Relay):
    """Passes everything on to another monitor, and counts the bytes that this process has sent.

    Attributes:
        of_phases: of each phase in which something was sent, its steps and bytes over all tasks.
    """

    def __init__(self, monitor: Monitor) -> None:
        super().__init__(monitor)
        self.of_phases: dict[Phase, dict[str, int]] = {}

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Count one phase of one task."""
        before = bytes_sent()
        with super().phase(task, phase, steps) as on_step:
            yield on_step
        if sent := bytes_sent() - before:
            count = self.of_phases.setdefault(phase, {"steps": 0, "bytes": 0})
            count["steps"] += steps
            count["bytes"] += sent
