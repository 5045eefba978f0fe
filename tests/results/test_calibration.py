"""Calibration against numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from forgetfree.errors import MetricError
from forgetfree.results import metrics


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
    assert metrics.expected_calibration_error(logits, [0, 1, 0, 0], bins=5) == pytest.approx(0.1575)


def test_a_confidence_at_an_edge_belongs_to_the_bin_below() -> None:
    """Two bins, (0, 0.5] and (0.5, 1]; confidences exactly 0.5 (wrong) and 0.75 (right).

    Apart: |0 − 0.5| / 2 + |1 − 0.75| / 2 = 0.375. Together it would be |1 − 1.25| / 2 = 0.125.
    """
    logits = [[0.0, 0.0], [np.log(3.0), 0.0]]
    assert metrics.expected_calibration_error(logits, [1, 0], bins=2) == pytest.approx(0.375)


def test_the_last_bin_holds_a_confidence_of_one() -> None:
    """Softmax of (1000, 0) is exactly (1, 0), with no overflow; one right, one wrong: |1 − 2| / 2 = 0.5."""
    assert metrics.expected_calibration_error([[1000.0, 0.0], [1000.0, 0.0]], [0, 1]) == 0.5


def test_gaps_of_one_bin_cancel_and_gaps_of_two_bins_do_not() -> None:
    """Confidences 0.6 (right, +0.4) and 0.8 (wrong, −0.8).

    One bin: |0.4 − 0.8| / 2 = 0.2. Fifteen bins, so two occupied: (0.4 + 0.8) / 2 = 0.6.
    """
    logits = logits_of([[0.6, 0.4], [0.8, 0.2]])
    assert metrics.expected_calibration_error(logits, [0, 1], bins=1) == pytest.approx(0.2)
    assert metrics.expected_calibration_error(logits, [0, 1]) == pytest.approx(0.6)


def test_calibration_is_computed_in_float64() -> None:
    """Of 1 / (1 + e^−20), 1 − p ≈ 2.061e-9 is lost in float32, where p rounds to 1."""
    logits = np.array([[20.0, 0.0]], dtype=np.float32)
    assert metrics.expected_calibration_error(logits, [0]) == pytest.approx(2.0611536e-9, rel=1e-6)


def test_the_number_of_bins_is_checked() -> None:
    with pytest.raises(MetricError, match=r"^bins must be at least 1; got 0\."):
        metrics.expected_calibration_error([[1.0, 0.0]], [0], bins=0)
