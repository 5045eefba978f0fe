"""The speed scripts run, and no ratio doubled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.speed import __main__ as speed
from benchmarks.speed import evaluation, fleet, growth, ledger_growth, long_stream, training_loop
from benchmarks.speed.measurement import Figure, alternate, measured, ratio


def test_contenders_take_turns() -> None:
    calls: list[str] = []
    seconds = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, turns=2, warm_up=1)
    assert calls == ["a", "b"] * 3
    assert [len(each) for each in seconds.values()] == [2, 2]


def test_a_ratio_is_the_median_of_the_turns_ratios() -> None:
    seconds = {"ours": np.array([1.0, 2.0, 9.0]), "plain": np.array([2.0, 2.0, 3.0])}
    figure = ratio("step", seconds, "ours", "plain", at_most=0.9)
    assert (figure.low, figure.value, figure.high) == (0.75, 1.0, 2.0)
    assert figure.seconds == {"ours": 2.0, "plain": 2.0}
    assert not figure.holds


def test_a_figure_that_is_not_reached_says_so() -> None:
    table = speed.table([Figure("append", 7.0, unit="ms", at_most=5.0), Figure("load", 1.0, at_most=5.0)])
    assert "| append | 7 ms | – | ≤ 5 (not reached) | – | – |" in table
    assert "| load | 1 | – | ≤ 5 | – | – |" in table


@pytest.mark.sampled(share=0)
@pytest.mark.slow
@pytest.mark.parametrize("name", speed.SCRIPTS)
def test_no_ratio_doubled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios vary with the load of the machine, so only a doubling fails, and only `make nightly` runs this."""
    monkeypatch.setattr(long_stream, "TASKS", 25)  # with fewer steps, a growing time is a larger share of a task's
    monkeypatch.setattr(long_stream, "STEPS", 12)
    monkeypatch.setattr(evaluation, "TEST_ROWS", 160)
    monkeypatch.setattr(ledger_growth, "TASKS", (10, 100, 1_000))
    monkeypatch.setattr(growth, "TASKS", (10, 100))
    monkeypatch.setattr(growth, "ROWS", (1_000, 2_000))
    monkeypatch.setattr(fleet, "FLEET", 256)
    monkeypatch.setattr(training_loop, "STEPS", 15)
    _, figures = measured(name, 1 if name in ("start", "whole_run") else 3, torch.get_num_threads())
    assert figures
    doubled = [figure for figure in figures if figure.at_most and not figure.unit and figure.value > 2 * figure.at_most]
    assert not doubled
