"""Learning the mask: the search for γ by the scores S (paper, §2, eqs. 3 and 4).

θ_pre, θ_ft and S are one flat vector each; the model itself holds θ(γ). No other whole-model copy is made, and a step passes
over each of them once. S is kept as its distance from where it starts: at −10 the last bit of a float32 is worth 1e-6, and
the steps by which entries are ranked may be smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree.core.base_regions import budget, top
from forgetfree.core.checkpoint import Checkpoint
from forgetfree.core.examples import Batch
from forgetfree.core.exchange import PartSum, owned
from forgetfree.core.graft import Graft, grafted
from forgetfree.core.parameters import ParameterSpace, at_least_float32, entries, stretch_of
from forgetfree.core.readout_model import PrecisionChoice, autocast
from forgetfree.core.regions import Region
from forgetfree.core.steps import OnStep, check_loss, trainable
from forgetfree.errors import OptionError, RegionError, TrainingError
from forgetfree.options import Options, option, recorded

sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input


@dataclass(frozen=True, kw_only=True)
class MaskOptions(Options):
    """How the mask scores S are learned. The defaults are the paper's (§3)."""

    learning_rate: float = option(1e7, "of SGD on S; the gradients of S are tiny, see score_init", above=0)
    steps: int = option(100, "SGD steps on S; 0 leaves the base region as it is", at_least=0)
    batch_size: int = option(1024, "rows per step", at_least=1)
    score_init: float = option(-10.0, "every S at first: σ(−10) ≈ 4.5e-5, so θ(γ) begins at the base region's graft")
    evaluate_every: int = option(10, "steps between evaluations of the hard mask", at_least=1)
    precision: PrecisionChoice = option("fp32", "of forward and backward passes")
    parts: int = option(1, "numbered parts of a step's mini-batches, which several processes share", at_least=1)


