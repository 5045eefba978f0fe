"""Calibration against numbers worked by hand; temperature scaling against a grid search, and a truth that is known."""

from __future__ import annotations

import numpy as np
import pytest

from forgetfree.errors import MetricError
from forgetfree.results import calibration
from forgetfree.results.answers import LabelAnswers
from forgetfree.results.calibration import HIGHEST, LOWEST, cross_entropy, fitted_temperature, temperature_of


def drawn(n: int, labels: int, temperature: float, seed: int) -> LabelAnswers:
    """Answers whose softmax at ``temperature`` is the probability of each label."""
    random = np.random.default_rng(seed)
    logits = 3 * random.normal(size=(n, labels))
    shares = np.exp(logits / temperature)
    shares /= shares.sum(axis=1, keepdims=True)
    right = np.array([random.choice(labels, p=share) for share in shares])
    return LabelAnswers(logits.astype(np.float32), right)


def fitted(answers: LabelAnswers) -> float:
    return fitted_temperature(answers.logits, answers.labels)


def loss(answers: LabelAnswers, temperature: float) -> float:
    logits = answers.logits.astype(np.float64) / temperature
    of_labels = logits[np.arange(len(logits)), answers.labels]
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - of_labels))


@pytest.mark.sampled("3-1.0")
@pytest.mark.parametrize(("labels", "truth"), [(2, 0.6), (3, 1.0), (5, 2.5)])
def test_it_is_that_of_a_grid_search_and_near_the_truth(labels: int, truth: float) -> None:
    answers = drawn(300, labels, truth, seed=labels)
    grid = np.exp(np.linspace(np.log(0.2), np.log(8), 4001))
    best = min(grid, key=lambda t: loss(answers, t))
    assert fitted(answers) == pytest.approx(best, rel=2e-3)
    assert fitted(drawn(20_000, labels, truth, seed=7)) == pytest.approx(truth, rel=0.05)


def test_scaling_calibrates_and_leaves_the_answers() -> None:
    known, scored = drawn(2000, 3, 2.5, seed=1), drawn(2000, 3, 2.5, seed=2)
    after = scored.scaled(fitted(known))
    assert after.score("accuracy") == scored.score("accuracy")
    assert scored.ece > 0.12 and after.ece < 0.04


def test_answers_that_are_all_right_or_all_wrong_end_at_the_bounds() -> None:
    logits = np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0]])
    assert LOWEST <= fitted(LabelAnswers(logits, np.array([0, 1, 0]))) < 0.05  # none is better than another there
    assert fitted(LabelAnswers(logits, np.array([1, 0, 1]))) == pytest.approx(HIGHEST, rel=1e-3)


def test_labels_that_were_ruled_out_do_not_count() -> None:
    """A word that was cut off is answered for certain, whatever its label is."""
    answers = drawn(200, 2, 1.5, seed=3)
    lowest = np.finfo(np.float32).min
    cut = np.array([[0.0, lowest], [0.0, lowest]], dtype=np.float32)
    more = LabelAnswers(np.concatenate([answers.logits, cut]), np.concatenate([answers.labels, [0, 1]]))
    assert fitted(more) == pytest.approx(fitted(answers), rel=1e-3)
    assert fitted(LabelAnswers(cut[:1], np.array([1]))) == 1.0


def test_scaling_that_does_not_help_on_other_rows_is_left_out_by_hand() -> None:
    """Two rows of logits (2, 0), the first right, the second wrong.

    A fit to both takes the largest T: 0.69 a row, where 1 has (0.13 + 2.13) / 2 = 1.13. But a fit to the first alone takes the
    smallest T, 0.01, with which the second costs 2 / 0.01 = 200.
    """
    logits, labels = np.array([[2.0, 0.0], [2.0, 0.0]]), np.array([0, 1])
    assert cross_entropy(logits, labels) == pytest.approx((np.log1p(np.exp(-2)) + np.log1p(np.exp(2))) / 2)
    assert cross_entropy(logits[1:], labels[1:], LOWEST) == pytest.approx(200)
    assert fitted_temperature(logits, labels) == pytest.approx(HIGHEST, rel=1e-3)
    assert temperature_of(logits, labels) == 1.0


