"""What was learned, what was forgotten, and how well the model knows it.

Two kinds of function live here. The first kind reads the *learning matrix* R of one run, with T tasks:
shape (T+1, T), values in [0, 1]; row 0 is measured before any training, row i after learning task i, and
column k belongs to the k-th task. Counting from zero as Python does, task k is learned between row k and
row k + 1; before, values may be missing: None or NaN. The second kind reads logits and labels of n examples.

All results are fractions, never percent, unless a metric has other bounds. All arithmetic is in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forgetfree import registry
from forgetfree.display import PERCENT, PLAIN, Scale
from forgetfree.errors import MetricError
from forgetfree.results.arguments import (
    Floats,
    Integers,
    floats_of,
    fractions_of,
    labels_of,
    learning_matrix,
    logits_of,
)

# ---- metrics of a learning matrix -----------------------------------------------------------------------


def average_accuracy(matrix: npt.ArrayLike) -> float:
    """Return the mean over tasks of the last row: every task counts the same, whatever the size of its test set.

    Args:
        matrix: learning matrix, shape (T+1, T), in [0, 1].

    Returns:
        A fraction in [0, 1].
    """
    return _mean(learning_matrix(matrix)[-1])


def forgetting(matrix: npt.ArrayLike) -> float:
    """Return the mean of `forgetting_per_task` over all tasks but the last (Chaudhry et al., ECCV 2018, eq. 3).

    Args:
        matrix: learning matrix, shape (T+1, T), in [0, 1].

    Returns:
        A fraction in [-1, 1], negative where tasks got better later; 0.0 for a stream of one task.
    """
    return _mean(forgetting_per_task(matrix)[:-1])


def forgetting_per_task(matrix: npt.ArrayLike, metrics: Sequence[str] | None = None) -> list[float]:
    """Return how far each task has fallen from its best: max over the earlier rows since it was learned − last row.

    Chaudhry et al. (ECCV 2018, eq. 2) take the maximum over all earlier rows. We take only those from the
    learning of the task on: what was never learned cannot be forgotten.

    Args:
        matrix: learning matrix, shape (T+1, T), in [0, 1].
        metrics: see `summarize`.

    Returns:
        T fractions in [-1, 1]. The last is 0.0: nothing came after the last task.
    """
    scores, signs = _scores_and_signs(matrix, metrics)
    return _forgotten(signs * scores)


def _forgotten(scores: Floats) -> list[float]:
    best = [scores[task + 1 : -1, task].max() for task in range(scores.shape[1] - 1)]
    return [float(top - last) for top, last in zip(best, scores[-1], strict=False)] + [0.0]


def backward_transfer(matrix: npt.ArrayLike) -> float:
    """Return the mean over tasks but the last of last row − row right after learning (Lopez-Paz & Ranzato, 2017).

    Args:
        matrix: learning matrix, shape (T+1, T), in [0, 1].

    Returns:
        A fraction in [-1, 1], negative where tasks were forgotten; 0.0 for a stream of one task.
    """
    return _backward(learning_matrix(matrix))


def _backward(scores: Floats) -> float:
    return _mean((scores[-1] - _right_after_learning(scores))[:-1])


def forward_transfer(matrix: npt.ArrayLike) -> float | None:
    """Return the mean over tasks but the first of row just before learning − row 0 (Lopez-Paz & Ranzato, 2017).

    Their baseline is a randomly initialised model; ours is the pre-trained model, which is row 0.

    Args:
        matrix: learning matrix, shape (T+1, T), in [0, 1].

    Returns:
        A fraction in [-1, 1], positive where earlier tasks helped; 0.0 for a stream of one task; None where tasks were not
        evaluated before they were learned.
    """
    return _forward(learning_matrix(matrix))


def _forward(scores: Floats) -> float | None:
    transfer = _mean((np.diagonal(scores) - scores[0])[1:])
    return None if np.isnan(transfer) else transfer


def intransigence(matrix: npt.ArrayLike, reference: npt.ArrayLike | None) -> float | None:
    """Return the mean over tasks of reference − row right after learning (Chaudhry et al., ECCV 2018, eq. 4).

    Their reference is a model trained on all tasks so far; ours is the model fine-tuned on the task alone.

    Args:
        matrix: learning matrix, shape (T+1, T), in [0, 1].
        reference: one result of separate fine-tuning per task, shape (T,), in [0, 1]; None if unknown.

    Returns:
        A fraction in [-1, 1], positive where the strategy learned less than fine-tuning did; None without a
        reference.
    """
    if reference is None:
        return None
    return _intransigence(learning_matrix(matrix), fractions_of(reference, "reference"))


def _intransigence(scores: Floats, expected: Floats) -> float:
    if expected.shape != (tasks := scores.shape[1:]):
        raise MetricError(
            f"reference must hold one fine-tuning result per task, shape {tasks}; got shape {expected.shape}."
        )
    return _mean(expected - _right_after_learning(scores))


def summarize(
    matrix: npt.ArrayLike,
    ece: npt.ArrayLike | None,
    reference: npt.ArrayLike | None = None,
    metrics: Sequence[str] | None = None,
) -> dict[str, float | None]:
    """Return the six numbers that results.json keeps as `summary`.

    Args:
        matrix: learning matrix, shape (T+1, T).
        ece: expected calibration errors, same shape and layout as `matrix`, in [0, 1]; None where answers have no
            probabilities.
        reference: one result of separate fine-tuning per task, shape (T,); None if unknown.
        metrics: the name of each task's; default: any of which higher is better, in [0, 1].

    Returns:
        Numbers under `average`, `forgetting`, `bwt`, `fwt` (None where its scores are missing), `intransigence` (None
        without reference) and `ece` (mean over tasks of the last row, None without). Where of a task's metric lower is better,
        its column counts with the other sign, so that to forget is above 0 and to gain is, too; the average is that of the
        scores as they are.
    """
    scores, signs = _scores_and_signs(matrix, metrics)
    expected = None
    if reference is not None:
        expected = signs * (fractions_of if metrics is None else floats_of)(reference, "reference")
    gains = signs * scores
    return {
        "average": _mean(scores[-1]),
        "forgetting": _mean(_forgotten(gains)[:-1]),
        "bwt": _backward(gains),
        "fwt": _forward(gains),
        "intransigence": None if expected is None else _intransigence(gains, expected),
        "ece": None if ece is None else _calibration(ece, scores.shape),
    }


def _calibration(ece: npt.ArrayLike, shape: tuple[int, ...]) -> float | None:
    """Return the mean of the last row over the tasks that have calibration errors; None where no task has."""
    errors = floats_of(ece, "ece")
    lacking = np.isnan(errors).all(axis=0)
    learning_matrix(np.where(lacking, 0.0, errors) if errors.ndim == 2 else errors, "ece")
    if errors.shape != shape:
        raise MetricError(
            f"ece must have the shape of matrix, {shape}; got {errors.shape}. "
            "Both have a row before training and a row after each task."
        )
    return None if lacking.all() else _mean(errors[-1][~lacking])


def _scores_and_signs(matrix: npt.ArrayLike, metrics: Sequence[str] | None) -> tuple[Floats, Floats]:
    """Return the checked matrix, and the sign of each column by which more is better."""
    if metrics is None:
        scores = learning_matrix(matrix)
        return scores, np.ones(scores.shape[1])
    scores = learning_matrix(matrix, within=(-np.inf, np.inf))
    for column, name in zip(scores.T, metrics, strict=True):
        low, high = registry.metric(name).limits
        held = column[~np.isnan(column)]
        if outside := held[(held < low) | (held > high)].tolist():
            raise MetricError(
                f"matrix must hold scores in [{low:g}, {high:g}], the bounds of their metric; got {outside[0]}."
            )
    return scores, np.array([float(sign(name)) for name in metrics])


def sign(*metrics: str) -> int:
    """Return 1 where higher scores are better by all of these metrics, -1 where lower are, 0 where they differ in that."""
    signs = {1 if registry.metric(name).higher_is_better else -1 for name in metrics}
    return signs.pop() if len(signs) == 1 else 0


def scale_of(*metrics: str) -> Scale:
    """Return how scores by any of these metrics are shown, and means over them: as plain numbers where they differ in that."""
    scales = {registry.metric(name).shown_as for name in metrics}
    return scales.pop() if len(scales) == 1 else PLAIN


# ---- metrics of predictions -----------------------------------------------------------------------------


def accuracy(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Return the share of examples whose largest logit is at the label; on a tie the lower label is the prediction.

    Args:
        logits: shape (n, n_labels), finite.
        labels: integers in [0, n_labels), shape (n,).

    Returns:
        A fraction in [0, 1].
    """
    scores = logits_of(logits)
    return _mean(scores.argmax(axis=1) == labels_of(labels, scores))


