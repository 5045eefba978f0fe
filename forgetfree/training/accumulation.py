"""The parts of a batch, one forward pass each, over which the gradients of an update are accumulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """The input of one forward pass: rows, their share of the batch, and whether they open or close an update."""

    rows: Sequence[int]
    share: float
    first: bool
    last: bool


#: What a forward pass takes of a batch that is not cut.
WHOLE = Part((), 1.0, True, True)


def parts(batch: Sequence[int], accumulation: int, counts: Sequence[int] | None = None) -> Iterator[Part]:
    """Cut a batch into ``accumulation`` parts of nearly equal size; fewer if it has fewer rows.

    Args:
        batch: the numbers of its rows.
        accumulation: how many parts.
        counts: the labels of each row of the data, by which a part has its share; default: one for each.
    """
    count = min(accumulation, len(batch))
    labels = [1 if counts is None else counts[row] for row in batch]
    for i in range(count):
        begin, end = len(batch) * i // count, len(batch) * (i + 1) // count
        yield Part(batch[begin:end], sum(labels[begin:end]) / sum(labels), i == 0, i == count - 1)
