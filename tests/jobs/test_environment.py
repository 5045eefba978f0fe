"""Where a command runs, and how its phases are timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forgetfree.jobs import environment
from forgetfree.training.monitor import Monitor, Stopwatch


def test_packages_that_are_not_here_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_PACKAGES", ("torch", "no-such-package"))
    assert list(environment.environment("cpu")["versions"]) == ["forgetfree", "python", "torch"]


def test_a_stopwatch_adds_up_each_phase_and_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases of 1 and 3 seconds, and one of 2 that fails."""
    heard: list[object] = []

    class Heard(Monitor):
        def phase(self, task: str, phase: str, steps: int):
            heard.append((task, phase, steps))
            return super().phase(task, phase, steps)

    times = iter([0.0, 1.0, 10.0, 13.0, 20.0, 22.0])
    monkeypatch.setattr("forgetfree.checkpoint.time", SimpleNamespace(perf_counter=lambda: next(times)))
    watch = Stopwatch(Heard())
    for _ in range(2):
        with watch.phase("sst2", "train", 5) as on_step:
            on_step(1, 0.5)
    with pytest.raises(ZeroDivisionError), watch.phase("sst2", "evaluate", 1):
        raise ZeroDivisionError
    assert watch.seconds == {"train": 4.0, "evaluate": 2.0}
    assert heard == [("sst2", "train", 5), ("sst2", "train", 5), ("sst2", "evaluate", 1)]


@pytest.mark.parametrize(
    ("heard", "updates"),
    [([1, 2, 3], 3), ([4, 5], 5), ([], 5)],
    ids=["ends early", "goes on after a checkpoint", "had ended before it was resumed"],
)
def test_a_stopwatch_counts_updates_that_were_done_before_a_unit_was_resumed(heard: list[int], updates: int) -> None:
    watch = Stopwatch(Monitor())
    with watch.phase("sst2", "train", 5) as on_step:
        for step in heard:
            on_step(step, 0.5)
    assert watch.updates == {"sst2": updates}


def test_of_many_shared_labels_only_the_first_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def task(name: str, labels: list[str]) -> Any:
        return SimpleNamespace(task=SimpleNamespace(name=name, labels=tuple(labels)))

    tasks = [task("first", [f"label {number}" for number in range(99)]), task("second", ["x"] * 99)]
    environment.tell_shared_labels([*tasks, tasks[0]])
    (line,) = capsys.readouterr().err.splitlines()
    assert "(first: label 0, label 1, " in line and "; second: x, " in line and len(line) < 400
    environment.tell_shared_labels([tasks[0], tasks[0]])
    assert capsys.readouterr().err == ""
