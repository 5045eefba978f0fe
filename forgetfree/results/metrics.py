"""Metrics of predicted labels, calibration, and the summary of a learning matrix.

Metrics of labels take the logits and labels of n examples. All arithmetic is in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forgetfree import registry
from forgetfree.display import PERCENT, PLAIN, Scale, brief
from forgetfree.errors import ForgetfreeError, MetricError, first_line

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


# ---- a metric -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A score of answers. Packages add their own through entry points, see `forgetfree.registry`.

    Attributes:
        score: returns the score of a model's `forgetfree.results.answers.Answers` on one task's rows.
        higher_is_better: whether higher scores are better; else lower.
        bounds: the lowest and the highest possible score; ``None``: unbounded.
        constant: returns the best score of one answer given to all rows; ``None``: every label is tried.
        rows: returns the value of each row ``(n,)`` if the score is their mean; else ``None``.
        scale: the display scale of scores; default: percentages if the bounds lie in [0, 1], else plain numbers.
        title: its name in tables; default: the registered name in capitals.
    """

    score: Callable[[Any], float]
    higher_is_better: bool = True
    bounds: tuple[float | None, float | None] = (0.0, 1.0)
    constant: Callable[[Any], float] | None = None
    rows: Callable[[Any], Floats] | None = None
    scale: Scale | None = None
    title: str = ""

    @property
    def shown_as(self) -> Scale:
        """`scale`, or its default."""
        low, high = self.limits
        return self.scale or (PERCENT if low >= 0 and high <= 1 else PLAIN)

    @property
    def limits(self) -> tuple[float, float]:
        """The bounds, with infinity for ``None``."""
        low, high = self.bounds
        return (-np.inf if low is None else low), (np.inf if high is None else high)


def measured(metric: str, function: Callable[[Any], float], answers: Any) -> float:
    """Return the value of a metric's ``score`` or ``constant`` for answers.

    Raises:
        MetricError: the function fails; a plugin may define it.
    """
    try:
        return function(answers)
    except ForgetfreeError:
        raise
    except Exception as error:
        name = type(error).__name__
        raise MetricError(
            f"The metric {metric!r} failed on the predictions for {len(answers.right):,} rows: {name}: "
            f"{first_line(error)}. Fix it, or choose another with metric in source.json."
        ) from error


def sign(*metrics: str) -> int:
    """Return 1 where higher scores are better by all of these metrics, -1 where lower are, 0 where they disagree."""
    signs = {1 if registry.metric(name).higher_is_better else -1 for name in metrics}
    return signs.pop() if len(signs) == 1 else 0


def scale_of(*metrics: str) -> Scale:
    """Return the scale of scores by these metrics and of means over them: plain numbers if their scales differ."""
    scales = {registry.metric(name).shown_as for name in metrics}
    return scales.pop() if len(scales) == 1 else PLAIN


#: Measured besides scores: shares, and amounts without an upper bound.
_SHARES, _AMOUNTS = ("ece", "agreement", "word_accuracy", "union_accuracy", "union_ece"), ("loss", "perplexity")


def limits_of(metric: str) -> tuple[float, float]:
    """Return the lowest and the highest possible value of a metric, or of another measured number such as ECE."""
    if metric in registry.metrics():
        limits: tuple[float, float] = registry.metric(metric).limits
        return limits
    return (0.0, 1.0) if metric in _SHARES else (0.0 if metric in _AMOUNTS else -np.inf, np.inf)


def title_of(metric: str) -> str:
    """Return the name of a metric in tables."""
    return registry.metric(metric).title or metric.upper()


# ---- metrics of predicted labels ------------------------------------------------------------------------
#
# Each takes finite logits, shape (n, n_labels), and integers in [0, n_labels), shape (n,), and returns a fraction in [0, 1].


