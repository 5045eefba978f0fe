"""Temperature scaling: one number a task makes confidence fit, learned on validation rows (Guo et al., ICML 2017, §4.2)."""

from __future__ import annotations

import math

import numpy as np

from forgetfree.results.answers import LabelAnswers

#: Validation rows of a task that its temperature is fitted to, at most.
CALIBRATION_ROWS = 512
#: Temperatures that are considered. Where all answers are right, the lower the better, without end.
LOWEST, HIGHEST = 0.01, 100.0
#: Logits below are those of labels that a row cannot have.
_IMPOSSIBLE = -1e30


def fitted_temperature(answers: LabelAnswers) -> float:
    """Return the T that minimises the mean cross-entropy of softmax(logits / T), in [`LOWEST`, `HIGHEST`].

    It is convex in 1/T, so there is one minimum. Rows whose label was ruled out beforehand do not count.

    Args:
        answers: on rows that were not trained on.
    """
    from scipy.optimize import minimize_scalar

    logits, labels = answers.logits.astype(np.float64), answers.labels
    counted = logits[np.arange(len(labels)), labels] > _IMPOSSIBLE
    logits, labels = logits[counted], labels[counted]
    if not len(labels):
        return 1.0
    gaps = logits - logits.max(axis=1, keepdims=True)
    right = gaps[np.arange(len(labels)), labels]

    def loss(log_temperature: float) -> float:
        scaled = math.exp(-log_temperature)
        return float(np.mean(np.log(np.exp(gaps * scaled).sum(axis=1)) - right * scaled))

    found = minimize_scalar(
        loss, bounds=(math.log(LOWEST), math.log(HIGHEST)), method="bounded", options={"xatol": 1e-5}
    )
    return math.exp(found.x)
