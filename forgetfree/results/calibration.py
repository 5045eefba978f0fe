"""What a model's confidence is worth: reliability, expected calibration error beside chance, and temperature scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forgetfree.errors import MetricError
from forgetfree.results.metrics import Floats, Integers, labels_of, logits_of

#: Validation rows of a task that its temperature is fitted to, at least and at most.
_FEWEST, _MOST = 64, 512
#: Of confidences in (0, 1], all of one width (Guo et al., ICML 2017).
BINS = 15
#: Temperatures that are considered. Where all answers are right, the lower the better, without end.
LOWEST, HIGHEST = 0.01, 100.0
#: Parts of the rows, each of which is left out once to see whether scaling helps on rows that the fit has not seen.
FOLDS = 5
#: Logits below are those of labels that a row cannot have.
_IMPOSSIBLE = -1e30
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


def calibration_rows(tests: int) -> int:
    """Return to how many validation rows a temperature is fitted, as far as there are so many: as many as are tested."""
    return min(max(tests, _FEWEST), _MOST)


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


def temperature_of(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Return the `fitted_temperature`; 1 unless scaling lowers the cross-entropy of rows that were left out of the fit.

    Row i is left out with those of its fold, i mod `FOLDS`, and scaled by the temperature that is fitted to all other rows.

    Args:
        logits: shape (n, n_labels), of rows that were not trained on.
        labels: of these rows, shape (n,).
    """
    scores, correct = _counted(logits, labels)
    fold = np.arange(len(correct)) % FOLDS
    before, after = 0.0, 0.0
    for each in range(min(FOLDS, len(correct))):
        out = fold == each
        before += cross_entropy(scores[out], correct[out]) * out.sum()
        after += cross_entropy(scores[out], correct[out], fitted_temperature(scores[~out], correct[~out])) * out.sum()
    return fitted_temperature(scores, correct) if after < before else 1.0


def cross_entropy(logits: npt.ArrayLike, labels: npt.ArrayLike, temperature: float = 1.0) -> float:
    """Return the mean negative log likelihood of the labels under softmax(logits / T), in nats."""
    scores, correct = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    gaps = (scores - scores.max(axis=1, keepdims=True)) / temperature
    return float(np.mean(np.log(np.exp(gaps).sum(axis=1)) - gaps[np.arange(len(correct)), correct]))


def fitted_temperature(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Return the T that minimises the `cross_entropy`, in [`LOWEST`, `HIGHEST`].

    It is convex in 1/T, so there is one minimum. Rows whose label was ruled out beforehand do not count.

    Args:
        logits: shape (n, n_labels), of rows that were not trained on.
        labels: of these rows, shape (n,).
    """
    from scipy.optimize import minimize_scalar

    scores, correct = _counted(logits, labels)
    if not len(correct):
        return 1.0
    fitted = minimize_scalar(
        lambda log_temperature: cross_entropy(scores, correct, math.exp(log_temperature)),
        bounds=(math.log(LOWEST), math.log(HIGHEST)),
        method="bounded",
        options={"xatol": 1e-5},
    )
    return math.exp(fitted.x)


def _counted(logits: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[Floats, Integers]:
    """Return the rows whose label was not ruled out beforehand."""
    scores, correct = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    counted = scores[np.arange(len(correct)), correct] > _IMPOSSIBLE
    return scores[counted], correct[counted]
