"""Regions by a rule: the most moved entries, random ones, the highest of any scores. Each may be γ_base (paper, §2)."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from forgetfree.core.parameters import at_least_float32, stretch_of
from forgetfree.core.regions import Region
from forgetfree.errors import OptionError

#: How γ_base is chosen; `forgetfree.learning.localization.choose_base` knows ``fisher`` and ``bias``, too.
BaseKind = Literal["movement", "empty", "random", "fisher", "bias"]
#: How many of many scores are looked at to guess how high the highest are.
_SAMPLE = 2**16


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

    There are fewer if fewer are eligible; an entry at −∞ never is.
    """
    if count <= 0:
        return Region.empty()
    candidates, found = _candidates(scores, count, eligible)
    if len(candidates) > count:
        threshold = torch.topk(found, count, sorted=False).values.min()
        chosen = found > threshold
        ties = (found == threshold).nonzero().squeeze(1)
        chosen[ties[: count - int(chosen.count_nonzero())]] = True
        candidates = candidates[chosen]
    return Region(candidates.cpu())


def _candidates(scores: Tensor, count: int, eligible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return indices, sorted, and values of eligible scores ``(N,)`` that hold the ``count`` highest, and few more.

    A sample shows how high they are likely to be. Where too few turn out to be that high, the guess is lowered.
    """
    step = max(1, len(scores) // _SAMPLE)
    sample = scores[::step] if eligible is None else scores[::step][eligible[::step]]
    expected = count / step
    likely = math.ceil(expected + 4 * math.sqrt(expected) + 8)  # four standard deviations above: seldom too few
    while likely < len(sample):
        threshold = float(torch.topk(sample, likely, sorted=False).values.min())
        found = _at_least(threshold, scores, eligible)
        if len(found[0]) >= count or threshold == -math.inf:
            return found
        likely *= 4
    return _at_least(-math.inf, scores, eligible)


def _at_least(threshold: float, scores: Tensor, eligible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return indices, sorted, and values of the eligible scores ``(N,)`` from a threshold on."""
    length = stretch_of(scores.device)
    indices, values = [], []
    for start in range(0, max(1, len(scores)), length):
        stretch = scores[start : start + length]
        held = stretch > threshold if threshold == -math.inf else stretch >= threshold
        if eligible is not None:
            held &= eligible[start : start + length]
        at = held.nonzero().squeeze(1)
        values.append(stretch[at])
        indices.append(at.add_(start))
    return torch.cat(indices), torch.cat(values)


def most_moved(theta_pre: Tensor, theta_ft: Tensor, count: int, among: Region | None = None) -> Region:
    """Return the ``count`` entries with the largest |θ_ft − θ_pre| (``among`` a region); fewer if fewer moved."""
    if among is not None:
        at = among.indices.to(theta_pre.device)
        return Region(among.indices[most_moved(theta_pre[at], theta_ft[at], count).indices])
    wide = at_least_float32(theta_ft.dtype)
    movement = theta_ft.to(wide, copy=True).sub_(theta_pre).abs_()
    return top(movement.masked_fill_(movement == 0, -math.inf), count)


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
