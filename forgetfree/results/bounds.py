"""How far the error on new rows can lie above that on training rows: the paper's bound, and one for described models.

The derivation is in docs/experiments.md, "Certificates". All logarithms are natural.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp
from torch import Tensor

#: Values that a float32 can take, as the paper counts them.
FLOAT32_LEVELS = 2.0**32
#: What a described scale costs: it is a float16.
SCALE_NATS = 16 * math.log(2)


def printed_bound(
    entries: int, rows: int, delta: float, levels: float = FLOAT32_LEVELS, log_regions: float = 0
) -> float:
    """Return ``2·√((s·ln q + ln Θ + ln(1/δ)) / n)``: the train–test term of the paper (appendix D, theorem D.2).

    >>> round(printed_bound(5000, 8192, 0.05), 1)
    7.4

    Args:
        entries: s, of the region.
        rows: n, of the training set.
        delta: δ, the probability that the bound fails.
        levels: q, the values that an entry can take.
        log_regions: ln Θ, of the number of regions that the training set could lead to; 0 for a region that is fixed before.
    """
    return 2 * math.sqrt((entries * math.log(levels) + log_regions + math.log(1 / delta)) / rows)


def region_nats(space_size: int, entries: int) -> float:
    """Return ``ln C(N, s)``: what it costs to say which s of N entries a region holds.

    >>> round(math.exp(region_nats(5, 2)))
    10
    """
    return float(gammaln(space_size + 1) - gammaln(entries + 1) - gammaln(space_size - entries + 1))


def certified_error(errors: int, rows: int, nats: float, delta: float) -> float:
    """Return the largest error rate under which so few errors on training rows have probability δ·e^(−nats) or more.

    With probability ≥ 1 − δ over the training rows no model that has a description of this length errs more often on new
    rows, however it was found: binomial tail inversion (Langford, 2005, section 3) in the union bound that gives each
    description its share of δ (Occam's razor, McAllester, 1999).

    Args:
        errors: training rows that the model answers wrongly.
        rows: all training rows.
        nats: the length of the model's description, so that e^(−nats) sums to at most 1 over all models.
        delta: δ.
    """
    if errors >= rows:
        return 1.0
    k = np.arange(errors + 1)
    choices = gammaln(rows + 1) - gammaln(k + 1) - gammaln(rows - k + 1)
    allowed = math.log(delta) - nats

    def excess(rate: float) -> float:
        """How far the log-probability of at most so many errors lies above what is allowed."""
        return float(logsumexp(choices + k * math.log(rate) + (rows - k) * math.log1p(-rate))) - allowed

    low, high = max(errors / rows, 1e-12), 1 - 1e-12
    return 1.0 if excess(high) > 0 else float(brentq(excess, low, high, xtol=1e-9))


def on_grid(values: Tensor, levels: int) -> Tensor:
    """Return the values rounded to ``scale · {−1, …, 1}`` in ``levels`` even steps; the scale is a float16.

    Of 32 scales the one with the smallest squared error is taken: with two levels about the mean magnitude.

    >>> on_grid(torch.tensor([4.0, -4.0, 2.0, -2.0]), 2).tolist()
    [3.0, -3.0, 3.0, -3.0]
    """
    largest = float(values.abs().max()) if len(values) else 0.0
    best = torch.zeros_like(values)
    for part in range(1, 33):
        scale = float(torch.tensor(largest * part / 32).to(torch.float16))
        if 0 < scale < math.inf:
            steps = ((values / scale).clamp(-1, 1) + 1) * (levels - 1) / 2
            rounded = (steps.round() * 2 / (levels - 1) - 1) * scale
            if (rounded - values).square().sum() < (best - values).square().sum():
                best = rounded
    return best
