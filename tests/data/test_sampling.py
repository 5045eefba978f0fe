"""Samples and batches by seed."""

from __future__ import annotations

from collections import Counter
from random import Random
from statistics import correlation, mean

import pytest

from forgetfree.data.rows import (
    Rows,
    by_length,
    evenly,
    few_rows_note,
    k_shot,
    micro_batches,
    plan_batches,
    representative,
)
from forgetfree.errors import UsageError
from forgetfree.tasks import TaskDefinition

OWN = TaskDefinition("own", "single", ("0", "1", "2"))
ROWS = Rows(tuple(f"row {i}" for i in range(30)), (), tuple((0, 1, 2, 1, 1)[i % 5] for i in range(30)))


def test_k_shot_draws_as_many_rows_of_every_label_by_seed_in_their_order() -> None:
    sample = k_shot(ROWS, OWN, 4, seed=0)
    assert sorted(sample.labels) == [0] * 4 + [1] * 4 + [2] * 4 and len(set(sample.first)) == 12
    places = [ROWS.first.index(text) for text in sample.first]
    assert places == sorted(places) and sample == ROWS.take(places)
    assert k_shot(ROWS, OWN, 4, seed=0) == sample
    assert len({k_shot(ROWS, OWN, 4, seed=seed).first for seed in range(5)}) == 5


def test_of_a_label_with_fewer_rows_than_shots_all_are_taken_with_a_note() -> None:
    assert k_shot(ROWS, OWN, 6, seed=0).labels.count(0) == 6 and not few_rows_note(ROWS, OWN, 6)
    said = "Task 'own' has 6 training rows of label '0', 6 training rows of label '2', fewer than --shots 7"
    assert said in few_rows_note(ROWS, OWN, 7) and not few_rows_note(ROWS, OWN, None)
    sample = k_shot(ROWS, OWN, 8, seed=0)
    assert [sample.labels.count(label) for label in range(3)] == [6, 8, 6]


@pytest.mark.parametrize("shots", [0, -1])
def test_no_shots_are_refused(shots: int) -> None:
    with pytest.raises(UsageError, match=f"--shots must be at least 1, got {shots}"):
        k_shot(ROWS, OWN, shots, seed=0)


def lengths_of(n: int) -> list[int]:
    """Return lengths as in real texts: most short, a few very long."""
    draw = Random(n)
    return [min(128, 5 + int(draw.expovariate(0.06))) for _ in range(n)]


LENGTHS = lengths_of(1001)
#: Numbers of rows and batch sizes: within one window of 50 batches, in several windows, and with a last batch of one row.
SIZES = [
    (1, 8),
    (2, 8),
    (3, 1),
    (5, 2),
    (5, 8),
    (128, 8),
    (401, 8),
    (1001, 8),
    (1500, 1024),
    (2490, 1024),
    (3668, 1024),
    (1600, 16),
    (2049, 16),
]


def sizes_of(rows: int, batch_size: int) -> list[int]:
    """Return the batch sizes: ``batch_size`` and a rest. A single row left over takes a second row from another batch."""
    whole, left = divmod(rows, batch_size)
    if left == 1 and whole:
        return [2, batch_size - 1, *[batch_size] * (whole - 1)]
    return [*[left] * (left > 0), *[batch_size] * whole]


