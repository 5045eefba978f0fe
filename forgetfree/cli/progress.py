"""Progress on the terminal: a live display, or plain lines where there is no terminal. Both go to stderr."""

from __future__ import annotations

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
from forgetfree.learning.monitor import PHASE_NAMES, Monitor, Phase, PlainMonitor, shown_loss


def make_monitor(title: str, stream: TextIO) -> Monitor:
    """Return the monitor that suits ``stream``: live on a terminal, plain lines elsewhere.

    Args:
        title: what works, as a user may have named it.
        stream: where it is shown.
    """
    console = Console(file=stream)
    return LiveMonitor(title, console) if console.is_terminal else PlainMonitor(title, stream)


class LiveMonitor(Monitor):
    """One live line for the phase at hand; finished phases scroll up."""

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._console = title, console

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Show stream, strategy, seed, task and phase, with a bar, steps, loss and the time that is left."""
        columns = (
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        title, name = (escape(escaped(text)) for text in (self._title, task))
        description = f"{title} · [bold]{name}[/] · {PHASE_NAMES[phase]}"
        with Progress(*columns, console=self._console) as progress:
            bar = progress.add_task(description, total=max(steps, 1), loss="")

            def on_step(step: int, loss: float) -> None:
                progress.update(bar, completed=step, loss=shown_loss(loss).strip())

            yield on_step
            progress.update(bar, completed=max(steps, 1))
