"""The state of a phase of training: kept while it lasts, so that a phase that is cut short goes on to the same bits.

A loop says what its steps change (`Resumable`), asks how many steps are done already, and tells of each further one:

    done = checkpoint.begin(steps, state)
    for step in range(done + 1, steps + 1):
        …
        checkpoint.after(step, steps, state)
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol


class Resumable(Protocol):
    """The state that the steps of a phase change and depend on.

    A state is made of tensors, numbers, texts and ``None``, in dictionaries, lists and tuples.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its tensors may be those in use."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring everything to a state, so that the next step does what it would have done then."""


class Checkpoint:
    """Keeps nothing: every phase begins with its first step. `forgetfree.jobs.checkpoints` has one that keeps files.

    Attributes:
        directory: where files are kept; ``None``: nowhere.
        earlier: the seconds that phases which go on here took in processes before this one.
    """

    directory: Path | None = None
    earlier: float = 0.0

    def clock(self) -> float:
        """Return a time in seconds; the difference of two is what lies between them, with the earlier parts of phases."""
        return time.perf_counter() + self.earlier

    def begin(self, steps: int, state: Resumable, *about: Any) -> int:
        """Bring a phase to where it was cut short, and return the number of steps that are done.

        Args:
            steps: of the phase.
            state: as it is at the start. It tells one phase from all others.
            about: what else tells it from others, as a part of a state.
        """
        return 0

    def after(self, step: int, steps: int, state: Resumable) -> None:
        """Keep the state now and then.

        Args:
            step: the number of the step that is done, from 1.
            steps: of the phase.
            state: after the step.
        """

    def forget(self) -> None:
        """Forget all phases so far: what they led to is kept elsewhere."""