@pytest.mark.sampled("5-8-True")
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("rows", "batch_size"), SIZES)
def test_an_epoch_holds_every_row_once(rows: int, batch_size: int, grouped: bool) -> None:
    per_epoch = -(-rows // batch_size)
    plan = plan_batches(lengths_of(rows), batch_size, 3 * per_epoch, seed=0, group_by_length=grouped)
    epochs = [plan[i * per_epoch : (i + 1) * per_epoch] for i in range(3)]
    for epoch in epochs:
        assert sorted(i for batch in epoch for i in batch) == list(range(rows))
        sizes = sorted(map(len, epoch))
        assert sizes == sorted(sizes_of(rows, batch_size))
    assert rows < 100 or epochs[0] != epochs[1]


@pytest.mark.sampled("False")
@pytest.mark.parametrize("grouped", [True, False])
def test_every_row_of_any_length_is_used_equally_often(grouped: bool) -> None:
    """This holds over many seeds, and in the first few batches, because a training run may end within an epoch."""
    seeds, batches = 2000, 12
    lengths = lengths_of(203)  # batches of 2 and one of 1: five windows of 50 batches hold 100 rows each
    used, weight = [0] * len(lengths), [0.0] * len(lengths)
    for seed in range(seeds):
        for batch in plan_batches(lengths, 2, batches, seed, group_by_length=grouped):
            for row in batch:
                used[row] += 1
                weight[row] += 1 / len(batch)  # a step is the mean over its batch
    share = batches / 102
    spread = (share * (1 - share) * seeds) ** 0.5
    assert max(abs(count - seeds * share) for count in used) < 4.5 * spread
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    for part in (by_length[:20], by_length[-20:]):  # the shortest and the longest rows
        assert sum(used[row] for row in part) == pytest.approx(20 * seeds * share, rel=0.03)
        assert sum(weight[row] for row in part) == pytest.approx(sum(weight) * 20 / 203, rel=0.03)


def test_batches_by_tokens_hold_every_row_once_and_no_more_tokens_than_long_rows_would() -> None:
    lengths = [5, 700, 3, 512, 2000, 9, 511] * 40
    batches = by_length(lengths, 4, by_tokens=True)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert [lengths[row] for batch in batches for row in batch] == sorted(lengths)
    tokens = [len(batch) * max(lengths[row] for row in batch) for batch in batches]
    assert max(tokens) <= 4 * 512 and len(batches[0]) > 4
    for size, of in ((1, lengths), (4, [0] * 9)):  # single rows for exact bits; rows that are not tokens
        assert by_length(of, size, by_tokens=True) == by_length(of, size)


def spread(plan: list[list[int]], lengths: list[int]) -> float:
    """Return the mean difference between the longest and the shortest row of a batch."""
    return mean(max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in plan if len(batch) > 1)


def test_rows_of_similar_length_are_grouped_only_in_large_data() -> None:
    few = LENGTHS[:400]  # one window
    assert plan_batches(few, 8, 50, 0) == plan_batches(few, 8, 50, 0, group_by_length=False)
    at_random = spread(plan_batches(LENGTHS, 8, 126, 0, group_by_length=False), LENGTHS)
    assert spread(plan_batches(few, 8, 50, 0), few) > 0.7 * at_random
    assert spread(plan_batches(LENGTHS, 8, 126, 0), LENGTHS) < 0.2 * at_random
    means = [mean(LENGTHS[i] for i in batch) for batch in plan_batches(LENGTHS, 8, 126, 0)]
    assert abs(correlation(means, list(range(126)))) < 0.25  # groups come in random order


def test_a_plan_is_drawn_by_seed_and_a_shorter_one_is_its_beginning() -> None:
    plan = plan_batches(LENGTHS, 8, 160, seed=3)
    assert plan == plan_batches(LENGTHS, 8, 160, seed=3)
    assert plan[:10] == plan_batches(LENGTHS, 8, 10, seed=3)
    assert plan != plan_batches(LENGTHS, 8, 160, seed=4)
    assert plan_batches(LENGTHS, 8, 0, seed=3) == []
    with pytest.raises(UsageError, match=r"There are no rows to draw batches from"):
        plan_batches([], 8, 3, seed=0)


def test_rows_in_the_order_of_their_labels_are_picked_from_every_label() -> None:
    turning = [0, 1, 2] * 10  # an even stride, 10 of 30 rows, would meet only one label
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
        ([int(i % 10 == 9) for i in range(1000)], 100, {0: 90, 1: 10}),  # an even stride would skip every positive
        ([int(i % 25 == 7) for i in range(3200)], 128, {0: 123, 1: 5}),
        ([0] * 97 + [1, 2, 3], 10, {0: 7, 1: 1, 2: 1, 3: 1}),  # rare labels are picked as well
        ([0] * 97 + [1, 2, 3], 4, {0: 1, 1: 1, 2: 1, 3: 1}),
        ([0] * 60 + [1] * 40, 7, {0: 4, 1: 3}),
        ([0, 1, 2, 1, 1, 2, 0, 0, 1], 2, {0: 1, 1: 1}),  # the rarest is left out
    ],
)
def test_picked_rows_hold_rare_labels(labels: list[int], count: int, expected: dict[int, int]) -> None:
    picked = representative(labels, count)
    assert Counter(labels[row] for row in picked) == expected
    assert picked == sorted(set(picked)) and len(picked) == count


def test_a_large_batch_is_cut_into_rows_of_nearly_equal_length() -> None:
    """Rows 4 to 8 have 9, 3, 5, 3 and 7 tokens, so the two shortest are 5 and 7; every row stays."""
    lengths = [1, 1, 1, 1, 9, 3, 5, 3, 7]
    assert list(micro_batches([4, 5, 6, 7, 8], lengths, 2)) == [[5, 7], [6, 8], [4]]
    assert list(micro_batches([6, 4, 5], [0] * 9, 2, tokens=1)) == [[6, 4], [5]]  # images have one length
    assert list(micro_batches([], lengths, 2)) == []
    lengths = [90, 5, 4, 3, 2]  # three rows padded to 4 tokens are 12; a row alone may be longer
    assert list(micro_batches(range(5), lengths, 8, tokens=12)) == [[4, 3, 2], [1], [0]]
    assert list(micro_batches(range(5), lengths, 2, tokens=12)) == [[4, 3], [2, 1], [0]]


def test_a_rare_label_is_named() -> None:
    rows = Rows(tuple("abcdefg"), (), (0, 1, 1, 1, 2, 2, 2))
    assert few_rows_note(rows, TaskDefinition("tickets", "single", ("Biling", "Billing", "Sales")), 3) == (
        "Task 'tickets' has 1 training row of label 'Biling', fewer than --shots 3: using all of them."
    )
