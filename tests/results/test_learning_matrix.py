"""Metrics of the learning matrix against numbers worked by hand; the arithmetic stands in each docstring."""

from __future__ import annotations

import numpy as np
import pytest

from forgetfree import registry
from forgetfree.errors import MetricError
from forgetfree.results import learning_matrix, metrics
from forgetfree.results.learning_matrix import matrix_of

# Three tasks. Task 0 peaks only after task 1, task 1 falls, and task 2 profits from task 1.
MATRIX = [
    [0.50, 0.25, 0.40],
    [0.80, 0.30, 0.35],
    [0.90, 0.70, 0.50],
    [0.60, 0.65, 0.85],
]
ECE = [[0.5, 0.5, 0.5], [0.4, 0.4, 0.4], [0.3, 0.3, 0.3], [0.1, 0.2, 0.3]]
ONE_TASK = [[0.5], [0.9]]


def test_average_is_the_mean_of_the_last_row() -> None:
    """(0.60 + 0.65 + 0.85) / 3 = 0.70."""
    assert learning_matrix.average_accuracy(MATRIX) == pytest.approx(0.70)


def test_forgetting_per_task_is_the_fall_from_the_best_since_learning() -> None:
    """max(0.80, 0.90) − 0.60 = 0.30; 0.70 − 0.65 = 0.05; the last task: 0."""
    assert learning_matrix.forgetting_per_task(MATRIX) == pytest.approx([0.30, 0.05, 0.0])


def test_forgetting_leaves_the_last_task_out() -> None:
    """(0.30 + 0.05) / 2 = 0.175."""
    assert learning_matrix.forgetting(MATRIX) == pytest.approx(0.175)


def test_forgetting_ignores_the_rows_before_learning() -> None:
    """Task 0: 0.80 − 0.75 = 0.05, although row 0 had 0.99."""
    assert learning_matrix.forgetting([[0.99, 0.5], [0.80, 0.5], [0.75, 0.9]]) == pytest.approx(0.05)


def test_forgetting_is_negative_where_a_task_got_better() -> None:
    """0.70 − 0.75 = −0.05."""
    assert learning_matrix.forgetting([[0.5, 0.5], [0.70, 0.5], [0.75, 0.9]]) == pytest.approx(-0.05)


def test_backward_transfer_compares_with_the_row_of_learning_not_with_the_best() -> None:
    """((0.60 − 0.80) + (0.65 − 0.70)) / 2 = −0.125."""
    assert learning_matrix.backward_transfer(MATRIX) == pytest.approx(-0.125)


def test_forward_transfer_leaves_the_first_task_out() -> None:
    """((0.30 − 0.25) + (0.50 − 0.40)) / 2 = 0.075."""
    assert learning_matrix.summarize(MATRIX, None)["fwt"] == pytest.approx(0.075)


def test_intransigence_against_fine_tuning() -> None:
    """((0.85 − 0.80) + (0.75 − 0.70) + (0.80 − 0.85)) / 3 = 0.05 / 3."""
    assert learning_matrix.summarize(MATRIX, None, [0.85, 0.75, 0.80])["intransigence"] == pytest.approx(0.05 / 3)


def test_summary_has_exactly_the_keys_of_the_results_file() -> None:
    """ECE: (0.1 + 0.2 + 0.3) / 3 = 0.2; the rest as above."""
    summary = learning_matrix.summarize(np.array(MATRIX), ECE, [0.85, 0.75, 0.80])
    assert list(summary) == ["average", "forgetting", "bwt", "fwt", "intransigence", "ece"]
    assert list(summary.values()) == pytest.approx([0.70, 0.175, -0.125, 0.075, 0.05 / 3, 0.2])
    assert all(type(value) is float for value in summary.values())
    assert learning_matrix.summarize(MATRIX, ECE)["intransigence"] is None


