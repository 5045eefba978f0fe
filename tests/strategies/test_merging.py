"""Merging: grafts entry by entry; as strategies, the merged weights, their predictions, the stored files."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from compared import learn
from safetensors.torch import load_file
from small_strategies import make
from torch import Tensor

from forgetfree.core.regions import Region
from forgetfree.core.selection import budget, most_moved
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Ledger
from forgetfree.strategies import merging
from forgetfree.strategies.merging import merged_graft, stitch, task_arithmetic, ties
from forgetfree.testing.tiny import tiny_stream

TASKS = ("qnli", "ag_news", "sst2")
MERGING = ("merge-task-arithmetic", "merge-ties", "merge-stitch")


def learned(name: str) -> Any:
    return learn(make(name, tiny_stream(TASKS)))


@pytest.mark.sampled("merge-task-arithmetic")
@pytest.mark.parametrize("name", MERGING)
def test_tasks_are_answered_by_the_merge_of_their_models_fine_tuned_alone(name: str) -> None:
    """θ_t is that of fine-tune with the same task and seed; the reference merges whole vectors."""
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
        assert int((gammas.sum(0) > 1).sum()) > 0  # some entries overlap
    with strategy.answering(strategy.learned[0]):
        theta = strategy.space.flatten(strategy.model.backbone)
    assert torch.allclose(theta, (pre.double() + change).float(), atol=1e-6)
    assert not torch.equal(theta, pre)
    assert torch.equal(strategy.space.flatten(strategy.model.backbone), pre)  # between evaluations
    for task, state in zip(strategy.learned, reference.learned, strict=True):
        ours, theirs = strategy.readouts[task.name], reference.readouts[state.name]
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_what_is_kept_are_the_grafts_and_the_merged_ledger(tmp_path: Any) -> None:
    kept = {}
    for name in MERGING:
        strategy = learned(name)
        strategy.save(tmp_path / name)
        ledger = Ledger.load(tmp_path / name / "grafts.safetensors")
        assert [record.parent for record in ledger.records] == [""] * 3
        merged = Ledger.load(tmp_path / name / "ledger.safetensors")
        assert merged.tasks == ledger.tasks and merged.owned() == strategy.merged().region
        assert all(torch.equal(merged.graft(task).values, strategy.merged().values) for task in merged.tasks)
        kept[name] = strategy.bytes_kept()
        tensors = [each for file in (tmp_path / name).iterdir() for each in load_file(file).values()]
        assert kept[name] == sum(tensor.nbytes for tensor in tensors)
        answers = strategy.evaluate()
        again = make(name, tiny_stream(TASKS))
        again.load(tmp_path / name)
        assert all((answers[task].logits == found.logits).all() for task, found in again.evaluate().items())
        assert torch.equal(
            again.merged().values,
            merged_graft([each.owned for each in ledger.records], strategy.pre_trained.theta, strategy.rule).values,
        )
    assert kept["merge-task-arithmetic"] > 3 * 2 * len(strategy.space)  # three changed models, unsparsified
    assert kept["merge-ties"] < kept["merge-task-arithmetic"]


# -- Grafts, by hand -------------------------------------------------------------------------------------

#: θ_pre of six entries, and three grafts on it. Task vectors, 0 where a graft has no entry:
#:     entry       0     1     2     3     4     5
#:     τ_1        +4    −1     ·    +2     ·     ·
#:     τ_2        +2    +3     ·    −2     ·     ·
#:     τ_3        −3     ·     ·    +1    −8     ·
PRE = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
GRAFTS = [
    Graft(Region.of([0, 1, 3]), torch.tensor([5.0, 1.0, 6.0])),
    Graft(Region.of([0, 1, 3]), torch.tensor([3.0, 5.0, 2.0])),
    Graft(Region.of([0, 3, 4]), torch.tensor([-2.0, 5.0, -3.0])),
]


RULES: dict[str, Any] = {"task-arithmetic": task_arithmetic, "ties": ties, "stitch": stitch}


def merge(
    grafts: list[Graft], pre: Tensor, rule: str, weight: float | None = None, density: float | None = None
) -> Graft:
    """Merge grafts by a rule; for TIES each is first trimmed to its most moved entries."""
    if density is not None:
        most = [most_moved(pre[each.region.indices], each.values, budget(len(pre), density)).indices for each in grafts]
        grafts = [Graft(Region(g.region.indices[at]), g.values[at]) for g, at in zip(grafts, most, strict=True)]
    return merged_graft(grafts, pre, RULES[rule] if weight is None else partial(RULES[rule], weight=weight))


@pytest.mark.parametrize(
    ("rule", "settings", "values"),
    [
        # The sums are 3, 2, 1 and −8.
        ("task-arithmetic", {"weight": 1.0}, [4.0, 4.0, 5.0, -3.0]),
        ("task-arithmetic", {"weight": 0.5}, [2.5, 3.0, 4.5, 1.0]),
        # The elected signs are +, +, +, −: the means of {4, 2}, {3}, {2, 1} and {−8}.
        ("ties", {"density": 1.0, "weight": 1.0}, [4.0, 5.0, 5.5, -3.0]),
        ("ties", {"density": 1.0, "weight": 0.5}, [2.5, 3.5, 4.75, 1.0]),
        # The two largest of each graft: {+4, +2 at 3}, {+3, +2 at 0 before −2 at 3}, {−3, −8}. Sums: 3, 3, 2, −8.
        ("ties", {"density": 0.34, "weight": 1.0}, [4.0, 5.0, 6.0, -3.0]),
        # Means of the values {5, 3, −2}, {1, 5}, {6, 2, 5} and {−3}.
        ("stitch", {}, [2.0, 3.0, 13 / 3, -3.0]),
    ],
)
@pytest.mark.parametrize("stretch", [2**20, 3])  # the whole vector at once, and in pieces
def test_by_hand(
    rule: Any, settings: dict[str, float], values: list[float], stretch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "_STRETCH", stretch)
    merged = merge(GRAFTS, PRE, rule, **settings)
    assert merged.region == Region.of([0, 1, 3, 4])
    assert torch.equal(merged.values, torch.tensor(values))


def test_an_elected_sign_without_a_majority_is_plus() -> None:
    even = [Graft(Region.of([1]), torch.tensor([2.0 + change])) for change in (3.0, -3.0)]
    assert merge(even, PRE, "ties", 1.0).values.tolist() == [5.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_one_graft_merged_with_an_empty_one_is_itself_bit_for_bit(rule: Any, dtype: torch.dtype) -> None:
    pre, values = (PRE / 3).to(dtype), (GRAFTS[0].values / 7).to(dtype)
    one = merge([Graft(GRAFTS[0].region, values)], pre, "stitch", density=1.0)  # drops entries unmoved in bfloat16
    empty = Graft(Region.empty(), values[:0])
    settings = {"weight": 1.0} if rule != "stitch" else {}
    settings |= {"density": 1.0} if rule == "ties" else {}
    merged = merge([empty, one], pre, rule, **settings)
    assert merged.region == one.region and merged.values.dtype == dtype
    close = torch.equal if dtype != torch.float64 or rule == "stitch" else torch.allclose
    assert close(merged.values, one.values)