def accuracy(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Return the share of examples whose largest logit is at the label; on a tie the lower label is the prediction."""
    scores = logits_of(logits)
    return mean_of(scores.argmax(axis=1) == labels_of(labels, scores))


def f1(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Return F1 of label 1 in a task of two labels, as GLUE scores QQP and MRPC: 2·TP / (2·TP + FP + FN).

    It is 0.0 where label 1 is neither present nor predicted.
    """
    scores = logits_of(logits)
    if scores.shape[1] != 2:
        raise MetricError(
            f"f1 is the F1 of label 1 and needs logits of shape (n, 2); got {scores.shape}. "
            "Use accuracy for a task of more than two labels."
        )
    from sklearn.metrics import f1_score  # takes a second to import

    return float(f1_score(labels_of(labels, scores), scores.argmax(axis=1), zero_division=0.0))


def macro_f1(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Return the mean of the F1 of each label that some example has: rare labels count as much as common ones."""
    from sklearn.metrics import f1_score

    scores = logits_of(logits)
    right = labels_of(labels, scores)
    return float(f1_score(right, scores.argmax(axis=1), labels=np.unique(right), average="macro", zero_division=0.0))


def agreement(logits: npt.ArrayLike, other_logits: npt.ArrayLike) -> float:
    """Return the share of examples, in [0, 1], for which two models with logits (n, n_labels) predict the same label."""
    ours, theirs = logits_of(logits), logits_of(other_logits, "other_logits")
    if ours.shape != theirs.shape:
        raise MetricError(
            f"agreement needs the logits of two models for the same examples; got shapes {ours.shape} "
            f"and {theirs.shape}."
        )
    return mean_of(ours.argmax(axis=1) == theirs.argmax(axis=1))


def _constant_accuracy(answers: Any) -> float:
    """Return the share of the commonest label."""
    counts = np.bincount(answers.labels)
    return float(counts.max() / counts.sum())


def _constant_f1(answers: Any) -> float:
    """Return F1 if label 1 is predicted for all rows: 2p / (p + n) for p rows of label 1 among n."""
    positive = int((answers.labels == 1).sum())
    return float(2 * positive / (positive + len(answers.labels)))


ACCURACY = Metric(
    lambda answers: accuracy(answers.logits, answers.labels),
    constant=_constant_accuracy,
    rows=lambda answers: answers.logits.argmax(axis=1) == answers.labels,
)
F1 = Metric(lambda answers: f1(answers.logits, answers.labels), constant=_constant_f1)
MACRO_F1 = Metric(lambda answers: macro_f1(answers.logits, answers.labels), title="macro F1")


# ---- calibration ----------------------------------------------------------------------------------------

#: The number of bins of confidences in (0, 1], of equal width (Guo et al., ICML 2017).
BINS = 15


@dataclass(frozen=True, eq=False)
class Reliability:
    """A reliability diagram (Guo et al., ICML 2017, fig. 1): accuracy and confidence, bin by bin.

    Attributes:
        right: which examples are predicted correctly, shape (n,).
        sure: the largest softmax probability of each example, shape (n,).
        places: the bin of each example, shape (n,).
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
        """The contribution of each example to the expected calibration error, times n ``(n,)``: the mean is the error.

        It is ± (right − confidence), with the sign of the bin's mean, which other rows would change only near 0.
        """
        return np.asarray(np.sign(self.accuracy - self.confidence)[self.places] * (self.right - self.sure))


def reliability(logits: npt.ArrayLike, labels: npt.ArrayLike, bins: int = BINS) -> Reliability:
    """Sort examples by their largest softmax probability into bins of equal width, open below and closed above.

    torchmetrics closes its bins below, so a confidence at an edge is counted in the next one; elsewhere the two agree.

    Args:
        logits: shape (n, n_labels), finite.
        labels: integers in [0, n_labels), shape (n,).
        bins: number of bins over (0, 1]; 15 as in the paper.
    """
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


# ---- of a learning matrix -------------------------------------------------------------------------------
#
# The *learning matrix* R of T tasks has shape (T+1, T); row 0 is measured before any training, row i after learning task i, and
# column k belongs to the k-th task. Counting from zero as Python does, task k is learned between row k and row k + 1; before,
# values may be missing: None or NaN. All results are fractions, never percent, unless a metric has other bounds.


def forgetting_per_task(matrix: npt.ArrayLike, metrics: Sequence[str] | None = None) -> list[float]:
    """Return how far each task has fallen from its best: max over the earlier rows since it was learned − last row.

    Chaudhry et al. (ECCV 2018, eq. 2) take the maximum over all earlier rows. We take only the rows since the task was learned:
    a task cannot be forgotten before.

    Args:
        matrix: learning matrix, shape (T+1, T), in [0, 1].
        metrics: see `summarize`.

    Returns:
        T fractions in [-1, 1]. The last is 0.0: nothing came after the last task.
    """
    scores, signs = _scores_and_signs(matrix, metrics)
    since = [column[task + 1 :] for task, column in enumerate((signs * scores).T)]
    return [*(float(gains[:-1].max() - gains[-1]) for gains in since[:-1]), 0.0]


def summarize(
    matrix: npt.ArrayLike, reference: npt.ArrayLike | None = None, metrics: Sequence[str] | None = None
) -> dict[str, float | None]:
    """Return the summary of a learning matrix.

    The average is the mean over tasks of the last row: every task counts the same, whatever the size of its test set.
    Forgetting is the mean of `forgetting_per_task` over all tasks but the last (Chaudhry et al., ECCV 2018, eq. 3), backward
    transfer the mean of last row − row right after learning (Lopez-Paz & Ranzato, 2017). Forward transfer is the mean over
    tasks but the first of row right after learning − reference, the model fine-tuned on the task alone: a new task has its own
    head, so the effect of earlier tasks shows only after the head is trained (Chaudhry et al., ECCV 2018, eq. 4, with the other
    sign and this reference). The gain of zero-shot answers is the mean over tasks but the first of row just before learning −
    row 0, the scores of the pre-trained model (Lopez-Paz & Ranzato, 2017, with a random one). All are 0 for a stream of one
    task.

    Args:
        matrix: learning matrix, shape (T+1, T).
        reference: one result of separate fine-tuning per task, shape (T,); None if unknown.
        metrics: the metric of each task; default: any in [0, 1] for which higher is better.

    Returns:
        Numbers under `average`, `forgetting`, `bwt`, `fwt` (None without reference) and `zero_shot_gain` (None where scores are
        missing). If lower is better for a task's metric, its column counts with the opposite sign, so that forgetting and gains
        are still positive; the average is over the scores as they are.
    """
    scores, signs = _scores_and_signs(matrix, metrics)
    gains = signs * scores
    learned = np.diagonal(gains, -1)
    zero_shot_gain, forward = mean_of((np.diagonal(gains) - gains[0])[1:]), None
    if reference is not None:
        expected = floats_of(reference, "reference")
        _check_numbers(expected, "reference", metrics is None)
        if expected.shape != signs.shape:
            raise MetricError(
                f"reference must hold one fine-tuning result per task, shape {signs.shape}; got shape {expected.shape}."
            )
        forward = mean_of((learned - signs * expected)[1:])
    return {
        "average": mean_of(scores[-1]),
        "forgetting": mean_of(forgetting_per_task(matrix, metrics)[:-1]),
        "bwt": mean_of((gains[-1] - learned)[:-1]),
        "fwt": forward,
        "zero_shot_gain": None if np.isnan(zero_shot_gain) else zero_shot_gain,
    }


def _scores_and_signs(matrix: npt.ArrayLike, metrics: Sequence[str] | None) -> tuple[Floats, Floats]:
    """Return the checked matrix, with NaN for missing scores before learning, and the sign of each column: see `sign`."""
    scores = floats_of(matrix, "matrix")
    _check_numbers(scores[~np.triu(np.isnan(scores))] if scores.ndim == 2 else scores, "matrix", metrics is None)
    if scores.ndim != 2 or scores.size == 0 or scores.shape[0] != scores.shape[1] + 1:
        raise MetricError(
            "matrix must have shape (T+1, T), a row before training and a row after each of T tasks; "
            f"got shape {scores.shape}."
        )
    if metrics is None:
        return scores, np.ones(scores.shape[1])
    return scores, np.array([sign(name) for name in metrics], dtype=np.float64)


def _check_numbers(array: Floats, name: str, fractions: bool) -> None:
    outside = array[~((array >= 0) & (array <= 1)) if fractions else ~np.isfinite(array)]
    if outside.size:
        what = "fractions in [0, 1], not percent" if fractions else "numbers"
        raise MetricError(f"{name} must hold {what}; got {outside[0]}.")


# ---- checked arrays -------------------------------------------------------------------------------------


def logits_of(values: npt.ArrayLike, name: str = "logits") -> Floats:
    """Return the checked logits of an argument, shape (n, n_labels)."""
    logits = floats_of(values, name)
    if logits.size == 0 or logits.ndim != 2 or logits.shape[1] < 2:
        raise MetricError(f"{name} must have shape (n, n_labels) with at least two labels; got shape {logits.shape}.")
    damaged = np.flatnonzero(~np.isfinite(logits).all(axis=1))
    if damaged.size:
        raise MetricError(
            f"{name} must be finite; {damaged.size} of {len(logits)} rows are not; the first is row {damaged[0]}. "
            "The usual cause is a learning rate that is too high for the model."
        )
    return logits


def labels_of(values: npt.ArrayLike, logits: Floats) -> Integers:
    """Return the checked labels of the examples with these `logits` (n, n_labels)."""
    labels = np.asarray(values)
    n, n_labels = logits.shape
    right = labels.shape == (n,) and np.issubdtype(labels.dtype, np.integer)
    if not right or ((labels < 0) | (labels >= n_labels)).any():
        raise MetricError(
            f"labels must be integers in [0, {n_labels}), one per row of logits, shape ({n},); got shape {labels.shape}, dtype "
            f"{labels.dtype}: {brief(labels.tolist())}."
        )
    return labels.astype(np.int64)


def floats_of(values: npt.ArrayLike, name: str) -> Floats:
    """Return an argument as an array of numbers."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise MetricError(f"{name} must be an array of numbers with rows of equal length; {error}.") from error


def mean_of(values: npt.ArrayLike) -> float:
    """Return the mean; 0.0 for no numbers, such as the forgetting of a stream of one task."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()) if array.size else 0.0
