"""What is being learned in a model: put back where that fails, and while the model answers other tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Self, TypeVar

State = TypeVar("State")


class InTraining(Generic[State]):
    """The training of a task, as a context manager: at the end the model has what it had before, unless `keep` was called.

    Args:
        read: returns copies of what training changes in the model.
        write: puts such copies into the model.

    Attributes:
        before: what was read at first.
    """

    def __init__(self, read: Callable[[], State], write: Callable[[State], None]) -> None:
        self._read, self._write = read, write
        self.before = read()
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.roll_back()

    def keep(self) -> None:
        """End the training; what it changed stays in the model."""
        self._has_ended = True

    def roll_back(self) -> None:
        """End the training, if it has not ended, and put back what was there before."""
        if not self._has_ended:
            self._has_ended = True
            self._write(self.before)

    @contextmanager
    def taken_out(self) -> Iterator[None]:
        """Let the model have what it had before inside, so that it can answer other tasks."""
        if self._has_ended:
            yield
            return
        now = self._read()
        self._write(self.before)
        try:
            yield
        finally:
            self._write(now)
