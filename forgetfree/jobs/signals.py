"""SIGTERM, which schedulers send, and Ctrl-C: a phase of training ends after its step with a checkpoint, all else at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

#: Seconds for a step and the writing of its checkpoint; after that, the last checkpoint has to do.
GRACE = 7.0


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


class Stop:
    """Whether this process was asked to end.

    Attributes:
        requested: whether it was.
        awaited: whether a phase is under way that looks at ``requested`` after each of its steps.
    """

    def __init__(self) -> None:
        self.requested = self.awaited = False
        self.end: Callable[[], NoReturn] = _interrupt

    def hear(self, number: int, _: object = None) -> None:
        """End at once; in a phase, let it end after its step, unless Ctrl-C comes twice."""
        before, self.requested = self.requested, True
        if not self.awaited or not hasattr(signal, "setitimer") or (before and number == signal.SIGINT):
            self.end()
        if not before:
            signal.setitimer(signal.ITIMER_REAL, GRACE)

    def too_late(self, number: int, _: object = None) -> None:
        """End, though the step has not."""
        self.end()


#: That of this process.
STOP = Stop()


@contextmanager
def terminable(end: Callable[[], NoReturn] = _interrupt) -> Iterator[None]:
    """End this process's work on SIGTERM and SIGINT, inside; only in the main thread, which alone receives signals.

    Args:
        end: how; default: by ``KeyboardInterrupt``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    STOP.requested, STOP.awaited, STOP.end = False, False, end
    handlers = {signal.SIGTERM: STOP.hear, signal.SIGINT: STOP.hear}
    if hasattr(signal, "SIGALRM"):
        handlers[signal.SIGALRM] = STOP.too_late
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        if STOP.requested and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        STOP.requested = STOP.awaited = False
