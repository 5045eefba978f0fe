"""The contract of a strategy: how small it is, and what each of its seams does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from avalanche.training.plugins import LwFPlugin
from torch import Tensor
from torch.nn.functional import cross_entropy

from forgetfree import registry
from forgetfree.continual.adapter import PluginStrategy
from forgetfree.continual.region_strategy import RegionStrategy
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.strategy_parts import Training
from forgetfree.errors import ConformanceError
from forgetfree.options import build, option
from forgetfree.testing import tiny_stream
from forgetfree.training.training_options import TrainingOptions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["grafting_continual", "packnet"])
def test_a_strategy_on_a_ledger_needs_eight_names(name: str) -> None:
    tree = ast.parse((ROOT / "strategies" / f"{name}.py").read_text(encoding="utf-8"))
    ours = [
        node for node in tree.body if isinstance(node, ast.ImportFrom) and str(node.module).startswith("forgetfree")
    ]
    assert sum(len(node.names) for node in ours) <= 8


def test_grafting_continual_follows_the_paper_from_top_to_bottom() -> None:
    text = (ROOT / "strategies" / "grafting_continual.py").read_text(encoding="utf-8")
    places = [text.index(step) for step in ("(1) Fine-tune", "(2) Starting from", "(3) Record", "(4) Answer")]
    assert places == sorted(places)


# -- What is refused -------------------------------------------------------------------------------------


class Plain(ContinualStrategy):
    """Trains everything, and answers with the one model, as it is."""

    def begin(self, task: Any) -> Training:
        return self.everything(task)

    def answering(self, task: Any) -> Any:
        return nullcontext()


def test_a_begin_that_returns_nothing_is_told_so() -> None:
    with pytest.raises(ConformanceError, match=r"begin\(task\): expected a Training, got None"):
        learned(type("Own", (Plain,), {"begin": lambda self, task: None}))


def test_a_begin_of_a_strategy_on_a_ledger_that_gives_no_region_is_told_so() -> None:
    parts = {"setup": lambda self: self.open_ledger("union"), "begin": lambda self, task: self.everything(task)}
    with pytest.raises(ConformanceError, match=r"expected a Training of a region, got one without.*region_training"):
        learned(type("Own", (RegionStrategy,), parts))


# -- The seams -------------------------------------------------------------------------------------------


def learned(cls: Any, **changes: Any) -> Any:
    """The strategy after the first of two tiny tasks."""
    options = build(cls.Options, {"steps": 3, "batch_size": 4, "learning_rate": 0.05, "dropout": False} | changes, "x")
    made = cls(stream=tiny_stream(), options=options)
    made.train(made.stream.benchmark.train_stream[0])
    return made


def weights(made: Any) -> Tensor:
    flat: Tensor = made.space.flatten(made.model.backbone)
    return flat.cpu()


def with_field(**fields: Any) -> Any:
    """Plain, with other fields of its `Training`."""
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


@pytest.mark.sampled("fine-tune", "grafting-continual")
@pytest.mark.parametrize(
    "name", ["grafting-continual", "graft-retrain", "packnet", "wsn", "bitfit", "lora", "fine-tune"]
)
def test_an_interrupt_at_the_end_of_begin_costs_no_earlier_task_a_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = learned(
        registry.strategy(name), **({"sparsity": 0.05} if name in ("grafting-continual", "graft-retrain") else {})
    )
    second = trained.stream.benchmark.train_stream[1]
    before, begin = trained.evaluate()["qnli"].logits, trained.begin

    def broken(task: Any) -> Training:
        begin(task)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trained, "begin", broken)
        trained.train(second)
    assert np.array_equal(trained.evaluate()["qnli"].logits, before)
    trained.train(second)
    assert np.array_equal(trained.evaluate()["qnli"].logits, before)
    if trained.ledger is not None:
        trained.ledger_model._switch.to(0)
        assert torch.equal(weights(trained), trained.pre_trained.theta)


@dataclass(frozen=True, kw_only=True)
class Patience(TrainingOptions):
    patience: int = option(3, "no argument of the plugin", at_least=1)


def test_options_of_your_own_stand_beside_a_plugins_arguments() -> None:
    class Patient(PluginStrategy, plugin=LwFPlugin, temperature=option(2.0, "T", above=0)):
        Options = Patience

    made = learned(Patient, patience=5, temperature=4.0)
    assert (made.options.patience, made.avalanche_plugin.lwf.temperature) == (5, 4.0)
