"""Where a region is searched for, what it stands on, and which values its training starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from avalanche.core import SupervisedPlugin
from torch.nn import functional as F

from forgetfree import registry
from forgetfree.errors import UsageError
from forgetfree.results.answers import LabelAnswers
from forgetfree.training.loop import loss_of, quality_of
from forgetfree.training.training_options import TrainingOptions

MakeStream = Callable[..., Any]
OPTIONS: dict[str, Any] = {
    **{"steps": 4, "batch_size": 4, "optimizer": "sgd", "learning_rate": 0.05, "sparsity": 0.05},
    **{"mask_steps": 2, "mask_batch_size": 12},
}


def learn(stream: Any, count: int = 2, name: str = "grafting-continual", **changes: Any) -> Any:
    cls = registry.strategy(name)
    plugins = changes.pop("plugins", None)
    strategy = cls(stream=stream, options=cls.Options(**OPTIONS | changes), device="cpu", plugins=plugins)
    for experience in list(stream.benchmark.train_stream)[:count]:
        strategy.train(experience)
    return strategy


def owned(strategy: Any) -> list[Any]:
    return [record.owned for record in strategy.ledger.records]


def test_the_loss_needs_no_metric(tiny_stream: MakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = tiny_stream("bert", "linear", stream="sst2")
    (task,), model = stream.tasks, stream.model
    score, minus = quality_of(model, task, task.validation, TrainingOptions())
    x, y, t = task.validation.batch(range(len(task.validation)))
    with torch.no_grad():
        logits = model.eval()(x, t)
    assert score == pytest.approx(float((logits.argmax(-1) == y).float().mean()))
    assert -minus == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-5)
    monkeypatch.delattr(LabelAnswers, "score")
    assert loss_of(model, task, task.validation, TrainingOptions()) == -minus


def test_the_rate_of_a_region_is_multiplied(tiny_stream: MakeStream) -> None:
    def rate(**changes: Any) -> float:
        strategy = registry.strategy("grafting-continual")
        made = strategy(stream=tiny_stream(), options=strategy.Options(**OPTIONS | changes), device="cpu")
        trained: float = made.begin(made.stream.tasks[0]).options.learning_rate
        return trained

    adamw = {"optimizer": "adamw", "sparsity": 0.01, "learning_rate": 1e-3}
    assert rate(**adamw, region_rate_factor=3.0) == pytest.approx(3e-2, rel=0.01)
    assert rate(region_rate_factor=0.5) == 0.025


def test_alone_each_task_is_a_retrained_graft(tiny_stream: MakeStream) -> None:
    """The same bits as graft-retrain's from the fine-tuned values, whatever was learned before."""
    one = learn(tiny_stream(), composition="alone")
    other = learn(tiny_stream(), name="graft-retrain", region_start="fine-tuned")
    union = learn(tiny_stream())
    for mine, theirs in zip(owned(one), owned(other), strict=True):
        assert torch.equal(mine.region.indices, theirs.region.indices) and torch.equal(mine.values, theirs.values)
    assert not torch.equal(owned(union)[1].values, owned(one)[1].values)
    with pytest.raises(UsageError, match="composition=alone stands each task on θ_pre"):
        learn(tiny_stream(), composition="alone", localize_at="union")


def test_a_region_found_on_the_union_has_only_free_entries(tiny_stream: MakeStream) -> None:
    on_pre, on_union = (learn(tiny_stream(), localize_at=at) for at in ("pretrained", "union"))
    first, second = (record.region for record in on_union.ledger.records)
    assert torch.equal(first.indices, on_pre.ledger.records[0].region.indices)  # nothing was owned yet
    assert len(first & second) == 0 and len(second)
    assert len(on_pre.ledger.records[0].region & on_pre.ledger.records[1].region) > 0


class Modes(SupervisedPlugin):
    """Whether the model dropped anything while regions were trained."""

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
    strategy = learn(tiny_stream(), 1, dropout=dropout, plugins=[modes])
    assert modes.seen == {expected}
    with_dropout, of_both = (
        strategy.bench(strategy.stream.tasks[0]).key(replace(strategy.options, dropout=each))
        for each in (True, dropout)
    )
    assert with_dropout == of_both  # one fine-tuned model serves both
