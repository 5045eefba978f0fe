"""Regions of the entries that score highest by gradient g, value θ and move Δ = θ_ft − θ_pre, without a search.

All but ``movement`` and ``taylor`` need θ_pre alone: what a model can afford that is too large to be fine-tuned as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree.core.base_regions import moves, top
from forgetfree.core.batch_loss import Batch, BatchLoss, check_loss
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.core.regions import Region
from forgetfree.core.trained import trainable
from forgetfree.errors import TrainingError

#: By what an entry is scored, see `saliency`.
Saliency = Literal["movement", "taylor", "gradient", "snip", "gallop", "fisher", "random"]
#: How γ is chosen: by learning the mask, from γ_base or from S = 0, or by a saliency.
RegionSource = Literal["mask", "midpoint"] | Saliency
#: What ``gallop`` adds to |θ|: among weights far below it, the gradient alone decides.
SMALL = 1e-3


def saliency(kind: Saliency, gradient: Tensor, theta_pre: Tensor, theta_ft: Tensor) -> Tensor:
    """Return the score of each entry, all arguments of one shape; its memory may be that of ``gradient``.

    Args:
        kind: ``movement``: |Δ| (paper, §2). ``taylor``: |g·Δ|, what the move changes the loss by, to first order.
            ``gradient``: |g|, as in SPEFT (arXiv:2412.13488). ``snip``: |g·θ|, what the loss changes by, to first order, if the
            entry becomes 0 (SNIP, arXiv:1810.02340). ``gallop``: |g| / (|θ| + 0.001), for large gradients of small weights:
            the two criteria of GaLLoP (arXiv:2510.19778), this quotient of them is ours. ``fisher`` and ``random`` have their
            score in the place of the gradient: the Fisher information, or numbers that were drawn.
        gradient: g, in float32; nothing is read of it for ``movement``.
        theta_pre: θ_pre, which is θ.
        theta_ft: θ_ft, which is read for ``movement`` and ``taylor`` alone.
    """
    match kind:
        case "movement":
            return moves(theta_pre, theta_ft).abs_()
        case "taylor":
            return gradient.mul_(moves(theta_pre, theta_ft)).abs_()
        case "gradient":
            return gradient.abs_()
        case "snip":
            return gradient.mul_(theta_pre).abs_()
        case "gallop":
            return gradient.abs_().div_(theta_pre.abs().to(gradient.dtype).add_(SMALL))
        case "fisher" | "random":
            return gradient


def is_saliency(source: RegionSource) -> TypeGuard[Saliency]:
    """Return whether γ is chosen without a search."""
    return source not in ("mask", "midpoint")


def mean_gradient(
    model: nn.Module, space: ParameterSpace, batches: Sequence[Batch], loss: BatchLoss, *, squared: bool = False
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

    It is the empirical Fisher information by which FISH masks choose entries (Sung et al., 2021, arXiv:2111.09839, eq. 4). Each
    gradient is of one row, because the square of a mean over rows is another quantity; in float32, without dropout.

    Args:
        model: holds the θ and the readout at which gradients are computed.
        space: its parameter space of N entries.
        rows: of one task, each as a batch of its own.

    Returns:
        ``(N,)`` on the model's device.
    """
    precision, model.precision = model.precision, "fp32"  # small squares would not survive half precision
    try:
        with trainable(model, space.parameters(model.backbone)):
            model.eval()
            squares, _ = mean_gradient(model.backbone, space, rows, _RowLosses(model), squared=True)
    finally:
        model.precision = precision
    return squares / len(rows)


class _RowLosses:
    """The summed cross-entropy of each row, for a gradient of its own."""

    scale = 1.0

    def __init__(self, model: ReadoutModel) -> None:
        self._model, self._device = model, next(model.parameters()).device

    def __call__(self, batch: Sequence[Batch]) -> float:
        total = 0.0
        for x, y, t in (tuple(tensor.to(self._device) for tensor in each) for each in batch):
            loss = F.cross_entropy(self._model(x, t).float(), y, reduction="sum")
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total


def most_salient(scores: Tensor, count: int, taken: Region | None = None) -> Region:
    """Return the ``count`` entries with the highest of the scores ``(N,)``; of equal ones, those with the lower index.

    Args:
        scores: see `saliency`; −∞ is written where an entry cannot be chosen. A score of 0 never is.
        count: the most entries.
        taken: entries that are left out.
    """
    scores.masked_fill_(scores == 0, -math.inf)
    if taken is not None:
        scores[taken.indices.to(scores.device)] = -math.inf
    return top(scores, count)
