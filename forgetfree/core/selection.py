"""Budgets, and regions of the highest scores: the most moved entries, which are γ_base (§2), and `choose`, γ without a search.

Entries are scored by gradient g, value θ and move Δ = θ_ft − θ_pre. All scores but ``movement`` need only θ_pre, so they
suit models that are too large to be fine-tuned as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

from forgetfree.core.parameters import ParameterSpace, at_least_float32
from forgetfree.core.regions import Region
from forgetfree.core.trained import check_loss, trainable
from forgetfree.errors import OptionError, TrainingError
from forgetfree.recipes import Saliency

#: The constant that ``gallop`` adds to |θ|: for much smaller weights, the gradient alone decides.
SMALL = 1e-3
#: The default number of rows for the gradients that choose a region.
ROWS = 256
#: The most entries for which sums of several batches' gradients stay on the model's device: 2 GB.
ON_DEVICE = 2**29
#: The most scores in a block of `_highest`.
_BLOCK = 32


def floor_share(share: float, total: int) -> int:
    """Return ``⌊share · total⌋``, even if rounding puts the product just below a whole number: 0.29 · 100."""
    return math.floor(share * total + 1e-6)


def budget(space_size: int, sparsity: float, name: str = "sparsity") -> int:
    """Return the most entries that a region may have: ``⌊sparsity · N⌋``.

    Args:
        space_size: N, the graftable entries.
        sparsity: the share of them.
        name: the name of the share in messages.

    Raises:
        OptionError: the sparsity is not in (0, 1], or leaves no entry.
    """
    if not isinstance(sparsity, Real) or not 0 < sparsity <= 1:
        raise OptionError(f"{name} must be a number above 0 and at most 1, got {sparsity!r}. The paper uses 1e-4.")
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

    For many scores, one quick pass rules out most. The highest scores lie in the ``count`` blocks of neighbours with the
    highest maxima: the highest entry of any other block ranks after the highest entry of each of these.
    """
    block = min(_BLOCK, len(scores) // (8 * count))
    if block < 2:
        return _chosen(scores, count).nonzero().squeeze(1)
    whole = len(scores) // block * block
    rows = scores[:whole].reshape(-1, block)
    maxima = rows.amax(1)
    # A NaN hides the maximum of its block. Few blocks have one, so only these are read again.
    hidden = maxima.isnan().nonzero().squeeze(1)
    maxima[hidden] = _without_nan(rows[hidden]).amax(1)
    high = _highest(maxima, count)
    chosen = _chosen(torch.cat([rows[high].view(-1), scores[whole:]]), count).nonzero().squeeze(1)
    inside = chosen[chosen < len(high) * block]
    rest = chosen[len(inside) :] + (whole - len(high) * block)
    return torch.cat([high[inside // block] * block + inside % block, rest])


def _chosen(scores: Tensor, count: int) -> Tensor:
    """Return a mask of the ``count`` highest scores ``(N,)``, without −∞ and NaN; of equal ones the first."""
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
    """Return for each tensor the ``⌊share · n⌋`` of its n free entries that moved most, at least one if any is free.

    ``free`` ``(N,)`` marks the entries that may be chosen; ``tensors`` are numbers, in order.
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


# -- The choice of γ, tensor by tensor ---------------------------------------------------------------------


class BatchLoss(Protocol):
    """A loss over the rows of several batches; it leaves ``scale`` times its gradient in the model's tensors."""

    scale: float

    def __call__(self, batch: Sequence[Any], /) -> float:
        """Return the loss."""


class PlainTensors:
    """The tensors of a space in a model, and their gradients.

    `forgetfree.core.linear_layers.LinearLayers` has the same methods, for weights without gradients.

    Args:
        model: holds θ, in evaluation mode while gradients are computed.
        space: its parameter space.
    """

    def __init__(self, model: nn.Module, space: ParameterSpace) -> None:
        self.model, self.space, self._tensors = model, space, space.parameters(model)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._tensors[0].device

    def theta(self, number: int) -> Tensor:
        """Return a tensor."""
        return self._tensors[number].detach()

    def is_frozen(self, number: int) -> bool:
        """Return whether a user has frozen a tensor."""
        return not self._tensors[number].requires_grad

    @contextmanager
    def gradients(self, receive: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Pass each gradient to ``receive`` as soon as it is there, and free it."""
        numbers = {id(tensor): number for number, tensor in enumerate(self._tensors)}

        @torch.no_grad()
        def free(tensor: Tensor) -> None:
            if (gradient := tensor.grad) is not None:
                receive(numbers[id(tensor)], gradient.to_dense() if gradient.is_sparse else gradient)
                tensor.grad = None

        with trainable(self.model, self._tensors), ExitStack() as hooks:
            for tensor in self._tensors:
                tensor.grad = None  # from an earlier pass of the caller
                hooks.callback(tensor.register_post_accumulate_grad_hook(free).remove)  # type: ignore[no-untyped-call]
            yield


class Graftable(Protocol):
    """The tensors from which γ is chosen: `PlainTensors` or `LinearLayers`."""

    model: nn.Module
    space: ParameterSpace

    @property
    def device(self) -> torch.device:
        """The device of the model."""

    def theta(self, number: int) -> Tensor:
        """Return a tensor of the space, at θ_pre."""

    def is_frozen(self, number: int) -> bool:
        """Return whether a user has frozen a tensor."""

    def gradients(self, receive: Callable[[int, Tensor], None]) -> AbstractContextManager[None]:
        """Pass a tensor's number and its gradient to ``receive`` in backward passes inside the block."""


def choose(
    source: Saliency,
    graftable: Graftable,
    count: int,
    *,
    batches: Sequence[Any] = (),
    loss: BatchLoss | None = None,
    fine_tuned: Sequence[Tensor] = (),
    taken: Region | None = None,
    frozen: Collection[int] = (),
    seed: int = 0,
    processes: bool = False,
) -> Region:
    """Return γ: the ``count`` entries with the highest scores, see `saliency`; of equal ones, those with the lower index.

    There are fewer if fewer have a score other than 0. No memory of the size of the model is needed, except for the sum of
    the gradients of several batches.

    Args:
        source: the scores; ``movement``: |θ_ft − θ_pre| (paper, §2); ``random``: random numbers.
        graftable: the tensors of a model that holds θ_pre, in evaluation mode; unchanged afterwards.
        count: the most entries.
        batches: for scores by gradients: the input of ``loss``; for ``fisher``, each has one row.
        loss: the loss of all batches, computed by the model.
        fine_tuned: for ``movement``: the tensors of θ_ft, in the order of the space.
        taken: entries to leave out, so that γ is chosen among the others.
        frozen: the numbers of tensors to leave out.
        seed: for ``random``.
        processes: whether ``batches`` are this process's part of the batches of all processes in a group.

    Raises:
        TrainingError: the loss or the gradient is not finite.
    """
    space = graftable.space
    best = _Highest(space, count, taken, frozen)
    if source == "random":
        generator = torch.Generator("cpu").manual_seed(seed)
        for number, spec in enumerate(space.tensors):
            # float32 has too few values: many entries would be equal.
            best.add(number, torch.rand(spec.size, generator=generator, dtype=torch.float64, device="cpu"))
    elif source == "movement":
        for number, tuned in enumerate(fine_tuned):
            pre = graftable.theta(number)
            best.add(number, moves(pre, tuned.to(pre.device)).abs_())
    else:
        assert loss is not None  # for scores by gradients

        def take(number: int, gradient: Tensor) -> None:
            best.add(number, saliency(source, gradient, graftable.theta(number)))

        whole = len(batches) == 1 and source != "fisher" and not processes
        if not (whole and each_gradient(graftable, batches, loss, take)):
            best = _Highest(space, count, taken, frozen)
            each_mean_gradient(graftable, batches, loss, take, squared=source == "fisher", processes=processes)
    return best.region()


class _Highest:
    """The ``count`` highest scores of the entries of a space; scores are added tensor by tensor, in any order."""

    def __init__(self, space: ParameterSpace, count: int, taken: Region | None, frozen: Collection[int]) -> None:
        self._space, self._count, self._frozen = space, count, frozen
        self._taken = {} if taken is None else {number: local for number, local, _ in space.split(taken.indices)}
        self._indices = torch.empty(0, dtype=torch.int64, device="cpu")
        self._scores = torch.empty(0, device="cpu")

    def add(self, number: int, scores: Tensor) -> None:
        """Add the scores of all entries of a tensor; scores of 0 and of left-out entries are set to −∞ in place."""
        if number in self._frozen:
            return
        scores = scores.reshape(-1)
        scores.masked_fill_(scores == 0, -math.inf)
        if number in self._taken:
            scores[self._taken[number].to(scores.device)] = -math.inf
        found = _highest(scores, self._count)
        indices = torch.cat([self._indices.to(found.device), found + self._space.tensors[number].offset])
        indices, order = indices.sort()
        scores = torch.cat([self._scores.to(scores), scores[found]])[order]
        kept = _chosen(scores, self._count)
        self._indices, self._scores = indices[kept], scores[kept]

    def region(self) -> Region:
        """Return the entries."""
        return Region(self._indices.cpu())


def saliency(source: Saliency, gradient: Tensor, theta: Tensor) -> Tensor:
    """Return the score of each entry at θ_pre, from arguments of one shape; ``gradient`` is overwritten.

    Args:
        source: ``gradient``: |g|, as in SPEFT (arXiv:2412.13488). ``snip``: |g·θ|, the change of the loss, to first order, if
            the entry becomes 0 (SNIP, arXiv:1810.02340). ``gallop``: |g| / (|θ| + 0.001), for large gradients of small weights:
            the two criteria of GaLLoP (arXiv:2510.19778); their quotient is our choice. ``fisher``: the mean over rows of
            (∂ log p(y|x) / ∂θ)², where y is the row's own label, or labels: the empirical Fisher information by which FISH
            masks choose entries (Sung et al., 2021, arXiv:2111.09839, eq. 4).
        gradient: g, the gradient of the mean loss, in float32; for ``fisher``, the mean of the squared gradients of rows.
        theta: θ_pre.
    """
    match source:
        case "gradient":
            return gradient.abs_()
        case "snip":
            return gradient.mul_(theta).abs_()
        case "gallop":
            return gradient.abs_().div_(theta.abs().to(gradient.dtype).add_(SMALL))
        case _:
            return gradient


def each_gradient(
    graftable: Graftable, batch: Sequence[Any], loss: BatchLoss, take: Callable[[int, Tensor], None]
) -> bool:
    """Pass each tensor's gradient to ``take`` within one backward pass, and free it; return whether each was complete.

    If reentrant checkpoints read a tensor several times, each gives a part of its gradient: then discard all gradients.

    Args:
        graftable: the tensors of a model that holds θ, in evaluation mode; unchanged afterwards.
        batch: the input of ``loss``.
        loss: the loss, computed by the model.
        take: gets the number of a tensor and its gradient, in float32, which it may change. A tensor that no row reaches has
            no gradient.

    Raises:
        TrainingError: the loss or the gradient is not finite.
    """
    given: dict[int, Tensor] = {}
    is_whole = True

    def receive(number: int, gradient: Tensor) -> None:
        nonlocal is_whole
        is_whole &= number not in given
        gradient = gradient.to(torch.float32, copy=True).div_(loss.scale)
        given[number] = gradient.sum()
        take(number, gradient)

    _backward(graftable, batch, loss, receive)
    _check_finite(given.values())
    return is_whole


def each_mean_gradient(
    graftable: Graftable,
    batches: Sequence[Any],
    loss: BatchLoss,
    take: Callable[[int, Tensor], None],
    *,
    squared: bool = False,
    processes: bool = False,
) -> None:
    """Pass each tensor's mean gradient over several batches to ``take``, summed in float32, whatever the tensors' dtype.

    The sum has 4 bytes per entry. Up to `ON_DEVICE` entries it is on the model's device, else in the host's memory.

    Args:
        graftable: the tensors of a model that holds θ, in evaluation mode; unchanged afterwards.
        batches: the input of ``loss``.
        loss: the loss of all batches, computed by the model.
        take: gets the number of a tensor and its gradient, in float32, which it may change.
        squared: pass the mean over batches, of one row each, of the squared gradients.
        processes: pass the mean over the batches of all processes in a group; all have the same tensors.
    """
    space, device = graftable.space, graftable.device
    sums: dict[int, Tensor] = {}

    def receive(number: int, gradient: Tensor) -> None:
        if number not in sums:
            where = device if len(space) <= ON_DEVICE else "cpu"
            sums[number] = torch.zeros(gradient.shape, device=where)
        sums[number].add_((gradient.float().square() if squared else gradient).to(sums[number].device))

    _backward(graftable, batches, loss, receive)
    divisor = float(len(batches) if squared else loss.scale)
    if processes:
        dist.all_reduce(counted := torch.tensor(divisor, device=device))
        divisor = float(counted)
        for number, spec in enumerate(space.tensors):
            sums.setdefault(number, torch.zeros(spec.shape, device="cpu"))
        sums = dict(sorted(sums.items()))
    sizes = []
    for number in list(sums):
        gradient = sums.pop(number).to(device)
        if processes:
            dist.all_reduce(gradient)
        gradient /= divisor
        sizes.append(gradient.sum())
        take(number, gradient)
    _check_finite(sizes)


def _backward(
    graftable: Graftable, batches: Sequence[Any], loss: BatchLoss, receive: Callable[[int, Tensor], None]
) -> None:
    """Compute the loss of batches, and pass each of its gradients to ``receive`` as soon as it is there."""
    with graftable.gradients(receive):
        check_loss(loss(batches), 1)


def _check_finite(sizes: Collection[Tensor]) -> None:
    """Raise ``TrainingError`` unless the sums of gradients are finite."""
    size = float(torch.stack(list(sizes)).sum()) if sizes else 0.0
    if not math.isfinite(size):
        raise TrainingError(
            f"The gradients by which a region is chosen add up to {size}, expected finite ones. Choose it in fp32 (or bf16 "
            "instead of fp16)."
        )
