"""Scores of entries by gradient, value and move, worked by hand; the mean gradient; how the highest are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from forgetfree.core.batch_loss import CrossEntropy
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.core.selection import mean_gradient, most_moved, most_salient, saliency
from forgetfree.errors import TrainingError

G, PRE, FT = [4.0, -2.0, 1.0], [0.5, -0.001, -3.0], [0.5, 0.999, -7.0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("movement", [0, 1, 4]),
        ("taylor", [0, 2, 4]),
        ("gradient", [4, 2, 1]),
        ("snip", [2, 0.002, 3]),
        ("gallop", [4 / 0.501, 2 / 0.002, 1 / 3.001]),
        ("fisher", G),
        ("random", G),
    ],
)
def test_scores_worked_by_hand(kind: Any, expected: list[float]) -> None:
    assert saliency(kind, *map(torch.tensor, (G, PRE, FT))).tolist() == pytest.approx(expected, rel=1e-6)


def test_moves_are_scored_as_a_base_is_chosen() -> None:
    """Small moves of bfloat16 count, too: they are subtracted in float32."""
    pre = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    ft = (pre.float() + 0.01 * torch.randn(1000, generator=torch.Generator().manual_seed(1))).bfloat16()
    assert most_salient(saliency("movement", torch.empty(0), pre, ft), 50) == most_moved(pre, ft, 50)
    assert torch.equal(saliency("taylor", torch.full((1000,), 2.0), pre, ft), 2 * (ft.float() - pre.float()).abs())


def test_the_highest_are_taken_but_none_without_a_score_and_none_that_is_left_out() -> None:
    scores = [3.0, 0.0, 5.0, 3.0, 1.0, 9.0]

    def chosen(count: int, taken: Region | None = None) -> list[int]:
        return most_salient(torch.tensor(scores), count, taken).indices.tolist()

    assert chosen(3) == [0, 2, 5]  # of equal ones the first
    assert chosen(3, Region.of([5])) == [0, 2, 3]
    assert chosen(9) == [0, 2, 3, 4, 5]


def logistic(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Logits (0, w·x) with w = 0, so that p = 1/2."""
    layer = nn.Linear(2, 2, bias=False, dtype=dtype)
    nn.init.zeros_(layer.weight)
    return layer


def gradient_of(layer: Any, rows: list[tuple[list[float], int]], size: int) -> torch.Tensor:
    def forward(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        logits = layer(x)
        return torch.stack([torch.zeros_like(logits[:, 1]), logits[:, 1]], 1)

    x = torch.tensor([row for row, _ in rows], dtype=layer.weight.dtype)
    y = torch.tensor([label for _, label in rows])
    batches = [(x[i : i + size], y[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]
    space, loss = ParameterSpace.of(layer), CrossEntropy(forward, torch.device("cpu"), "fp32")
    return mean_gradient(layer, space, batches, loss)[0]


ROWS: list[tuple[list[float], int]] = [([2.0, 0.0], 1), ([4.0, 6.0], 0), ([0.0, 0.0], 0), ([2.0, 2.0], 1)]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_gradient_is_the_mean_over_rows_however_they_are_cut(size: int) -> None:
    """∂L/∂w of a row is (1/2 − y)·x: −(1, 0), (2, 3), (0, 0), −(1, 1), whose mean is (0, 1/2)."""
    layer = logistic()
    assert gradient_of(layer, ROWS, size).tolist() == [0, 0, 0, 0.5]
    assert layer.weight.grad is None and layer.weight.requires_grad


def test_small_parts_add_up_beside_large_ones_in_half_precision() -> None:
    """128 and a hundred times 1/4: in bfloat16, whose steps are 1 there, each of these would be lost."""
    rows: list[tuple[list[float], int]] = [([256.0, 0.0], 0)] + [([0.5, 0.0], 0)] * 100
    found = gradient_of(logistic(torch.bfloat16), rows, 1)
    assert found.dtype == torch.float32
    assert float(found[2]) == pytest.approx(153 / 101, rel=0.01)


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    """The slope of √|f| at f = 0, where the loss itself is finite."""
    layer: Any = logistic()
    loss = CrossEntropy(lambda x, t: layer(x).abs().sqrt(), torch.device("cpu"), "fp32")
    y = torch.tensor([0])
    with pytest.raises(TrainingError, match="gradients by which a region is chosen add up to nan"):
        mean_gradient(layer, ParameterSpace.of(layer), [(torch.ones(1, 2), y, y)], loss)
