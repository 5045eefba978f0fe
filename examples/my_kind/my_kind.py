"""A kind of tasks and two metrics of your own, for forgetfree: ratings, whose labels have an order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
from sklearn.metrics import cohen_kappa_score

from forgetfree.data.columns import ColumnNames
from forgetfree.data.rows import TaskRows
from forgetfree.data.tables import TaskTables
from forgetfree.kinds.classification import Classification
from forgetfree.kinds.kind import Form
from forgetfree.results.answers import LabelAnswers
from forgetfree.results.metrics import Metric


class Rating(Classification):
    """How many stars a text gives: labels in an order, so that a near miss is better than a far one."""

    forms: ClassVar[Mapping[str, Form]] = {"rating": ("a text, and how many stars it gives", ("text", "stars"))}
    metrics: ClassVar[tuple[str, ...]] = ("weighted-kappa", "stars-off")

    def form(self, columns: ColumnNames) -> str:
        """Return the kind's name."""
        return "rating"

    def read(self, task: TaskTables) -> TaskRows:
        """Return a task with its rows; the column of the labels is ``stars``, unless another is named."""
        label = task.columns.label or "stars"
        return super().read(replace(task, columns=replace(task.columns, label=label)))


def weighted_kappa(answers: LabelAnswers) -> float:
    """Return Cohen's kappa with quadratic weights (Cohen, 1968); 0 where labels and answers are all the same."""
    kappa = cohen_kappa_score(answers.labels, answers.logits.argmax(axis=1), weights="quadratic")
    return float(np.nan_to_num(kappa))


def stars_off(answers: LabelAnswers) -> float:
    """Return by how many stars an answer is wrong, on average."""
    return float(np.abs(answers.logits.argmax(axis=1) - answers.labels).mean())


KAPPA = Metric(weighted_kappa, bounds=(-1.0, 1.0), constant=lambda answers: 0.0)
STARS_OFF = Metric(stars_off, higher_is_better=False, bounds=(0.0, None))
