"""Rows of texts and of any data set: batches, subsets, digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from forgetfree.data.examples import DatasetExamples

X = torch.arange(12.0).reshape(4, 3)
LABELS = [1, 0, 2, 1]


class Rows(Sequence[Any]):
    """Items with a task label and a weight, as in Avalanche's and other data sets."""

    def __init__(self, x: torch.Tensor = X) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: Any) -> Any:
        return self.x[i], LABELS[i], 7, 0.5


@pytest.mark.parametrize("labels", [LABELS, tuple(LABELS), torch.tensor(LABELS)], ids=["list", "tuple", "tensor"])
def test_a_batch_is_inputs_labels_and_the_task(labels: Any) -> None:
    rows = DatasetExamples(Rows(), labels, 3)
    x, y, t = rows.batch([2, 0])
    assert torch.equal(x, torch.tensor([[6.0, 7.0, 8.0], [0.0, 1.0, 2.0]]))
    assert (y.tolist(), t.tolist()) == ([2, 1], [3, 3])
    assert (y.dtype, t.dtype) == (torch.int64, torch.int64)


def test_the_digest_depends_on_inputs_and_labels_only() -> None:
    rows = DatasetExamples(Rows(), LABELS, 0)
    assert rows.digest == DatasetExamples(Rows(), LABELS, 5, [0, 1, 2, 3]).digest
    assert rows.subset([1, 2]).digest == DatasetExamples(Rows(), LABELS, 0, [1, 2]).digest
    assert rows.digest != rows.subset([1, 0, 2, 3]).digest
    assert rows.digest != DatasetExamples(Rows(X + 1), LABELS, 0).digest
    assert rows.digest != DatasetExamples(Rows(), [1, 0, 2, 2], 0).digest
