"""Learning the mask: the search for γ by the scores S (paper, §2, eqs. 3 and 4).

θ_pre, θ_ft and S are one flat vector each; the model itself holds θ(γ). No other whole-model copy is made. On a GPU, θ(γ) and
its gradient are flat vectors, too, and the model's tensors are views of them: a step is then a few operations, in place of a
few for each tensor. S is stored as its shift S − S_0 from its start: at −10 the last bit of a float32 is worth 1e-6, and the
steps that rank the entries may be smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.checkpoint import Checkpoint
from forgetfree.core.parameters import ALIGNMENT_OF_BUFFERS, ParameterSpace, at_least_float32, entries
from forgetfree.core.readout_model import Precision
from forgetfree.core.regions import Region, grafted
from forgetfree.core.selection import budget, top
from forgetfree.core.trained import Batch, CrossEntropy, OnStep, Reading, check_loss, trainable
from forgetfree.errors import OptionError, RegionError, TrainingError
from forgetfree.options import Options, option, recorded

#: The most entries that a GPU computes at once: a fifth of a gigabyte of intermediate values.
PIECE = 2**24

sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input


class MaskOptions(Options):
    """The search for the mask scores S. The defaults are the paper's (§3)."""

    learning_rate: float = option(1e7, "of SGD on S; the gradients of S are tiny, see score_init", above=0)
    steps: int = option(100, "SGD steps on S; 0 leaves the base region as it is", at_least=0)
    batch_size: int = option(1024, "rows per step", at_least=1)
    score_init: float = option(-10.0, "every S at first: σ(−10) ≈ 4.5e-5, so θ(γ) begins at the base region's graft")
    evaluate_every: int = option(10, "steps between evaluations of the hard mask", at_least=1)
    precision: Precision = option("fp32", "of forward and backward passes")


@dataclass(frozen=True)
class LearnedRegion:
    """The result of a search.

    Attributes:
        region: the hard mask, with at most ``budget`` entries.
        budget: the most entries that the region may have.
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


def descend_(shift: Tensor, start: float, gradient: Tensor, move: Tensor, rate: float) -> None:
    """Take a step down the loss outside γ_base (eq. 3): S −= rate · ∂L/∂θ ⊙ D ⊙ σ′(S), with σ′ = σ (1 − σ).

    Args:
        shift: S − S_0, updated in place.
        start: S_0.
        gradient: ∂L/∂θ.
        move: D = θ_ft − θ_pre.
        rate: the learning rate.
    """
    sigma = (shift + start).sigmoid_()
    slope = sigmoid_backward(move, sigma, grad_input=sigma)  # D ⊙ σ′(S)
    shift.addcmul_(slope, gradient, value=-rate)


def hard_region(shift: Tensor, start: float, base: Region, count: int) -> Region:
    """Return the at most ``count`` entries with the highest γ, where S = ``start + shift``.

    Of equal entries those with the lower index win. An entry at −∞ is never taken.

    γ rises with −S in the base region and with S outside it; these rank the entries without the sigmoid's rounding. Outside,
    where most entries are, ``shift`` alone ranks them, so only the best few are compared with the base's in float64.
    """
    inside = Region(base.indices[(shift[base.indices.to(shift.device)] > -math.inf).cpu()])
    outside = top(shift, count + len(inside)) - inside  # ``count`` or more remain, if there are as many
    candidates, order = torch.cat([inside.indices, outside.indices]).sort()
    rank = shift[candidates.to(shift.device)].cpu().double().add_(start)  # not all devices have float64
    rank[order < len(inside)] *= -1
    return Region(candidates[top(rank, count).indices])


class _FlatModel:
    """The graftable entries of a model, and their gradients, as one vector ``(N,)`` each.

    The model's tensors are views of them, except tensors with other strides, another dtype, or a start that is not aligned,
    where kernels may round differently: these are copied back and forth.
    """

    def __init__(self, space: ParameterSpace, tensors: Sequence[nn.Parameter]) -> None:
        self.theta = torch.empty(len(space), dtype=space.dtype, device=tensors[0].device)
        self.gradient = torch.zeros_like(self.theta)
        self._views: list[nn.Parameter] = []
        self._apart: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        views = space.views(self.theta), space.views(self.gradient)
        for spec, tensor, theta, gradient in zip(space.tensors, tensors, *views, strict=True):
            is_aligned = spec.offset * tensor.itemsize % ALIGNMENT_OF_BUFFERS == 0
            if is_aligned and tensor.is_contiguous() and tensor.dtype == space.dtype:
                tensor.data, tensor.grad = theta.copy_(tensor.detach()), gradient
                self._views.append(tensor)
            else:
                self._apart.append((tensor, theta, gradient))

    def collect(self) -> None:
        """Take the gradients of the tensors that are not views."""
        for tensor, _, gradient in self._apart:
            if tensor.grad is not None:
                gradient.copy_(tensor.grad)
                tensor.grad = None

    def write(self) -> None:
        """Copy the values into the tensors that are not views."""
        for tensor, theta, _ in self._apart:
            tensor.copy_(theta)

    def pieces(self, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Return values, gradients and other vectors ``(N,)`` in pieces, so that intermediate values take little memory."""
        return zip(*(torch.split(each, PIECE) for each in (self.theta, self.gradient, *vectors)), strict=True)

    def release(self) -> None:
        """Give each tensor its own memory again."""
        for tensor in self._views:
            tensor.data, tensor.grad = tensor.data.clone(), None