def f1(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Return F1 of label 1 in a task of two labels, as GLUE scores QQP and MRPC: 2·TP / (2·TP + FP + FN).

    Args:
        logits: shape (n, 2), finite.
        labels: 0 or 1, shape (n,).

    Returns:
        A fraction in [0, 1]; 0.0 where label 1 is neither present nor predicted.
    """
    scores = logits_of(logits)
    if scores.shape[1] != 2:
        raise MetricError(
            f"f1 is the F1 of label 1 and needs logits of shape (n, 2); got {scores.shape}. "
            "Use accuracy for a task of more than two labels."
        )
    from sklearn.metrics import f1_score  # takes a second to import

    return float(f1_score(labels_of(labels, scores), scores.argmax(axis=1), zero_division=0.0))


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
        held = self.counts > 0
        gaps = np.abs(self.accuracy[held] - self.confidence[held])
        return float((self.counts[held] * gaps).sum() / self.counts.sum())


def reliability(logits: npt.ArrayLike, labels: npt.ArrayLike, bins: int = 15) -> Reliability:
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
    # The largest probability is exp(0) / Σ exp(logit − largest): it cannot overflow, nor exceed 1.
    confidence = 1.0 / np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1)
    edges = np.linspace(0.0, 1.0, bins + 1)
    # side="left" puts a confidence equal to an edge into the bin below it.
    member = np.searchsorted(edges, confidence, side="left") - 1
    counts = np.bincount(member, minlength=bins)
    with np.errstate(invalid="ignore"):  # 0 / 0 in an empty bin
        means = [np.bincount(member, weights=of, minlength=bins) / counts for of in (correct, confidence)]
    return Reliability(edges, counts.astype(np.int64), *means)


def expected_calibration_error(logits: npt.ArrayLike, labels: npt.ArrayLike, bins: int = 15) -> float:
    """Return the expected calibration error (Guo et al., ICML 2017, eq. 3), see `reliability`.

    Args:
        logits: shape (n, n_labels), finite.
        labels: integers in [0, n_labels), shape (n,).
        bins: number of bins over (0, 1]; 15 as in the paper.

    Returns:
        A fraction in [0, 1]; 0.0 is perfect calibration.
    """
    return reliability(logits, labels, bins).ece


def agreement(logits: npt.ArrayLike, other_logits: npt.ArrayLike) -> float:
    """Return the share of examples for which two models predict the same label.

    Args:
        logits: shape (n, n_labels), finite.
        other_logits: the same shape, finite, for the same examples.

    Returns:
        A fraction in [0, 1].
    """
    ours, theirs = logits_of(logits), logits_of(other_logits, "other_logits")
    if ours.shape != theirs.shape:
        raise MetricError(
            f"agreement needs the logits of two models for the same examples; got shapes {ours.shape} "
            f"and {theirs.shape}."
        )
    return _mean(ours.argmax(axis=1) == theirs.argmax(axis=1))


@dataclass(frozen=True)
class Metric:
    """A score of answers. Packages add theirs by entry points, see `forgetfree.registry`.

    Attributes:
        score: returns the score of a model's `forgetfree.results.answers.Answers` on one task's rows.
        higher_is_better: else lower.
        bounds: the lowest and the highest score there can be; ``None``: there is none.
        constant: returns the best score that one and the same answer to all rows can have; none: every label is tried.
        scale: how scores are shown; default: as percentages where the bounds lie in [0, 1], else as plain numbers.
    """

    score: Callable[[Any], float]
    higher_is_better: bool = True
    bounds: tuple[float | None, float | None] = (0.0, 1.0)
    constant: Callable[[Any], float] | None = None
    scale: Scale | None = None

    @property
    def shown_as(self) -> Scale:
        """`scale`, or its default."""
        low, high = self.limits
        return self.scale or (PERCENT if low >= 0 and high <= 1 else PLAIN)

    @property
    def limits(self) -> tuple[float, float]:
        """The bounds, infinite where there is none."""
        low, high = self.bounds
        return (-np.inf if low is None else low), (np.inf if high is None else high)


def _constant_accuracy(answers: Any) -> float:
    """Return the share of the commonest label."""
    counts = np.bincount(answers.labels)
    return float(counts.max() / counts.sum())


def _constant_f1(answers: Any) -> float:
    """Return F1 where all rows are answered 1: 2p / (p + n) for p rows of label 1 among n."""
    positive = int((answers.labels == 1).sum())
    return float(2 * positive / (positive + len(answers.labels)))


ACCURACY = Metric(lambda answers: accuracy(answers.logits, answers.labels), constant=_constant_accuracy)
F1 = Metric(lambda answers: f1(answers.logits, answers.labels), constant=_constant_f1)


def _right_after_learning(matrix: Floats) -> Floats:
    """Return the score of each task in the row in which it was learned, shape (T,)."""
    return np.diagonal(matrix, offset=-1)


def _mean(values: npt.ArrayLike) -> float:
    """Return the mean; 0.0 of no numbers, which is what a stream of one task transfers and forgets."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()) if array.size else 0.0
