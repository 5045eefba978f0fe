"""The choice and the order of rows: k-shot samples and mini-batches, all by seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

from forgetfree import registry
from forgetfree.data.rows import Rows
from forgetfree.display import listed
from forgetfree.errors import UsageError
from forgetfree.tasks import TaskDefinition

#: Batches whose rows are sorted by length together; more saves padding, fewer mixes lengths better.
_WINDOW = 50
#: How many labels with too few rows are named.
_MOST_GROUPS = 5


def k_shot(rows: Rows, task: TaskDefinition, shots: int, seed: int) -> Rows:
    """Draw ``shots`` rows of every label by ``seed``, and return them in their order (LM-BFF, §3).

    What is counted is up to the kind of the task. Of sentences whose words are labelled, ``shots`` are to hold each kind of
    entity, the rarest kind first (Yang and Katiyar, 2020, §4.2), and as many none, if there are so many.

    A label with fewer rows keeps all of them: see `few_rows_note`.

    Raises:
        UsageError: ``shots`` is below 1.
    """
    if shots < 1:
        raise UsageError(f"--shots must be at least 1, got {shots}. Leave it out to train on all rows.")
    members = registry.kind(task.kind).members(rows.labels)
    random, drawn = Random(seed), set[int]()
    for rows_of_group in members.values():
        available = [i for i in rows_of_group if i not in drawn]
        drawn |= set(
            random.sample(available, max(0, min(shots - (len(rows_of_group) - len(available)), len(available))))
        )
    return rows.take(sorted(drawn))


def few_rows_note(rows: Rows, task: TaskDefinition, shots: int | None) -> str:
    """Return which labels have fewer training rows than ``shots``, of which all are taken; an empty text where none has."""
    kind = registry.kind(task.kind)
    members = kind.members(rows.labels)
    needed = {group: len(own) for group, own in members.items() if group != kind.optional_group}
    rare = sorted((count, members[group], group) for group, count in needed.items() if count < (shots or 0))
    if not rare:
        return ""
    counts = [f"{count} training {kind.group_name(task, group, count)}" for count, _, group in rare]
    return f"Task {task.name!r} has {listed(counts, _MOST_GROUPS)}, fewer than --shots {shots}: all of them are taken."


def plan_batches(
    lengths: Sequence[int], batch_size: int, batches: int, seed: int, *, group_by_length: bool = True
) -> list[list[int]]:
    """Row numbers of ``batches`` mini-batches, where every epoch holds each row once.

    Batches are drawn evenly at random. Data with more rows than a window may be grouped by length, which saves padding: each
    random window of rows is sorted, and the batches of an epoch then come in random order. No row is favoured: the rows of
    smaller batches are drawn before any sorting, and every other batch is equally likely to come at any place.

    Args:
        lengths: the lengths of all rows.
        batch_size: rows per batch. What is left of an epoch makes a smaller one, of two rows at least where that can be:
            BatchNorm cannot train on a single row.
        batches: the number of batches.
        seed: the seed of all random choices.
        group_by_length: put rows of similar length together where the data is larger than a window.

    Raises:
        UsageError: there are no rows.
    """
    if not lengths:
        raise UsageError("There are no rows to draw batches from. Give at least one.")
    random, plan = Random(seed), list[list[int]]()
    window, rows = _WINDOW * batch_size, len(lengths)
    smaller = [rows % batch_size] if rows % batch_size else []
    if smaller == [1] and 2 < batch_size < rows:
        smaller = [batch_size - 1, 2]
    while len(plan) < batches:
        order = list(range(rows))
        random.shuffle(order)
        rest = [[order.pop() for _ in range(size)] for size in smaller]
        if group_by_length and rows > window:
            for start in range(0, len(order), window):
                order[start : start + window] = sorted(order[start : start + window], key=lengths.__getitem__)
        epoch = [order[i : i + batch_size] for i in range(0, len(order), batch_size)] + rest
        random.shuffle(epoch)
        plan += epoch
    return plan[:batches]


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Row numbers of batches that hold every row once, shortest rows first, for evaluation."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def evenly(total: int, count: int | None) -> list[int]:
    """At most ``count`` row numbers spread evenly over ``total`` rows; all of them for ``None``."""
    if count is None or count >= total:
        return list(range(total))
    return [i * total // count for i in range(count)]


def representative(labels: Sequence[int], count: int | None) -> list[int]:
    """At most ``count`` row numbers with nearly the same shares of labels as all rows, and each label once.

    They are spread evenly; where that misses labels, because of their order or because they are rare, evenly within each
    label. If there are more labels than ``count``, the rarest are left out.
    """
    rows, total = evenly(len(labels), count), Counter(labels)
    counts = Counter(labels[row] for row in rows)
    if not rows or all(
        counts[label] and abs(counts[label] / len(rows) - n / len(labels)) <= 0.1 for label, n in total.items()
    ):
        return rows
    quota = {label: max(1, len(rows) * n // len(labels)) for label, n in total.items()}
    while left := len(rows) - sum(quota.values()):
        if left > 0:  # to the label that is furthest below its share
            quota[max(quota, key=lambda label: total[label] * len(rows) / len(labels) - quota[label])] += 1
        else:  # from the label that has most, of equals the rarest
            quota[max(reversed(quota), key=lambda label: (quota[label], -total[label]))] -= 1
    by_label = {label: [i for i, each in enumerate(labels) if each == label] for label in total}
    return sorted(by_label[label][place] for label, many in quota.items() for place in evenly(total[label], many))


def micro_batches(
    rows: Sequence[int], lengths: Sequence[int], size: int, tokens: int | None = None
) -> Iterator[list[int]]:
    """Cut one large batch into pieces of rows of nearly equal length, shortest rows first.

    A step that adds up the pieces does not depend on how they are cut, but the shorter their padding, the faster it is.

    Args:
        rows: the row numbers of the batch.
        lengths: the lengths of all rows.
        size: the most rows of a piece.
        tokens: the most tokens of a piece with its padding, if it has more than one row; default: any number.
    """
    piece: list[int] = []
    for row in sorted(rows, key=lengths.__getitem__):
        if len(piece) == size or (piece and tokens is not None and (len(piece) + 1) * lengths[row] > tokens):
            yield piece
            piece = []
        piece.append(row)
    if piece:
        yield piece