class MaskSearch:
    """S for one model, and the steps of the search: descend by eq. 3 and graft by eq. 4, in one pass.

    Args:
        model: holds the graftable tensors.
        space: its parameter space of N entries.
        theta_pre: θ_pre ``(N,)``.
        theta_ft: θ_ft ``(N,)``.
        base: γ_base.
        options: the learning rate, and the start of S.
        loss: the loss of θ(γ) over a batch; it leaves gradients in ``model``.

    Attributes:
        shift: S − S_0 ``(N,)``. An entry that fine-tuning did not move is at −∞, stays there, and is never taken.
        in_model: whether the model holds θ(γ).
        losses: the loss of θ(γ) at every step.
        validation: the step and score of every hard mask that was evaluated.
        best: the score, step and hard mask that are best so far.
    """

    def __init__(
        self,
        model: nn.Module,
        space: ParameterSpace,
        theta_pre: Tensor,
        theta_ft: Tensor,
        base: Region,
        options: MaskOptions,
        loss: CrossEntropy,
    ) -> None:
        self.tensors = space.parameters(model)
        self.device = self.tensors[0].device
        self.in_model = False
        self._model, self._space, self._options, self._base = model, space, options, base
        self._pre, self._ft, self._loss = theta_pre, theta_ft, loss
        self.shift = torch.zeros(len(space), dtype=at_least_float32(space.dtype), device=self.device)
        self.shift.masked_fill_(theta_ft == theta_pre, -math.inf)
        self._at = base.indices.to(self.device)
        self._flat = None if self.device.type == "cpu" else _FlatModel(space, self.tensors)
        self._gradient_sum: tuple[int, Reading] | None = None  # of the last step, until it is checked
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.best: tuple[float, int, Region] | None = None

    @torch.no_grad()
    def graft_(self, rate: float = 0.0, step: int = 0) -> None:
        """Take a step down the loss by the gradients in the model (eq. 3), and write θ(γ) into it (eq. 4): in one pass.

        With D = θ_ft − θ_pre, γ = σ(S) outside the base region, and θ(γ) = θ_pre + σ(S) ⊙ D. Inside, γ = 1 − σ(S) flips the
        sign of the gradient and swaps θ_pre and θ_ft.

        Raises:
            TrainingError: a gradient is not finite; S and the model are invalid then.
        """
        start = self._options.score_init
        gradient_sum = self.shift.new_zeros(())  # NaN or infinite if a gradient is
        if rate:
            self._turn_signs()
        for theta, gradient, pre, ft, shift in self._pieces():
            move = ft.to(shift.dtype, copy=True).sub_(pre)
            if rate and gradient is not None:
                descend_(shift, start, gradient, move, rate)
                gradient_sum += gradient.sum(dtype=shift.dtype)
            sigma = (shift + start).sigmoid_()
            torch.addcmul(pre, sigma, move, out=theta)
        self.check_gradients()
        self._gradient_sum = step, Reading(gradient_sum)
        if self.device.type == "cpu":
            self.check_gradients()
        at, wide = self._at, self.shift.dtype
        sigma = torch.sigmoid(self.shift[at] + start)
        inside = torch.lerp(self._ft[at].to(wide), self._pre[at].to(wide), sigma)
        if self._flat is None:
            self._space.scatter_(self._model, self._base.indices, inside)
        else:
            self._flat.theta.index_copy_(0, at, inside.to(self._flat.theta.dtype))
            self._flat.gradient.zero_()
            self._flat.write()
        self.in_model = True

    def _turn_signs(self) -> None:
        """Flip the signs of the gradients in the base region."""
        if self._flat is not None:
            self._flat.collect()
            gradient = self._flat.gradient
            gradient.index_copy_(0, self._at, -gradient.index_select(0, self._at))
            return
        for i, local, _ in self._space.split(self._base.indices):
            if (gradient_of := self.tensors[i].grad) is not None:
                inside, place = entries(gradient_of, local)
                inside[place] *= -1

    def _pieces(self) -> Iterator[tuple[Any, ...]]:
        """Return θ(γ), its gradient, θ_pre, θ_ft and S − S_0, piece by piece."""
        vectors = self._pre, self._ft, self.shift
        if self._flat is not None:
            yield from self._flat.pieces(*vectors)
            return
        for theta, *others in zip(self.tensors, *map(self._space.views, vectors), strict=True):
            yield theta, theta.grad, *others
            theta.grad = None

    def check_gradients(self) -> None:
        """Raise ``TrainingError`` unless the gradients of the last step were finite."""
        if self._gradient_sum is None:
            return
        (step, reading), self._gradient_sum = self._gradient_sum, None
        if not math.isfinite(total := float(reading)):
            raise TrainingError(
                f"The gradients at step {step} of the mask search add up to {total}, expected finite ones. Localize in fp32 "
                "(or bf16 instead of fp16), or fine-tune with a lower learning rate."
            )

    def release(self) -> None:
        """Give each tensor of the model its own memory again, if it is a view."""
        if self._flat is not None:
            self._flat.release()

    def step_(self, batch: Sequence[Batch], step: int) -> float:
        """Move S by the gradient over one batch, and return the mean loss of θ(γ) over its rows."""
        if not self.in_model:
            self.graft_()
        loss = check_loss(self._loss(batch), step)
        self.graft_(self._options.learning_rate / self._loss.scale, step)
        return loss

    def region(self, step: int, count: int) -> Region:
        """Return the hard mask after ``step`` steps."""
        self.check_gradients()
        if step == 0:  # no step has ranked the entries outside the base region
            moved = self.shift[self._at] > -math.inf
            return Region(self._base.indices[moved.cpu()][:count])
        return hard_region(self.shift, self._options.score_init, self._base, count)

    def scores(self) -> Tensor:
        """Return S, made in place of ``shift``: the search cannot go on."""
        shift = self.shift.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=0.0)
        return shift.add_(self._options.score_init)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the search; see `forgetfree.checkpoint.Resumable`."""
        self.check_gradients()
        best = self.best and (*self.best[:2], self.best[2].indices)
        return {"shift": self.shift, "losses": self.losses, "validation": self.validation, "best": best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of `state_dict`."""
        self.shift.copy_(state["shift"])
        self.in_model = False
        self.losses, self.validation = state["losses"], state["validation"]
        if state["best"]:
            score, step, indices = state["best"]
            self.best = score, step, Region(indices)


