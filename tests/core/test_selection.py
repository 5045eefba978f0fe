"""Regions of the highest scores: hand-worked saliencies and Fisher information, sums of gradients, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.speed.measurement import PeakMemory
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.core.selection import PlainTensors, choose, each_gradient, each_mean_gradient, most_moved, saliency
from forgetfree.core.trained import CrossEntropy
from forgetfree.errors import TrainingError

# -- Scores -----------------------------------------------------------------------------------------------

G, PRE = [4.0, -2.0, 1.0], [0.5, -0.001, -3.0]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("gradient", [4, 2, 1]),
        ("snip", [2, 0.002, 3]),
        ("gallop", [4 / 0.501, 2 / 0.002, 1 / 3.001]),
        ("fisher", G),
    ],
)
def test_scores_worked_by_hand(source: Any, expected: list[float]) -> None:
    assert saliency(source, torch.tensor(G), torch.tensor(PRE)).tolist() == pytest.approx(expected, rel=1e-6)


class Tensors(nn.Module):
    """A model of two tensors with given values: entries 0 to 2, and 3 to 5."""

    def __init__(self, first: list[float], second: list[float], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor(first, dtype=dtype))
        self.second = nn.Parameter(torch.tensor(second, dtype=dtype))


def test_the_highest_are_taken_of_all_tensors_but_none_without_a_score_and_none_that_is_left_out() -> None:
    """The gradient of Σ score · θ is the score."""
    model = Tensors([0.0] * 3, [0.0] * 3)
    space = ParameterSpace.of(model)

    class Loss:
        scale = 1.0

        def __call__(self, batch: Sequence[Any]) -> float:
            for first, second in batch:
                (model.first @ torch.tensor(first) + model.second @ torch.tensor(second)).backward()
            return 0.0

    def chosen(
        count: int, batches: Sequence[Any] = (([3.0, 0.0, -5.0], [3.0, 1.0, 9.0]),), **left_out: Any
    ) -> list[int]:
        found = choose("gradient", PlainTensors(model, space), count, batches=batches, loss=Loss(), **left_out)
        return found.indices.tolist()

    assert chosen(3) == [0, 2, 5]  # of equal scores, the first
    assert chosen(3, taken=Region.of([5])) == [0, 2, 3]
    assert chosen(3, frozen=[1]) == [0, 2]
    assert chosen(9) == [0, 2, 3, 4, 5]
    model.second.grad = torch.full((3,), 50.0)  # a gradient left by other code
    assert chosen(3) == [0, 2, 5]
    assert chosen(2, [([3.0, 0.0, -5.0], [3.0, 1.0, 9.0]), ([0.0, 0.0, 9.0], [2.0, 0.0, -8.5])]) == [2, 3]  # by the sum


def test_small_moves_of_half_precision_count() -> None:
    """Differences are computed in float32, as for a base region."""
    pre = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    ft = (pre.float() + 0.01 * torch.randn(1000, generator=torch.Generator().manual_seed(1))).bfloat16()
    model = Tensors(pre[:300].tolist(), pre[300:].tolist(), torch.bfloat16)
    chosen = choose("movement", PlainTensors(model, ParameterSpace.of(model)), 50, fine_tuned=[ft[:300], ft[300:]])
    assert chosen == most_moved(pre, ft, 50)


def layer_of_zeros(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a layer with weights 0: logits are (0, w·x) with w = 0, so that p = 1/2."""
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
    loss, found = CrossEntropy(forward, torch.device("cpu"), "fp32"), list[torch.Tensor]()
    read: Any = each_gradient if len(batches) == 1 else each_mean_gradient
    read(
        PlainTensors(layer, ParameterSpace.of(layer)),
        batches,
        loss,
        lambda number, gradient: found.append(gradient.view(-1)),
    )
    return found[0]


BATCH_ROWS: list[tuple[list[float], int]] = [([2.0, 0.0], 1), ([4.0, 6.0], 0), ([0.0, 0.0], 0), ([2.0, 2.0], 1)]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_gradient_is_the_mean_over_rows_however_they_are_cut(size: int) -> None:
    """∂L/∂w of a row is (1/2 − y)·x: −(1, 0), (2, 3), (0, 0), −(1, 1), whose mean is (0, 1/2)."""
    layer = layer_of_zeros()
    assert gradient_of(layer, BATCH_ROWS, size).tolist() == [0, 0, 0, 0.5]
    assert layer.weight.grad is None and layer.weight.requires_grad


