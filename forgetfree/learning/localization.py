"""Localizes the skill of one task: from a fine-tuned model and rows to a region (paper, §2, eqs. 3 and 4)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forgetfree.core.base_regions import BaseKind, base_region, budget, most_moved, top
from forgetfree.core.batch_loss import BatchLoss, CrossEntropy
from forgetfree.core.checkpoint import Checkpoint
from forgetfree.core.examples import Batch, Examples
from forgetfree.core.fisher import diagonal_fisher
from forgetfree.core.mask import LearnedRegion, MaskOptions, learn_regions
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.core.regions import Region, biases
from forgetfree.core.steps import OnStep
from forgetfree.core.tensors import load_tensors_, persistent_buffers, tensors_of
from forgetfree.data.sampling import micro_batches, plan_batches, representative
from forgetfree.errors import OptionError
from forgetfree.learning.encoded_task import EncodedTask
from forgetfree.learning.training import TrainingOptions, predict
from forgetfree.models.state import ModelState
from forgetfree.options import option, recorded
from forgetfree.parallel.parts import batch_loss
from forgetfree.seeds import derive_seed


@dataclass(frozen=True, kw_only=True)
class LocalizationOptions(TrainingOptions):
    """How a task is fine-tuned and then localized."""

    sparsity: float = option(
        1e-4, "share of the graftable entries a region may have; the paper: 1e-4", above=0, at_most=1
    )
    base: BaseKind = option(
        "movement",
        "γ_base: the most moved entries (§2), none (§5.1), random ones, those of largest Fisher information at θ_pre (FISH "
        "masks, Sung et al., 2021), or the most moved of the biases",
    )
    base_fraction: float = option(
        0.1,
        "size of γ_base as a share of the entries that the region may have, the rest is left to S; the paper: 0.1 (§3.1). "
        "With mask_steps=0, γ_base is the whole region",
        above=0,
        at_most=1,
    )
    fisher_rows: int = option(256, "training rows that base=fisher reads, at most", at_least=1)
    mask_steps: int | None = option(
        None,
        "SGD steps on the mask scores S, 0 to keep γ_base; none: as many as read the rows fine-tuning read, at "
        "most the paper's 100",
        at_least=0,
    )
    mask_batch_size: int = option(1024, "rows per step on S", at_least=1)
    mask_micro_batch_size: int | None = option(
        None,
        "rows per forward pass of such a step; none: about 240 tokens on a CPU, which takes little memory; 64 rows elsewhere",
        at_least=1,
    )
    mask_score_init: float = option(-10.0, "every S at first: σ(−10) ≈ 4.5e-5")
    mask_learning_rate: float = option(1e7, "of SGD on S", above=0)
    mask_evaluations: int = option(4, "hard masks tried on validation rows while S is learned", at_least=1)
    validation_rows: int = option(512, "validation rows those are scored on, at most", at_least=1)


def check_localization(options: LocalizationOptions, space: ParameterSpace) -> None:
    """Raise ``OptionError`` unless the sparsity allows an entry, and something chooses the region."""
    budget(len(space), options.sparsity)
    if options.base == "empty" and options.mask_steps == 0:
        raise OptionError("base=empty with mask_steps=0 leaves no region. Set mask_steps above 0, or base=movement.")


def mask_options(options: LocalizationOptions, rows: int, fine_tuning_steps: int) -> MaskOptions:
    """Return how S is learned on ``rows`` training rows, after this many updates of fine-tuning."""
    size = min(options.mask_batch_size, rows)
    steps = options.mask_steps
    if steps is None:
        steps = min(100, max(1, fine_tuning_steps * options.batch_size // size))
    return MaskOptions(
        steps=steps,
        batch_size=size,
        score_init=options.mask_score_init,
        learning_rate=options.mask_learning_rate,
        evaluate_every=max(1, -(-steps // options.mask_evaluations)),
        precision=options.precision,
    )


def choose_base(
    kind: BaseKind,
    model: ReadoutModel,
    rows: Examples,
    theta_pre: Tensor,
    theta_ft: Tensor,
    count: int,
    *,
    seed: int,
    fisher_rows: int,
) -> Region:
    """Choose γ_base of any kind, with at most ``count`` entries.

    Args:
        kind: the kind of γ_base.
        model: holds θ_pre and the task's fine-tuned readout.
        rows: the task's training rows.
        theta_pre: θ_pre ``(N,)``.
        theta_ft: θ_ft ``(N,)``.
        count: the number of entries.
        seed: for random entries.
        fisher_rows: the most rows that are read for the Fisher information, spread evenly.
    """
    if kind == "bias":
        return most_moved(theta_pre, theta_ft, count, among=biases(model.space()))
    if kind == "fisher":
        read = rows.subset(representative(rows.targets, fisher_rows))
        return top(diagonal_fisher(model, model.space(), read).masked_fill_(theta_ft == theta_pre, -math.inf), count)
    return base_region(kind, theta_pre, theta_ft, count, seed)


def base_size(options: LocalizationOptions, mask: MaskOptions, count: int) -> int:
    """Return the size of γ_base for a region of at most ``count`` entries: all of them if no S is learned."""
    return count if mask.steps == 0 else max(1, int(options.base_fraction * count + 1e-6))


def searches(options: LocalizationOptions, sparsities: Sequence[float], base: Region | None, space_size: int) -> int:
    """Return how many searches for S the sparsities need: one, or one for each γ_base of its own size.

    Args:
        options: name the kind of base, if no base is given.
        sparsities: those of the regions.
        base: γ_base, if it is given; one that is too large is cut to its most moved entries.
        space_size: the number of entries of the parameter space.
    """
    smallest = budget(space_size, min(sparsities))
    sized = options.base != "empty" if base is None else len(base) > smallest
    return len(sparsities) if sized else 1


def _later(on_step: OnStep, before: int, step: int, loss: float) -> None:
    on_step(before + step, loss)


def localize(
    model: ReadoutModel,
    task: EncodedTask,
    pre: ModelState,
    fine_tuned: ModelState,
    options: LocalizationOptions,
    mask: MaskOptions,
    *,
    sparsities: Sequence[float],
    seed: int,
    base: Region | None = None,
    on_step: OnStep | None = None,
    checkpoint: Checkpoint | None = None,
) -> list[LearnedRegion]:
    """Find γ of one task by eqs. 3 and 4, with the fine-tuned readout: one for each sparsity.

    Each is found as if it were the only one.

    Args:
        model: holds θ_pre, before and afterwards.
        task: its training rows teach S, its validation rows choose between hard masks.
        pre: θ_pre.
        fine_tuned: θ_ft, with the task's readout.
        options: base, rows to validate on.
        mask: how S is learned, see `mask_options`.
        sparsities: the shares of the space that the regions may have.
        seed: for a random base and for the batches.
        base: γ_base, cut to its most moved entries if it is too large. Default: of the kind that the options name.
        on_step: called after every step.
        checkpoint: keeps where the search stands.
    """
    space = model.space()
    if searches(options, sparsities, base, len(space)) > 1:
        return [
            region
            for i, each in enumerate(sparsities)
            for region in localize(
                model,
                task,
                pre,
                fine_tuned,
                options,
                mask,
                sparsities=[each],
                seed=seed,
                base=base,
                on_step=on_step and partial(_later, on_step, i * mask.steps),
                checkpoint=checkpoint,
            )
        ]
    device = next(model.parameters()).device
    theta_pre, theta_ft = pre.theta.to(device), fine_tuned.theta.to(device)
    validation = task.validation.subset(representative(task.validation.targets, options.validation_rows))

    def score() -> float:
        logits = predict(model, validation, batch_size=options.rows_at_once, precision=options.precision)
        return task.quality(task.answers(logits, validation))

    with _reading_as(fine_tuned, pre, model, task):
        count = budget(len(space), sparsities[0])
        if base is None:
            size, draw = base_size(options, mask, count), derive_seed(seed, "base")
            base = choose_base(
                options.base, model, task.train, theta_pre, theta_ft, size, seed=draw, fisher_rows=options.fisher_rows
            )
        elif len(base) > count:
            base = most_moved(theta_pre, theta_ft, count, among=base)
        return learn_regions(
            model.backbone,
            space,
            theta_pre,
            theta_ft,
            mask_batches(task.train, mask, derive_seed(seed, "batches"), options, device),
            mask_loss(model, options),
            sparsities=sparsities,
            base=base,
            options=mask,
            validate=score,
            on_step=on_step,
            checkpoint=checkpoint,
            about=(seed, recorded(options), task.train.labels, sorted(fine_tuned.readouts[task.name].items())),
        )


def mask_loss(model: ReadoutModel, options: LocalizationOptions) -> BatchLoss:
    """Return the loss of θ(γ) over a batch of `mask_batches`, whose parts several processes may share."""
    tensors = model.space().parameters(model.backbone)
    return batch_loss(CrossEntropy(model, tensors[0].device, options.precision), tensors, options)


def mask_batches(
    rows: Examples, mask: MaskOptions, seed: int, options: LocalizationOptions, device: torch.device
) -> Iterator[list[Batch]]:
    """Yield the mini-batches of each step on S, of as many rows and tokens as a forward pass takes."""
    piece = {"size": options.mask_micro_batch_size or 64}
    if options.mask_micro_batch_size is None and device.type == "cpu":
        piece["tokens"] = 240
    # Each step changes every score, so it must not depend on rows of one length alone.
    lengths = rows.lengths
    for batch in plan_batches(lengths, mask.batch_size, mask.steps, seed, group_by_length=False):
        yield [rows.batch(part) for part in micro_batches(batch, lengths, **piece)]


@contextmanager
def _reading_as(fine_tuned: ModelState, pre: ModelState, model: ReadoutModel, task: EncodedTask) -> Iterator[None]:
    """Give the model the fine-tuned readout and buffers, without dropout; restore it after the block.

    A mask is judged as the trained region will be: with BatchNorm's statistics of the task.
    """
    readout, mode = model.readout_module(task.label), model.training
    untrained = tensors_of(readout)
    load_tensors_(readout, fine_tuned.readouts[task.name])
    _load_buffers(model, fine_tuned)
    model.eval()
    try:
        yield
    finally:
        model.train(mode)
        load_tensors_(readout, untrained)
        _load_buffers(model, pre)


def _load_buffers(model: ReadoutModel, state: ModelState) -> None:
    for name, buffer in persistent_buffers(model.backbone).items():
        buffer.copy_(state.buffers[name])
