"""Learning the mask: the search for γ by the scores S (paper, §2, eqs. 3 and 4).

θ_pre, θ_ft and S are one flat vector each; the model itself holds θ(γ). No other whole-model copy is made. S is kept as
its distance from where it starts: at −10 the last bit of a float32 is worth 1e-6, and the steps by which entries are ranked
may be smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree.core.base_regions import budget, top
from forgetfree.core.examples import Batch
from forgetfree.core.graft import Graft, grafted
from forgetfree.core.parameters import ParameterSpace, at_least_float32
from forgetfree.core.readout_model import Precision, autocast
from forgetfree.core.regions import Region
from forgetfree.core.steps import OnStep, check_loss, trainable
from forgetfree.errors import OptionError, RegionError
from forgetfree.options import Options, option


@dataclass(frozen=True, kw_only=True)
class MaskOptions(Options):
    """How the mask scores S are learned. Defaults: the paper's (§3)."""

    learning_rate: float = option(1e7, "of SGD on S; the gradients of S are tiny, see score_init", above=0)
    steps: int = option(100, "SGD steps on S; 0 leaves the base region as it is", at_least=0)
    batch_size: int = option(1024, "rows per step", at_least=1)
    micro_batch_size: int = option(64, "rows per forward pass; a step adds them up", at_least=1)
    score_init: float = option(-10.0, "every S at first: σ(−10) ≈ 4.5e-5, so θ(γ) begins at the base region's graft")
    evaluate_every: int = option(10, "steps between evaluations of the hard mask", at_least=1)
    precision: Precision = option("fp32", "of forward and backward passes")


@dataclass(frozen=True)
class LearnedRegion:
    """What the search found.

    Attributes:
        region: the hard mask: at most the budget.
        budget: the most entries it was allowed.
        scores: the final S ``(N,)``.
        step: the step the region was taken from; 0 is the base region itself.
        validation: ``(step, score)`` of every hard mask that was evaluated.
        losses: the loss of θ(γ) at every step.
    """

    region: Region
    budget: int
    scores: Tensor
    step: int
    validation: tuple[tuple[int, float], ...]
    losses: tuple[float, ...]


def soft_mask(scores: Tensor, base: Tensor) -> Tensor:
    """Eq. 4: γ = γ_base ⊙ (1 − σ(S)) + (1 − γ_base) ⊙ σ(S), for S and boolean γ_base of one shape."""
    sigma = torch.sigmoid(scores)
    return torch.where(base, 1 - sigma, sigma)


def hard_region(climbed: Tensor, start: float, base: Tensor, eligible: Tensor, count: int) -> Region:
    """The entries of highest γ among the eligible, at most ``count``, for S = ``start + climbed``; of equals the lower index.

    γ rises with −S in the base region and with S outside it; these rank it without the sigmoid's rounding. Outside, where
    most entries are, ``climbed`` alone ranks them, so no more than ``count`` of them meet those of the base in float64.
    """
    inside = (eligible & base).nonzero().squeeze(1).cpu()
    others = ~eligible
    others |= base
    among = len(climbed) - int(others.sum())
    scores = climbed.masked_fill(others, -math.inf)
    del others  # the search for the highest needs its memory
    outside = top(scores, min(count, among)).indices
    candidates = torch.cat([outside, inside]).sort().values
    scores = climbed[candidates.to(climbed.device)].double().add_(start)
    scores[base[candidates.to(base.device)]] *= -1
    return Region(candidates[top(scores, count).indices]) if len(candidates) > count else Region(candidates)