def test_scaling_that_helps_on_other_rows_is_kept_by_hand() -> None:
    """Four in five rows of logits (2 log 4, 0) are right, in every fold: 2 log 4 / T = log 4, whichever fold is left out."""
    logits = np.tile([2 * np.log(4.0), 0.0], (25, 1))
    labels = np.repeat([0, 0, 0, 0, 1], 5)
    assert temperature_of(logits, labels) == pytest.approx(2, rel=1e-3)


def test_of_answers_that_are_calibrated_scaling_is_left_out_more_often_than_not() -> None:
    kept = [
        temperature_of(each.logits, each.labels) == 1.0 for each in (drawn(100, 3, 1.0, seed) for seed in range(40))
    ]
    assert 20 < sum(kept) < 40


def logits_of(probabilities: list[list[float]]) -> np.ndarray:
    """Logits whose softmax is `probabilities`."""
    return np.log(np.array(probabilities))


def test_ece_worked_by_hand() -> None:
    """Five bins of width 0.2; n = 4, all predictions 0.

    Bin (0.6, 0.8]: confidences 0.7 and 0.78, one right: |1 − 1.48| / 4 = 0.12.
    Bin (0.8, 1.0]: confidences 0.9 and 0.95, both right: |2 − 1.85| / 4 = 0.0375.
    Together 0.1575.
    """
    logits = logits_of([[0.7, 0.3], [0.78, 0.22], [0.9, 0.1], [0.95, 0.05]])
    assert calibration.expected_calibration_error(logits, [0, 1, 0, 0], bins=5) == pytest.approx(0.1575)


def test_a_confidence_at_an_edge_belongs_to_the_bin_below() -> None:
    """Two bins, (0, 0.5] and (0.5, 1]; confidences exactly 0.5 (wrong) and 0.75 (right).

    Apart: |0 − 0.5| / 2 + |1 − 0.75| / 2 = 0.375. Together it would be |1 − 1.25| / 2 = 0.125.
    """
    logits = [[0.0, 0.0], [np.log(3.0), 0.0]]
    assert calibration.expected_calibration_error(logits, [1, 0], bins=2) == pytest.approx(0.375)


def test_the_last_bin_holds_a_confidence_of_one() -> None:
    """Softmax of (1000, 0) is exactly (1, 0), with no overflow; one right, one wrong: |1 − 2| / 2 = 0.5."""
    assert calibration.expected_calibration_error([[1000.0, 0.0], [1000.0, 0.0]], [0, 1]) == 0.5


def test_gaps_of_one_bin_cancel_and_gaps_of_two_bins_do_not() -> None:
    """Confidences 0.6 (right, +0.4) and 0.8 (wrong, −0.8).

    One bin: |0.4 − 0.8| / 2 = 0.2. Fifteen bins, so two occupied: (0.4 + 0.8) / 2 = 0.6.
    """
    logits = logits_of([[0.6, 0.4], [0.8, 0.2]])
    assert calibration.expected_calibration_error(logits, [0, 1], bins=1) == pytest.approx(0.2)
    assert calibration.expected_calibration_error(logits, [0, 1]) == pytest.approx(0.6)


def test_calibration_is_computed_in_float64() -> None:
    """Of 1 / (1 + e^−20), 1 − p ≈ 2.061e-9 is lost in float32, where p rounds to 1."""
    logits = np.array([[20.0, 0.0]], dtype=np.float32)
    assert calibration.expected_calibration_error(logits, [0]) == pytest.approx(2.0611536e-9, rel=1e-6)


def test_the_number_of_bins_is_checked() -> None:
    with pytest.raises(MetricError, match=r"^bins must be at least 1; got 0\."):
        calibration.expected_calibration_error([[1.0, 0.0]], [0], bins=0)
