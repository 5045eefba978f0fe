"""Localization of one task's skill: γ_base, the steps on S and their batches (paper, §2 and §3).

`forgetfree.training.single_task` goes from θ_ft to a region by them; equations 3 and 4 are `forgetfree.core.mask`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from forgetfree.core.mask import MaskOptions
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.precision import decided
from forgetfree.core.readout_model import Precision, ReadoutModel
from forgetfree.core.selection import (
    budget,
    diagonal_fisher,
    floor_share,
    mean_gradient,
    saliency,
)
from forgetfree.core.trained import Batch, BatchLoss, CrossEntropy
from forgetfree.data.examples import Examples
from forgetfree.data.sampling import micro_batches, plan_batches, representative
from forgetfree.errors import OptionError
from forgetfree.recipes import Saliency
from forgetfree.training.training_options import LocalizationOptions

#: Hard masks that are tried on validation rows while S is learned.
MASK_EVALUATIONS = 2
#: Validation rows, at most, by which a mask or a composition is chosen.
VALIDATION_ROWS = 512
#: Training rows, at most, whose mean gradient chooses a region, and those whose gradients `fisher` reads one by one.
GRADIENT_ROWS, FISHER_ROWS = 64, 256
#: Rows and tokens, at most, of a pass with gradients of the whole model, on a CPU: few tokens take little memory.
_ON_CPU = {"size": 64, "tokens": 240}
#: Elsewhere: a pass of 64 rows of 30 tokens leaves a GPU idle, and a step takes three times as long (docs/scaling.md).
_ELSEWHERE = {"size": 256, "tokens": 2**14}


def check_localization(options: LocalizationOptions, space: ParameterSpace) -> None:
    """Raise ``OptionError`` unless the sparsity allows an entry, and something chooses the region."""
    budget(len(space), options.sparsity)
    if options.mask_steps == 0 and options.region_from == "mask" and not options.base_fraction:
        raise OptionError(
            "base_fraction=0 with mask_steps=0 leaves no region. Set mask_steps above 0, or region_from=movement."
        )


def mask_options(options: LocalizationOptions, rows: int, fine_tuning_steps: int) -> MaskOptions:
    """Return how S is learned on ``rows`` training rows, after this many updates of fine-tuning."""
    size = min(options.mask_batch_size, rows)
    steps = options.mask_steps
    if steps is None:
        steps = min(100, max(1, fine_tuning_steps * options.batch_size // size))
    return MaskOptions(
        steps=steps,
        batch_size=size,
        learning_rate=options.mask_learning_rate,
        evaluate_every=max(1, -(-steps // MASK_EVALUATIONS)),
        precision=cast(Precision, options.precision),  # decided by now
    )


def base_size(options: LocalizationOptions, mask: MaskOptions, count: int) -> int:
    """Return the size of γ_base for a region of at most ``count`` entries: all of them if no S is learned."""
    if mask.steps == 0 or not options.base_fraction:
        return 0 if mask.steps else count
    return max(1, floor_share(options.base_fraction, count))


def mask_loss(model: ReadoutModel, options: LocalizationOptions) -> BatchLoss:
    """Return the loss of θ(γ) over a batch of `mask_batches`."""
    device = next(model.parameters()).device
    return CrossEntropy(model, device, decided(options.precision, model))


def mask_batches(rows: Examples, mask: MaskOptions, seed: int, device: torch.device) -> Iterator[list[Batch]]:
    """Yield the mini-batches of each step on S, of as many rows and tokens as a forward pass takes."""
    # Each step changes every score, so it must not depend on rows of one length alone.
    for batch in plan_batches(rows.lengths, mask.batch_size, mask.steps, seed, group_by_length=False):
        yield in_pieces(rows, batch, device)


def in_pieces(rows: Examples, batch: Sequence[int], device: torch.device) -> list[Batch]:
    """Return rows, by their numbers, in mini-batches of as many rows and tokens as a pass with whole gradients takes."""
    piece = _ON_CPU if device.type == "cpu" else _ELSEWHERE
    return [rows.batch(part) for part in micro_batches(batch, rows.lengths, **piece)]


def score_entries(
    kind: Saliency,
    model: ReadoutModel,
    rows: Examples,
    theta_pre: Tensor,
    theta_ft: Tensor,
    options: LocalizationOptions,
    seed: int,
) -> Tensor:
    """Return how much speaks for each entry ``(N,)``, see `saliency`; on the model's device.

    Args:
        kind: by what.
        model: holds θ_pre and the task's readout, in evaluation mode.
        rows: the task's training rows.
        theta_pre: θ_pre ``(N,)``.
        theta_ft: θ_ft ``(N,)``.
        options: the precision of passes.
        seed: for ``random``.
    """
    space, gradient = model.space(), torch.empty(0, device="cpu")
    if kind == "random":
        generator = torch.Generator().manual_seed(seed)
        # float32 has too few numbers: entries would be alike.
        gradient = torch.rand(len(space), generator=generator, dtype=torch.float64, device="cpu").to(theta_pre.device)
    elif kind == "fisher":
        read = representative(rows.targets, FISHER_ROWS)
        gradient = diagonal_fisher(model, space, [rows.batch([row]) for row in read])
    elif kind != "movement":
        read = representative(rows.targets, GRADIENT_ROWS)
        batches = in_pieces(rows, read, theta_pre.device)
        gradient, _ = mean_gradient(model.backbone, space, batches, mask_loss(model, options))
    return saliency(kind, gradient, theta_pre, theta_ft)
