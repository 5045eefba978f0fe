"""By what a region is chosen: the same as by a slow reference, and without θ_ft where none is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from forgetfree import registry
from forgetfree.core.regions import Region
from forgetfree.core.selection import most_moved, top
from forgetfree.errors import OptionError
from forgetfree.training.monitor import Monitor
from forgetfree.training.single_task import READOUT_STEPS

MakeStream = Callable[..., Any]
OPTIONS: dict[str, Any] = {
    **{"steps": 3, "batch_size": 4, "optimizer": "sgd", "learning_rate": 0.05, "sparsity": 0.01, "region_steps": 0},
    **{"mask_steps": 1, "mask_batch_size": 1000, "dropout": False},
}


class Phases(Monitor):
    """Notes phases and their steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []

    @contextmanager
    def phase(self, task: str, phase: Any, steps: int) -> Iterator[Callable[[int, float], None]]:
        self.steps.append((phase, steps))
        yield lambda step, loss: None


def learn(stream: Any, count: int = 1, name: str = "grafting-continual", seed: int = 0, **changes: Any) -> Any:
    cls, phases = registry.strategy(name), Phases()
    strategy = cls(stream=stream, options=cls.Options(**OPTIONS | changes), device="cpu", monitor=phases, seed=seed)
    for experience in list(stream.benchmark.train_stream)[:count]:
        strategy.train(experience)
    strategy.phases = phases.steps
    return strategy


def gradient_at(strategy: Any, theta: torch.Tensor, readout: Any) -> torch.Tensor:
    """Return the gradient over all training rows of the first task, at a θ."""
    task, model, space = strategy.stream.tasks[0], strategy.model, strategy.space
    space.load_(model.backbone, theta)
    model.readout_module(task.label).load_state_dict(readout)
    model.eval()
    x, y, t = task.train.batch(range(len(task.train)))
    with torch.enable_grad():
        loss = F.cross_entropy(model(x, t), y)
        gradients = torch.autograd.grad(loss, space.parameters(model.backbone))
    return torch.cat([each.reshape(-1) for each in gradients])


@pytest.mark.parametrize("source", ["gradient", "snip", "gallop", "taylor", "midpoint", "movement"])
def test_a_region_is_that_of_a_slow_reference(tiny_stream: MakeStream, source: str) -> None:
    strategy = learn(tiny_stream("bert", "linear"), region_from=source)
    task, pre = strategy.stream.tasks[0], strategy.pre_trained
    chosen = strategy.ledger.records[0].region
    count = int(0.01 * len(pre.theta))
    ft = strategy.fine_tuned(task)
    at = (pre.theta + ft.theta) / 2 if source == "midpoint" else pre.theta
    g = gradient_at(strategy, at, ft.readouts[task.name])
    move = ft.theta - pre.theta
    scores = {
        "gradient": g.abs(),
        "snip": (g * pre.theta).abs(),
        "gallop": g.abs() / (pre.theta.abs() + 1e-3),
        "taylor": (g * move).abs(),
        "midpoint": -g * move,  # the first step on S is along it
        "movement": move.abs(),
    }
    expected = top(scores[source], count)
    assert len(chosen) == count
    assert len(chosen & expected) >= count - 1  # two that nearly tie may change places by rounding
    assert source != "movement" or chosen == most_moved(pre.theta, ft.theta, count)


@pytest.mark.parametrize("name", ["grafting-continual", "graft-retrain"])
@pytest.mark.parametrize("source", ["gradient", "fisher", "random"])
def test_nothing_is_fine_tuned_where_theta_pre_is_enough(tiny_stream: MakeStream, name: str, source: str) -> None:
    """The readout alone is trained first; the region's values start at θ_pre, whatever region_start says."""
    how = {"region_from": source, "region_start": "fine-tuned"}
    strategy = learn(tiny_stream("bert", "linear"), 1, name, **how)
    assert strategy.phases[:2] == [("fine_tune", READOUT_STEPS), ("localize", 1)]
    (record,), pre = strategy.ledger.records, strategy.pre_trained
    assert torch.equal(record.owned.values, pre.theta[record.region.indices])
    assert not torch.equal(record.readout["weight"], pre.readouts["qnli"]["weight"])
    moved = learn(tiny_stream("bert", "linear"), 1, name, **how | {"region_steps": 2, "learning_rate": 0.5})
    assert not torch.equal(moved.ledger.records[0].owned.values, pre.theta[record.region.indices])


def test_label_words_need_no_readout_first(tiny_stream: MakeStream) -> None:
    strategy = learn(tiny_stream("roberta-mlm"), region_from="gradient")
    assert ("fine_tune", READOUT_STEPS) not in strategy.phases and len(strategy.ledger.records[0].region)


@pytest.mark.parametrize("source", ["gradient", "movement"])
def test_on_the_union_only_free_entries_are_chosen(tiny_stream: MakeStream, source: str) -> None:
    strategy = learn(tiny_stream("bert", "linear"), 2, region_from=source, localize_at="union")
    first, second = (record.region for record in strategy.ledger.records)
    assert first.isdisjoint(second) and len(first) == len(second)


def test_random_entries_are_those_of_the_seed(tiny_stream: MakeStream) -> None:
    regions = [
        learn(tiny_stream("bert", "linear"), seed=seed, region_from="random").ledger.records[0].region
        for seed in (0, 0, 1)
    ]
    assert regions[0] == regions[1] and len(regions[0] & regions[2]) < 0.1 * len(regions[0])


def test_a_base_and_no_mask_steps_are_still_a_way_to_say_movement(tiny_stream: MakeStream) -> None:
    by_base, by_name = (
        learn(tiny_stream(), **how).ledger.records[0].region
        for how in ({"mask_steps": 0}, {"region_from": "movement", "base_fraction": 0.0})
    )
    assert by_base == by_name and isinstance(by_name, Region)


def test_midpoint_without_a_step_is_refused(tiny_stream: MakeStream) -> None:
    with pytest.raises(OptionError, match="region_from=midpoint with mask_steps=0 leaves no region"):
        learn(tiny_stream(), region_from="midpoint", mask_steps=0)
