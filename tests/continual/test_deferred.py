"""Avalanche is imported without some libraries that it hardly uses."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forgetfree.continual import UNUSED
from forgetfree.continual.deferred import deferred


@pytest.mark.slow
@pytest.mark.sampled(share=0.15)
def test_these_are_not_imported_and_work_when_they_are_used(tmp_path: Path) -> None:
    code = f"""
import sys
import forgetfree.continual.strategy, forgetfree.strategies.avalanche_baselines
assert 'avalanche' in sys.modules
print([name for name in {UNUSED!r} if name in sys.modules])
import torch
from avalanche.evaluation.metric_results import Figure
from avalanche.evaluation.metrics import TopkAccuracy
from avalanche.logging import TensorboardLogger
metric = TopkAccuracy(2)
metric.update(torch.tensor([[0.1, 0.5, 0.4], [0.6, 0.3, 0.1]]), torch.tensor([2, 2]), 0)
print(metric.result())
import torchmetrics
print(hasattr(torchmetrics, '__file__'))
print(isinstance(Figure(), Figure), isinstance(1, Figure), callable(Figure.savefig))
print(type(TensorboardLogger({str(tmp_path)!r}).writer).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    said = ["[]", "{0: 0.5}", "True", "True False True", "SummaryWriter"]
    assert done.stdout.splitlines() == said, done.stderr


def test_a_module_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with deferred("colorsys", "torch"):
        assert sys.modules["torch"] is torch
        from colorsys import rgb_to_hsv

        assert importlib.import_module("colorsys") is sys.modules["colorsys"]
        assert not hasattr(sys.modules["colorsys"], "__file__")
    assert "colorsys" not in sys.modules
    assert rgb_to_hsv(0, 0, 1) == pytest.approx((2 / 3, 1, 1))
    assert hasattr(sys.modules["colorsys"], "__file__")