def learn_region(
    model: nn.Module,
    space: ParameterSpace,
    theta_pre: Tensor,
    theta_ft: Tensor,
    batches: Iterable[Sequence[Batch]],
    loss: CrossEntropy,
    *,
    sparsity: float,
    base: Region,
    options: MaskOptions,
    validate: Callable[[], float] | None = None,
    on_step: OnStep | None = None,
    checkpoint: Checkpoint | None = None,
    about: Sequence[Any] = (),
) -> LearnedRegion:
    """Localize a skill: learn S by SGD on the loss of θ(γ), then take a hard region (paper, eqs. 3 and 4).

    Args:
        model: holds the graftable tensors; ends with θ_pre in them, bit for bit.
        space: its parameter space of N entries.
        theta_pre: θ_pre ``(N,)``.
        theta_ft: θ_ft ``(N,)``.
        batches: one item per step: the mini-batches of its batch.
        loss: computes a batch's loss with ``model``, such as `CrossEntropy`; dropout is off.
        sparsity: the region has at most ``sparsity · N`` entries.
        base: γ_base.
        options: the options of the search.
        validate: returns the score of the model in its current state, higher is better; called for the hard mask every
            ``evaluate_every`` steps, unless there is only one. The best mask wins, the later of equals; without ``validate``,
            the last one. The base region itself is the result only of 0 steps: it may be much smaller than the budget.
        on_step: called after every step.
        checkpoint: keeps the state of the search.
        about: extra values mixed into the checkpoint's key, so that a search with other ``batches`` or ``loss`` is not resumed
            by mistake.

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
    search = MaskSearch(model, space, theta_pre, theta_ft, base, options, loss)
    count = budget(len(space), sparsity)
    if options.steps <= options.evaluate_every:
        validate = None  # there is one mask, and nothing to choose
    checkpoint = checkpoint or Checkpoint()

    def consider(step: int) -> tuple[float, int, Region]:
        """Return the better of the hard mask after this step and the best before."""
        region, score = search.region(step, count), -math.inf
        if validate is not None:
            search.in_model = False
            space.load_(model, theta_pre)
            with grafted(model, space, region, theta_ft[region.indices.to(search.device)]):
                score = validate()
            search.validation.append((step, score))
        found = score, step, region
        return found if search.best is None or score >= search.best[0] else search.best

    mode = model.training
    try:
        done = checkpoint.begin(options.steps, search, theta_pre, theta_ft, base.indices, recorded(options), *about)
        with trainable(model, search.tensors):
            for step, batch in enumerate(islice(batches, done, options.steps), done + 1):
                model.eval()  # validate may have put it back into training mode
                search.losses.append(search.step_(batch, step))
                if on_step:
                    on_step(step, search.losses[-1])
                if step % options.evaluate_every == 0 or step == options.steps:
                    search.best = consider(step)
                checkpoint.after(step, options.steps, search)
        if search.best is None:  # there was no step, or there were fewer batches than steps
            model.eval()
            search.best = consider(len(search.losses))
    finally:
        search.release()
        space.load_(model, theta_pre)
        model.train(mode)
    _, step, region = search.best
    return LearnedRegion(region, count, search.scores(), step, tuple(search.validation), tuple(search.losses))
