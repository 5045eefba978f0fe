"""The contract of a strategy: its small size, and the effect of each of its hooks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from avalanche.training.plugins import LwFPlugin
from small_strategies import Plain
from torch import Tensor
from torch.nn.functional import cross_entropy

from forgetfree.continual.adapter import PluginStrategy
from forgetfree.continual.region_strategy import RegionStrategy
from forgetfree.continual.strategy_parts import Training
from forgetfree.core.regions import Region
from forgetfree.errors import ConformanceError
from forgetfree.options import build, option
from forgetfree.testing import tiny_stream
from forgetfree.training.training_options import TrainingOptions

ROOT = Path(__file__).parents[2]


def test_a_strategy_on_a_ledger_needs_eight_names() -> None:
    tree = ast.parse((ROOT / "strategies" / "grafting_continual.py").read_text(encoding="utf-8"))
    ours = [
        node for node in tree.body if isinstance(node, ast.ImportFrom) and str(node.module).startswith("forgetfree")
    ]
    assert sum(len(node.names) for node in ours) <= 8


# -- Refusals --------------------------------------------------------------------------------------------


def test_a_begin_that_returns_nothing_is_told_so() -> None:
    with pytest.raises(ConformanceError, match=r"begin\(task\): expected a Training, got None"):
        learned(type("Own", (Plain,), {"begin": lambda self, task: None}))


def test_a_begin_of_a_strategy_on_a_ledger_that_gives_no_region_is_told_so() -> None:
    parts = {"setup": lambda self: self.open_ledger("union"), "begin": lambda self, task: self.everything(task)}
    with pytest.raises(ConformanceError, match=r"expected a Training of a region, got one without.*region_training"):
        learned(type("Own", (RegionStrategy,), parts))


def test_a_parent_in_a_ledger_that_has_none_is_told_so() -> None:
    def begin(self: Any, task: Any) -> Any:
        return self.region_training(task, Region.of([0]), parent="other")

    parts = {"setup": lambda self: self.open_ledger("alone"), "begin": begin}
    with pytest.raises(
        ConformanceError,
        match=r"expected parent='', .*'alone'.*got 'other'.*open_ledger\('parents'\)",
    ):
        learned(type("Own", (RegionStrategy,), parts))


# -- Hooks -----------------------------------------------------------------------------------------------


def learned(cls: Any, **changes: Any) -> Any:
    """Return the strategy after the first of two tiny tasks."""
    options = build(cls.Options, {"steps": 3, "batch_size": 4, "learning_rate": 0.05, "dropout": False} | changes, "x")
    made = cls(stream=tiny_stream(), options=options)
    made.train(made.stream.benchmark.train_stream[0])
    return made


def weights(made: Any) -> Tensor:
    flat: Tensor = made.space.flatten(made.model.backbone)
    return flat.cpu()


def with_field(**fields: Any) -> Any:
    """Return a subclass of `Plain` with other fields of its `Training`."""
    return type("Own", (Plain,), {"begin": lambda self, task: replace(self.everything(task), **fields)})


def test_a_loss_and_an_answer_of_your_own_are_trained_by() -> None:
    plain = weights(learned(Plain))
    assert torch.equal(plain, weights(learned(with_field(loss=cross_entropy))))
    assert not torch.equal(plain, weights(learned(with_field(loss=lambda x, y: 2 * cross_entropy(x, y)))))

    class Same(Plain):
        def begin(self, task: Any) -> Training:
            return self.everything(task, answer=lambda x, t: self.model(x, t))

    class Shifted(Plain):
        def begin(self, task: Any) -> Training:
            return self.everything(task, answer=lambda x, t: self.model(x.flip(1), t))

    assert torch.equal(plain, weights(learned(Same)))
    assert not torch.equal(plain, weights(learned(Shifted)))


def test_an_optimizer_and_a_schedule_of_your_own_move_the_weights() -> None:
    decayed = lambda groups: torch.optim.SGD(groups, weight_decay=1e-4)  # noqa: E731
    plain = weights(learned(Plain, schedule="constant"))
    assert torch.equal(plain, weights(learned(with_field(optimizer=decayed), schedule="constant")))
    assert not torch.equal(plain, weights(learned(with_field(optimizer=torch.optim.Adagrad), schedule="constant")))
    assert torch.equal(plain, weights(learned(with_field(schedule=lambda done: 1.0))))
    frozen = learned(with_field(schedule=lambda done: 0.0))
    assert torch.equal(weights(frozen), frozen.pre_trained.theta)


@pytest.mark.parametrize("where", ["begin", "loss"])
def test_what_begin_entered_hears_of_the_error_that_breaks_training_off(where: str) -> None:
    seen: list[Any] = []

    @contextmanager
    def scope() -> Iterator[None]:
        try:
            yield
        except ZeroDivisionError as error:
            seen.append(error)
            raise

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    class Entering(Plain):
        def begin(self, task: Any) -> Training:
            self.scope.enter_context(scope())
            return self.everything(task, loss=fail) if where == "loss" else fail()

    with pytest.raises(ZeroDivisionError):
        learned(Entering)
    assert len(seen) == 1


class Patience(TrainingOptions):
    patience: int = option(3, "no argument of the plugin", at_least=1)


def test_options_of_your_own_stand_beside_a_plugins_arguments() -> None:
    class Patient(PluginStrategy, plugin=LwFPlugin, temperature=option(2.0, "T", above=0)):
        Options = Patience

    made = learned(Patient, patience=5, temperature=4.0)
    assert (made.options.patience, made.avalanche_plugin.lwf.temperature) == (5, 4.0)
