"""Regions: the criteria that choose them, the models that these need, and the values from which regions are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import compared
import pytest
import torch
from avalanche.core import SupervisedPlugin
from torch.nn import functional as F

from forgetfree import registry
from forgetfree.core.regions import Region
from forgetfree.core.selection import most_moved, top
from forgetfree.data.examples import EncodedRows
from forgetfree.data.rows import representative
from forgetfree.errors import OptionError
from forgetfree.training import single_task
from forgetfree.training.monitor import Monitor
from forgetfree.training.single_task import READOUT_STEPS

MakeStream = Callable[..., Any]
OPTIONS: dict[str, Any] = {
    **{"steps": 3, "batch_size": 4, "optimizer": "sgd", "learning_rate": 0.05, "sparsity": 0.01, "region_steps": 0},
    **{"mask_steps": 1, "mask_batch_size": 1000, "dropout": False},
}

#: Options with training of regions, with dropout, too.
TRAINED: dict[str, Any] = {"steps": 4, "sparsity": 0.05, "region_steps": None, "dropout": True} | {
    "mask_steps": 2,
    "mask_batch_size": 12,
}


class Phases(Monitor):
    """Records phases and their numbers of steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []

    @contextmanager
    def phase(self, task: str, phase: Any, steps: int) -> Iterator[Callable[[int, float], None]]:
        self.steps.append((phase, steps))
        yield lambda step, loss: None


def learn(stream: Any, count: int = 1, name: str = "grafting-continual", plugins: Any = None, **changes: Any) -> Any:
    cls, phases = registry.strategy(name), Phases()
    options = cls.Options(**OPTIONS | changes)
    strategy = cls(stream=stream, options=options, device="cpu", monitor=phases, plugins=plugins)
    strategy.phases = phases.steps
    return compared.learn(strategy, count)


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


@pytest.mark.parametrize("source", ["gradient", "snip", "gallop", "movement"])
def test_a_region_is_that_of_a_slow_reference(tiny_stream: MakeStream, source: str) -> None:
    strategy = learn(tiny_stream("bert", "linear"), region_from=source)
    task, pre = strategy.stream.tasks[0], strategy.pre_trained
    chosen = strategy.ledger.records[0].region
    count = int(0.01 * len(pre.theta))
    ft = strategy.fine_tuned(task)
    g = gradient_at(strategy, pre.theta, ft.readouts[task.name])
    scores = {
        "gradient": g.abs(),
        "snip": (g * pre.theta).abs(),
        "gallop": g.abs() / (pre.theta.abs() + 1e-3),
        "movement": (ft.theta - pre.theta).abs(),
    }
    expected = top(scores[source], count)
    assert len(chosen) == count
    assert len(chosen & expected) >= count - 1  # two nearly equal scores may change places by rounding
    assert source != "movement" or chosen == most_moved(pre.theta, ft.theta, count)


@pytest.mark.parametrize(
    ("name", "source"),
    [("grafting-continual", "random"), ("graft-retrain", "fisher")],
)
def test_nothing_is_fine_tuned_where_theta_pre_is_enough(tiny_stream: MakeStream, name: str, source: str) -> None:
    """The readout alone is trained first; the region's values start at θ_pre, for any region_start."""
    how = {"region_from": source, "region_start": "fine-tuned"}
    strategy = learn(tiny_stream("bert", "linear"), 1, name, **how)
    assert strategy.phases[:2] == [("fine_tune", READOUT_STEPS), ("localize", 1)]
    (record,), pre = strategy.ledger.records, strategy.pre_trained
    assert torch.equal(record.owned.values, pre.theta[record.region.indices])
    assert not torch.equal(record.readout["weight"], pre.readouts["qnli"]["weight"])
    moved = learn(tiny_stream("bert", "linear"), 1, name, **how | {"region_steps": 2, "learning_rate": 0.5})
    assert not torch.equal(moved.ledger.records[0].owned.values, pre.theta[record.region.indices])


@pytest.mark.parametrize("source", ["gradient", "snip", "fisher"])
def test_gradients_are_those_of_a_limited_number_of_rows(
    tiny_stream: MakeStream, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = learn(tiny_stream("bert", "linear"), 0, region_from=source)
    monkeypatch.setattr(single_task, "ROWS", 3)
    task, read, batch = strategy.stream.tasks[0], list[int](), EncodedRows.batch
    tuned = strategy.fine_tuned(task)

    def noted(rows: EncodedRows, places: Sequence[int]) -> Any:
        read.extend(places)
        return batch(rows, places)

    monkeypatch.setattr(EncodedRows, "batch", noted)
    strategy.localize(task, tuned)
    assert sorted(read) == sorted(representative(task.train.targets, 3))


def test_label_words_need_no_readout_first(tiny_stream: MakeStream) -> None:
    strategy = learn(tiny_stream("roberta-mlm"), region_from="gradient")
    assert ("fine_tune", READOUT_STEPS) not in strategy.phases and len(strategy.ledger.records[0].region)


def test_a_base_and_no_mask_steps_are_still_a_way_to_say_movement(tiny_stream: MakeStream) -> None:
    by_base, by_name = (
        learn(tiny_stream(), **how).ledger.records[0].region
        for how in ({"mask_steps": 0}, {"region_from": "movement", "base_fraction": 0.0})
    )
    assert by_base == by_name and isinstance(by_name, Region)


class Modes(SupervisedPlugin):
    """Records whether the model was in training mode, with dropout, while regions were trained."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[bool] = set()

    def after_forward(self, strategy: Any, **_: Any) -> None:
        self.seen.add(strategy.model.backbone.training)


@pytest.mark.parametrize(("dropout", "expected"), [(True, True), ("fine-tuning", False)])
def test_a_region_may_be_trained_without_the_dropout_of_fine_tuning(
    tiny_stream: MakeStream, dropout: Any, expected: bool
) -> None:
    modes = Modes()
    strategy = learn(tiny_stream(), plugins=[modes], **TRAINED | {"dropout": dropout})
    assert modes.seen == {expected}
    with_dropout, of_both = (
        strategy.bench(strategy.stream.tasks[0]).key(strategy.options.model_copy(update={"dropout": each}))
        for each in (True, dropout)
    )
    assert with_dropout == of_both  # one fine-tuned model is used for both


def test_a_region_may_be_sought_among_entries_that_no_earlier_task_owns(tiny_stream: MakeStream) -> None:
    """With among=free the second task trains all of γ; otherwise the first task owns a part of it."""
    how = {"region_from": "snip", "sparsity": 0.3}
    for among in ("all", "free"):
        first, second = learn(tiny_stream("bert", "linear"), 2, among=among, **how).ledger.records
        assert (len(second.region & first.region) > 0) == (among == "all")
        assert (second.owned.region == second.region) == (among == "free")
    with pytest.raises(OptionError, match="does not support among=free"):
        learn(tiny_stream("bert", "linear"), region_from="mask", among="free")
