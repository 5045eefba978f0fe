"""What a model's confidence is worth: reliability and expected calibration error beside chance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forgetfree.errors import MetricError
from forgetfree.results.metrics import Floats, Integers, labels_of, logits_of

#: Of confidences in (0, 1], all of one width (Guo et al., ICML 2017).
BINS = 15
#: Outcomes that are drawn of a calibrated model.
_DRAWS = 1000


@dataclass(frozen=True, eq=False)
class Reliability:
    """A reliability diagram (Guo et al., ICML 2017, fig. 1): what a model's confidence is worth, bin by bin.

    Attributes:
        edges: of the bins over (0, 1], shape (bins + 1,).
        counts: examples per bin, shape (bins,).
        accuracy: share of them that are right; NaN in an empty bin.
        confidence: mean of their largest softmax probability; NaN in an empty bin.
    """

    edges: Floats
    counts: Integers
    accuracy: Floats
    confidence: Floats

    @property
    def ece(self) -> float:
        """Expected calibration error (eq. 3 there): Σ_b n_b/n · |accuracy_b − confidence_b|, in [0, 1]."""
        filled = self.counts > 0
        gaps = np.abs(self.accuracy[filled] - self.confidence[filled])
        return float((self.counts[filled] * gaps).sum() / self.counts.sum())


def reliability(logits: npt.ArrayLike, labels: npt.ArrayLike, bins: int = BINS) -> Reliability:
    """Sort examples by their largest softmax probability into bins of equal width, open below and closed above.

    torchmetrics closes its bins below, so a confidence at an edge is counted in the next one; elsewhere the two agree.

    Args:
        logits: shape (n, n_labels), finite.
        labels: integers in [0, n_labels), shape (n,).
        bins: number of bins over (0, 1]; 15 as in the paper.
    """
    if bins < 1:
        raise MetricError(f"bins must be at least 1; got {bins}. The usual number is 15.")
    scores = logits_of(logits)
    correct = scores.argmax(axis=1) == labels_of(labels, scores)
    confidence = _confidence(scores)
    edges = np.linspace(0.0, 1.0, bins + 1)
    # side="left" puts a confidence equal to an edge into the bin below it.
    member = np.searchsorted(edges, confidence, side="left") - 1
    counts = np.bincount(member, minlength=bins)
    with np.errstate(invalid="ignore"):  # 0 / 0 in an empty bin
        means = [np.bincount(member, weights=of, minlength=bins) / counts for of in (correct, confidence)]
    return Reliability(edges, counts.astype(np.int64), *means)


def expected_calibration_error(logits: npt.ArrayLike, labels: npt.ArrayLike, bins: int = BINS) -> float:
    """Return the expected calibration error (Guo et al., ICML 2017, eq. 3), see `reliability`.

    Args:
        logits: shape (n, n_labels), finite.
        labels: integers in [0, n_labels), shape (n,).
        bins: number of bins over (0, 1]; 15 as in the paper.

    Returns:
        A fraction in [0, 1]; 0.0 is perfect calibration.
    """
    return reliability(logits, labels, bins).ece


def calibration_gaps(logits: npt.ArrayLike, labels: npt.ArrayLike) -> Floats:
    """Return what each example adds to the expected calibration error, times their number ``(n,)``: their mean is the error.

    It is ± (right − confidence), with the sign of the bin's mean, which other rows would change only near 0.
    """
    shown, scores = reliability(logits, labels), logits_of(logits)
    confidence = _confidence(scores)
    member = np.searchsorted(shown.edges, confidence, side="left") - 1
    signs = np.sign(shown.accuracy - shown.confidence)[member]
    return np.asarray(signs * ((scores.argmax(axis=1) == labels_of(labels, scores)) - confidence))


def _confidence(scores: Floats) -> Floats:
    """Return the largest softmax probability of each row of logits."""
    # It is exp(0) / Σ exp(logit − largest), which cannot overflow, nor exceed 1.
    return np.asarray(1.0 / np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1))


def ece_noise_floor(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Return the expected calibration error that a perfectly calibrated model of the same confidences shows on as many rows.

    Each row is right with the probability that the model gives to its answer; the mean over many such outcomes.
    """
    shown = reliability(logits, labels)
    filled = np.flatnonzero(shown.counts)
    confidence = _confidence(np.asarray(logits, dtype=np.float64))
    member = np.searchsorted(shown.edges, confidence, side="left") - 1
    random = np.random.default_rng(len(confidence))
    gaps = np.zeros(_DRAWS)
    for bin_ in filled:
        of_bin = confidence[member == bin_]
        right = random.random((_DRAWS, len(of_bin))) < of_bin
        gaps += np.abs((right - of_bin).sum(axis=1))
    return float(gaps.mean() / len(confidence))


def debiased_ece(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Return the expected calibration error without what chance adds to it, estimated as Kumar et al. do (NeurIPS 2019).

    The accuracy of each bin is taken as normal around what was seen, with variance a·(1 − a)/n; what the mean of the error
    grows by when it is drawn so is taken off. For a calibrated model that is only a part of it: read it beside the noise
    floor.
    """
    shown = reliability(logits, labels)
    filled = shown.counts > 0
    counts, right = shown.counts[filled], shown.accuracy[filled]
    gap, spread = right - shown.confidence[filled], np.sqrt(right * (1 - right) / counts)
    from scipy.stats import foldnorm

    certain = spread == 0
    shape = np.abs(gap) / np.where(certain, 1, spread)
    expected = np.where(certain, np.abs(gap), foldnorm.mean(shape, scale=np.where(certain, 1, spread)))
    return float((counts * (2 * np.abs(gap) - expected)).sum() / counts.sum())
