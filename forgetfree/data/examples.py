"""Rows as examples for mini-batches: encoded texts, as one ragged tensor per split, and the rows of any indexable data set.

A mini-batch is ``(x, y, t)``: token ids ``(B, L)`` padded on the right, labels ``(B,)``, task labels ``(B,)``, all int64.
Where words are labelled, row i has one label and task label for each word that the model reads, and the first token of each
such word is in x as its complement ``~id``, below 0. In multi-label classification, a row has a 0 or 1 for each of the task's
labels. Everything else that a model needs (attention mask, token types, the mask position) follows from the ids: see
`forgetfree.models.task_model.TokenLayout`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from forgetfree import registry
from forgetfree.core.readout_model import LOWEST
from forgetfree.core.trained import Batch


@dataclass(frozen=True, eq=False, repr=False)
class EncodedRows:
    """The rows of one split as token ids.

    Attributes:
        tokens: all rows' ids, one after the other: int32 ``(total,)``.
        offsets: the start of each row, and the end: int64 ``(n + 1,)``.
        labels: int64 ``(n,)``; where words are labelled, the labels of all words, also of words that were cut off; where rows
            have several labels, a 0 or 1 for each of the task's labels.
        task: the task label, the same for every row.
        pad: the id that fills short rows.
        words: if a row has several ``labels``, the start of each row's labels, and the end: int64 ``(n + 1,)``.
        kind: the kind in the task's definition.
    """

    tokens: Tensor
    offsets: Tensor
    labels: Tensor
    task: int
    pad: int
    words: Tensor | None = None
    kind: str = "single"

    @classmethod
    def of(
        cls, rows: Sequence[Sequence[int]], labels: Sequence[Any], task: int, pad: int, kind: str = "single"
    ) -> Self:
        """Pack rows of ids of any length; ``labels`` has one for each, or a sequence with one for each of its words."""
        tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int32, device="cpu")
        words = None
        if labels and isinstance(labels[0], Sequence):
            words = torch.tensor([0, *map(len, labels)], device="cpu").cumsum(0)
            labels = [label for row in labels for label in row]
        numbers = torch.tensor(list(labels), dtype=torch.int64, device="cpu")
        offsets = torch.tensor([0, *map(len, rows)], device="cpu").cumsum(0)
        return cls(tokens, offsets, numbers, task, pad, words, kind)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each row."""
        lengths: list[int] = self.offsets.diff().tolist()
        return lengths

    @cached_property
    def counts(self) -> list[int]:
        """The number of labels that are read in each row: one, one for each word that is not cut off, or all."""
        if self.words is None:
            return [1] * len(self)
        before = torch.nn.functional.pad((self.tokens < 0).cumsum(0), (1, 0))
        marked = before[self.offsets].diff()
        counts: list[int] = (marked if marked.any() else self.words.diff()).tolist()
        return counts

    @property
    def digest(self) -> str:
        """The SHA-256 of all ids and labels."""
        digest = hashlib.sha256()
        for tensor in (self.tokens, self.offsets, self.labels, *([] if self.words is None else [self.words])):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    @property
    def targets(self) -> list[int]:
        """The group of each row, under the name that Avalanche expects: the label, or a group that the task's kind chooses."""
        if self.words is None:
            labels: list[int] = self.labels.tolist()
            return labels
        groups: list[int] = registry.kind(self.kind).groups([self._labels(i) for i in range(len(self))])
        return groups

    def _labels(self, i: int) -> Any:
        """Return the label of a row, or the list of its labels."""
        if self.words is None:
            return int(self.labels[i])
        return self.labels[self.words[i] : self.words[i + 1]].tolist()

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        x = self.tokens[self.offsets[i] : self.offsets[i + 1]].long()
        if self.words is None:
            return x, int(self.labels[i])
        first = int(self.words[i])
        return x, self.labels[first : first + self.counts[i]]

    def answered(self, logits: Tensor) -> Tensor:
        """Return the logits of all labels from those that were read: words that were cut off are O, label 0, with certainty."""
        if self.words is None:
            return logits
        lengths, counts = self.words.diff(), torch.tensor(self.counts, device="cpu")
        number_in_row = torch.arange(len(self.labels), device="cpu") - self.words[:-1].repeat_interleave(lengths)
        answers = torch.full((len(self.labels), logits.shape[1]), LOWEST, device="cpu")
        answers[:, 0] = 0.0
        answers[number_in_row < counts.repeat_interleave(lengths)] = logits
        return answers

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return a mini-batch of the rows at ``indices``, padded to the longest of them."""
        return self.collate([(*self[i], self.task) for i in indices])

    def collate(self, items: Sequence[tuple[Any, ...]]) -> Batch:
        """Pad ``(ids, label, …, task)`` items into one mini-batch: the ``collate_fn`` of data loaders."""
        x = torch.nn.utils.rnn.pad_sequence(
            [item[0] for item in items], batch_first=True, padding_value=float(self.pad)
        )
        labels = [torch.as_tensor(item[1], device="cpu").reshape(-1) for item in items]
        tasks = torch.tensor([item[-1] for item in items], device="cpu")
        return x, torch.cat(labels), tasks.repeat_interleave(torch.tensor([len(each) for each in labels], device="cpu"))

    def subset(self, indices: Sequence[int]) -> EncodedRows:
        """Return the rows at ``indices``, in that order."""
        rows = [self.tokens[self.offsets[i] : self.offsets[i + 1]].tolist() for i in indices]
        return EncodedRows.of(rows, [self._labels(i) for i in indices], self.task, self.pad, self.kind)


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


class DatasetExamples:
    """Rows of a data set whose items are ``(x, label, …)``, where ``x`` is a tensor of one shape.

    Args:
        dataset: an indexable data set.
        labels: the labels of all its rows.
        task: their task label.
        rows: the row numbers to use; default: all.
    """

    def __init__(self, dataset: Any, labels: Sequence[int], task: int, rows: Sequence[int] | None = None) -> None:
        self._dataset = dataset
        self._all_labels = labels
        self._rows = list(range(len(dataset))) if rows is None else list(rows)
        self.task = task
        self.labels = torch.tensor([int(labels[row]) for row in self._rows], dtype=torch.int64, device="cpu")

        self.targets: list[int] = self.labels.tolist()
        self.lengths, self.counts = [0] * len(self._rows), [1] * len(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all inputs and labels, as they are read now."""
        digest = hashlib.sha256(self.labels.numpy().tobytes())
        for row in self._rows:
            x = self._dataset[row][0].detach().cpu().reshape(-1)
            digest.update(x.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return a mini-batch of the rows at ``indices``."""
        x = torch.stack([self._dataset[self._rows[i]][0] for i in indices])
        return x, self.labels[list(indices)], torch.full((len(indices),), self.task, device="cpu")

    def subset(self, indices: Sequence[int]) -> DatasetExamples:
        """Return the rows at ``indices``, in that order."""
        return DatasetExamples(self._dataset, self._all_labels, self.task, [self._rows[i] for i in indices])


#: The rows of one split of one task.
Examples = EncodedRows | DatasetExamples
