"""What a strategy tells of its progress, phase by phase and step by step; `Monitor` itself hears it and shows nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from forgetfree.checkpoint import Checkpoint
from forgetfree.results.runs import ELSEWHERE
from forgetfree.results.scores import Score

Phase = Literal["fine_tune", "localize", "train", "evaluate"]
PHASES: tuple[Phase, ...] = ("fine_tune", "localize", "train", "evaluate")

PHASE_NAMES: dict[Phase, str] = {
    "fine_tune": "fine-tune",
    "localize": "localize",
    "train": "train",
    "evaluate": "evaluate",
}


#: Beside the phases in `Stopwatch.seconds`: how many fine-tuned models were found that do not tell their seconds.
UNCOUNTED = "fine_tune_uncounted"


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

    def found(self, task: str, steps: int, seconds: float | None) -> None:
        """Hear that the fine-tuned model of a task was there.

        Args:
            task: its name.
            steps: the updates that made it.
            seconds: how long it took whoever made it, if that is known.
        """

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

    def found(self, task: str, steps: int, seconds: float | None) -> None:
        """Pass it on."""
        self._monitor.found(task, steps, seconds)

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
    """Passes everything on to another monitor, and sums up the seconds of each phase and the updates of each task.

    Attributes:
        updates: of the weights, by task: of fine-tuning, also of models that were found, and of training; a search for a mask
            has none.
        seconds: the seconds of each phase so far; under `ELSEWHERE` those of the fine-tuned models that were found, under
            `UNCOUNTED` how many of these do not tell theirs.
    """

    def __init__(self, monitor: Monitor) -> None:
        super().__init__(monitor)
        self.updates = Counter[str]()
        self.seconds: dict[str, float] = {}
        self._fine_tuned = set[str]()

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
                done = done or steps  # none is told where the phase had ended before the unit was resumed
        finally:
            self._add(phase, clock() - begin)
            if phase in ("fine_tune", "train"):
                self.updates[task] += done
            if phase == "fine_tune":
                self._fine_tuned.add(task)

    def found(self, task: str, steps: int, seconds: float | None) -> None:
        """Count a fine-tuned model that others made, once."""
        super().found(task, steps, seconds)
        if task not in self._fine_tuned:
            self._fine_tuned.add(task)
            self.updates[task] += steps
            self._add(UNCOUNTED if seconds is None else ELSEWHERE, 1.0 if seconds is None else seconds)

    def _add(self, name: str, amount: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + amount


def told_seconds(seconds: Mapping[str, float], phases: Iterable[str] = PHASES) -> dict[str, float | None]:
    """Return what results say of `Stopwatch.seconds`.

    `ELSEWHERE` is left out where all fine-tuned models were made here, and ``None`` where one does not tell its seconds.
    """
    told: dict[str, float | None] = {phase: round(seconds.get(phase, 0.0), 3) for phase in phases}
    if UNCOUNTED in seconds:
        return told | {ELSEWHERE: None}
    return told | ({ELSEWHERE: round(seconds[ELSEWHERE], 3)} if ELSEWHERE in seconds else {})
