"""FT: a model per task, in a store that several strategies may share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forgetfree.models.state import ModelState, StateStore
from forgetfree.strategies.fine_tune import FineTune
from forgetfree.strategies.grafting_continual import GraftingContinual
from forgetfree.testing.tiny import tiny_stream
from forgetfree.training.monitor import seconds_by_phase
from forgetfree.training.training_options import TrainingOptions


def make(directory: Path, **more: Any) -> FineTune:
    return FineTune(stream=tiny_stream(), options=TrainingOptions(steps=2), store=StateStore(directory), **more)


def test_what_it_keeps_is_counted_without_reading_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to read all of them from disk after each task."""
    for directory in (tmp_path, tmp_path):  # made, and then found in the store
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
    """Of strategies with stores of their own, whose models have the names of their tasks."""
    for rate in (0.05, 0.5):
        options = TrainingOptions(steps=2, learning_rate=rate)
        strategy = FineTune(stream=tiny_stream(("sst2",)), options=options)
        strategy.train(strategy.stream.benchmark.train_stream)
        strategy.save(tmp_path)
    again = FineTune(stream=tiny_stream(("sst2",)), options=options)
    again.load(tmp_path)
    assert again.evaluate()["sst2"].same_as(strategy.evaluate()["sst2"])


def test_whoever_finds_a_model_tells_how_long_it_took(tmp_path: Path) -> None:
    """Those who made it count it as their own; a store that does not tell it is no zero."""

    def seconds(strategy: Any) -> dict[str, float | None]:
        for experience in strategy.stream.benchmark.train_stream:
            strategy.train(experience)
        return seconds_by_phase(strategy.seconds)

    def grafting() -> GraftingContinual:
        options = GraftingContinual.Options(steps=2, sparsity=0.1, region_from="movement")
        return GraftingContinual(stream=tiny_stream(), options=options, store=StateStore(tmp_path))

    made = seconds(make(tmp_path))
    assert "fine_tune_elsewhere" not in made and made["fine_tune"]
    for found in (seconds(make(tmp_path)), seconds(grafting())):
        assert found["fine_tune_elsewhere"] == pytest.approx(made["fine_tune"], abs=0.01)
    (note, *_) = tmp_path.glob("*.json")
    note.write_text('{"seconds": -1}')
    assert seconds(grafting())["fine_tune_elsewhere"] is None
    for path in tmp_path.iterdir():
        path.unlink()
    assert "fine_tune_elsewhere" not in seconds(grafting()) and len(list(tmp_path.glob("*.json"))) == 2
