"""Regions by a rule: the most moved entries, random ones, the highest of any scores. Each may be γ_base (paper, §2)."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from forgetfree.core.parameters import at_least_float32
from forgetfree.core.regions import Region
from forgetfree.errors import OptionError

#: How γ_base is chosen; `forgetfree.learning.localization.choose_base` knows ``fisher`` and ``bias``, too.
BaseKind = Literal["movement", "empty", "random", "fisher", "bias"]


def budget(space_size: int, sparsity: float) -> int:
    """Return the most entries that a region may have: ``⌊sparsity · N⌋``.

    Raises:
        OptionError: the sparsity is not in (0, 1], or leaves no entry.
    """
    if not 0 < sparsity <= 1:
        raise OptionError(f"sparsity must be above 0 and at most 1, got {sparsity}. The paper uses 1e-4.")
    # The product may lie a rounding error below a whole number: 0.29 · 100.
    entries = math.floor(sparsity * space_size + 1e-6)
    if entries < 1:
        raise OptionError(
            f"sparsity {sparsity} leaves no entry of the {space_size} graftable ones. Give at least {1 / space_size:.1e}."
        )
    return entries


def top(scores: Tensor, count: int, eligible: Tensor | None = None) -> Region:
    """Return the ``count`` highest of the eligible scores ``(N,)``; of equal scores, those with the lower index.

    There are fewer if fewer are eligible. ``scores`` is overwritten where not eligible.
    """
    if eligible is not None:
        scores[~eligible] = -math.inf
        count = min(count, int(eligible.sum()))
    if count <= 0:
        return Region.empty()
    threshold = _highest(scores, count).min()
    chosen = (scores > threshold).nonzero().squeeze(1)
    ties = (scores == threshold).nonzero().squeeze(1)[: count - len(chosen)]
    return Region.of(torch.cat([chosen, ties]))


def _highest(scores: Tensor, count: int) -> Tensor:
    """Return the ``count`` highest of the scores ``(N,)``, in any order.

    Of many scores, a sample of one in 64 shows about how high they must be, which leaves few to sort.
    """
    sample = scores[::64]
    likely = count // 32 + 64  # twice as many as belong to the highest, so that the guess is seldom too high
    if likely < len(sample):
        above = scores[scores >= torch.topk(sample, likely, sorted=False).values.min()]
        scores = above if len(above) >= count else scores
    return torch.topk(scores, count, sorted=False).values


def most_moved(theta_pre: Tensor, theta_ft: Tensor, count: int, among: Region | None = None) -> Region:
    """Return the ``count`` entries with the largest |θ_ft − θ_pre| (``among`` a region); fewer if fewer moved."""
    wide = at_least_float32(theta_ft.dtype)
    movement = (theta_ft.to(wide) - theta_pre.to(wide)).abs_()
    moved = movement > 0
    return top(movement, count, moved if among is None else moved & among.mask(len(moved)).to(moved.device))


def base_region(
    kind: Literal["movement", "empty", "random"], theta_pre: Tensor, theta_ft: Tensor, count: int, seed: int = 0
) -> Region:
    """Choose γ_base by a rule that needs neither model nor rows (paper, §2; sizes: §3.1).

    Args:
        kind: ``movement``: the ``count`` most moved entries of |θ_ft − θ_pre|; ``empty``; ``random``: ``count`` entries
            drawn by ``seed``.
        theta_pre: θ_pre ``(N,)``.
        theta_ft: θ_ft ``(N,)``.
        count: the number of entries.
        seed: for ``random``.

    Raises:
        OptionError: there is no such kind.
    """
    if kind == "empty":
        return Region.empty()
    if kind == "random":
        generator = torch.Generator().manual_seed(seed)
        return Region.of(torch.randperm(len(theta_pre), generator=generator)[:count])
    if kind != "movement":
        raise OptionError(f"base must be one of {', '.join(get_args(BaseKind))}, got {kind!r}.")
    return most_moved(theta_pre, theta_ft, count)
