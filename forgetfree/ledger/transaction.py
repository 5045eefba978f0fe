"""A change of a model that is undone at the end, unless it is committed, and suspended while the model answers other tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Self, TypeVar

State = TypeVar("State")


class Transaction(Generic[State]):
    """The change that the training of a task makes to a model: at the end of the block it is undone, unless committed.

    Args:
        read: returns copies of the state that training changes.
        write: writes such copies into the model.

    Attributes:
        before: the state before the change.
    """

    def __init__(self, read: Callable[[], State], write: Callable[[State], None]) -> None:
        self._read, self._write = read, write
        self.before = read()
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.roll_back()

    def commit(self) -> None:
        """Leave the change in the model."""
        self._has_ended = True

    def roll_back(self) -> None:
        """Undo the change, unless it is committed."""
        if not self._has_ended:
            self._has_ended = True
            self._write(self.before)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore the state before the change inside the block, so that the model answers other tasks."""
        if self._has_ended:
            yield
            return
        now = self._read()
        self._write(self.before)
        try:
            yield
        finally:
            self._write(now)
