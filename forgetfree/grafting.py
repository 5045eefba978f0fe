"""Grafting: θ(γ) = γ ⊙ θ_ft + (1 − γ) ⊙ θ_pre, and the search for γ (paper, §2, eqs. 1 to 4).

θ_pre, θ_ft and the scores S are one flat vector each; the model itself holds θ(γ). No other whole-model
copy is made. S is kept as its distance from where it starts: at −10 the last bit of a float32 is worth 1e-6,
and the steps by which entries are ranked may be smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree.binding import network_differences, network_of
from forgetfree.data.encoding import Batch
from forgetfree.errors import GraftError, OptionError, RegionError
from forgetfree.files import StrPath, write_atomically
from forgetfree.models.body import body_fingerprint, body_of
from forgetfree.models.readout_model import ReadoutKind, autocast
from forgetfree.models.state import persistent_buffers
from forgetfree.options import Options, option
from forgetfree.parameters import ParameterSpace, at_least_float32, entries
from forgetfree.regions import Region
from forgetfree.tasks import MAX_LENGTH, TaskDefinition
from forgetfree.training import OnStep, check_loss, trainable

#: How γ_base is chosen; ``fisher`` and ``bias`` by `forgetfree.localization.choose_base`, which has model and rows.
BaseKind = Literal["movement", "empty", "random", "fisher", "bias"]


@dataclass(frozen=True)
class GraftOrigin:
    """Where a graft comes from: what else is needed to answer with it.

    Attributes:
        task: what it was made for.
        readout: how its logits are read: ``linear``, ``prompt``, ``causal`` or ``classifier``.
        model: the base model's name, as it was asked for.
        fingerprint: of the base model's body, see `forgetfree.models.body.body_fingerprint`.
        sparsity: the share of the space that its region was allowed.
        architecture: of ``classifier``: the Hugging Face class whose head the readout is.
        classes: of ``classifier``: of each of the task's labels, the number of the head's class.
        max_length: tokens a row was read at, at most.
        network: what the base model computes beside its weights, see `forgetfree.binding.network_of`; of ``classifier``, the
            fine-tuned model. Empty where nobody says it.
        tokenizer: what its tokenizer does, see `forgetfree.binding.tokenizer_digest`; empty likewise.
    """

    task: TaskDefinition
    readout: ReadoutKind
    model: str
    fingerprint: str
    sparsity: float
    architecture: str = ""
    classes: tuple[int, ...] = ()
    max_length: int = MAX_LENGTH
    network: str = ""
    tokenizer: str = ""


@dataclass(frozen=True)
class Graft:
    """A region and the values the model takes there. With a space of its own it can go out into the world.

    Attributes:
        region: γ.
        values: ``(s,)``.
        space: what the region's indices mean: names, shapes and dtypes of tensors in the *body* of the model.
        readout: the tensors that read out its task, by name.
        buffers: the body's persistent buffers that training changed, by name.
        origin: the task and the base model.
    """

    region: Region
    values: Tensor
    space: ParameterSpace | None = None
    readout: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    origin: GraftOrigin | None = None

    @classmethod
    def of(cls, model: nn.Module, space: ParameterSpace, region: Region) -> Graft:
        """What ``model`` holds at ``region``."""
        return cls(region, space.gather(model, region.indices))

    def apply_(self, model: nn.Module, space: ParameterSpace | None = None, *, check: bool = True) -> Graft:
        """Write the graft into ``model`` and return what stood there: applying that undoes this, bit for bit.

        Args:
            model: any model with the body that the graft was made for, with a head or without one.
            space: the space of ``model`` itself that the region belongs to; default: the graft's own, of the body.
            check: compare the body's fingerprint with the origin's, where the graft has one (reads the whole body once).
                Leave it out to put one graft on top of another.

        Raises:
            GraftError: the graft has no space, or does not belong to this model; nothing is changed.
            RegionError: the model does not fit ``space``.
        """
        body = body_of(model)
        target, own = (body, self._check(body, check)) if space is None else (model, space)
        buffers = self._buffers_of(body)
        before = replace(
            self,
            values=own.gather(target, self.region.indices),
            readout={},
            buffers={name: buffer.clone() for name, buffer in buffers.items()},
            origin=None,
        )
        own.scatter_(target, self.region.indices, self.values)
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(self.buffers[name])
        return before

    def save(self, path: StrPath) -> None:
        """Write it as one file, atomically: see `forgetfree.graft_file`.

        Raises:
            GraftError: it has no space of its own, or holds NaN or infinity.
        """
        from forgetfree.graft_file import serialize

        write_atomically(Path(path), serialize(self))

    @classmethod
    def load(cls, path: StrPath) -> Graft:
        """Read what `save` wrote and verify everything about it.

        Raises:
            GraftError: with the reason; a damaged file is never half-read.
        """
        from forgetfree.graft_file import read

        return read(Path(path))

    def _check(self, body: nn.Module, fingerprint: bool) -> ParameterSpace:
        """The graft's own space, if ``body`` is one that the graft was made for."""
        if self.space is None:
            raise GraftError(
                "This graft does not say which tensors its region means. Give the parameter space that it was made in: "
                "apply_(model, space)."
            )
        try:
            self.space.check(self.region.indices)
            tensors = self.space.parameters(body)
        except RegionError as error:
            raise GraftError(f"The graft belongs to a model of another layout: {error}") from error
        for spec, tensor in zip(self.space.tensors, tensors, strict=True):
            if tensor.dtype != spec.dtype:
                raise GraftError(
                    f"The graft belongs to a model of another layout: expected {spec.name!r} in {spec.dtype}, got "
                    f"{tensor.dtype}. Load the model with dtype={spec.dtype}."
                )
        origin = self.origin
        # Of a classifier, the network is the fine-tuned one's: what its head needs may be another than the base model's.
        bound = origin is not None and origin.readout != "classifier" and origin.network
        if bound and (differ := network_differences(bound, network_of(body))):
            raise GraftError(
                f"The graft belongs to a model that computes otherwise: {'; '.join(differ)}. Load it with the config.json "
                "that the graft was made with."
            )
        if fingerprint and origin is not None:
            got, expected = body_fingerprint(body), origin.fingerprint
            if got != expected:
                raise GraftError(
                    f"The graft belongs to other weights, those of {origin.model!r}: expected fingerprint "
                    f"{expected[:12]}, the model's is {got[:12]}. Load the very weights it was made from. In Python, "
                    "check=False puts it on top of another graft."
                )
        return self.space

    def _buffers_of(self, body: nn.Module) -> dict[str, Tensor]:
        """The body's own buffers of the names that the graft has."""
        found = persistent_buffers(body) if self.buffers else {}
        for name, wanted in self.buffers.items():
            if name not in found or found[name].shape != wanted.shape or found[name].dtype != wanted.dtype:
                raise GraftError(
                    f"The graft belongs to a model of another layout: it has no buffer {name!r} of shape "
                    f"{tuple(wanted.shape)} in {wanted.dtype}. Load the model it was made from."
                )
        return {name: found[name] for name in self.buffers}


