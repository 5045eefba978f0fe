"""Merging: one model for several tasks, made of their grafts on one θ_pre, without training.

A task vector is τ_t = θ_t − θ_pre (Ilharco et al., 2023): here at the entries γ_t that a graft holds, and 0 elsewhere. Every
rule is entrywise. It takes what T grafts hold at n entries, values θ_t and γ_t ``(T, n)`` with θ_pre where a graft holds
nothing, and θ_pre ``(n,)``, and returns the merged values ``(n,)``. `forgetfree.ledger.merging` merges whole grafts by them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from forgetfree.errors import OptionError

#: How grafts are merged, see the functions of these names.
MergeRule = Literal["task-arithmetic", "ties", "stitch"]
#: λ where no validation rows choose it (Yadav et al., 2023, §4.2); the other rules have none.
WEIGHTS = {"task-arithmetic": 0.4, "ties": 1.0}
#: The share of all entries that TIES keeps of each task vector (Yadav et al., 2023, §4.2).
DENSITY = 0.2


def task_arithmetic(theta: Tensor, gamma: Tensor, pre: Tensor, weight: float) -> Tensor:
    """Return θ_pre + λ Σ_t τ_t (Ilharco et al., 2023, arXiv:2212.04089, §2)."""
    return pre + weight * (theta - pre).sum(0)


def ties(theta: Tensor, gamma: Tensor, pre: Tensor, weight: float) -> Tensor:
    """Return θ_pre + λ times the mean of those τ_t that have the elected sign (Yadav et al., 2023, arXiv:2306.01708, alg. 1).

    The elected sign is that of Σ_t τ_t; + where the sum is 0. The τ_t are those of grafts that are trimmed already.
    """
    vectors = theta - pre
    elected = torch.where(vectors.sum(0) >= 0, 1, -1)
    agrees = vectors.sign() == elected
    return pre + weight * (vectors * agrees).sum(0) / agrees.sum(0).clamp(min=1)


def stitch(theta: Tensor, gamma: Tensor, pre: Tensor) -> Tensor:
    """Return the mean of the values of those grafts that hold an entry: Localize-and-Stitch (He et al., 2024).

    That is θ_pre + Σ_t γ'_t ⊙ τ_t with γ'_t = γ_t / Σ_u γ_u (arXiv:2408.13656, §3). An entry that
    one graft alone holds keeps its value, bit for bit.
    """
    return (theta * gamma).sum(0) / gamma.sum(0)


def merged_values(rule: MergeRule, theta: Tensor, gamma: Tensor, pre: Tensor, weight: float | None = None) -> Tensor:
    """Return the merged values by a rule; ``weight`` is λ, by default that of `WEIGHTS`."""
    match rule:
        case "task-arithmetic":
            return task_arithmetic(theta, gamma, pre, WEIGHTS[rule] if weight is None else weight)
        case "ties":
            return ties(theta, gamma, pre, WEIGHTS[rule] if weight is None else weight)
        case "stitch":
            return stitch(theta, gamma, pre)


def check_merge(rule: str, weight: float | None, density: float | None) -> None:
    """Raise ``OptionError`` where the rule has no such setting, or a value is out of range."""
    if weight is not None and rule not in WEIGHTS:
        raise OptionError(f"The weight is of {' and '.join(WEIGHTS)}: {rule} has none. Leave it out.")
    if density is not None and rule != "ties":
        raise OptionError(f"The density is of ties: {rule} has none. Leave it out.")
    if weight is not None and not 0 < weight < float("inf"):
        raise OptionError(f"The weight must be above 0, got {weight}. {WEIGHTS[rule]} is usual for {rule}.")
    if density is not None and not 0 < density <= 1:
        raise OptionError(f"The density must be above 0 and at most 1, got {density}. {DENSITY} is usual.")
