"""Budgets, and regions of the highest scores: the most moved entries, which are γ_base (§2), and saliencies, without a search.

Entries are scored by gradient g, value θ and move Δ = θ_ft − θ_pre. All but ``movement`` need θ_pre alone:
what a model can afford that is too large to be fine-tuned as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from forgetfree.core.parameters import ParameterSpace, at_least_float32
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.core.regions import Region
from forgetfree.core.trained import Batch, CrossEntropy, check_loss, trainable
from forgetfree.errors import OptionError, TrainingError
from forgetfree.recipes import Saliency

#: What ``gallop`` adds to |θ|: among weights far below it, the gradient alone decides.
SMALL = 1e-3
#: The most scores of which one maximum is taken.
_BLOCK = 32


def floor_share(share: float, total: int) -> int:
    """Return ``⌊share · total⌋``, where the product may lie a rounding error below a whole number: 0.29 · 100."""
    return math.floor(share * total + 1e-6)


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
    entries = floor_share(sparsity, space_size)
    if entries < 1:
        raise OptionError(
            f"{name} {sparsity} leaves no entry of the {space_size} graftable ones. Give at least {1 / space_size:.1e}."
        )
    return entries


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


def most_moved(theta_pre: Tensor, theta_ft: Tensor, count: int) -> Region:
    """Return the ``count`` entries with the largest |θ_ft − θ_pre|; fewer if fewer moved."""
    movement = moves(theta_pre, theta_ft).abs_()
    return top(movement.masked_fill_(movement == 0, -math.inf), count)


def most_moved_by_tensor(
    space: ParameterSpace, tensors: Sequence[int], theta_pre: Tensor, theta_ft: Tensor, share: float, free: Tensor
) -> Region:
    """Return of each tensor the ``⌊share · n⌋`` of its n free entries that moved most, at least one if any is free.

    ``free`` says which entries may be chosen ``(N,)``; ``tensors`` are numbers, in order.
    """
    movement, pieces = moves(theta_pre, theta_ft).abs_(), [Region.empty().indices]
    for spec in (space.tensors[i] for i in tensors):
        where = slice(spec.offset, spec.offset + spec.size)
        count = int(free[where].sum())
        most = min(count, max(1, floor_share(share, count)))
        pieces.append(top(movement[where], most, free[where]).indices + spec.offset)
    return Region(torch.cat(pieces))


def moves(theta_pre: Tensor, theta_ft: Tensor) -> Tensor:
    """Return θ_ft − θ_pre, in float32 at least."""
    return theta_ft.to(at_least_float32(theta_ft.dtype), copy=True).sub_(theta_pre)


# -- Saliencies ------------------------------------------------------------------------------------------


def saliency(kind: Saliency, gradient: Tensor, theta_pre: Tensor, theta_ft: Tensor) -> Tensor:
    """Return the score of each entry, all arguments of one shape; its memory may be that of ``gradient``.

    Args:
        kind: ``movement``: |Δ| (paper, §2). ``gradient``: |g|, as in SPEFT (arXiv:2412.13488). ``snip``: |g·θ|, what the loss
            changes by, to first order, if the entry becomes 0 (SNIP, arXiv:1810.02340). ``gallop``: |g| / (|θ| + 0.001), for
            large gradients of small weights: the two criteria of GaLLoP (arXiv:2510.19778), this quotient of them is ours.
            ``fisher`` and ``random`` have their score in the place of the gradient: the Fisher information, or numbers that
            were drawn.
        gradient: g, in float32; nothing is read of it for ``movement``.
        theta_pre: θ_pre, which is θ.
        theta_ft: θ_ft, which is read for ``movement`` alone.
    """
    match kind:
        case "movement":
            return moves(theta_pre, theta_ft).abs_()
        case "gradient":
            return gradient.abs_()
        case "snip":
            return gradient.mul_(theta_pre).abs_()
        case "gallop":
            return gradient.abs_().div_(theta_pre.abs().to(gradient.dtype).add_(SMALL))
        case "fisher" | "random":
            return gradient


def mean_gradient(
    model: nn.Module, space: ParameterSpace, batches: Sequence[Batch], loss: CrossEntropy, *, squared: bool = False
) -> tuple[Tensor, float]:
    """Return the gradient of the mean loss over all rows, ``(N,)`` in float32 on the model's device, and that loss.

    Mini-batch by mini-batch its parts are added up in float32, whatever the tensors' dtype, and freed.

    Args:
        model: holds θ, in evaluation mode; the same afterwards.
        space: its parameter space of N entries.
        batches: the mini-batches.
        loss: of them all, through ``model``.
        squared: square what each backward pass leaves, before it is added.

    Raises:
        TrainingError: the loss or the gradient is not finite.
    """
    tensors = space.parameters(model)
    total = torch.zeros(len(space), device=tensors[0].device)
    views = {id(tensor): view for tensor, view in zip(tensors, space.views(total), strict=True)}

    @torch.no_grad()
    def take(tensor: Tensor) -> None:
        if tensor.grad is not None:
            views[id(tensor)].add_(tensor.grad.float().square() if squared else tensor.grad)
            tensor.grad = None

    with trainable(model, tensors):
        hooks = [tensor.register_post_accumulate_grad_hook(take) for tensor in tensors]  # type: ignore[no-untyped-call]
        try:
            value = check_loss(loss(batches), 1)
        finally:
            for hook in hooks:
                hook.remove()
    total /= loss.scale
    if not math.isfinite(size := float(total.sum())):
        raise TrainingError(
            f"The gradients by which a region is chosen add up to {size}, expected finite ones. Choose it in fp32 (or bf16 "
            "instead of fp16)."
        )
    return total, value


def diagonal_fisher(model: ReadoutModel, space: ParameterSpace, rows: Sequence[Batch]) -> Tensor:
    """Return for every graftable entry the mean over rows of (∂ log p(y|x) / ∂θ)², where y is the row's own label, or labels.

    It is the empirical Fisher information by which FISH masks choose entries (Sung et al., 2021, arXiv:2111.09839, eq. 4):
    ``(N,)`` on the model's device. Each gradient is of one row, a batch of its own, because the square of a mean over rows is
    another quantity; in float32, without dropout.
    """
    device, precision = next(model.parameters()).device, model.precision
    model.precision = "fp32"  # small squares would not survive half precision
    try:
        with trainable(model, space.parameters(model.backbone)):
            model.eval()
            squares, _ = mean_gradient(
                model.backbone, space, rows, CrossEntropy(model, device, summed=True), squared=True
            )
    finally:
        model.precision = precision
    return squares / len(rows)


def most_salient(scores: Tensor, count: int, taken: Region | None = None) -> Region:
    """Return the ``count`` entries with the highest of the scores ``(N,)``; of equal ones, those with the lower index.

    What is ``taken`` is left out, and what has a score of 0; −∞ is written there.
    """
    scores.masked_fill_(scores == 0, -math.inf)
    if taken is not None:
        scores[taken.indices.to(scores.device)] = -math.inf
    return top(scores, count)
