"""Progress: on a terminal one bar for the whole job and the current phases beneath it, elsewhere a few plain lines."""

from __future__ import annotations

import fcntl
import io
import math
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest
from rich.cells import cell_len
from rich.console import Console

from forgetfree import cli
from forgetfree.jobs import progress
from forgetfree.jobs.progress import Ended, ShownProgress, Step, TaskLearned, make_progress
from forgetfree.results.run_folder import Score

UNITS = ["fine-tune seed 0", "grafting-continual seed 0"]


def scores(after: int, *values: float) -> list[Score]:
    """Return accuracies and calibration errors after a number of tasks, on tasks named a, b, c."""
    pairs = [(task, value) for task, value in zip("abc", values, strict=False)]
    return [
        Score("fine-tune", 0, t, after, m, v, 8) for t, value in pairs for m, v in (("accuracy", value), ("ece", 0.5))
    ]


class Terminal:
    """A pseudo-terminal that reports 80 columns, and a wider emulator, on which a bar that is too long is seen."""

    def __init__(self) -> None:
        main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
        self.file = os.fdopen(side, "w")
        self.screen = pyte.Screen(200, 50)
        self.widest, self.frames = 0, list[str]()
        self._reader = threading.Thread(target=self._read, args=(main,), daemon=True)
        self._reader.start()

    def _read(self, main: int) -> None:
        stream = pyte.ByteStream(self.screen)
        while True:
            try:
                stream.feed(os.read(main, 65536))
            except OSError:  # the terminal was closed
                return
            lines = [line.rstrip() for line in self.screen.display]
            self.widest = max([self.widest, *(len(line) for line in lines if "seed 0" in line or "━" in line)])
            self.frames.append("\n".join(line for line in lines if line))

    def closed(self) -> str:
        """Close the terminal, and return its last frame."""
        self.file.close()
        self._reader.join(timeout=10)
        return self.frames[-1]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    yield Terminal()


@pytest.fixture
def run(data_directory: Path, model_directory: Any) -> list[str]:
    """Return the words of a run with two strategies, whose names differ in length, on three tasks."""
    fixed = {"--data": data_directory, "--model": model_directory("bert"), "--shots": 4, "--steps": 20}
    strategies = ["--strategy", "fine-tune", "--strategy", "grafting-continual", "--sparsity", "0.01"]
    return ["run", "qnli,ag_news,sst2", *strategies, *(str(word) for pair in fixed.items() for word in pair)]


