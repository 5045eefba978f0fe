"""Parts of a batch and the tree that adds them up, by hand and in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from forgetfree.errors import OptionError
from forgetfree.parallel import exchange, parts
from forgetfree.parallel.exchange import own_items, own_parts, tree_sum
from forgetfree.parallel.parts import Part, PartSum, cut
from forgetfree.training.training_options import TrainingOptions

#: Of which (a + b) + c differs from a + (b + c) in float32, so that the order shows.
BIG, SMALL = 2.0**24, 1.0


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setattr(exchange, "_group", exchange._Group(rank, size))


def test_a_tree_adds_neighbours_first() -> None:
    values = [torch.tensor([each]) for each in (BIG, SMALL, SMALL, -BIG)]
    # (2^24 + 1) + (1 − 2^24) = 2^24 + (1 − 2^24) = 1; one after the other, (((2^24 + 1) + 1) − 2^24) = 0.
    assert tree_sum(values).tolist() == [1.0]
    assert (((values[0] + values[1]) + values[2]) + values[3]).tolist() == [0.0]
    assert tree_sum(values[:1]).tolist() == [BIG]


def test_parts_and_batches_are_dealt_out_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, expected in ((1, [[0, 1, 2, 3]]), (2, [[0, 1], [2, 3]]), (4, [[0], [1], [2], [3]])):
        found = []
        for rank in range(size):
            as_rank(monkeypatch, rank, size)
            found.append(list(own_parts(4)))
        assert found == expected
    as_rank(monkeypatch, 1, 2)
    assert own_items("abcde") == "bd"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_processes_add_up_to_the_same_bits(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Each process's part of the tree, joined by the tree over the processes, is the tree over all parts."""
    gradients = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 7)
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(1))]
    handed: list[Tensor] = []
    monkeypatch.setattr(parts, "summed", lambda vector: handed.append(vector.clone()) or vector)
    for rank in range(size):
        as_rank(monkeypatch, rank, size)
        added = PartSum(parameters, 4)
        for part in own_parts(4):
            parameters[0].grad, parameters[1].grad = gradients[part, :6].view(2, 3).clone(), gradients[part, 6:].clone()
            added.take(0.5 + part)
            assert parameters[0].grad is None
        added.give()
    total = tree_sum(handed)
    (a, b, c, d) = gradients
    assert torch.equal(total[:7], (a + b) + (c + d))
    assert total[7:].tolist() == [0.5 + 1.5 + 2.5 + 3.5, 4, 4]  # the loss, and how many parts had each gradient


def test_what_no_part_has_a_gradient_for_has_none_in_the_sum() -> None:
    used, unused, half = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1).half())
    added = PartSum([used, unused, half], 2)
    used.grad, half.grad = torch.tensor([1.0, 2.0]), torch.tensor([3.0]).half()
    added.take(1.0)
    used.grad = torch.tensor([10.0, 20.0])
    added.take(torch.tensor(2.0))
    assert float(added.give()) == 3.0
    assert used.grad.tolist() == [11.0, 22.0] and unused.grad is None
    assert half.grad.dtype == torch.float16 and half.grad.tolist() == [3.0]
    used.grad = torch.tensor([1.0, 1.0])  # the next batch starts anew
    added.take(0.0)
    added.take(0.0)
    assert float(added.give()) == 0.0 and used.grad.tolist() == [1.0, 1.0]


def test_numbered_parts_of_a_batch_and_of_one_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    options = TrainingOptions(parts=4)
    whole = [
        Part([10, 11], 0.25, True, False, 0),
        Part([12, 13], 0.25, False, False, 1),
        Part([14, 15], 0.25, False, False, 2),
        Part([16, 17], 0.25, False, True, 3),
    ]
    assert list(cut(range(10, 18), options)) == [Part(range(p.rows[0], p.rows[0] + 2), *_rest(p)) for p in whole]
    small = [(part.rows, part.share) for part in cut([5, 9, 2], options)]
    assert small == [([5], 0.0), ([5], 1 / 3), ([9], 1 / 3), ([2], 1 / 3)]
    weighted = [part.share for part in cut([0, 1, 2, 3], options, counts=[3, 1, 1, 5])]
    assert weighted == [0.3, 0.1, 0.1, 0.5]
    as_rank(monkeypatch, 1, 2)
    mine = list(cut([7, 8, 9, 10], options))
    assert mine == [Part([9], 0.25, True, False, 2), Part([10], 0.25, False, True, 3)]


def _rest(part: Part) -> tuple[float, bool, bool, int | None]:
    return part.share, part.first, part.last, part.number


def test_dropout_is_drawn_by_step_and_number() -> None:
    def draw(step: int, number: int | None) -> float:
        Part([0], 1.0, True, True, number).seed_(3, step)
        return float(torch.rand(()))

    torch.manual_seed(0)
    assert draw(1, 2) == draw(1, 2) != draw(1, 3)
    assert draw(2, 2) != draw(1, 2)
    assert draw(1, None) != draw(1, None)  # others go on as they are


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parts": 3}, "power of two, and at most batch_size=8, got 3"),
        ({"parts": 16}, "at most batch_size=8, got 16"),
        ({"parts": 4, "accumulation": 2}, "parts=4 cuts batches already, got accumulation=2"),
        ({"parts": 4, "cache_lower_layers": True, "dropout": False}, "needs cache_lower_layers=false"),
    ],
)
def test_parts_that_cannot_be(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TrainingOptions(**wrong)  # type: ignore[arg-type]
