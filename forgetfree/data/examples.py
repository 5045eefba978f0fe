"""Rows as training reads them: for any way of keeping them, and those of a data set that can be indexed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from forgetfree.core.batch_loss import Batch
from forgetfree.data.encoding import EncodedRows


class Examples(Protocol):
    """The rows of one split of one task; of texts they are `EncodedRows`."""

    @property
    def task(self) -> int:
        """The task label of every row."""

    @property
    def labels(self) -> Tensor:
        """int64 ``(n,)``; where words are labelled, those of all words."""

    @property
    def targets(self) -> list[int]:
        """What a sample of the rows should hold of evenly: the label of each row."""

    @property
    def counts(self) -> list[int]:
        """The number of labels of each row in a batch: 1, unless words are labelled."""

    @property
    def lengths(self) -> list[int]:
        """The length of each row, used to group rows into batches; all 0 where rows have one length."""

    @property
    def digest(self) -> str:
        """A hash of all inputs and labels."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the mini-batch of the rows at ``indices``."""

    def subset(self, indices: Sequence[int]) -> Examples:
        """Return the rows at ``indices``, in that order."""


class DatasetExamples:
    """Rows of a data set whose items are ``(x, label, …)``, where ``x`` is a tensor of one shape.

    Args:
        dataset: indexable.
        labels: of all its rows.
        task: their task label.
        rows: which rows; default: all.
    """

    def __init__(self, dataset: Any, labels: Sequence[int], task: int, rows: Sequence[int] | None = None) -> None:
        self._dataset = dataset
        self._all_labels = labels
        self._rows = list(range(len(dataset))) if rows is None else list(rows)
        self.task = task
        self.labels = torch.tensor([int(labels[row]) for row in self._rows], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> list[int]:
        """0 for each row."""
        return [0] * len(self)

    @property
    def targets(self) -> list[int]:
        """The label of each row."""
        labels: list[int] = self.labels.tolist()
        return labels

    @property
    def counts(self) -> list[int]:
        """1 for each row."""
        return [1] * len(self)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all inputs and labels, as they are read now."""
        digest = hashlib.sha256(self.labels.numpy().tobytes())
        for row in self._rows:
            x = self._dataset[row][0].detach().cpu().reshape(-1)
            digest.update(x.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the mini-batch of the rows at ``indices``."""
        x = torch.stack([self._dataset[self._rows[i]][0] for i in indices])
        return x, self.labels[list(indices)], torch.full((len(indices),), self.task)

    def subset(self, indices: Sequence[int]) -> DatasetExamples:
        """Return the rows at ``indices``, in that order."""
        return DatasetExamples(self._dataset, self._all_labels, self.task, [self._rows[i] for i in indices])


class OneLength:
    """Rows padded to one length, for data loaders without our ``collate_fn``; the model skips the padding."""

    def __init__(self, rows: EncodedRows, length: int) -> None:
        self._rows, self._length = rows, length
        self.targets = rows.targets

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        x, y = self._rows[i]
        return torch.nn.functional.pad(x, (0, self._length - len(x)), value=self._rows.pad), y
