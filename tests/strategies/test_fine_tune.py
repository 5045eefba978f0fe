"""FT: a model per task, in a store that several strategies may share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forgetfree.models.state import ModelState, StateStore
from forgetfree.strategies.fine_tune import FineTune
from forgetfree.testing.tiny import tiny_stream
from forgetfree.training.training_options import TrainingOptions


def make(directory: Path, **more: Any) -> FineTune:
    return FineTune(stream=tiny_stream(), options=TrainingOptions(steps=2), store=StateStore(directory), **more)


def test_what_it_keeps_is_counted_without_reading_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count once read all models from disk after each task."""
    for directory in (tmp_path, tmp_path):  # first made, then found in the store
        strategy = make(directory)
        kept = [strategy.bytes_kept()]
        for experience in strategy.stream.benchmark.train_stream:
            strategy.train(experience)
            with monkeypatch.context() as patch:
                patch.setattr(ModelState, "load", None)
                kept.append(strategy.bytes_kept())
        sizes = [strategy.models.of(task).size_in_bytes for task in strategy.stream.tasks]
        assert kept == [0, sizes[0], sum(sizes)] and sizes[0] > 1000
    strategy.save(tmp_path / "saved")
    again = make(tmp_path)
    again.load(tmp_path / "saved")
    assert again.bytes_kept() == sum(sizes)


def test_what_is_saved_takes_the_place_of_what_was_saved_there_before(tmp_path: Path) -> None:
    """Two strategies with different stores save models under the same task name; the later one is loaded."""
    for rate in (0.05, 0.5):
        options = TrainingOptions(steps=2, learning_rate=rate)
        strategy = FineTune(stream=tiny_stream(("sst2",)), options=options)
        strategy.train(strategy.stream.benchmark.train_stream)
        strategy.save(tmp_path)
    again = FineTune(stream=tiny_stream(("sst2",)), options=options)
    again.load(tmp_path)
    assert again.evaluate()["sst2"].same_as(strategy.evaluate()["sst2"])
