"""The hard region of 10 million scores, by the mask and by the movement of entries.

python -m benchmarks.speed hard_region
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.speed.measurement import Figure, alternate, ratio
from forgetfree.core.mask import hard_region
from forgetfree.core.regions import Region
from forgetfree.core.selection import most_moved

ENTRIES = 10_000_000


def figures(turns: int = 9) -> list[Figure]:
    """Measure on normally distributed scores; reading them once is the lower limit."""
    generator = torch.Generator().manual_seed(0)
    shift, pre = torch.randn(2, ENTRIES, generator=generator)
    ft = pre + shift
    made = []
    for sparsity in (1e-4, 1e-3):
        count = int(sparsity * ENTRIES)
        base = Region(torch.arange(0, ENTRIES, 10 * ENTRIES // count))
        seconds = alternate(
            {
                "ours": lambda: hard_region(shift, -10.0, base, count),  # noqa: B023
                "most moved": lambda: most_moved(pre, ft, count),  # noqa: B023
                "torch.topk": lambda: torch.topk(shift, count),  # noqa: B023
                "reading once": lambda: shift.max(),
            },
            turns=turns,
        )
        low, median, high = np.quantile(1000 * seconds["ours"], [0.25, 0.5, 0.75])
        limit = 1000 * float(np.median(seconds["reading once"]))
        name = f"hard region of 10 million scores, s = {sparsity:g}"
        made += [
            Figure(name, float(median), float(low), float(high), 25.0, limit, "ms"),
            ratio(f"{name} / torch.topk", seconds, "ours", "torch.topk"),
        ]
    return made
