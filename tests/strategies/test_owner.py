"""A strategy owns the model of its stream: a second one on it starts from θ_pre, and the first is then refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from avalanche.core import SupervisedPlugin
from compared import assert_same, logits
from small_strategies import learned_rows, make
from torch import Tensor

from forgetfree.continual.stream import make_stream
from forgetfree.errors import RunError
from forgetfree.testing.tiny import tiny_model, tiny_stream, tiny_task

#: Pairs of strategies that store one model, a ledger, a model a task or adapters, or use a plugin or a template.
PAIRS = [("continual-ft", "grafting-continual"), ("grafting-continual", "fine-tune"), ("ewc", "o-lora"), ("der", "ewc")]


@cache
def alone(name: str) -> list[dict[str, Tensor]]:
    """Return the logits of a strategy with a stream to itself: before training, and after each task."""
    return learned_rows(make(name, tiny_stream()))


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_second_strategy_starts_afresh_and_on_a_copy_each_has_a_model_of_its_own(one: str, other: str) -> None:
    stream = tiny_stream()
    first, copied, experiences = make(one, stream), make(one, stream.copy()), list(stream.benchmark.train_stream)
    first.train(experiences[0])
    second = make(other, stream)
    assert_same(logits(second), alone(other)[0])
    for done, experience in enumerate(experiences, 1):
        second.train(experience)
        copied.train(experience)
        assert_same(logits(second), alone(other)[done])
        assert_same(logits(copied), alone(one)[done])


USES: dict[str, Callable[[Any, Path], Any]] = {
    "train": lambda strategy, path: strategy.train(strategy.stream.benchmark.train_stream[0]),
    "evaluate": lambda strategy, path: strategy.evaluate(),
    "save": lambda strategy, path: strategy.save(path),
    "load": lambda strategy, path: strategy.load(path),
    "model": lambda strategy, path: strategy.model,
}


@pytest.mark.parametrize("use", USES)
def test_the_earlier_one_is_refused(use: str, tmp_path: Path) -> None:
    stream = tiny_stream()
    first = make("continual-ft", stream)
    first.save(tmp_path)
    make("ewc", stream)
    with pytest.raises(RunError, match=r"ContinualFT has lost its model to another strategy \(EWC\).*stream\.copy\(\)"):
        USES[use](first, tmp_path)


def test_streams_over_one_model_share_its_owner() -> None:
    loaded, rows = tiny_model(), [tiny_task(name) for name in ("qnli", "ag_news")]
    first, second = (make("grafting-continual", make_stream("x", rows, loaded)) for _ in range(2))
    with pytest.raises(RunError, match=r"lost its model to another strategy \(GraftingContinual\)"):
        first.evaluate()
    second.evaluate()


def test_a_strategy_and_its_stream_can_be_copied() -> None:
    strategy = make("continual-ft", tiny_stream())
    experiences = list(strategy.stream.benchmark.train_stream)
    strategy.train(experiences[0])
    copied = copy.deepcopy(strategy)
    strategy.train(experiences[1])
    assert_same(logits(copied), alone("continual-ft")[1])
    make("ewc", copied.stream)
    assert_same(logits(strategy), alone("continual-ft")[2])
    with pytest.raises(RunError, match=r"stream\.copy"):
        copied.evaluate()


@pytest.mark.parametrize("name", ["continual-ft", "grafting-continual"])
def test_precision_is_the_strategys_own(name: str) -> None:
    stream = tiny_stream()
    strategy = make(name, stream, precision="bf16")
    assert stream.model.precision == "fp32"
    strategy.train(stream.benchmark.train_stream[0])
    assert stream.model.precision == "fp32"
    strategy.evaluate()
    assert stream.model.precision == "fp32"
    strategy.plugins.append(_Fails())
    with pytest.raises(ZeroDivisionError):
        strategy.train(stream.benchmark.train_stream[1])
    assert stream.model.precision == "fp32"


class _Fails(SupervisedPlugin):
    def before_forward(self, strategy: Any, **_: Any) -> None:
        assert strategy.model.precision == "bf16"
        raise ZeroDivisionError
