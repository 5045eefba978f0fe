"""Budgets, and regions of the highest scores: of the most moved entries, say, which are γ_base (§2)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from forgetfree.core.parameters import at_least_float32
from forgetfree.core.regions import Region
from forgetfree.display import counted
from forgetfree.errors import OptionError

#: The most scores of which one maximum is taken.
_BLOCK = 32
#: Regions of fewer entries are told as tiny, and how many entries are suggested in their place.
_TINY, _ENOUGH = 20, 100


def budget(space_size: int, sparsity: float, name: str = "sparsity") -> int:
    """Return the most entries that a region may have: ``⌊sparsity · N⌋``.

    Args:
        space_size: N, the graftable entries.
        sparsity: the share of them.
        name: what messages call that share.

    Raises:
        OptionError: the sparsity is not in (0, 1], or leaves no entry.
    """
    if not 0 < sparsity <= 1:
        raise OptionError(f"{name} must be above 0 and at most 1, got {sparsity}. The paper uses 1e-4.")
    # The product may lie a rounding error below a whole number: 0.29 · 100.
    entries = math.floor(sparsity * space_size + 1e-6)
    if entries < 1:
        raise OptionError(
            f"{name} {sparsity} leaves no entry of the {space_size} graftable ones. Give at least {1 / space_size:.1e}."
        )
    return entries


def tiny_region_note(space_size: int, sparsities: Iterable[float]) -> str:
    """Say that the smallest region has hardly any entries, where it has fewer than `_TINY`; else return an empty text."""
    sparsity = min(sparsities, default=1.0)
    entries = math.floor(sparsity * space_size + 1e-6)
    if space_size < _ENOUGH or not 0 < entries < _TINY:
        return ""
    digit = 10.0 ** math.floor(math.log10(_ENOUGH / space_size))
    enough = math.ceil(_ENOUGH / space_size / digit - 1e-9) * digit
    return (
        f"sparsity {sparsity:g} of {space_size:,} graftable entries is a region of {counted(entries, 'entry')}, which can hold "
        f"little of a task. For {_ENOUGH} entries or more, set the sparsity to {enough:.1g}."
    )


def top(scores: Tensor, count: int, eligible: Tensor | None = None) -> Region:
    """Return the ``count`` highest of the eligible scores ``(N,)``; of equal scores, those with the lower index.

    There are fewer if fewer are eligible; an entry at −∞ or NaN never is.
    """
    if eligible is not None:
        scores = scores.masked_fill(~eligible, -math.inf)
    return Region(_highest(scores, count).cpu()) if count > 0 and len(scores) else Region.empty()


def _highest(scores: Tensor, count: int) -> Tensor:
    """Return the sorted indices of the ``count`` highest scores ``(N,)``, without −∞ and NaN.

    Of many scores, most are ruled out by one quick pass. They lie in the ``count`` blocks of neighbours that have the highest
    maxima: any other block's highest entry comes after the highest one of each of these.
    """
    block = min(_BLOCK, len(scores) // (8 * count))
    if block < 2:
        return _chosen(scores, count).nonzero().squeeze(1)
    whole = len(scores) // block * block
    rows = scores[:whole].reshape(-1, block)
    maxima = rows.amax(1)
    # A NaN hides its neighbours. Few blocks have one, so only these are read again.
    hidden = maxima.isnan().nonzero().squeeze(1)
    maxima[hidden] = _without_nan(rows[hidden]).amax(1)
    high = _highest(maxima, count)
    chosen = _chosen(torch.cat([rows[high].view(-1), scores[whole:]]), count).nonzero().squeeze(1)
    inside = chosen[chosen < len(high) * block]
    rest = chosen[len(inside) :] + (whole - len(high) * block)
    return torch.cat([high[inside // block] * block + inside % block, rest])


def _chosen(scores: Tensor, count: int) -> Tensor:
    """Return as a mask which scores ``(N,)`` are the ``count`` highest, without −∞ and NaN; of equal ones the first."""
    scores = _without_nan(scores)
    if count >= len(scores):
        return scores > -math.inf
    threshold = torch.topk(scores, count, sorted=False).values.min()
    chosen = scores > threshold
    ties = (scores == threshold).nonzero().squeeze(1)[: count - int(chosen.count_nonzero())]
    chosen[ties] = threshold > -math.inf
    return chosen


def _without_nan(scores: Tensor) -> Tensor:
    return scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def most_moved(theta_pre: Tensor, theta_ft: Tensor, count: int, among: Region | None = None) -> Region:
    """Return the ``count`` entries with the largest |θ_ft − θ_pre| (``among`` a region); fewer if fewer moved."""
    if among is not None:
        at = among.indices.to(theta_pre.device)
        return Region(among.indices[most_moved(theta_pre[at], theta_ft[at], count).indices])
    movement = moves(theta_pre, theta_ft).abs_()
    return top(movement.masked_fill_(movement == 0, -math.inf), count)


def moves(theta_pre: Tensor, theta_ft: Tensor) -> Tensor:
    """Return θ_ft − θ_pre, in float32 at least."""
    return theta_ft.to(at_least_float32(theta_ft.dtype), copy=True).sub_(theta_pre)
