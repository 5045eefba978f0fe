"""Regions of the highest scores: saliencies and Fisher information worked by hand, bases of γ, and what a tiny region tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import TaskHead
from forgetfree.core.regions import Region
from forgetfree.core.selection import (
    diagonal_fisher,
    mean_gradient,
    most_moved,
    most_salient,
    saliency,
)
from forgetfree.core.trained import Batch, CrossEntropy
from forgetfree.data.examples import DatasetExamples
from forgetfree.errors import TrainingError
from forgetfree.models.task_model import ModuleModel

# -- Saliencies ------------------------------------------------------------------------------------------

G, PRE, FT = [4.0, -2.0, 1.0], [0.5, -0.001, -3.0], [0.5, 0.999, -7.0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("movement", [0, 1, 4]),
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


def test_the_highest_are_taken_but_none_without_a_score_and_none_that_is_left_out() -> None:
    scores = [3.0, 0.0, 5.0, 3.0, 1.0, 9.0]

    def chosen(count: int, taken: Region | None = None) -> list[int]:
        return most_salient(torch.tensor(scores), count, taken).indices.tolist()

    assert chosen(3) == [0, 2, 5]  # of equal ones the first
    assert chosen(3, Region.of([5])) == [0, 2, 3]
    assert chosen(9) == [0, 2, 3, 4, 5]


def layer_of_zeros(dtype: torch.dtype = torch.float32) -> nn.Module:
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


BATCH_ROWS: list[tuple[list[float], int]] = [([2.0, 0.0], 1), ([4.0, 6.0], 0), ([0.0, 0.0], 0), ([2.0, 2.0], 1)]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_gradient_is_the_mean_over_rows_however_they_are_cut(size: int) -> None:
    """∂L/∂w of a row is (1/2 − y)·x: −(1, 0), (2, 3), (0, 0), −(1, 1), whose mean is (0, 1/2)."""
    layer = layer_of_zeros()
    assert gradient_of(layer, BATCH_ROWS, size).tolist() == [0, 0, 0, 0.5]
    assert layer.weight.grad is None and layer.weight.requires_grad


def test_small_parts_add_up_beside_large_ones_in_half_precision() -> None:
    """128 and a hundred times 1/4: in bfloat16, whose steps are 1 there, each of these would be lost."""
    rows: list[tuple[list[float], int]] = [([256.0, 0.0], 0)] + [([0.5, 0.0], 0)] * 100
    found = gradient_of(layer_of_zeros(torch.bfloat16), rows, 1)
    assert found.dtype == torch.float32
    assert float(found[2]) == pytest.approx(153 / 101, rel=0.01)


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    """The slope of √|f| at f = 0, where the loss itself is finite."""
    layer: Any = layer_of_zeros()
    loss = CrossEntropy(lambda x, t: layer(x).abs().sqrt(), torch.device("cpu"), "fp32")
    y = torch.tensor([0])
    with pytest.raises(TrainingError, match="gradients by which a region is chosen add up to nan"):
        mean_gradient(layer, ParameterSpace.of(layer), [(torch.ones(1, 2), y, y)], loss)


# -- Fisher information, and bases -------------------------------------------------------------------------

ROWS = [(torch.tensor([2.0, 0.0]), 1), (torch.tensor([4.0, 6.0]), 0)]


def logistic(dropout: float = 0.0) -> ModuleModel:
    """f = w·x with w = 0, and logits (0, f): p(1|x) = σ(f) = 1/2."""
    network = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Dropout(dropout), nn.Linear(1, 2))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network[2].weight[1] = 1.0
    model = ModuleModel(network)
    model.add_task(TaskHead("toy", 2))
    return model


def examples(rows=ROWS) -> DatasetExamples:
    return DatasetExamples(rows, [label for _, label in rows], task=0)


def one_by_one(rows: DatasetExamples) -> list[Batch]:
    return [rows.batch([row]) for row in range(len(rows))]


def test_the_diagonal_is_the_mean_of_squared_gradients() -> None:
    """∂ log p(y|x)/∂w = (y − 1/2)·x: (1, 0) and (−2, −3). Their squares' mean: (5/2, 9/2); their mean's square: (1/4, 9/4)."""
    model = logistic()
    assert diagonal_fisher(model, model.space(), one_by_one(examples())).tolist() == [2.5, 4.5]


def test_the_model_is_left_as_it_was() -> None:
    """Weights, gradients, mode and precision stay; dropout is off, and gradients are those of float32."""
    model = logistic(dropout=0.9).train()
    model.precision = "bf16"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = examples([(torch.tensor([0.3, 2.1]), 1)])  # in bf16, 0.3008 and 2.09
    found = diagonal_fisher(model, model.space(), one_by_one(rows))
    assert found.tolist() == pytest.approx([0.0225, 1.1025], rel=1e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.precision == "bf16"
    assert model.training and all(p.grad is None and p.requires_grad for p in model.parameters())
