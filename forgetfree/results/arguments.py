"""Reads what metrics are given: arrays of the right shape, with numbers that can be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forgetfree.errors import MetricError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def learning_matrix(values: npt.ArrayLike, name: str = "matrix", within: tuple[float, float] = (0.0, 1.0)) -> Floats:
    """Check a matrix, and return it, shape (T+1, T) with T ≥ 1; NaN for what is missing before a task is learned."""
    matrix = floats_of(values, name)
    fractions_of(matrix[~np.triu(np.isnan(matrix))] if matrix.ndim == 2 else matrix, name, within)
    if matrix.ndim != 2 or matrix.size == 0 or matrix.shape[0] != matrix.shape[1] + 1:
        raise MetricError(
            f"{name} must have shape (T+1, T), a row before training and a row after each of T tasks; "
            f"got shape {matrix.shape}."
        )
    return matrix


def fractions_of(values: npt.ArrayLike, name: str, within: tuple[float, float] = (0.0, 1.0)) -> Floats:
    """Return the checked fractions of an argument, or numbers within other bounds."""
    array = floats_of(values, name)
    outside = array[~((array >= within[0]) & (array <= within[1]))]  # written so that NaN is outside
    if outside.size:
        low, high = within
        what = "fractions in [0, 1], not percent"
        if within != (0.0, 1.0):
            what = f"numbers in [{low:g}, {high:g}]" if np.isfinite(within).any() else "numbers"
        raise MetricError(f"{name} must hold {what}; got {outside[0]}.")
    return array


def logits_of(values: npt.ArrayLike, name: str = "logits") -> Floats:
    """Return the checked logits of an argument, shape (n, n_labels)."""
    logits = floats_of(values, name)
    if logits.size == 0:
        raise MetricError(f"{name} is empty, shape {logits.shape}: there is no metric of no examples.")
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise MetricError(f"{name} must have shape (n, n_labels) with at least two labels; got shape {logits.shape}.")
    damaged = np.flatnonzero(~np.isfinite(logits).all(axis=1))
    if damaged.size:
        raise MetricError(
            f"{name} must be finite; {damaged.size} of {len(logits)} rows are not, the first is row "
            f"{damaged[0]}. A learning rate too high for the model is the usual cause."
        )
    return logits


def labels_of(values: npt.ArrayLike, logits: Floats) -> Integers:
    """Return the checked labels of the examples that `logits` (n, n_labels) belong to."""
    labels = np.asarray(values)
    n, n_labels = logits.shape
    if labels.shape != (n,):
        raise MetricError(f"labels must have shape ({n},), one per row of logits; got shape {labels.shape}.")
    if not np.issubdtype(labels.dtype, np.integer):
        raise MetricError(f"labels must be integers; got dtype {labels.dtype}.")
    outside = labels[(labels < 0) | (labels >= n_labels)]
    if outside.size:
        raise MetricError(f"labels must be in [0, {n_labels}), as logits has it; got {outside[0]}.")
    return labels.astype(np.int64)


def floats_of(values: npt.ArrayLike, name: str) -> Floats:
    """Return an argument as an array of numbers."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise MetricError(f"{name} must be an array of numbers with rows of equal length; {error}.") from error