def test_one_task_neither_transfers_nor_forgets() -> None:
    """Average 0.9, intransigence 0.95 − 0.9 = 0.05, ECE 0.2, and zeros."""
    assert learning_matrix.forgetting_per_task(ONE_TASK) == [0.0]
    assert learning_matrix.summarize(ONE_TASK, [[0.3], [0.2]], [0.95]) == pytest.approx(
        {"average": 0.9, "forgetting": 0.0, "bwt": 0.0, "fwt": 0.0, "intransigence": 0.05, "ece": 0.2}
    )


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[0.5, 0.5], [0.5, 0.5]], r"^matrix must have shape \(T\+1, T\), .* got shape \(2, 2\)\.$"),
        ([0.5, 0.5], r"^matrix must have shape .* got shape \(2,\)\.$"),
        ([[]], r"^matrix must have shape .* got shape \(1, 0\)\.$"),
        ([[0.5], [90.0]], r"^matrix must hold fractions in \[0, 1\], not percent; got 90\.0\.$"),
        ([[0.5], [-0.1]], r"^matrix must hold fractions .* got -0\.1\.$"),
        ([[0.5], [float("nan")]], r"^matrix must hold fractions .* got nan\.$"),
        ([[0.5], [0.5, 0.6]], r"^matrix must be an array of numbers with rows of equal length; "),
        ([["high"], [0.5]], r"^matrix must be an array of numbers with rows of equal length; "),
    ],
)
def test_a_wrong_matrix_is_refused_by_every_metric(matrix: list[list[float]], message: str) -> None:
    for metric in (
        learning_matrix.average_accuracy,
        learning_matrix.forgetting,
        learning_matrix.forgetting_per_task,
        learning_matrix.backward_transfer,
    ):
        with pytest.raises(MetricError, match=message):
            metric(matrix)
    with pytest.raises(MetricError, match=message):
        learning_matrix.summarize(matrix, None, [0.5])
    with pytest.raises(MetricError, match=message.replace("matrix", "ece")):
        learning_matrix.summarize(ONE_TASK, matrix)


def test_a_wrong_reference_is_refused() -> None:
    with pytest.raises(MetricError, match=r"^reference must hold one .* shape \(3,\); got shape \(2,\)\.$"):
        learning_matrix.summarize(MATRIX, None, [0.5, 0.5])
    with pytest.raises(MetricError, match=r"^reference must hold fractions in \[0, 1\].* got 85\.0\.$"):
        learning_matrix.summarize(MATRIX, None, [85.0, 0.5, 0.5])


def test_an_ece_matrix_of_another_stream_is_refused() -> None:
    with pytest.raises(MetricError, match=r"^ece must have the shape of matrix, \(4, 3\); got \(2, 1\)\."):
        learning_matrix.summarize(MATRIX, ONE_TASK)


OWN = {
    "error": metrics.Metric(lambda answers: 0.0, higher_is_better=False, bounds=(0.0, None)),
    "correlation": metrics.Metric(lambda answers: 0.0, bounds=(-1.0, 1.0)),
}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics of a package."""
    known = registry.metric
    monkeypatch.setattr(registry, "metric", lambda name: OWN.get(name) or known(name))


@pytest.mark.usefixtures("registered")
def test_where_lower_is_better_to_forget_is_above_zero() -> None:
    """Errors 4, 1, 3 of the first task: it falls back by 2; the second, an accuracy, gains 0.2 before it is learned."""
    found = learning_matrix.summarize([[4, 0.3], [1, 0.5], [3, 0.9]], None, [2, 0.8], ["error", "accuracy"])
    assert found == pytest.approx(
        {
            "average": (3 + 0.9) / 2,
            "forgetting": 2,
            "bwt": -2,
            "fwt": 0.2,
            "intransigence": ((-2 + 1) + (0.8 - 0.9)) / 2,
            "ece": None,
        }
    )


@pytest.mark.usefixtures("registered")
def test_a_score_outside_its_metrics_bounds_is_refused() -> None:
    assert learning_matrix.summarize([[0.0], [-0.5]], None, None, ["correlation"])["average"] == -0.5
    with pytest.raises(MetricError, match=r"scores in \[-1, 1\], the bounds of their metric; got 1.5"):
        learning_matrix.summarize([[0.0], [1.5]], None, None, ["correlation"])


def test_scores_of_other_bounds_are_not_called_fractions() -> None:
    with pytest.raises(MetricError, match=r"^matrix must hold numbers; got nan\.$"):
        learning_matrix.summarize([[0.5], [np.nan]], None, metrics=["accuracy"])
    with pytest.raises(MetricError, match=r"^it must hold numbers in \[-1, 1\]; got 2\.0\.$"):
        matrix_of([[0.5], [2.0]], "it", (-1.0, 1.0))
