"""The state of a phase of training, stored while it runs, so that an interrupted phase resumes and ends with the same bits.

A loop describes the state that its steps change (`Resumable`), asks how many steps are done, and reports each further step:

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

    A state consists of tensors, numbers, texts and ``None``, in dictionaries, lists and tuples.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its tensors need not be copies."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, so that the next step gives the same result as it would have given then."""


class Checkpoint:
    """Stores nothing: every phase begins with its first step. `forgetfree.jobs.checkpoints` has one that writes files.

    Attributes:
        directory: the directory of the files; ``None`` without files.
        earlier: the seconds that the resumed phases took in earlier processes.
    """

    directory: Path | None = None
    earlier: float = 0.0

    def clock(self) -> float:
        """Return a time in seconds; the difference of two times includes the earlier parts of phases resumed in between."""
        return time.perf_counter() + self.earlier

    def begin(self, steps: int, state: Resumable, *about: Any) -> int:
        """Load the last stored state of a phase, and return the number of steps that are done.

        Args:
            steps: the number of steps of the phase.
            state: the state at the start of the phase, which is part of the checkpoint's key.
            about: extra values mixed into the checkpoint's key, so that another phase is not resumed by mistake. Their types
                are those of a state.
        """
        return 0

    def after(self, step: int, steps: int, state: Resumable) -> None:
        """Store the state from time to time.

        Args:
            step: the number of the last step, from 1.
            steps: the number of steps of the phase.
            state: the state after the step.
        """

    def forget(self) -> None:
        """Forget all phases so far: their results are stored elsewhere."""
