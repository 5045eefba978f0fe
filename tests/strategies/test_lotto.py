"""LoTTO: a mask has the entries that moved most, without those of earlier tasks, and is trained from the current model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from small_strategies import theta_of

from forgetfree import registry
from forgetfree.core.regions import Region
from forgetfree.core.selection import most_moved

MakeStream = Callable[..., Any]
OPTIONS: dict[str, Any] = {"steps": 3, "batch_size": 4, "sparsity": 0.02, "optimizer": "adamw", "learning_rate": 0.01}


def make(stream: Any, plugins: Sequence[Any] = (), **changes: Any) -> Any:
    cls = registry.strategy("lotto")
    return cls(stream=stream, options=cls.Options(**OPTIONS | changes), device="cpu", plugins=plugins)


def calibration(strategy: Any, task: Any, frozen: Region) -> Any:
    return strategy.training_result(task, strategy.space.parameters(strategy.model.backbone), frozen=frozen)


@pytest.mark.parametrize("kind", ["bert", "roberta-mlm"])
def test_masks_are_sparse_and_no_later_task_touches_an_earlier_one(tiny_stream: MakeStream, kind: str) -> None:
    strategy = make(tiny_stream(kind, "linear" if kind == "bert" else "auto"), weight_decay=0.1)
    thetas = [theta_of(strategy)]
    for experience in strategy.stream.benchmark.train_stream:
        strategy.train(experience)
        thetas.append(theta_of(strategy))
    moves = [after != before for before, after in pairwise(thetas)]
    count = int(0.02 * len(thetas[0]))
    assert [int(moved.sum()) for moved in moves] == [count] * 3
    assert int(torch.stack(moves).sum(0).max()) == 1  # the masks are disjoint
    assert set(strategy.evaluate()) == {task.name for task in strategy.stream.tasks}


def test_a_mask_is_what_moves_most_among_free_entries(tiny_stream: MakeStream) -> None:
    """The reference trains the second task on the model after the first one, with the first one's entries frozen."""
    strategy = make(tiny_stream("bert", "linear"), region_steps=2)
    first, second, _ = strategy.stream.benchmark.train_stream
    strategy.train(first)
    before = theta_of(strategy)
    owned = before != strategy.pre_trained.theta
    calibrated = calibration(strategy, strategy.stream.tasks[1], Region.from_mask(owned))
    assert torch.equal(theta_of(strategy), before)
    assert torch.equal(calibrated.theta[owned], before[owned])
    assert int((calibrated.theta != before).sum()) > 0.9 * int((~owned).sum())
    strategy.train(second)
    moved = (theta_of(strategy) != before).nonzero().squeeze(1)
    assert torch.equal(moved, most_moved(before, calibrated.theta, int(0.02 * len(before))).indices)


def test_a_readout_is_trained_from_where_calibration_left_it(tiny_stream: MakeStream) -> None:
    strategy = make(tiny_stream("bert", "linear"), region_steps=0)
    task = strategy.stream.tasks[0]
    calibrated = calibration(strategy, task, Region.empty()).readouts[task.name]
    strategy.train(strategy.stream.benchmark.train_stream[0])
    found = strategy.model.readout_module(task.label).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in calibrated.items())
    assert not torch.equal(found["weight"], strategy.pre_trained.readouts[task.name]["weight"])


def test_it_goes_on_from_what_was_saved(tiny_stream: MakeStream, tmp_path: Any) -> None:
    """The entries of earlier tasks are recognised in the loaded model itself."""
    strategy = make(tiny_stream("bert", "linear"))
    tasks = list(strategy.stream.benchmark.train_stream)
    strategy.train(tasks[0])
    strategy.save(tmp_path)
    again = make(tiny_stream("bert", "linear"))
    again.load(tmp_path)
    for each in (strategy, again):
        each.train(each.stream.benchmark.train_stream[1])
    assert torch.equal(theta_of(strategy), theta_of(again))


def test_where_no_entry_is_left_nothing_is_trained(tiny_stream: MakeStream) -> None:
    strategy = make(tiny_stream("roberta-mlm", "auto"), sparsity=1.0)
    first, *later = strategy.stream.benchmark.train_stream
    strategy.train(first)
    learned = theta_of(strategy)
    strategy.train(later[0])
    assert torch.equal(theta_of(strategy), learned)
