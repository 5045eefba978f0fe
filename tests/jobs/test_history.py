"""The record of a unit in progress: history.jsonl, and the seconds and updates of its phases."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forgetfree.checkpoint import Checkpoint
from forgetfree.jobs.history import History
from forgetfree.options import build
from forgetfree.registry import strategy
from forgetfree.results.run_folder import HISTORY
from forgetfree.testing import tiny_stream
from forgetfree.training.monitor import Monitor, Stopwatch
from forgetfree.training.training_options import rate_at


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / HISTORY).read_text().splitlines()]


@pytest.mark.sampled("continual-ft", "grafting-continual")
@pytest.mark.parametrize("name", ["continual-ft", "grafting-continual", "packnet", "ewc"])
def test_each_logged_step_has_its_rate(name: str, tmp_path: Path) -> None:
    cls = strategy(name)
    how = {
        "steps": 7,
        "learning_rate": 0.3,
        "region_rate_factor": 0.5,
        "warmup": 0.3,
        "schedule": "linear",
        "sparsity": 0.05,
    }
    how |= {"mask_steps": 2, "mask_learning_rate": 5.0, "region_steps": 5}
    options = build(cls.Options, {key: how[key] for key in how if key in cls.Options.model_fields}, name)
    stream = tiny_stream()
    made = cls(stream=stream, options=options, monitor=Stopwatch(History(Monitor(), tmp_path, Checkpoint())))
    made.train(stream.benchmark.train_stream[0])
    made.evaluate()
    region = getattr(options, "region_steps", None) is not None
    for phase, steps, rate in (("fine_tune", 7, 0.3), ("train", 5 if region else 7, 0.15 if region else 0.3)):
        found = [(line["step"], line["rate"]) for line in lines(tmp_path) if line["phase"] == phase]
        expected = [(step, pytest.approx(rate * rate_at(step - 1, steps, options))) for step in range(1, steps + 1)]
        assert found == expected or (phase == "fine_tune" and not region and not found)
    searched = [line["rate"] for line in lines(tmp_path) if line["phase"] == "localize"]
    assert searched == ([5.0, 5.0] if name == "grafting-continual" else [])


def test_a_stopwatch_adds_up_each_phase_and_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are phases of 1 and 3 seconds, and one of 2 that fails."""
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
