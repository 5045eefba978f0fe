"""What answers say of each label: precision, recall, F1, and which labels are taken for which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from forgetfree.results.answers import LabelAnswers
from forgetfree.results.metrics import Floats, Integers

#: The labels of a task: their names by their numbers.
LabelNames = Mapping[int, str]


@dataclass(frozen=True, eq=False)
class LabelScores:
    """Scores of the labels of one task, as scikit-learn defines them.

    Attributes:
        names: of the labels.
        precision: the share of the rows answered with a label that have it, 0 where none is ``(labels,)``.
        recall: the share of the rows of a label that are answered with it ``(labels,)``.
        f1: the harmonic mean of both ``(labels,)``.
        rows: how many rows have the label ``(labels,)``.
        confusion: how many rows of the row's label are answered with the column's ``(labels, labels)``. Where the task is
            withheld, other rows are answered with another task's label.
    """

    names: tuple[str, ...]
    precision: Floats
    recall: Floats
    f1: Floats
    rows: Integers
    confusion: Integers

    @classmethod
    def of(cls, answers: LabelAnswers, names: LabelNames) -> Self:
        """Return the scores of answers to a task's rows, whose labels are numbered as in the names."""
        from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

        right, predicted = answers.labels, answers.logits.argmax(axis=1)
        precision, recall, f1, rows = precision_recall_fscore_support(
            right, predicted, labels=list(names), zero_division=0.0
        )
        confusion = confusion_matrix(right, predicted, labels=list(names))
        return cls(tuple(names.values()), precision, recall, f1, rows, confusion)

    @property
    def elsewhere(self) -> Integers:
        """How many rows of each label are answered with another task's ``(labels,)``."""
        others: npt.NDArray[np.int64] = self.rows - self.confusion.sum(axis=1)
        return others

    @property
    def macro(self) -> tuple[float, float, float]:
        """Precision, recall and F1, each the mean over the labels that some row has."""
        there = self.rows > 0
        precision, recall, f1 = (float(each[there].mean()) for each in (self.precision, self.recall, self.f1))
        return precision, recall, f1
