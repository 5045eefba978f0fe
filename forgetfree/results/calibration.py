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
        right: which examples are answered rightly, shape (n,).
        sure: their largest softmax probability, shape (n,).
        places: the bin of each, shape (n,).
        counts: examples per bin, shape (bins,).
        accuracy: share of them that are right; NaN in an empty bin.
        confidence: mean of their largest softmax probability; NaN in an empty bin.
    """

    right: npt.NDArray[np.bool_]
    sure: Floats
    places: Integers
    counts: Integers
    accuracy: Floats
    confidence: Floats

    @property
    def ece(self) -> float:
        """Expected calibration error (eq. 3 there): Σ_b n_b/n · |accuracy_b − confidence_b|, in [0, 1]."""
        filled = self.counts > 0
        gaps = np.abs(self.accuracy[filled] - self.confidence[filled])
        return float((self.counts[filled] * gaps).sum() / self.counts.sum())

    @property
    def gaps(self) -> Floats:
        """What each example adds to the expected calibration error, times their number ``(n,)``: their mean is the error.

        It is ± (right − confidence), with the sign of the bin's mean, which other rows would change only near 0.
        """
        return np.asarray(np.sign(self.accuracy - self.confidence)[self.places] * (self.right - self.sure))

    @property
    def noise_floor(self) -> float:
        """The expected calibration error that a perfectly calibrated model of the same confidences shows on as many rows.

        Each row is right with the probability that the model gives to its answer; the mean over many such outcomes.
        """
        random, gaps = np.random.default_rng(len(self.sure)), np.zeros(_DRAWS)
        for place in np.flatnonzero(self.counts):
            sure = self.sure[self.places == place]
            gaps += np.abs(((random.random((_DRAWS, len(sure))) < sure) - sure).sum(axis=1))
        return float(gaps.mean() / len(self.sure))

    @property
    def debiased_ece(self) -> float:
        """The expected calibration error without what chance adds to it, estimated as Kumar et al. do (NeurIPS 2019).

        The accuracy of each bin is taken as normal around what was seen, with variance a·(1 − a)/n; what the mean of the
        error grows by when it is drawn so is taken off. For a calibrated model that is only a part of it: read it beside the
        noise floor.
        """
        from scipy.stats import foldnorm

        filled = self.counts > 0
        counts, right = self.counts[filled], self.accuracy[filled]
        gap, spread = np.abs(right - self.confidence[filled]), np.sqrt(right * (1 - right) / counts)
        certain = spread == 0
        scale = np.where(certain, 1, spread)
        expected = np.where(certain, gap, foldnorm.mean(gap / scale, scale=scale))
        return float((counts * (2 * gap - expected)).sum() / counts.sum())


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
    right = scores.argmax(axis=1) == labels_of(labels, scores)
    # The largest is exp(0) / Σ exp(logit − largest), which cannot overflow, nor exceed 1.
    sure = np.asarray(1.0 / np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1))
    # side="left" puts a confidence equal to an edge into the bin below it.
    places = np.searchsorted(np.linspace(0.0, 1.0, bins + 1), sure, side="left") - 1
    counts = np.bincount(places, minlength=bins)
    with np.errstate(invalid="ignore"):  # 0 / 0 in an empty bin
        means = [np.bincount(places, weights=of, minlength=bins) / counts for of in (right, sure)]
    return Reliability(right, sure, places, counts, *means)


def expected_calibration_error(logits: npt.ArrayLike, labels: npt.ArrayLike, bins: int = BINS) -> float:
    """Return the expected calibration error (Guo et al., ICML 2017, eq. 3), a fraction in [0, 1], see `reliability`."""
    return reliability(logits, labels, bins).ece
