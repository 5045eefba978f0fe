"""Processes that ``torchrun`` has started: which one this is, and whom it follows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pkgutil import resolve_name

#: The parts of a batch where several processes are asked for, and nobody says how many parts.
PARTS = 4
#: What it sets in each of them.
_SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


def launched() -> int | None:
    """Return how many processes ``torchrun`` has started, of which this is one; ``None``: it has not."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _SET) else None


@contextmanager
def of_torchrun(follow: str) -> Iterator[bool]:
    """Say, inside, whether this process leads: any does but those that ``torchrun`` has started beside it; they follow it.

    Args:
        follow: what they do, as ``module:function``: it is imported in them alone.
    """
    if launched() is None:
        yield True
        return
    from forgetfree.device import find_device, give_device
    from forgetfree.errors import ForgetfreeError
    from forgetfree.parallel.exchange import ProcessLost, connected, from_first, joined

    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    give_device(int(os.environ["LOCAL_RANK"]))
    with connected(rank, processes, device=find_device("auto")):
        if rank:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which torchrun sends
            with suppress(ProcessLost, ForgetfreeError):
                resolve_name(follow)()
            yield False
            return
        try:
            yield True
        finally:
            with suppress(ProcessLost), joined():
                from_first(None)