@pytest.mark.sampled(share=0.15)
def test_a_run_fits_into_80_columns_and_its_bar_reaches_the_end(
    run: list[str], terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", terminal.file)
    assert cli.main([*run, "--out", "out"]) == 0
    monkeypatch.undo()
    end = terminal.closed()
    assert 0 < terminal.widest <= 80
    bars = [line for line in end.splitlines() if "━" in line]
    assert len(bars) == 1, end
    assert re.fullmatch(r"tasks learned +━+ 6/6 \d:\d\d:\d\d", bars[0])
    told = re.findall(r"✓ (\S+) seed 0 · (\w+) [\d.]+ %(, average of \d tasks [\d.]+ %)?", "\n".join(terminal.frames))
    tasks = {(strategy, task) for strategy, task, _ in told}
    assert tasks == {
        (name, task) for name in ("fine-tune", "grafting-continual") for task in ("qnli", "ag_news", "sst2")
    }
    assert re.search(r"✓ grafting-continual seed 0 · sst2 [\d.]+ %, average of 3 tasks [\d.]+ %\n", end)
    assert any(re.search(r"tasks learned +[━╸╺]+ 2/6 ", frame) for frame in terminal.frames)
    assert "After the last task" in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_line_fits_whatever_the_names_are(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    live = ShownProgress(console, live=True)
    units = [f"strategy-with-quite-a-long-name-{i} seed {i}" for i in range(10)]
    with live.job(units, tasks=50):
        for i, unit in enumerate(units[:8]):
            live.hear(Step(unit, "日本語の仕事" * i, "fine_tune", 79_999, 80_000, 0.1234))
        with console.capture() as captured:
            console.print(live._bars.get_renderable())
    lines = [line.removeprefix("\x1b[2K") for line in captured.get().splitlines()]
    assert max(map(cell_len, lines)) <= width
    assert sum("79999/80000 loss 0.123" in line for line in lines) == 8


def test_a_terminal_gets_bars_and_a_file_plain_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # some CI systems set it, though their logs are files
    found: list[Any] = [make_progress(terminal.file), make_progress(io.StringIO())]
    monkeypatch.setenv("TERM", "dumb")
    found.append(make_progress(terminal.file))
    assert [each._live for each in found] == [True, False, False]
    terminal.file.close()


def test_plain_lines_come_with_each_task_and_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, out = [1.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    plain = ShownProgress(Console(file=out), live=False)
    with plain.job(UNITS[:1], tasks=2):
        monitor = plain.monitor(UNITS[0])
        with monitor.phase("a", "train", 10) as on_step:
            for step in range(1, 11):
                now[0] += 8.0
                on_step(step, 1 / step)
        monitor.log_scores(scores(1, 0.75))
        with monitor.phase("b", "train", 10) as on_step:
            on_step(10, 0.5)
        monitor.log_scores(scores(2, 0.5, 1.0))
        plain.hear(Ended(UNITS[0]))
    assert out.getvalue().splitlines() == [
        "0/2 tasks · fine-tune seed 0 · a · train 8/10 loss 0.125",
        "1/2 tasks, 0:01:20 left · fine-tune seed 0 · a 75.0 %",
        "2/2 tasks, 0:00:00 left · fine-tune seed 0 · b 100.0 %, average of 2 tasks 75.0 %",
        "2/2 tasks, 0:00:00 left · done in 0:01:20",
    ]


def test_the_score_of_a_task_is_the_one_by_its_own_metric() -> None:
    """The first task is scored by micro F1, though macro F1 is known as well."""
    measured = (("a", "micro_f1", 0.75), ("a", "macro_f1", 0.1), ("b", "accuracy", 1.0), ("c", "accuracy", 0.0))
    found = [Score("fine-tune", 0, task, 2, metric, value, 8) for task, metric, value in measured]
    assert str(TaskLearned("unit", 2, found)) == "unit · b 100.0 %, average of 2 tasks 87.5 %"


def test_tokens_are_counted_while_texts_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    now, out = [1.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    plain = ShownProgress(Console(file=out), live=False)
    with plain.job(UNITS[:1], tasks=1):
        monitor = plain.monitor(UNITS[0])
        with monitor.phase("a", "evaluate", 2) as on_step:
            on_step(2, math.nan)
            for tokens in (1, 50):
                now[0] += 61.0
                monitor.log_tokens(tokens, 100)
        plain.hear(Ended(UNITS[0]))  # the unit failed
    assert [line.split(" · ", 1)[1] for line in out.getvalue().splitlines()] == [
        "fine-tune seed 0 · a · evaluate 1/100",
        "fine-tune seed 0 · a · evaluate 50/100",
        "done in 0:02:02",
    ]


@pytest.mark.sampled(share=0.15)
@pytest.mark.slow
def test_workers_tell_the_parent_what_they_do(run: list[str], tmp_path: Path, capfd: Any) -> None:
    assert cli.main([*run, "--jobs", "2", "--out", str(tmp_path / "out")]) == 0
    told = [line for line in capfd.readouterr().err.splitlines() if " tasks" in line]
    assert [line[:3] for line in told] == ["1/6", "2/6", "3/6", "4/6", "5/6", "6/6", "6/6"] and "· done in 0:" in told[
        -1
    ]
    assert sum("grafting-continual seed 0 · " in line for line in told) == 3
