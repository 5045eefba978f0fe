"""Two strategies on one stream: in whatever order they are built, trained and evaluated, each gives its own answers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from avalanche.core import SupervisedPlugin
from torch import Tensor

from forgetfree import registry
from forgetfree.continual.streams import make_stream
from forgetfree.errors import RunError
from forgetfree.options import build
from forgetfree.testing.tiny import tiny_model, tiny_stream, tiny_task

SMALL: dict[str, Any] = {"steps": 3, "batch_size": 4, "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.1}
OWN = {name: {"sparsity": 0.05, "mask_steps": 2} for name in ("grafting-continual", "graft-retrain")}
#: One of each kind: all of the model, a ledger, a model a task, adapters alone and together, a plugin, a template.
KINDS = [
    "continual-ft",
    "grafting-continual",
    "fine-tune",
    "lora",
    "o-lora",
    "ewc",
    "replay",
    "gdumb",
    "der",
    "packnet",
]
PAIRS = [(one, KINDS[(i + step) % len(KINDS)]) for i, one in enumerate(KINDS) for step in (0, 1, 3)]


def make(name: str, stream: Any, **changes: Any) -> Any:
    cls = registry.strategy(name)
    more = {key: 8 for key in ("mem_size", "batch_size_mem") if key in cls.Options.__dataclass_fields__}
    return cls(stream=stream, options=build(cls.Options, SMALL | OWN.get(name, {}) | more | changes, name))


def logits(strategy: Any) -> dict[str, Tensor]:
    return {name: torch.from_numpy(answers.logits) for name, answers in strategy.evaluate().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def alone() -> Any:
    """The answers of a strategy that has its stream to itself: before training, and after each task."""
    known: dict[str, list[dict[str, Tensor]]] = {}

    def answers(name: str) -> list[dict[str, Tensor]]:
        if name not in known:
            strategy = make(name, tiny_stream())
            known[name] = [logits(strategy)]
            for experience in strategy.stream.benchmark.train_stream:
                strategy.train(experience)
                known[name].append(logits(strategy))
        return known[name]

    return answers


@pytest.mark.sampled("der-grafting-continual", "gdumb-continual-ft")
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_built_first_and_trained_in_turn(one: str, other: str, alone: Any) -> None:
    stream = tiny_stream()
    first, second = make(one, stream), make(other, stream)
    for done, experience in enumerate(stream.benchmark.train_stream, 1):
        first.train(experience)
        second.train(experience)
        assert same(logits(first), alone(one)[done])
        assert same(logits(second), alone(other)[done])


@pytest.mark.sampled("continual-ft-continual-ft", "continual-ft-grafting-continual")
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_building_another_changes_nothing(one: str, other: str, alone: Any) -> None:
    stream = tiny_stream()
    experiences = list(stream.benchmark.train_stream)
    first = make(one, stream)
    first.train(experiences[0])
    second = make(other, stream)
    assert same(logits(second), alone(other)[0])
    assert same(logits(first), alone(one)[1])
    first.train(experiences[1])
    assert same(logits(second), alone(other)[0])
    assert same(logits(first), alone(one)[2])


@pytest.mark.sampled("continual-ft-ewc", "grafting-continual-lora")
@pytest.mark.parametrize(("one", "other"), [("continual-ft", "ewc"), ("grafting-continual", "lora")])
def test_streams_over_one_model(one: str, other: str, alone: Any) -> None:
    """They share its backbone, and nothing else."""
    loaded, rows = tiny_model(), [tiny_task(name) for name in ("qnli", "ag_news")]
    first, second = (make(name, make_stream("x", rows, loaded)) for name in (one, other))
    pairs = zip(first.stream.benchmark.train_stream, second.stream.benchmark.train_stream, strict=True)
    for done, (mine, theirs) in enumerate(pairs, 1):
        first.train(mine)
        second.train(theirs)
        assert same(logits(first), alone(one)[done])
        assert same(logits(second), alone(other)[done])


@pytest.mark.sampled("continual-ft", "grafting-continual")
@pytest.mark.parametrize("name", ["continual-ft", "grafting-continual", "o-lora", "ewc"])
def test_what_is_saved_is_the_strategys_own(name: str, tmp_path: Path, alone: Any) -> None:
    stream = tiny_stream()
    first, second = make(name, stream), make("continual-ft", stream, learning_rate=0.01)
    for experience in stream.benchmark.train_stream:
        first.train(experience)
        second.train(experience)
    first.save(str(tmp_path))  # text does for a path
    fresh = make(name, tiny_stream())
    fresh.load(str(tmp_path))
    assert same(logits(fresh), alone(name)[-1])
    # Loading is by turns, too.
    before = logits(second)
    make(name, stream).load(str(tmp_path))
    assert same(logits(second), before)


def test_a_strategy_and_its_stream_can_be_copied(alone: Any) -> None:
    strategy = make("continual-ft", tiny_stream())
    experiences = list(strategy.stream.benchmark.train_stream)
    strategy.train(experiences[0])
    copied = copy.deepcopy(strategy)
    strategy.train(experiences[1])
    assert same(logits(copied), alone("continual-ft")[1])
    make("ewc", copied.stream)
    assert same(logits(copied), alone("continual-ft")[1])
    assert same(logits(strategy), alone("continual-ft")[2])


def test_another_strategy_cannot_be_used_while_one_trains() -> None:
    class Asks(SupervisedPlugin):
        def after_update(self, strategy: Any, **_: Any) -> None:
            other.evaluate()

    stream = tiny_stream()
    other = make("ewc", stream)
    cls = registry.strategy("grafting-continual")
    options = build(cls.Options, SMALL | OWN["grafting-continual"], "x")
    first = cls(stream=stream, options=options, plugins=[Asks()])
    with pytest.raises(RunError, match=r"GraftingContinual is training or evaluating with the model that EWC needs"):
        first.train(stream.benchmark.train_stream[0])
    first.plugins.pop()
    other.train(stream.benchmark.train_stream[0])  # the one that was stopped lets go
    assert same(logits(other), logits(_alone_after_one("ewc")))


def _alone_after_one(name: str) -> Any:
    strategy = make(name, tiny_stream())
    strategy.train(strategy.stream.benchmark.train_stream[0])
    return strategy


def test_a_strategy_that_is_gone_leaves_no_copy_of_its_weights() -> None:
    stream = tiny_stream()
    make("continual-ft", stream).train(stream.benchmark.train_stream[0])
    second = make("continual-ft", stream)
    second.train(stream.benchmark.train_stream[0])
    assert second.set_aside is None
    assert same(logits(second), logits(_alone_after_one("continual-ft")))


@pytest.mark.sampled("continual-ft", "grafting-continual")
@pytest.mark.parametrize("name", ["continual-ft", "grafting-continual", "lora", "ewc"])
def test_precision_is_the_strategys_own(name: str) -> None:
    """It used to stay behind on the model, so that whatever came next computed in it."""
    stream = tiny_stream()
    strategy = make(name, stream, precision="bf16")
    assert stream.model.precision == "fp32"
    strategy.train(stream.benchmark.train_stream[0])
    assert stream.model.precision == "fp32"
    strategy.evaluate()
    assert stream.model.precision == "fp32"
    with pytest.raises(ZeroDivisionError):
        strategy.plugins.append(_Fails())
        strategy.evaluate()
    assert stream.model.precision == "fp32"


class _Fails(SupervisedPlugin):
    def before_eval_forward(self, strategy: Any, **_: Any) -> None:
        assert strategy.model.precision == "bf16"
        raise ZeroDivisionError
