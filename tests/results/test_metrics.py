"""Metrics against hand-worked numbers; each docstring has the arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

from forgetfree.errors import MetricError
from forgetfree.kinds.tagging import TagAnswers
from forgetfree.results import metrics
from forgetfree.results.answers import LabelAnswers, constant_scores


def test_accuracy_is_the_share_of_right_predictions() -> None:
    """Predictions 0, 2, 1, 0 (a tie goes to the lower label) against 0, 2, 2, 0: 3 of 4."""
    logits = [[3.0, 1.0, 2.0], [0.0, -1.0, 5.0], [-3.0, -1.0, -2.0], [1.0, 1.0, 0.0]]
    assert metrics.accuracy(logits, [0, 2, 2, 0]) == 0.75


def binary(predictions: list[int]) -> np.ndarray:
    """Return logits of shape (n, 2) that predict `predictions`."""
    return np.eye(2)[predictions]


@pytest.mark.parametrize(
    ("predictions", "labels", "expected"),
    [
        ([1, 1, 1, 0, 0], [1, 1, 0, 1, 0], 2 / 3),  # TP 2, FP 1, FN 1: 4 / (4 + 1 + 1)
        ([0, 0], [0, 0], 0.0),  # neither present nor predicted: 0 / 0, defined as 0
    ],
)
def test_f1_of_label_one(predictions: list[int], labels: list[int], expected: float) -> None:
    assert metrics.f1(binary(predictions), labels) == pytest.approx(expected)


def test_f1_is_for_two_labels_only() -> None:
    with pytest.raises(MetricError, match=r"^f1 .* logits of shape \(n, 2\); got \(1, 3\)\. Use accuracy"):
        metrics.f1([[1.0, 2.0, 3.0]], [2])


def test_macro_f1_is_the_mean_over_labels_that_rows_have() -> None:
    """Labels 0, 0, 1 are answered 0, 2, 1: F1 is 2/3 for label 0 and 1 for label 1; label 2, of another task, has no row."""
    assert metrics.macro_f1(np.eye(3)[[0, 2, 1]], [0, 0, 1]) == pytest.approx((2 / 3 + 1) / 2)
    assert answers([0, 0, 0, 1]).constant_score("macro_f1") == pytest.approx(6 / 7 / 2)


def answers(labels: Any) -> LabelAnswers:
    """Return some answers to rows with these labels."""
    return LabelAnswers(np.zeros((len(labels), 2)), np.asarray(labels))


@pytest.mark.parametrize(
    ("labels", "accuracy", "f1"),
    [
        ([0, 0, 0, 1], 0.75, 0.4),  # always label 1: precision 1/4, recall 1
        ([1, 1, 0], 2 / 3, 0.8),
        ([0, 0], 1.0, 0.0),
        ([2, 2, 2, 1, 0, 0], 0.5, 2 / 7),
    ],
)
def test_a_constant_answer_worked_by_hand(labels: list[int], accuracy: float, f1: float) -> None:
    assert answers(labels).constant_score("accuracy") == pytest.approx(accuracy)
    assert answers(labels).constant_score("f1") == pytest.approx(f1)


def test_one_constant_answer_for_all_tasks_worked_by_hand() -> None:
    """Three tasks have consecutive labels: 2 is right on 3 of 4 rows of the second task, and nowhere else."""
    labels = [answers(each) for each in ([0, 1, 0, 1], [2, 2, 2, 3], [4, 5])]
    assert constant_scores(labels, ["accuracy"] * 3) == [0.5, 0.75, 0.5]
    assert constant_scores(labels, ["accuracy"] * 3, task_known=False) == [0.0, 0.75, 0.0]
    # The tasks share their labels: label 1 has 0.25 + F1 0.8, label 0 has 0.75 + 0.
    shared = [answers(each) for each in ([0, 0, 0, 1], [1, 1, 0])]
    assert constant_scores(shared, ["accuracy", "f1"], task_known=False) == pytest.approx([0.25, 0.8])


def test_one_constant_answer_for_all_tasks_whose_words_are_labelled() -> None:
    """B-X for all words finds both entities of the first task among 4 words, 2·2 / (4 + 2), and none of the second."""
    words = [
        TagAnswers(np.zeros((4, 3)), np.array(labels), ("O", "B-X", "I-X"), np.array([2, 2]))
        for labels in ([0, 1, 1, 0], [1, 2, 0, 0])
    ]
    found = constant_scores(words, ["f1", "f1"], task_known=False)
    assert found == pytest.approx([2 / 3, 0.0])


def test_agreement_is_the_share_of_equal_predictions() -> None:
    """Predictions 0, 1, 1, 0 and 0, 1, 0, 1 agree on 2 of 4 rows, whatever the labels are."""
    assert metrics.agreement(binary([0, 1, 1, 0]), 7.0 * binary([0, 1, 0, 1])) == 0.5


@pytest.mark.parametrize("seed", range(5))
def test_predictions_are_scored_as_scikit_learn_and_torchmetrics_score_them(seed: int) -> None:
    """Scores are equal to the bit, except for calibration, whose sums have another order; no confidence is at a bin's edge."""
    draw = np.random.default_rng(seed)
    logits, labels = 3 * draw.normal(size=(200, 2)), draw.integers(0, 2, 200)
    predictions = logits.argmax(axis=1)
    assert metrics.accuracy(logits, labels) == sklearn.metrics.accuracy_score(labels, predictions)
    assert metrics.f1(logits, labels) == sklearn.metrics.f1_score(labels, predictions)
    (_, false_positive), (false_negative, true_positive) = sklearn.metrics.confusion_matrix(labels, predictions)
    assert metrics.f1(logits, labels) == 2 * true_positive / (2 * true_positive + false_positive + false_negative)
    assert metrics.macro_f1(logits, labels) == sklearn.metrics.f1_score(labels, predictions, average="macro")
    for classes in (2, 5):
        logits, labels = 3 * draw.normal(size=(200, classes)), draw.integers(0, classes, 200)
        theirs = multiclass_calibration_error(torch.tensor(logits), torch.tensor(labels), classes, n_bins=15)
        assert metrics.expected_calibration_error(logits, labels) == pytest.approx(float(theirs), abs=1e-6)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (np.empty((0, 2)), [], r"^logits must have shape \(n, n_labels\) .* got shape \(0, 2\)\.$"),
        ([0.5, 0.5], [0, 1], r"^logits must have shape \(n, n_labels\) .* got shape \(2,\)\.$"),
        ([[0.5]], [0], r"^logits must have shape .* at least two labels; got shape \(1, 1\)\.$"),
        ([[0.0, 1.0], [np.inf, 0.0]], [0, 0], r"^logits must be finite; 1 of 2 rows .* is row 1\. The usual cause"),
        ([[np.nan, 0.0]], [0], r"^logits must be finite; 1 of 1 rows are not; the first is row 0\."),
        ([["a", "b"]], [0], r"^logits must be an array of numbers"),
        ([[0.0, 1.0]], [0, 1], r"^labels must be .* one per row of logits, shape \(1,\); got shape \(2,\)"),
        ([[0.0, 1.0]], [1.0], r"^labels must be integers .* dtype float64"),
        ([[0.0, 1.0]], [2], r"^labels must be integers in \[0, 2\), .*: \[2\]\.$"),
        ([[0.0, 1.0]], [-1], r"^labels must be integers in \[0, 2\), .*: \[-1\]\.$"),
    ],
)
def test_wrong_predictions_are_refused(logits: Any, labels: Any, message: str) -> None:
    for metric in (metrics.accuracy, metrics.f1, metrics.expected_calibration_error):
        with pytest.raises(MetricError, match=message):
            metric(logits, labels)


