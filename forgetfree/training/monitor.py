"""Progress of training, phase by phase and step by step; `Monitor` itself logs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from forgetfree.checkpoint import Checkpoint
from forgetfree.results.run_folder import Score

Phase = Literal["fine_tune", "localize", "train", "evaluate"]
PHASES: tuple[Phase, ...] = ("fine_tune", "localize", "train", "evaluate")


class Monitor:
    """Receives the progress of phases and steps, and passes it on to another monitor, if one is given."""

    _monitor: Monitor | None = None

    def __init__(self, monitor: Monitor | None = None) -> None:
        self._monitor = monitor

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Yield a callback for the steps of one phase of one task.

        Args:
            task: its name.
            phase: the phase.
            steps: the number of steps it will take.

        Yields:
            A callback for each step, with its number and its loss (NaN if there is none).
        """
        if self._monitor is None:
            yield lambda step, loss: None
        else:
            with self._monitor.phase(task, phase, steps) as on_step:
                yield on_step

    def log_rate(self, of_step: Callable[[int], float]) -> None:
        """Log the learning rates of the current phase; ``of_step`` returns that of a step from the step's number."""
        if self._monitor is not None:
            self._monitor.log_rate(of_step)

    def log_tokens(self, tokens: int, most: int) -> None:
        """Log the number of tokens written so far in the current phase, out of at most ``most``."""
        if self._monitor is not None:
            self._monitor.log_tokens(tokens, most)

    def log_reused(self, task: str, steps: int) -> None:
        """Log that the fine-tuned model of a task was reused, and the number of updates that made it."""
        if self._monitor is not None:
            self._monitor.log_reused(task, steps)

    def log_scores(self, scores: Sequence[Score]) -> None:
        """Log the scores of a stream on every task, before the first task is learned and after each one."""
        if self._monitor is not None:
            self._monitor.log_scores(scores)

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint of the phases."""
        return Checkpoint() if self._monitor is None else self._monitor.checkpoint()


class Stopwatch(Monitor):
    """Passes everything on to another monitor, and sums up the seconds of each phase and the updates of each task.

    Attributes:
        updates: the updates of the weights by task, in fine-tuning (also of reused models) and in training; a search for a
            mask has none.
        seconds: the seconds of each phase so far.
    """

    def __init__(self, monitor: Monitor) -> None:
        super().__init__(monitor)
        self.updates = Counter[str]()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Measure one phase of one task."""
        clock, done = self.checkpoint().clock, 0
        begin = clock()
        try:
            with super().phase(task, phase, steps) as pass_on:

                def on_step(step: int, loss: float) -> None:
                    nonlocal done
                    done = step
                    pass_on(step, loss)

                yield on_step
                done = done or steps  # no step is logged if the phase had ended before the unit was resumed
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + clock() - begin
            if phase in ("fine_tune", "train"):
                self.updates[task] += done

    def log_reused(self, task: str, steps: int) -> None:
        """Count the updates of a reused model once; fine-tuning comes first, so nothing is counted before."""
        super().log_reused(task, steps)
        self.updates[task] = self.updates[task] or steps
