"""Grafts merged entry by entry."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from peft.utils.merge_utils import task_arithmetic as peft_task_arithmetic
from peft.utils.merge_utils import ties as peft_ties
from torch import Tensor

from forgetfree.core.merging import WEIGHTS, MergeRule
from forgetfree.core.regions import Region
from forgetfree.errors import OptionError
from forgetfree.ledger import merging
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.merging import merged_graft, trimmed

# -- Grafts, merged: by hand, by PEFT's own functions, and by an obvious reference, entry after entry ------

#: θ_pre of six entries, and three grafts on it. Task vectors, 0 where a graft holds nothing:
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


@pytest.mark.parametrize(
    ("rule", "settings", "values"),
    [
        # The sums are 3, 2, 1 and −8.
        ("task-arithmetic", {"weight": 1.0}, [4.0, 4.0, 5.0, -3.0]),
        ("task-arithmetic", {"weight": 0.5}, [2.5, 3.0, 4.5, 1.0]),
        ("task-arithmetic", {}, [1 + 0.4 * 3, 2 + 0.4 * 2, 4 + 0.4 * 1, 5 - 0.4 * 8]),
        # Elected are +, +, +, −: the means of {4, 2}, {3}, {2, 1} and {−8}.
        ("ties", {"density": 1.0}, [4.0, 5.0, 5.5, -3.0]),
        ("ties", {"density": 1.0, "weight": 0.5}, [2.5, 3.5, 4.75, 1.0]),
        # The two largest of six each: {+4, +2 at 3}, {+3, +2 at 0 before −2 at 3}, {−3, −8}. Sums: 3, 3, 2, −8.
        ("ties", {"density": 0.34}, [4.0, 5.0, 6.0, -3.0]),
        # Means of the values {5, 3, −2}, {1, 5}, {6, 2, 5} and {−3}.
        ("stitch", {}, [2.0, 3.0, 13 / 3, -3.0]),
    ],
)
def test_by_hand(rule: Any, settings: dict[str, float], values: list[float]) -> None:
    merged = merged_graft(GRAFTS, PRE, rule, **settings)
    assert merged.region == Region.of([0, 1, 3, 4])
    assert torch.equal(merged.values, torch.tensor(values))


def test_an_elected_sign_without_a_majority_is_plus() -> None:
    even = [Graft(Region.of([1]), torch.tensor([2.0 + change])) for change in (3.0, -3.0)]
    assert merged_graft(even, PRE, "ties", density=1.0).values.tolist() == [5.0]


def random_grafts(count: int, size: int, seed: int) -> tuple[list[Graft], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pre, grafts = torch.randn(size, generator=generator), []
    for number in range(count):
        region = Region.from_mask(torch.rand(size, generator=generator) < 0.2 + 0.2 * number)
        moved = torch.randn(len(region), generator=generator) * 0.1
        grafts.append(Graft(region, pre[region.indices] + moved))
    return grafts, pre


def by_the_book(rule: str, grafts: list[Graft], pre: Tensor, weight: float, density: float) -> dict[int, float]:
    """Each entry by itself, in Python's floats."""
    held = [dict(zip(g.region.indices.tolist(), g.values.tolist(), strict=True)) for g in grafts]
    base = pre.tolist()
    vectors = [{entry: value - base[entry] for entry, value in each.items()} for each in held]
    if rule == "ties":
        keep = math.floor(density * len(base) + 1e-6)
        vectors = [dict(sorted(v.items(), key=lambda item: (-abs(item[1]), item[0]))[:keep]) for v in vectors]
    found = {}
    for entry in sorted({entry for each in vectors for entry in each}):
        changes = [each[entry] for each in vectors if entry in each]
        if rule == "task-arithmetic":
            found[entry] = base[entry] + weight * sum(changes)
        elif rule == "ties":
            sign = 1 if sum(changes) >= 0 else -1
            agreeing = [change for change in changes if change * sign > 0]
            found[entry] = base[entry] + weight * (sum(agreeing) / len(agreeing) if agreeing else 0)
        else:
            values = [each[entry] for each in held if entry in each]
            found[entry] = sum(values) / len(values)
    return found


@pytest.mark.parametrize("rule", get_args(MergeRule))
@pytest.mark.parametrize(("count", "seed"), [(1, 0), (2, 1), (4, 2)])
def test_as_the_reference(rule: Any, count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grafts, pre = random_grafts(count, 500, seed)
    settings: dict[str, float] = {"weight": 0.7} if rule in WEIGHTS else {}
    settings |= {"density": 0.3} if rule == "ties" else {}
    merged = merged_graft(grafts, pre, rule, **settings)
    expected = by_the_book(rule, grafts, pre, 0.7, 0.3)
    assert merged.region.indices.tolist() == list(expected)
    assert torch.allclose(merged.values.double(), torch.tensor(list(expected.values())).double(), rtol=1e-7)
    monkeypatch.setattr(merging, "_STRETCH", 7)  # in pieces, to the same bits
    assert torch.equal(merged_graft(grafts, pre, rule, **settings).values, merged.values)


def test_as_peft_merges_its_adapters() -> None:
    grafts, pre = random_grafts(3, 400, 5)
    vectors = []
    for graft in grafts:
        vector = torch.zeros(400)
        vector[graft.region.indices] = graft.values - pre[graft.region.indices]
        vectors.append(vector)
    for merged, change in (
        (
            merged_graft(grafts, pre, "task-arithmetic", weight=0.6),
            peft_task_arithmetic(vectors, torch.full((3,), 0.6)),
        ),
        (merged_graft(grafts, pre, "ties", weight=0.6, density=0.25), peft_ties(vectors, torch.full((3,), 0.6), 0.25)),
    ):
        theta = pre.clone()
        theta[merged.region.indices] = merged.values
        assert torch.allclose(theta, pre + change, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", get_args(MergeRule))
def test_one_graft_merged_with_an_empty_one_is_itself_bit_for_bit(rule: Any, dtype: torch.dtype) -> None:
    (graft,), pre = random_grafts(1, 300, 3)
    pre, values = pre.to(dtype), graft.values.to(dtype)
    one = trimmed(Graft(graft.region, values), pre, 1.0)  # without what did not move, in bfloat16
    empty = Graft(Region.empty(), values[:0])
    settings = {"weight": 1.0} if rule in WEIGHTS else {}
    settings |= {"density": 1.0} if rule == "ties" else {}
    merged = merged_graft([empty, one], pre, rule, **settings)
    assert merged.region == one.region and merged.values.dtype == dtype
    close = torch.equal if dtype != torch.float64 or rule == "stitch" else torch.allclose
    assert close(merged.values, one.values)


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        ("stitch", {"weight": 1.0}, "The weight is of task-arithmetic and ties: stitch has none"),
        ("task-arithmetic", {"density": 0.5}, "The density is of ties: task-arithmetic has none"),
        ("ties", {"weight": 0.0}, "The weight must be above 0, got 0.0. 1.0 is usual for ties"),
        ("ties", {"weight": math.inf}, "The weight must be above 0, got inf"),
        ("ties", {"density": 1.5}, "The density must be above 0 and at most 1, got 1.5"),
        ("ties", {"density": 0.01}, "density 0.01 leaves no entry of the 6"),
    ],
)
def test_a_setting_out_of_place_is_refused(rule: Any, settings: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message.replace(".", r"\.")):
        merged_graft(GRAFTS, PRE, rule, **settings)