# -- Calibration -----------------------------------------------------------------------------------------


def logits_of(probabilities: list[list[float]]) -> np.ndarray:
    """Return logits whose softmax is `probabilities`."""
    return np.log(np.array(probabilities))


def test_ece_worked_by_hand() -> None:
    """Five bins of width 0.2; n = 4, all predictions 0.

    Bin (0.6, 0.8]: confidences 0.7 and 0.78, one right: |1 − 1.48| / 4 = 0.12.
    Bin (0.8, 1.0]: confidences 0.9 and 0.95, both right: |2 − 1.85| / 4 = 0.0375.
    Together 0.1575.
    """
    logits = logits_of([[0.7, 0.3], [0.78, 0.22], [0.9, 0.1], [0.95, 0.05]])
    assert metrics.expected_calibration_error(logits, [0, 1, 0, 0], bins=5) == pytest.approx(0.1575)


def test_a_confidence_at_an_edge_belongs_to_the_bin_below() -> None:
    """Two bins, (0, 0.5] and (0.5, 1]; confidences exactly 0.5 (wrong) and 0.75 (right).

    In separate bins: |0 − 0.5| / 2 + |1 − 0.75| / 2 = 0.375. In one bin, it would be |1 − 1.25| / 2 = 0.125.
    """
    logits = [[0.0, 0.0], [np.log(3.0), 0.0]]
    assert metrics.expected_calibration_error(logits, [1, 0], bins=2) == pytest.approx(0.375)


def test_the_last_bin_holds_a_confidence_of_one() -> None:
    """Softmax of (1000, 0) is exactly (1, 0), with no overflow; one right, one wrong: |1 − 2| / 2 = 0.5."""
    assert metrics.expected_calibration_error([[1000.0, 0.0], [1000.0, 0.0]], [0, 1]) == 0.5


def test_calibration_is_computed_in_float64() -> None:
    """For p = 1 / (1 + e^−20), 1 − p ≈ 2.061e-9 is lost in float32, where p rounds to 1."""
    logits = np.array([[20.0, 0.0]], dtype=np.float32)
    assert metrics.expected_calibration_error(logits, [0]) == pytest.approx(2.0611536e-9, rel=1e-6)
