"""What training needs of a task's rows, however they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

#: Inputs ``(B, …)``, labels ``(B,)``, task labels ``(B,)``.
Batch = tuple[Tensor, Tensor, Tensor]


class Examples(Protocol):
    """The rows of one split of one task. `forgetfree.data` has them for texts, and for data sets that can be indexed."""

    @property
    def task(self) -> int:
        """The task label of every row."""

    @property
    def labels(self) -> Tensor:
        """int64 ``(n,)``."""

    @property
    def lengths(self) -> list[int]:
        """Length per row, by which batches are put together; all 0 where every row is as long."""

    @property
    def digest(self) -> str:
        """Names all inputs and labels."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """The mini-batch of the rows at ``indices``."""

    def subset(self, indices: Sequence[int]) -> Examples:
        """The rows at ``indices``, in that order."""