def test_small_parts_add_up_beside_large_ones_in_half_precision() -> None:
    """The sum is 128 plus a hundred times 1/4; in bfloat16, whose spacing at 128 is 1, each small term would be lost."""
    rows: list[tuple[list[float], int]] = [([256.0, 0.0], 0)] + [([0.5, 0.0], 0)] * 100
    found = gradient_of(layer_of_zeros(torch.bfloat16), rows, 1)
    assert found.dtype == torch.float32
    assert float(found[2]) == pytest.approx(153 / 101, rel=0.01)


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    """√|f| has no finite slope at f = 0, where the loss itself is finite."""
    layer: Any = layer_of_zeros()
    loss = CrossEntropy(lambda x, t: layer(x).abs().sqrt(), torch.device("cpu"), "fp32")
    y = torch.tensor([0])
    with pytest.raises(TrainingError, match="gradients by which a region is chosen add up to nan"):
        choose("snip", PlainTensors(layer, ParameterSpace.of(layer)), 1, batches=[(torch.ones(1, 2), y, y)], loss=loss)


class Shared(nn.Module):
    """A layer used twice, each time under a reentrant checkpoint: the backward pass gives its gradient in two parts."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x


def test_parts_of_a_gradient_are_added_before_they_are_scored() -> None:
    torch.manual_seed(0)
    reentrant, plain = Shared(True), Shared(False)
    plain.load_state_dict(reentrant.state_dict())
    x, y = torch.randn(8, 4, requires_grad=True), torch.arange(8) % 4
    regions = [
        choose(
            "gradient",
            PlainTensors(model, ParameterSpace.of(model)),
            5,
            batches=[(x, y, y)],
            loss=CrossEntropy(lambda x, t, model=model: model(x), torch.device("cpu")),  # type: ignore[misc]
        )
        for model in (reentrant, plain)
    ]
    assert regions[0] == regions[1] and len(regions[0]) == 5


@pytest.mark.parametrize(("rows", "most"), [(1, 1.0), (2, 5.0)])
def test_nothing_of_the_size_of_the_model_is_made_but_the_sum_of_several_batches(rows: int, most: float) -> None:
    """The peak is in bytes per entry, beside the weights and the largest gradient; a sum of batches takes 4."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(64)))
    space, peak = ParameterSpace.of(model), PeakMemory(*model.parameters())
    batches = [(torch.randn(1, 256, dtype=torch.bfloat16), *[torch.zeros(1, dtype=torch.int64)] * 2)] * rows
    with peak:
        loss = CrossEntropy(lambda x, t: model(x), torch.device("cpu"))
        choose("snip", PlainTensors(model, space), len(space) // 1000, batches=batches, loss=loss)
    assert (peak.bytes - 2 * 256 * 256) / len(space) < most


# -- Fisher information ------------------------------------------------------------------------------------


def test_fisher_information_is_the_mean_of_squared_gradients() -> None:
    """Rows (2, 0) and (4, 6), with p = 1/2 and y = 1, 0, have gradients (1, 0) and (−2, −3); the mean square is (5/2, 9/2).

    The square of the mean would be (1/4, 9/4). A single row's gradient is squared, too.
    """
    layer, found = layer_of_zeros(), list[torch.Tensor]()

    def forward(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return layer(x) * torch.tensor([0.0, 1.0])

    batches = [(torch.tensor([x]), torch.tensor([y]), torch.tensor([y])) for x, y in (([2.0, 0.0], 1), ([4.0, 6.0], 0))]
    loss = CrossEntropy(forward, torch.device("cpu"), summed=True)
    each_mean_gradient(
        PlainTensors(layer, ParameterSpace.of(layer)),
        batches,
        loss,
        lambda _, squares: found.append(squares),
        squared=True,
    )
    assert found[0][1].tolist() == [2.5, 4.5]
    chosen = choose("fisher", PlainTensors(layer, ParameterSpace.of(layer)), 1, batches=batches[1:], loss=loss)
    assert chosen == Region.of([3])  # its gradient is (−2, −3)
