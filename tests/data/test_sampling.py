"""Samples and batches by seed."""

from __future__ import annotations

from collections import Counter

import pytest

from forgetfree.data.rows import Rows
from forgetfree.data.sampling import by_length, evenly, k_shot, micro_batches, plan_batches, representative
from forgetfree.errors import UsageError

ROWS = Rows(tuple(f"row {i}" for i in range(30)), (), tuple((0, 1, 2, 1, 1)[i % 5] for i in range(30)))


def test_k_shot_draws_as_many_rows_of_every_label() -> None:
    sample = k_shot(ROWS, 4, seed=0, task="own")
    assert sorted(sample.labels) == [0] * 4 + [1] * 4 + [2] * 4
    assert len(set(sample.first)) == 12


def test_k_shot_keeps_rows_and_labels_together_in_their_order() -> None:
    sample = k_shot(ROWS, 4, seed=0, task="own")
    places = [ROWS.first.index(text) for text in sample.first]
    assert places == sorted(places)
    assert sample == ROWS.take(places)


def test_k_shot_is_drawn_by_seed() -> None:
    assert k_shot(ROWS, 4, seed=1, task="own") == k_shot(ROWS, 4, seed=1, task="own")
    assert len({k_shot(ROWS, 4, seed=seed, task="own").first for seed in range(5)}) == 5


def test_k_shot_may_take_the_whole_of_the_rarest_label() -> None:
    assert k_shot(ROWS, 6, seed=0, task="own").labels.count(0) == 6


def test_more_shots_than_rows_are_refused_with_the_largest_that_will_do() -> None:
    with pytest.raises(
        UsageError, match=r"Task 'own' has 6 training rows of label 0, fewer than --shots 7\. Give --shots 6"
    ):
        k_shot(ROWS, 7, seed=0, task="own")


@pytest.mark.parametrize("shots", [0, -1])
def test_no_shots_are_refused(shots: int) -> None:
    with pytest.raises(UsageError, match=f"--shots must be at least 1, got {shots}"):
        k_shot(ROWS, shots, seed=0, task="own")


LENGTHS = [(7 * i) % 23 for i in range(1000)]


def test_an_epoch_holds_no_row_twice() -> None:
    """1000 rows are 125 batches of 8."""
    plan = plan_batches(LENGTHS, 8, 250, seed=0)
    assert len(plan) == 250
    for epoch in (plan[:125], plan[125:]):
        assert sorted(i for batch in epoch for i in batch) == list(range(1000))
    assert plan[:125] != plan[125:]


def test_batches_hold_rows_of_similar_length() -> None:
    spread = [
        max(LENGTHS[i] for i in batch) - min(LENGTHS[i] for i in batch) for batch in plan_batches(LENGTHS, 8, 125, 0)
    ]
    assert sum(spread) / len(spread) < 2


def test_a_plan_is_drawn_by_seed_and_a_shorter_one_is_its_beginning() -> None:
    plan = plan_batches(LENGTHS, 8, 60, seed=3)
    assert plan == plan_batches(LENGTHS, 8, 60, seed=3)
    assert plan[:10] == plan_batches(LENGTHS, 8, 10, seed=3)
    assert plan != plan_batches(LENGTHS, 8, 60, seed=4)
    assert plan_batches(LENGTHS, 8, 0, seed=3) == []


def test_the_last_smaller_batch_of_an_epoch_is_left_out_unless_it_is_all_there_is() -> None:
    assert {len(batch) for batch in plan_batches([1] * 10, 4, 20, seed=0)} == {4}
    assert [sorted(batch) for batch in plan_batches([1] * 3, 4, 2, seed=0)] == [[0, 1, 2]] * 2


def test_evaluation_batches_hold_every_row_once_shortest_first() -> None:
    batches = by_length([3, 1, 2, 5, 4], 2)
    assert batches == [[1, 2], [0, 4], [3]]


def test_rows_in_the_order_of_their_labels_are_picked_from_every_label() -> None:
    turning = [0, 1, 2] * 10  # an even stride over 30 rows of which 10 are wanted meets one label alone
    picked = representative(turning, 10)
    assert sorted(turning[row] for row in picked) == [0] * 4 + [1] * 3 + [2] * 3
    assert picked == sorted(set(picked))
    assert representative(turning, None) == representative(turning, 99) == list(range(30))
    mixed = [0, 1, 1, 0] * 10
    assert representative(mixed, 8) == evenly(40, 8)
    assert representative([], 5) == []


@pytest.mark.parametrize(
    ("labels", "count", "expected"),
    [
        ([int(i % 10 == 9) for i in range(1000)], 100, {0: 90, 1: 10}),  # evenly, every positive would be stepped over
        ([int(i % 25 == 7) for i in range(3200)], 128, {0: 123, 1: 5}),
        ([0] * 97 + [1, 2, 3], 10, {0: 7, 1: 1, 2: 1, 3: 1}),  # rare ones are held, too
        ([0] * 97 + [1, 2, 3], 4, {0: 1, 1: 1, 2: 1, 3: 1}),
        ([0] * 60 + [1] * 40, 7, {0: 4, 1: 3}),
        ([0, 1, 2, 1, 1, 2, 0, 0, 1], 2, {0: 1, 1: 1}),  # the rarest is left out
    ],
)
def test_picked_rows_hold_rare_labels(labels: list[int], count: int, expected: dict[int, int]) -> None:
    picked = representative(labels, count)
    assert Counter(labels[row] for row in picked) == expected
    assert picked == sorted(set(picked)) and len(picked) == count


def test_more_labels_than_rows_are_picked_as_far_as_they_go() -> None:
    picked = representative([i % 50 for i in range(5000)], 10)
    assert len({row % 50 for row in picked}) == len(picked) == 10


def test_rows_are_picked_evenly() -> None:
    assert evenly(10, None) == evenly(10, 12) == evenly(10, 10) == list(range(10))
    assert evenly(10, 4) == [0, 2, 5, 7]
    assert evenly(7, 0) == []


def test_a_large_batch_is_cut_in_order() -> None:
    assert list(micro_batches([4, 5, 6, 7, 8], 2)) == [[4, 5], [6, 7], [8]]
