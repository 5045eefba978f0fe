"""The choice of a parent: the earlier task on whose weights a linear probe reads a new task's rows best, or θ_pre.

Nothing is trained but the probe: features of the rows are read once under each candidate. A parent must have a lower loss and
fewer errors than θ_pre, because with few rows a lower loss alone is often chance; of those, the lowest loss decides. Where a
readout reads no features, such as that of texts, the loss of the rows takes the place of the probe's. Other rules are compared
in ``docs/results/parents.md``.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from forgetfree.core.readout_model import LINEAR, ReadoutModel
from forgetfree.data.examples import Examples
from forgetfree.data.rows import representative
from forgetfree.training.encoded_task import EncodedTask, features_of, loss_of
from forgetfree.training.floors import Integers, labels_of_rows
from forgetfree.training.training_options import TrainingOptions

#: Training rows, at most: those of the probe, which also reads as many validation rows; and those whose loss the model gives.
PROBED_ROWS, PROBED_TEXTS = 512, 64
#: Where there are more earlier tasks than ``MANY``, the ``NEAREST`` whose rows are most like the new ones are probed.
MANY, NEAREST = 16, 8
_FOLDS = 4
_UNKNOWN = (math.inf, math.inf)


def parent_among(
    model: ReadoutModel,
    task: EncodedTask,
    earlier: Sequence[EncodedTask],
    standing_on: Callable[[str], AbstractContextManager[object]],
    options: TrainingOptions,
    centres: dict[str, npt.NDArray[Any]],
) -> str:
    """Return the earlier task that a new one should stand on; empty: none, θ_pre.

    Args:
        model: reads the rows.
        task: the new task.
        earlier: the others.
        standing_on: returns a context in which the model has the weights of an earlier task, by name; by the empty name, θ_pre.
        options: evaluation batch size and precision.
        centres: see `nearest_tasks`.
    """
    if not earlier:
        return ""
    with standing_on(""):
        candidates = nearest_tasks(model, task, earlier, centres)
    found = {}
    for parent in ("", *candidates):
        with standing_on(parent):
            found[parent] = probe(model, task, options)
    return better_parent(found)


def better_parent(found: Mapping[str, Sequence[float]]) -> str:
    """Return the parent with the lowest loss of those whose measures are all below those of θ_pre, or else the empty name.

    Without a task that is not chosen, the choice is the same: so it is in a run that never learned that task.

    >>> better_parent({"": (1.0, 0.5), "mr": (0.8, 0.4), "sst2": (0.9, 0.3), "qnli": (0.7, 0.5)})
    'mr'
    >>> better_parent({"": (1.0, 0.5), "qnli": (0.7, 0.5)})
    ''

    Args:
        found: the loss, and other measures of which less is better, by the parent's name; the empty name is θ_pre.
    """
    better = [parent for parent, its in found.items() if all(map(operator.lt, its, found[""]))]
    return min(better, key=lambda parent: found[parent][0], default="")


def probe(model: ReadoutModel, task: EncodedTask, options: TrainingOptions) -> Sequence[float]:
    """Return the loss and the share of errors of a linear probe on the weights that a model holds; of texts, the model's loss.

    Losses are in nats. The probe reads training rows, and at most as many validation rows: with few rows, there are few of
    both.
    """
    most = PROBED_ROWS if model.readout in LINEAR else PROBED_TEXTS
    train = task.train.subset(representative(task.train.targets, most))
    if model.readout not in LINEAR:
        return (loss_of(model, task, train, options),)
    validation = task.validation.subset(representative(task.validation.targets, len(train)))
    parts = [part for part in (train, validation) if len(part)]
    features = np.concatenate([_features(model, part) for part in parts])
    return cross_validation(features, np.concatenate([labels_of_rows(part) for part in parts]))


def cross_validation(features: npt.NDArray[Any], labels: Integers) -> tuple[float, float]:
    """Return the log loss, in nats, and the share of errors of a logistic regression, by four-fold cross-validation.

    Args:
        features: ``(n, H)``, which are standardised.
        labels: ``(n,)``; or whether each row has each label ``(n, n_labels)``, of which both are means.

    Returns:
        Both; infinite where there are too few rows to tell two labels apart, or features are not finite.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if labels.ndim > 1:
        columns = [cross_validation(features, column) for column in labels.T]
        loss, errors = np.mean([each for each in columns if each != _UNKNOWN] or [_UNKNOWN], axis=0)
        return float(loss), float(errors)
    if not np.isfinite(features).all():
        return _UNKNOWN
    names, counts = np.unique(labels, return_counts=True)
    common = np.isin(labels, names[counts > 1])  # a label of one row is in no other fold
    features, labels, counts = features[common], labels[common], counts[counts > 1]
    if len(counts) < 2:
        return _UNKNOWN
    regression = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
    folds = StratifiedKFold(min(_FOLDS, int(counts.min())))
    with warnings.catch_warnings():  # one that has not quite converged tells candidates apart, too
        warnings.simplefilter("ignore", ConvergenceWarning)
        shares = cross_val_predict(regression, features, labels, cv=folds, method="predict_proba")
    return float(log_loss(labels, shares)), float(np.mean(np.unique(labels)[shares.argmax(1)] != labels))


def nearest_tasks(
    model: ReadoutModel, task: EncodedTask, earlier: Sequence[EncodedTask], centres: dict[str, npt.NDArray[Any]]
) -> list[str]:
    """Return the names of the earlier tasks to probe: all of a few; of many, those whose rows have the nearest mean features.

    Where a readout reads no features, those are the latest.

    Args:
        model: holds θ_pre.
        task: the new task.
        earlier: the others.
        centres: the mean features of tasks by name, to which new ones are added.
    """
    names = [each.name for each in earlier]
    if len(names) <= MANY:
        return names
    if model.readout not in LINEAR:
        return names[-NEAREST:]
    for each in (*earlier, task):
        if each.name not in centres:
            rows = each.train.subset(representative(each.train.targets, PROBED_TEXTS))
            centres[each.name] = _features(model, rows).mean(0)
    distances = [float(np.linalg.norm(centres[name] - centres[task.name])) for name in names]
    return [names[number] for number in sorted(np.argsort(distances, kind="stable")[:NEAREST])]


def _features(model: ReadoutModel, rows: Examples) -> npt.NDArray[Any]:
    """Return what the readout reads of rows ``(n, H)``."""
    features: npt.NDArray[Any] = features_of(model, rows, model.features).flatten(1).numpy()
    return features
