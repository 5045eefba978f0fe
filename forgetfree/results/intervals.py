"""How far a mean over seeds may be off: Student's interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def student(values: Sequence[float] | npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval, mean ± t(0.975, n − 1) · s / √n: what other seeds would give.

    Args:
        values: one for each seed, taken as independent and nearly normal.

    Returns:
        The mean, and both ends of the interval: NaN where there is one seed, or where all values are equal (no spread says
        nothing about other seeds).
    """
    from scipy.stats import t

    found = np.asarray(values, dtype=float)
    n, mean = len(found), float(found.mean())
    if float(np.ptp(found)) <= 1e-12:  # equal decimals differ in their last bits
        return mean, math.nan, math.nan
    half = float(t.ppf(0.975, n - 1) * found.std(ddof=1) / math.sqrt(n))
    return mean, mean - half, mean + half
