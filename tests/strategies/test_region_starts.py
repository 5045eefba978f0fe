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
from forgetfree.core.regions import Region
from forgetfree.errors import OptionError, UsageError
from forgetfree.results.answers import LabelAnswers
from forgetfree.training.loop import loss_of, quality_of
from forgetfree.training.scaled_start import choose_scale, scales
from forgetfree.training.training_options import TrainingOptions

MakeStream = Callable[..., Any]
OPTIONS: dict[str, Any] = {
    **{"steps": 4, "batch_size": 4, "optimizer": "sgd", "learning_rate": 0.05, "sparsity": 0.05},
    **{"mask_steps": 2, "mask_batch_size": 12, "mask_evaluations": 1},
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


def test_scales_are_doubled() -> None:
    assert scales(1) == [0, 1] and scales(32) == [0, 1, 2, 4, 8, 16, 32] and scales(31.9) == [0, 1, 2, 4, 8, 16]


def slope_on(model: Any, rows: Any) -> torch.Tensor:
    """Return the gradient of the mean loss on rows."""
    x, y, t = rows.batch(range(len(rows)))
    model.eval()
    with torch.enable_grad():
        gradients = torch.autograd.grad(F.cross_entropy(model(x, t), y), model.space().parameters(model.backbone))
    return torch.cat([each.reshape(-1) for each in gradients])


@pytest.mark.sampled("-3.0")
@pytest.mark.parametrize("away", [3.0, -3.0, 0.0])
def test_the_scale_is_that_of_a_slow_search(tiny_stream: MakeStream, away: float) -> None:
    """The move is chosen with, against, and across the gradient, so that the best scale differs."""
    stream = tiny_stream("bert", "linear", stream="sst2")
    (task,), model = stream.tasks, stream.model
    task = replace(task, validation=task.train)  # more rows than there are of validation
    space, readout = model.space(), model.readout_module(task.label)
    x, y, t = task.train.batch(range(len(task.train)))
    slope = slope_on(model, task.train)
    pre = space.flatten(model.backbone)
    ft = pre - away * slope if away else pre + torch.randn(len(pre), generator=torch.Generator().manual_seed(1))
    region = Region.from_mask(torch.arange(len(pre)) % 7 == 0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def slow(scale: float) -> float:
        space.load_(model.backbone, pre)
        theta = pre.clone()
        for i in region.indices.tolist():
            theta[i] = pre[i] + scale * (ft[i] - pre[i])
        space.load_(model.backbone, theta)
        with torch.no_grad():
            logits = torch.cat([model(x[i : i + 1], t[i : i + 1]) for i in range(len(x))])
        return float(F.cross_entropy(logits, y))

    expected = min(scales(8), key=slow)
    space.load_(model.backbone, pre)
    how: Any = {"options": TrainingOptions(), "largest": 8.0, "rows": 10**6}
    assert choose_scale(model, task, region, pre, ft, **how) == expected
    if away < 0:
        assert expected == 0
    assert choose_scale(model, task, region, pre, pre, **how) == 0  # of equal ones the least
    after = model.state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert list(readout.parameters())


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


def test_a_move_that_leaves_the_numbers_is_not_taken(tiny_stream: MakeStream) -> None:
    stream = tiny_stream("bert", "linear", stream="sst2")
    space = stream.model.space()
    pre = space.flatten(stream.model.backbone)
    how: Any = {"options": TrainingOptions(), "largest": 4.0, "rows": 8}
    everywhere = Region.from_mask(torch.ones(len(pre), dtype=torch.bool))
    assert choose_scale(stream.model, stream.tasks[0], everywhere, pre, pre + 1e38, **how) == 0


def test_a_scaled_region_starts_there(tiny_stream: MakeStream) -> None:
    """Without updates, its values are θ_pre + c · (θ_ft − θ_pre), and results say which c."""
    strategy = learn(tiny_stream(), region_start="scaled", region_steps=0, learning_rate=0.2)
    for task, graft in zip(strategy.stream.tasks, owned(strategy), strict=False):
        scale = strategy.extra_results()["scales"][task.name]
        pre = strategy.pre_trained.theta[graft.region.indices]
        ft = strategy.fine_tuned(task).theta[graft.region.indices]
        assert scale in scales(128)
        assert torch.allclose(graft.values, pre + scale * (ft - pre), atol=1e-6 * max(1, scale))
    assert "scales" not in learn(tiny_stream(), 1).extra_results()


def test_only_one_and_nought_are_tried_where_no_more_is_allowed(tiny_stream: MakeStream) -> None:
    strategy = learn(tiny_stream(), region_start="scaled", largest_scale=1, region_steps=0)
    assert set(strategy.notes.values()) <= {0, 1}
    with pytest.raises(OptionError, match="largest_scale must be at least 1"):
        learn(tiny_stream(), largest_scale=0.5)


def test_no_row_that_is_tested_or_trained_on_chooses_the_scale(tiny_stream: MakeStream) -> None:
    """A move that helps validation rows is taken, whatever others say; under their other labels it is not."""
    stream = tiny_stream("bert", "linear", stream="sst2")
    (task,), model = stream.tasks, stream.model
    pre = stream.model.space().flatten(model.backbone)
    ft = pre - slope_on(model, task.validation)
    everywhere = Region.from_mask(torch.ones(len(pre), dtype=torch.bool))

    def chosen(**rows: Any) -> float:
        how: Any = {"options": TrainingOptions(), "largest": 8.0, "rows": 512}
        return choose_scale(model, replace(task, **rows), everywhere, pre, ft, **how)

    swapped = replace(task.validation, labels=1 - task.validation.labels)
    assert chosen(train=swapped, test=swapped) == chosen() > 0
    assert chosen(validation=swapped) == 0


def test_the_rate_of_a_region_is_multiplied(tiny_stream: MakeStream) -> None:
    def rate(**changes: Any) -> float:
        strategy = registry.strategy("grafting-continual")
        made = strategy(stream=tiny_stream(), options=strategy.Options(**OPTIONS | changes), device="cpu")
        trained: float = made.begin(made.stream.tasks[0]).options.learning_rate
        return trained

    adamw = {"optimizer": "adamw", "sparsity": 0.01, "learning_rate": 1e-3}
    assert rate(**adamw, region_rate_factor=3.0) == pytest.approx(3e-2, rel=0.01)
    assert rate(region_rate_factor=0.5) == 0.025
    assert rate(**adamw, region_rate_factor=3.0, region_learning_rate=0.1) == 0.1


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


@pytest.mark.sampled("True-False-False")
@pytest.mark.parametrize(
    ("dropout", "of_region", "expected"), [(True, None, True), (True, False, False), (False, True, True)]
)
def test_a_region_has_a_dropout_of_its_own(
    tiny_stream: MakeStream, dropout: bool, of_region: bool | None, expected: bool
) -> None:
    modes = Modes()
    learn(tiny_stream(), 1, dropout=dropout, region_dropout=of_region, plugins=[modes])
    assert modes.seen == {expected}
