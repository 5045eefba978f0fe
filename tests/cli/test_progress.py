"""Progress: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import math

import pytest

from forgetfree.cli.progress import LiveMonitor, make_monitor
from forgetfree.learning import monitor
from forgetfree.learning.monitor import PlainMonitor


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_live_display_and_a_file_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(make_monitor("t", Terminal()), LiveMonitor)
    assert isinstance(make_monitor("t", io.StringIO()), PlainMonitor)


def test_plain_lines_come_at_intervals_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step every 8 s: a line after 24 s (step 3 of 6, so 24 s are left) and after 48 s, and one at the end."""
    clock = iter([0.0, *(8.0 * step for step in range(1, 7)), 50.0])
    monkeypatch.setattr(monitor.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with PlainMonitor("stream · strategy · seed 0", out).phase("sst2", "localize", 6) as on_step:
        for step in range(1, 7):
            on_step(step, 1 / step)
    assert out.getvalue().splitlines() == [
        "stream · strategy · seed 0 · sst2 · localize 3/6 loss 0.333 (0:24 left)",
        "stream · strategy · seed 0 · sst2 · localize 6/6 loss 0.167 (0:00 left)",
        "stream · strategy · seed 0 · sst2 · localize 6/6 loss 0.167 done in 0:50",
    ]


def test_a_phase_without_a_loss_shows_none() -> None:
    out = io.StringIO()
    with PlainMonitor("t", out).phase("sst2", "evaluate", 1) as on_step:
        on_step(1, math.nan)
    assert out.getvalue() == "t · sst2 · evaluate 1/1 done in 0:00\n"


def test_the_live_display_names_task_phase_loss_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    from rich.console import Console

    monitor = LiveMonitor("stream · strategy", Console(file=out, width=140, force_terminal=True))
    with monitor.phase("sst2", "train", 2) as on_step:
        on_step(1, 0.5)
        on_step(2, 0.25)
    shown = out.getvalue()
    for text in ("stream · strategy", "sst2", "train", "2/2", "loss 0.250"):
        assert text in shown
