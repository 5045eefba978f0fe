"""Merging as strategies: what is merged, what answers, what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forgetfree import registry
from forgetfree.core.graft import grafted
from forgetfree.errors import OptionError
from forgetfree.ledger import Ledger, merged_graft
from forgetfree.options import build
from forgetfree.testing.tiny import tiny_stream

SMALL = {"steps": 4, "batch_size": 4, "learning_rate": 0.3, "momentum": 0.9}
TASKS = ("qnli", "ag_news", "sst2")
OWN: dict[str, dict[str, Any]] = {
    "merge-task-arithmetic": {"weight": 0.5},
    "merge-ties": {"density": 0.3},
    "merge-stitch": {"sparsity": 0.4, "mask_steps": 2},
}


def make(name: str, stream: Any, **changes: Any) -> Any:
    cls = registry.strategy(name)
    return cls(stream=stream, options=build(cls.Options, SMALL | OWN.get(name, {}) | changes, name))


def learned(name: str) -> Any:
    strategy = make(name, tiny_stream(TASKS))
    for experience in strategy.stream.benchmark.train_stream:
        strategy.train(experience)
    return strategy


@pytest.mark.sampled("merge-task-arithmetic")
@pytest.mark.parametrize("name", OWN)
def test_tasks_are_answered_by_the_merge_of_their_models_fine_tuned_alone(name: str) -> None:
    """θ_t is what fine-tune makes of the same task with the same seed; the merge is by hand, whole vector by whole vector."""
    reference = make("fine-tune", tiny_stream(TASKS))
    thetas = []
    for experience in reference.stream.benchmark.train_stream:
        reference.train(experience)
        thetas.append(reference.models.of(reference.learned[-1]).theta)
    pre = reference.pre_trained.theta
    strategy = learned(name)
    regions = [record.region for record in strategy.ledger.records]
    vectors = torch.stack([theta - pre for theta in thetas]).double()
    gammas = torch.stack([region.mask(len(pre)) for region in regions])
    if name == "merge-task-arithmetic":
        change = 0.5 * vectors.sum(0)
    elif name == "merge-ties":
        vectors = vectors * gammas
        sign = torch.where(vectors.sum(0) >= 0, 1.0, -1.0)
        agree = (vectors * sign > 0).double()
        change = (vectors * agree).sum(0) / agree.sum(0).clamp(min=1)
        assert [len(region) for region in regions] == [int(0.3 * len(pre))] * 3
    else:
        change = (vectors * gammas).sum(0) / gammas.sum(0).clamp(min=1)
        assert max(map(len, regions)) <= 0.4 * len(pre)
        assert int((gammas.sum(0) > 1).sum()) > 0  # some overlap
    with strategy.answering(strategy.learned[0]):
        theta = strategy.space.flatten(strategy.model.backbone)
    assert torch.allclose(theta, (pre.double() + change).float(), atol=1e-6)
    assert not torch.equal(theta, pre)
    assert torch.equal(strategy.space.flatten(strategy.model.backbone), pre)  # at rest
    for task, state in zip(strategy.learned, reference.learned, strict=True):
        ours, theirs = strategy.readouts[task.name], reference.readouts[state.name]
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.sampled("merge-task-arithmetic")
@pytest.mark.parametrize("name", OWN)
def test_one_task_is_answered_as_its_graft_answers(name: str) -> None:
    changes = {"weight": 1.0} if name == "merge-task-arithmetic" else {}
    strategy = make(name, tiny_stream(TASKS), **changes)
    strategy.train(next(iter(strategy.stream.benchmark.train_stream)))
    graft, task = strategy.ledger.records[0].owned, strategy.learned[0]
    model = strategy.model
    with strategy.answering(task):
        merged = strategy.space.flatten(model.backbone)
    with grafted(model.backbone, strategy.space, graft.region, graft.values):
        assert torch.equal(strategy.space.flatten(model.backbone), merged)


def test_what_is_kept_are_the_grafts_and_the_merged_ledger(tmp_path: Any) -> None:
    kept = {}
    for name in OWN:
        strategy = learned(name)
        strategy.save(tmp_path / name)
        ledger = Ledger.load(tmp_path / name / "grafts.safetensors")
        assert ledger.composition == "alone" and len(ledger.records) == 3
        merged = Ledger.load(tmp_path / name / "ledger.safetensors")
        assert merged.tasks == ledger.tasks and merged.owned() == strategy.merged().region
        assert all(torch.equal(merged.graft(task).values, strategy.merged().values) for task in merged.tasks)
        kept[name] = strategy.bytes_kept()
        assert kept[name] == sum(file.stat().st_size for file in (tmp_path / name).iterdir())
        answers = strategy.evaluate()
        again = make(name, tiny_stream(TASKS))
        again.load(tmp_path / name)
        assert all((answers[task].logits == found.logits).all() for task, found in again.evaluate().items())
        assert torch.equal(again.merged().values, merge_of(name, ledger, strategy).values)
    assert kept["merge-task-arithmetic"] > 3 * 2 * len(strategy.space)  # three changed models, as they are
    assert kept["merge-ties"] < kept["merge-task-arithmetic"]


def merge_of(name: str, ledger: Ledger, strategy: Any) -> Any:
    rule: Any = name.removeprefix("merge-")
    settings = {key: value for key, value in OWN[name].items() if key in ("weight", "density")}
    return merged_graft([record.owned for record in ledger.records], strategy.pre_trained.theta, rule, **settings)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("merge-ties", {"density": 1e-9}, "leaves no entry"),
        ("merge-ties", {"density": 0.0}, "above 0"),
        ("merge-task-arithmetic", {"weight": -1.0}, "above 0"),
        ("merge-stitch", {"sparsity": 1e-9}, "leaves no entry"),
    ],
)
def test_bad_options_are_refused_before_training(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(name, tiny_stream(TASKS), **changes)