@contextmanager
def grafted(model: nn.Module, space: ParameterSpace, graft: Graft) -> Iterator[None]:
    """The model with ``graft`` inside, and exactly as it was after."""
    before = graft.apply_(model, space)
    try:
        yield
    finally:
        before.apply_(model, space)


# -- θ by a formula: flat vectors (N,) -------------------------------------------------------------------


def graft_theta(theta_pre: Tensor, theta_ft: Tensor, region: Region) -> Tensor:
    """Eq. 1: γ ⊙ θ_ft + (1 − γ) ⊙ θ_pre."""
    theta = theta_pre.clone()
    theta[region.indices] = theta_ft[region.indices]
    return theta


def pruned_theta(theta_ft: Tensor, region: Region) -> Tensor:
    """A lottery ticket: γ ⊙ θ_ft, all else set to 0 (paper, fig. 4)."""
    return graft_theta(torch.zeros_like(theta_ft), theta_ft, region)


def interpolate(theta_pre: Tensor, theta: Tensor, alpha: float) -> Tensor:
    """WiSE-FT (Wortsman et al., 2022): (1 − α) θ_pre + α θ; exactly θ_pre at α = 0 and θ at α = 1."""
    return torch.lerp(theta_pre, theta, alpha)


# -- Base regions ----------------------------------------------------------------------------------------


def budget(space_size: int, sparsity: float) -> int:
    """The most entries a region may have: ``⌊sparsity · N⌋``.

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
    """The ``count`` highest scores ``(N,)`` among the eligible; equal scores go to the lower index.

    Fewer where fewer are eligible. ``scores`` is overwritten where not eligible.
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
    """The ``count`` highest of the scores ``(N,)``, in any order.

    Of many scores, one in 64 tells about how high they must be, which leaves few to sort.
    """
    sample = scores[::64]
    likely = count // 32 + 64  # twice as many as belong to the highest, so that the guess is seldom too high
    if likely < len(sample):
        above = scores[scores >= torch.topk(sample, likely, sorted=False).values.min()]
        scores = above if len(above) >= count else scores
    return torch.topk(scores, count, sorted=False).values


