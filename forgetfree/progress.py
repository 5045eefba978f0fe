"""Progress on the terminal: a live display, or plain lines where there is no terminal. Both go to stderr."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from forgetfree.display import escaped
from forgetfree.monitor import Monitor, Phase

#: Seconds between plain lines of one phase.
_INTERVAL = 20.0
_NAMES: dict[Phase, str] = {
    "fine_tune": "fine-tune",
    "localize": "localise",
    "train": "train",
    "evaluate": "evaluate",
}


def make_monitor(title: str, stream: TextIO) -> Monitor:
    """The monitor that suits ``stream``: live on a terminal, plain lines elsewhere.

    Args:
        title: what works, as a user may have named it.
        stream: where it is shown.
    """
    console = Console(file=stream)
    return LiveMonitor(title, console) if console.is_terminal else PlainMonitor(title, stream)


class PlainMonitor(Monitor):
    """A line when a phase begins, at most one every 20 seconds while it lasts, and one when it ends."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title, self._stream = title, stream

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Lines such as ``qnli-agnews-sst2 · fine-tune · seed 0 · qnli · train 40/800 loss 0.61 (2:31 left)``."""
        start = spoken = time.monotonic()
        done, last = 0, math.nan

        def on_step(step: int, loss: float) -> None:
            nonlocal spoken, done, last
            done, last = step, loss
            now = time.monotonic()
            if now - spoken >= _INTERVAL:
                spoken = now
                left = (now - start) / step * (steps - step)
                self._say(task, phase, f"{step}/{steps}{_loss(loss)} ({_clock(left)} left)")

        yield on_step
        self._say(task, phase, f"{done}/{steps}{_loss(last)} done in {_clock(time.monotonic() - start)}")

    def _say(self, task: str, phase: Phase, text: str) -> None:
        print(escaped(f"{self._title} · {task} · {_NAMES[phase]} {text}"), file=self._stream, flush=True)


class LiveMonitor(Monitor):
    """One live line for the phase at hand; finished phases scroll up."""

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._console = title, console

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Stream · strategy · seed · task · phase, bar, steps, loss, time left."""
        columns = (
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        title, name = (escape(escaped(text)) for text in (self._title, task))
        description = f"{title} · [bold]{name}[/] · {_NAMES[phase]}"
        with Progress(*columns, console=self._console) as progress:
            bar = progress.add_task(description, total=max(steps, 1), loss="")

            def on_step(step: int, loss: float) -> None:
                progress.update(bar, completed=step, loss=_loss(loss).strip())

            yield on_step
            progress.update(bar, completed=max(steps, 1))


def _loss(loss: float) -> str:
    return "" if math.isnan(loss) else f" loss {loss:.3f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