@dataclass(frozen=True)
class LearnedRegion:
    """The result of a search.

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
    """Return γ of eq. 4, γ_base ⊙ (1 − σ(S)) + (1 − γ_base) ⊙ σ(S), for S and a boolean γ_base of one shape."""
    sigma = torch.sigmoid(scores)
    return torch.where(base, 1 - sigma, sigma)


def hard_region(climbed: Tensor, start: float, base: Region, count: int) -> Region:
    """Return the at most ``count`` entries with the highest γ, where S = ``start + climbed``.

    Of equal entries those with the lower index win. An entry at −∞ is never taken.

    γ rises with −S in the base region and with S outside it; these rank it without the sigmoid's rounding. Outside, where
    most entries are, ``climbed`` alone ranks them, so no more than ``count`` of them meet those of the base in float64.
    """
    inside = Region(base.indices[(climbed[base.indices.to(climbed.device)] > -math.inf).cpu()])
    outside = top(climbed, count + len(inside)) - inside  # the base's are at most as many as were added
    candidates, order = torch.cat([inside.indices, outside.indices]).sort()
    rank = climbed[candidates.to(climbed.device)].double().add_(start)
    rank[(order < len(inside)).to(rank.device)] *= -1
    return Region(candidates[top(rank, count).indices])


class MaskSearch:
    """S for one model, and the steps of the search: descend by eq. 3 and graft by eq. 4, in one pass."""

    def __init__(
        self,
        model: nn.Module,
        space: ParameterSpace,
        theta_pre: Tensor,
        theta_ft: Tensor,
        base: Region,
        how: MaskOptions,
    ) -> None:
        self.tensors = space.parameters(model)
        self.device = self.tensors[0].device
        self.in_model = False  # whether the model holds θ(γ)
        self._model, self._space, self._how, self._base = model, space, how, base
        self._pre, self._ft = theta_pre, theta_ft
        wide = at_least_float32(space.dtype)
        # S − S_0. What fine-tuning did not move carries nothing: it is at −∞, stays there, and is never taken.
        self.climbed = torch.zeros(len(space), dtype=wide, device=self.device)
        self.climbed[theta_ft == theta_pre] = -math.inf
        # float16 gradients of a mean over many rows would vanish without it.
        self._loss_scale = 1024.0 if how.precision == "fp16" else 1.0
        self._added = PartSum(self.tensors, how.parts)
        self._where: list[tuple[int, tuple[int, ...]]] = []
        self._cut_()

    def _cut_(self) -> None:
        """Cut θ(γ), θ_pre, θ_ft and S − S_0 into stretches; again if a tensor got other storage, as `FlatTensors` gives it."""
        where = [(tensor.data_ptr(), tensor.stride()) for tensor in self.tensors]
        if where == self._where:
            return
        held = [tensor.detach() for tensor in self.tensors]
        flat = zip(held, *map(self._space.views, (self._pre, self._ft, self.climbed)), strict=True)
        self._stretches = [list(zip(*(_cut(tensor, like[0]) for tensor in like), strict=True)) for like in flat]
        most = max(each[0].numel() for stretches in self._stretches for each in stretches)
        self._scratch = torch.empty(2, most, dtype=self.climbed.dtype, device=self.device)
        self._where = where

    @torch.no_grad()
    def graft_(self, rate: float = 0.0, step: int = 0) -> None:
        """Take a step down the loss by the gradients in the model (eq. 3), and put θ(γ) there (eq. 4): in one pass.

        With D = θ_ft − θ_pre, γ = σ(S) outside the base region: S −= rate · ∂L/∂θ ⊙ D ⊙ σ′(S), and θ(γ) = θ_pre + σ(S) ⊙ D.
        Inside, γ = 1 − σ(S) turns the sign of the gradient and lets θ_pre and θ_ft change places.

        Raises:
            TrainingError: a gradient is not finite; S and the model are of no use then.
        """
        self._cut_()
        start = self._how.score_init
        gradient_sum = self.climbed.new_zeros(())  # NaN or infinite where a gradient is
        if rate:
            for i, local, _ in self._space.split(self._base.indices):
                if (gradient := self.tensors[i].grad) is not None:
                    inside, place = entries(gradient, local)
                    inside[place] *= -1
        for parameter, stretches in zip(self.tensors, self._stretches, strict=True):
            gradients = _cut(parameter.grad, parameter) if rate and parameter.grad is not None else ()
            for (theta, pre, ft, climbed), gradient in zip_longest(stretches, gradients):
                sigma, move = (scratch[: pre.numel()].view(pre.shape) for scratch in self._scratch)
                move.copy_(ft).sub_(pre)
                if gradient is not None:
                    torch.add(climbed, start, out=sigma).sigmoid_()
                    slope = sigmoid_backward(move, sigma, grad_input=sigma)  # D ⊙ σ′(S), σ′ = (1 − σ) σ
                    climbed.addcmul_(slope, gradient, value=-rate)
                    gradient_sum += gradient.sum(dtype=climbed.dtype)
                torch.add(climbed, start, out=sigma).sigmoid_()
                torch.addcmul(pre, sigma, move, out=theta)
            parameter.grad = None
        if not math.isfinite(total := float(gradient_sum)):
            raise TrainingError(
                f"The gradients at step {step} of the mask search add up to {total}, expected finite ones. Localize in fp32 "
                "(or bf16 instead of fp16), or fine-tune with a lower learning rate."
            )
        at = self._base.indices.to(self.device)
        sigma, wide = torch.sigmoid(self.climbed[at] + start), self.climbed.dtype
        self._space.scatter_(
            self._model, self._base.indices, torch.lerp(self._ft[at].to(wide), self._pre[at].to(wide), sigma)
        )
        self.in_model = True

    def step_(self, batch: Sequence[Batch], forward: Callable[[Tensor, Tensor], Tensor], step: int) -> float:
        """Move S by the gradient over one batch, and return the mean loss of θ(γ) over its rows."""
        if not self.in_model:
            self.graft_()
        rows = sum(len(y) for _, y, _ in batch)
        total, parts = 0.0, self._how.parts
        for part in owned(parts) if parts > 1 else [0]:  # what is not cut is computed by every process
            for x, y, t in batch[len(batch) * part // parts : len(batch) * (part + 1) // parts]:
                with autocast(self._how.precision, self.device.type):
                    logits = forward(x.to(self.device), t.to(self.device))
                loss = F.cross_entropy(logits.float(), y.to(self.device), reduction="sum") / rows
                (loss * self._loss_scale).backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            if parts > 1:
                self._added.take(total)
                total = 0.0
        total = check_loss(self._added.give() if parts > 1 else total, step)
        self.graft_(self._how.learning_rate / self._loss_scale, step)
        return total

    def region(self, step: int, count: int) -> Region:
        """Return the hard mask after ``step`` steps."""
        if step == 0:  # nothing speaks for any entry outside the base region
            moved = self.climbed[self._base.indices.to(self.device)] > -math.inf
            return Region(self._base.indices[moved.cpu()][:count])
        return hard_region(self.climbed, self._how.score_init, self._base, count)

    def scores(self) -> Tensor:
        """Return S itself; the search is over then."""
        climbed = self.climbed.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=0.0)
        return climbed.add_(self._how.score_init)


@dataclass
class _Course:
    """How far a search has come; see `forgetfree.core.checkpoint.Resumable`.

    Attributes:
        search: S.
        losses: of each step.
        best: by budget, the score, step and hard mask that are best so far.
        validation: by budget, the step and score of every hard mask that was evaluated.
    """

    search: MaskSearch
    losses: list[float] = field(default_factory=list)
    best: dict[int, tuple[float, int, Region]] = field(default_factory=dict)
    validation: dict[int, list[tuple[int, float]]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        best = {count: (score, step, region.indices) for count, (score, step, region) in self.best.items()}
        return {"climbed": self.search.climbed, "losses": self.losses, "best": best, "validation": self.validation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.search.climbed.copy_(state["climbed"])
        self.search.in_model = False
        self.losses += state["losses"]
        self.best |= {count: (score, step, Region(at)) for count, (score, step, at) in state["best"].items()}
        self.validation |= state["validation"]


def _cut(tensor: Tensor, like: Tensor) -> Sequence[Tensor]:
    """Return views of a tensor that the cache holds; the whole one, where those of the tensor it is ``like`` have gaps."""
    return torch.split(tensor.reshape(-1), stretch_of(tensor.device)) if like.is_contiguous() else (tensor,)


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
    checkpoint: Checkpoint | None = None,
    about: Sequence[Any] = (),
) -> list[LearnedRegion]:
    """Localize a skill: learn S by SGD on the loss of θ(γ), then take hard regions (paper, eqs. 3 and 4).

    S does not depend on how many entries are taken in the end, so one search from one γ_base serves several sparsities.

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
        validate: returns the score of the model as it stands, higher is better; asked for hard masks every
            ``evaluate_every`` steps, unless there is only one. The best mask wins, the later of equals; without ``validate``,
            the last one. The base region itself is the answer to 0 steps alone: it may be much smaller than the budget.
        on_step: called after every step.
        checkpoint: keeps where the search stands.
        about: what tells it there from searches with other ``batches`` or ``forward``, as parts of a state.

    Returns:
        One region a sparsity, each as if it had been asked for alone.

    Raises:
        RegionError: θ_pre or θ_ft do not fit the space.
        OptionError: there is neither a base region nor a step to learn one.
        TrainingError: the loss or a gradient is not finite.
    """
    if len(theta_pre) != len(space) or len(theta_ft) != len(space):
        raise RegionError(
            f"θ_pre and θ_ft must have the space's {len(space)} entries, got {len(theta_pre)} and {len(theta_ft)}."
        )
    if not len(base) and not options.steps:
        raise OptionError("An empty base region and 0 steps leave no region. Give steps, or another base region.")
    search = MaskSearch(model, space, theta_pre, theta_ft, base, options)
    counts = [budget(len(space), sparsity) for sparsity in sparsities]
    if options.steps <= options.evaluate_every:
        validate = None  # there is one mask, and nothing to choose
    checkpoint = checkpoint or Checkpoint()
    state = _Course(search, validation={count: [] for count in counts})
    losses, best, validation = state.losses, state.best, state.validation

    def consider(step: int) -> None:
        for count, scores in validation.items():
            region, score = search.region(step, count), -math.inf
            if validate is not None:
                search.in_model = False
                space.load_(model, theta_pre)
                with grafted(model, space, Graft(region, theta_ft[region.indices.to(search.device)])):
                    score = validate()
                scores.append((step, score))
            if count not in best or score >= best[count][0]:
                best[count] = score, step, region

    mode = model.training
    try:
        done = checkpoint.begin(options.steps, state, theta_pre, theta_ft, base.indices, recorded(options), *about)
        with trainable(model, search.tensors):
            for step, batch in enumerate(islice(batches, done, options.steps), done + 1):
                model.eval()  # validate may have put it back into training mode
                losses.append(search.step_(batch, forward, step))
                if on_step:
                    on_step(step, losses[-1])
                if step % options.evaluate_every == 0 or step == options.steps:
                    consider(step)
                checkpoint.after(step, options.steps, state)
        if not best:  # there was no step, or there were fewer batches than steps
            model.eval()
            consider(len(losses))
    finally:
        space.load_(model, theta_pre)
        model.train(mode)
    scores = search.scores()
    return [
        LearnedRegion(best[count][2], count, scores, best[count][1], tuple(validation[count]), tuple(losses))
        for count in counts
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
    """Run `learn_regions` for one sparsity."""
    how: Any = {"base": base, "options": options, "validate": validate, "on_step": on_step}
    return learn_regions(model, space, theta_pre, theta_ft, batches, forward, sparsities=[sparsity], **how)[0]
