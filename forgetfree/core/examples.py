"""What training needs from a task's rows, for any way of keeping them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

#: Inputs ``(B, …)``, labels ``(B,)``, task labels ``(B,)``; several labels and task labels a row where words are labelled.
Batch = tuple[Tensor, Tensor, Tensor]


class Examples(Protocol):
    """The rows of one split of one task; `forgetfree.data` implements it for texts and for indexable data sets."""

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