def most_moved(theta_pre: Tensor, theta_ft: Tensor, count: int, among: Region | None = None) -> Region:
    """The ``count`` entries of largest |θ_ft − θ_pre|, of those ``among`` a region; fewer where fewer moved."""
    wide = at_least_float32(theta_ft.dtype)
    movement = (theta_ft.to(wide) - theta_pre.to(wide)).abs_()
    moved = movement > 0
    return top(movement, count, moved if among is None else moved & among.mask(len(moved)).to(moved.device))


def base_region(
    kind: Literal["movement", "empty", "random"], theta_pre: Tensor, theta_ft: Tensor, count: int, seed: int = 0
) -> Region:
    """γ_base (paper, §2; sizes: §3.1).

    Args:
        kind: ``movement``: the ``count`` most moved entries of |θ_ft − θ_pre|; ``empty``; ``random``: ``count`` entries
            drawn by ``seed``.
        theta_pre: θ_pre ``(N,)``.
        theta_ft: θ_ft ``(N,)``.
        count: entries.
        seed: of ``random``.

    Raises:
        OptionError: no such kind.
    """
    if kind == "empty":
        return Region.empty()
    if kind == "random":
        generator = torch.Generator().manual_seed(seed)
        return Region.of(torch.randperm(len(theta_pre), generator=generator)[:count])
    if kind != "movement":
        raise OptionError(f"base must be one of {', '.join(get_args(BaseKind))}, got {kind!r}.")
    return most_moved(theta_pre, theta_ft, count)


# -- Learning the mask (eqs. 3 and 4) --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MaskOptions(Options):
    """How the mask scores S are learned. Defaults: the paper's (§3)."""

    learning_rate: float = option(1e7, "of SGD on S; the gradients of S are tiny, see score_init", above=0)
    steps: int = option(100, "SGD steps on S; 0 leaves the base region as it is", at_least=0)
    batch_size: int = option(1024, "rows per step", at_least=1)
    micro_batch_size: int = option(64, "rows per forward pass; a step adds them up", at_least=1)
    score_init: float = option(-10.0, "every S at first: σ(−10) ≈ 4.5e-5, so θ(γ) begins at the base region's graft")
    evaluate_every: int = option(10, "steps between evaluations of the hard mask", at_least=1)
    precision: Literal["fp32", "bf16", "fp16"] = option("fp32", "of forward and backward passes")


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
    """Localise a skill: learn S by SGD on the loss of θ(γ), then take hard regions (paper, eqs. 3 and 4).

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


# -- Training a region -----------------------------------------------------------------------------------


class RegionParameters:
    """A region's values as one trainable vector ``(s,)``, so that nothing else can move.

    The optimiser sees this vector and not the model's tensors: neither weight decay nor momentum nor rounding can reach
    an entry outside the region. Where the tensors are narrower than float32, the vector keeps what they round away. Each
    update: `collect` gradients, step, `write`.
    """

    def __init__(self, model: nn.Module, space: ParameterSpace, region: Region) -> None:
        tensors = space.parameters(model)
        device = tensors[0].device
        self._pieces = [(tensors[i], local.to(device), where) for i, local, where in space.split(region.indices)]
        self.values = nn.Parameter(space.gather(model, region.indices).to(at_least_float32(space.dtype)))
        #: What the optimiser moves.
        self.parameters = [self.values]
        #: The model's tensors that hold an entry of the region: the only ones that need gradients.
        self.touched = [tensor for tensor, _, _ in self._pieces]

    @torch.no_grad()
    def collect(self) -> None:
        """Take the region's gradients ``(s,)`` from the model's tensors, and free those."""
        gradient = torch.zeros_like(self.values)
        for tensor, local, where in self._pieces:
            if tensor.grad is not None:
                flat, at = entries(tensor.grad, local)
                gradient[where] = flat[at].to(gradient)
                tensor.grad = None
        self.values.grad = gradient

    @torch.no_grad()
    def write(self) -> None:
        """Put the region's values into the model's tensors."""
        for tensor, local, where in self._pieces:
            flat, at = entries(tensor, local)
            flat[at] = self.values[where].to(flat)
