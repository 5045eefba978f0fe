"""Phases of one unit that differ only in options, labels or readout do not reuse each other's results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forgetfree.data.sources import load_tasks
from forgetfree.jobs import checkpoints
from forgetfree.jobs.checkpoints import FileCheckpoint
from forgetfree.models.loading import load_model
from forgetfree.models.state import ModelState
from forgetfree.training.monitor import Monitor
from forgetfree.training.single_task import SingleTask
from forgetfree.training.training_options import LocalizationOptions

OPTIONS = LocalizationOptions(
    steps=4, batch_size=4, learning_rate=0.1, sparsity=0.02, base_fraction=0.0, mask_steps=2, mask_batch_size=8
)
#: The second request after `OPTIONS`: changed options, and whether all labels are flipped.
OTHERS: dict[str, tuple[dict[str, Any], bool]] = {
    "batch size": ({"batch_size": 2, "mask_batch_size": 4}, False),
    "penalty": ({"l1": 0.1, "mask_learning_rate": 1e6}, False),
    "dropout": ({"dropout": False, "mask_steps": 3}, False),
    "labels": ({}, True),
}


class Keeping(Monitor):
    """A monitor that keeps the state of every phase, as in a unit."""

    def __init__(self, directory: Path) -> None:
        self._kept = FileCheckpoint(directory, {})
        self._kept.start()

    def checkpoint(self) -> FileCheckpoint:
        return self._kept


@pytest.fixture
def bench(model_directory: Callable[[str], Path], data_directory: Path) -> Callable[..., SingleTask]:
    """Return a function that makes one task with its own model, with its labels or with the opposite ones."""

    def make(monitor: Monitor | None = None, opposite: bool = False) -> SingleTask:
        (rows,) = load_tasks("sst2", str(data_directory))
        if opposite:
            flipped = replace(rows.train, labels=[1 - label for label in rows.train.labels])
            rows = replace(rows, train=flipped)
        return SingleTask.of(load_model(str(model_directory("bert")), "linear"), rows, seed=3, monitor=monitor)

    return make


def fine_tuned(bench: SingleTask, options: LocalizationOptions, start: ModelState) -> Tensor:
    return bench.fine_tuned(options).theta


def searched(bench: SingleTask, options: LocalizationOptions, start: ModelState) -> Tensor:
    return bench.localized(start, options).scores


@pytest.mark.sampled("batch size-fine_tuned")
@pytest.mark.parametrize("phase", [fine_tuned, searched])
@pytest.mark.parametrize("other", OTHERS)
def test_a_phase_is_not_taken_for_one_that_started_alike(
    bench: Callable[..., SingleTask],
    phase: Callable[[SingleTask, LocalizationOptions, ModelState], Tensor],
    other: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoints, "INTERVAL", 0.0)
    monkeypatch.setattr(checkpoints, "SHARE", math.inf)
    changed, opposite = OTHERS[other]
    start = bench().fine_tuned(OPTIONS.model_copy(update={"learning_rate": 0.05}))
    kept, second = Keeping(tmp_path), OPTIONS.model_copy(update=changed)
    first = phase(bench(kept), OPTIONS, start)
    again = phase(bench(kept, opposite), second, start)
    assert torch.equal(again, phase(bench(opposite=opposite), second, start))
    assert not torch.equal(again, first)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def test_a_search_reads_by_its_own_readout(
    bench: Callable[..., SingleTask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two searches share θ_ft, but not the readout."""
    monkeypatch.setattr(checkpoints, "SHARE", math.inf)
    kept, start = Keeping(tmp_path), bench().fine_tuned(OPTIONS)
    turned = replace(start, readouts={"sst2": {name: -tensor for name, tensor in start.readouts["sst2"].items()}})
    first = searched(bench(kept), OPTIONS, start)
    assert torch.equal(searched(bench(kept), OPTIONS, turned), searched(bench(), OPTIONS, turned))
    assert torch.equal(searched(bench(kept), OPTIONS, start), first)