def learn_regions(
    model: nn.Module,
    space: ParameterSpace,
    theta_pre: Tensor,
    theta_ft: Tensor,
    batches: Iterable[Sequence[Batch]],
    forward: Callable[[Tensor, Tensor], Tensor],
    *,
    sparsities: Sequence[float],
    base: Region,
    options: MaskOptions,
    validate: Callable[[], float] | None = None,
    on_step: OnStep | None = None,
) -> list[LearnedRegion]:
    """Localize a skill: learn S by SGD on the loss of θ(γ), then take hard regions (paper, eqs. 3 and 4).

    S does not depend on how many entries are taken in the end, so one search from one γ_base serves several sparsities.
    The gradient is ∂L/∂S = ∂L/∂θ ⊙ (θ_ft − θ_pre) ⊙ (1 − 2 γ_base) ⊙ σ′(S).

    Args:
        model: holds the graftable tensors; ends with θ_pre in them, bit for bit.
        space: its parameter space of N entries.
        theta_pre: θ_pre ``(N,)``.
        theta_ft: θ_ft ``(N,)``.
        batches: one item a step: the mini-batches that make up its batch.
        forward: ``(x, t)`` to logits, through ``model``; dropout is off.
        sparsities: each asks for a region of at most ``sparsity · N`` entries.
        base: γ_base.
        options: the search.
        validate: score of the model as it stands, higher is better; asked for hard masks every ``evaluate_every`` steps.
            The best one wins, the later of equals. Without it the last one does. The base region itself is the answer to 0
            steps alone: it may be much smaller than the budget.
        on_step: told of every step.

    Returns:
        One region a sparsity, each as if it had been asked for alone.

    Raises:
        RegionError: θ_pre or θ_ft do not fit the space.
        OptionError: neither a base region nor a step to learn one.
        TrainingError: the loss is not finite.
    """
    if len(theta_pre) != len(space) or len(theta_ft) != len(space):
        raise RegionError(
            f"θ_pre and θ_ft must have the space's {len(space)} entries, got {len(theta_pre)} and {len(theta_ft)}."
        )
    if not len(base) and not options.steps:
        raise OptionError("An empty base region and 0 steps leave no region. Give steps, or another base region.")
    parameters = space.parameters(model)
    device = parameters[0].device
    # float16 gradients of a mean over many rows would vanish without it.
    loss_scale = 1024.0 if options.precision == "fp16" else 1.0
    counts = [budget(len(space), sparsity) for sparsity in sparsities]
    wide = at_least_float32(space.dtype)
    climbed = torch.zeros(len(space), dtype=wide, device=device)  # S − S_0
    is_base = base.mask(len(space)).to(device)
    moved = theta_ft != theta_pre
    pieces = list(
        zip(parameters, *(space.views(flat) for flat in (theta_pre, theta_ft, climbed, is_base)), strict=True)
    )
    validation: list[list[tuple[int, float]]] = [[] for _ in counts]
    losses: list[float] = []
    best: list[tuple[float, int, Region]] = []

    def consider(step: int) -> None:
        # An entry that fine-tuning did not move carries nothing. Without a step, nothing speaks for any but the base.
        for i, count in enumerate(counts):
            if step == 0:
                region = Region(base.indices[moved[base.indices.to(device)].cpu()][:count])
            else:
                region = hard_region(climbed, options.score_init, is_base, moved, count)
            value = -math.inf
            if validate is not None:
                space.load_(model, theta_pre)
                with grafted(model, space, Graft(region, theta_ft[region.indices.to(device)])):
                    value = validate()
                validation[i].append((step, value))
            if len(best) == i:
                best.append((value, step, region))
            elif value >= best[i][0] or validate is None:
                best[i] = (value, step, region)

    mode = model.training
    model.eval()
    try:
        if options.steps == 0:
            consider(0)
        with trainable(model, parameters):
            for step, batch in enumerate(batches, 1):
                model.eval()  # validate may have put it back into training mode
                with torch.no_grad():
                    for parameter, pre, ft, climb, in_base in pieces:
                        gamma = soft_mask(options.score_init + climb, in_base)
                        parameter.copy_(torch.lerp(pre.to(wide), ft.to(wide), gamma))
                        parameter.grad = None
                losses.append(_accumulate(batch, forward, options.precision, device, step, loss_scale))
                with torch.no_grad():
                    for parameter, pre, ft, climb, in_base in pieces:
                        if parameter.grad is None:
                            continue
                        sigma = (options.score_init + climb).sigmoid_()
                        slope = sigma.mul_(1 - sigma)  # σ′
                        gradient = (ft.to(wide) - pre).mul_(parameter.grad).mul_(torch.where(in_base, -slope, slope))
                        climb.sub_(gradient, alpha=options.learning_rate / loss_scale)
                        parameter.grad = None
                if on_step:
                    on_step(step, losses[-1])
                if step % options.evaluate_every == 0 or step == options.steps:
                    consider(step)
                if step == options.steps:
                    break
    finally:
        space.load_(model, theta_pre)
        model.train(mode)
    if not best:  # there were fewer batches than steps
        consider(len(losses))
    scores = climbed.add_(options.score_init)
    return [
        LearnedRegion(region, count, scores, step, tuple(values), tuple(losses))
        for (_, step, region), count, values in zip(best, counts, validation, strict=True)
    ]


def learn_region(
    model: nn.Module,
    space: ParameterSpace,
    theta_pre: Tensor,
    theta_ft: Tensor,
    batches: Iterable[Sequence[Batch]],
    forward: Callable[[Tensor, Tensor], Tensor],
    *,
    sparsity: float,
    base: Region,
    options: MaskOptions,
    validate: Callable[[], float] | None = None,
    on_step: OnStep | None = None,
) -> LearnedRegion:
    """`learn_regions` for one sparsity."""
    how: Any = {"base": base, "options": options, "validate": validate, "on_step": on_step}
    return learn_regions(model, space, theta_pre, theta_ft, batches, forward, sparsities=[sparsity], **how)[0]


def _accumulate(
    batch: Sequence[Batch],
    forward: Callable[[Tensor, Tensor], Tensor],
    precision: str,
    device: torch.device,
    step: int,
    loss_scale: float,
) -> float:
    """Gradients of ``loss_scale`` times the mean loss over all rows of ``batch``; returns that mean loss."""
    rows = sum(len(y) for _, y, _ in batch)
    total = 0.0
    for x, y, t in batch:
        with autocast(precision, device.type):
            logits = forward(x.to(device), t.to(device))
        loss = F.cross_entropy(logits.float(), y.to(device), reduction="sum") / rows
        (loss * loss_scale).backward()  # type: ignore[no-untyped-call]
        total += check_loss(loss, step)
    return total
