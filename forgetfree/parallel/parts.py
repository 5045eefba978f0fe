"""The parts of a batch: what each forward pass takes, and what their losses and gradients add up to.

Numbered parts are those that several processes share: a power of two of them, whose gradients are added by a tree over the
numbers, so that the sum has the same bits whoever computes a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from forgetfree.core.batch_loss import Batch, BatchLoss, CrossEntropy, check_loss
from forgetfree.core.trained import TrainedParameters
from forgetfree.errors import OptionError
from forgetfree.parallel.exchange import own_parts, summed
from forgetfree.seeds import derive_seed


class BatchOptions(Protocol):
    """How batches are cut: of `TrainingOptions`."""

    @property
    def accumulation(self) -> int:
        """Parts one after the other."""

    @property
    def parts(self) -> int | None:
        """Numbered parts."""


@dataclass(frozen=True)
class Part:
    """The input of one forward pass: rows, their share of the batch, and whether they open or close an update.

    A numbered part draws dropout by its number.
    """

    rows: Sequence[int]
    share: float
    first: bool
    last: bool
    number: int | None = None

    def seed_(self, seed: int, step: int) -> None:
        """Seed the draws of a numbered part of a step: they do not depend on who computes it."""
        if self.number is not None:
            torch.manual_seed(derive_seed(seed, "dropout", step, self.number))


#: What a forward pass takes of a batch that is not cut.
WHOLE = Part((), 1.0, True, True)


def cut(batch: Sequence[int], options: BatchOptions, counts: Sequence[int] | None = None) -> Iterator[Part]:
    """Cut a batch as the options say, and yield those parts that this process computes; arguments as those of `parts`.

    A numbered part that has no row of a small batch takes one with a share of 0, so every part is computed by someone.
    """
    if options.parts is None:
        yield from parts(batch, options.accumulation, counts)
        return
    labels = [1 if counts is None else counts[row] for row in batch]
    mine = own_parts(options.parts)
    for i in mine:
        begin, end = len(batch) * i // options.parts, len(batch) * (i + 1) // options.parts
        share = sum(labels[begin:end]) / sum(labels)
        yield Part(batch[begin:end] or batch[:1], share, i == mine[0], i == mine[-1], i)


def parts(batch: Sequence[int], accumulation: int, counts: Sequence[int] | None = None) -> Iterator[Part]:
    """Cut a batch into ``accumulation`` parts of nearly equal size; fewer if it has fewer rows.

    Args:
        batch: the numbers of its rows.
        accumulation: how many parts.
        counts: the labels of each row of the data, by which a part has its share; default: one for each.
    """
    count = min(accumulation, len(batch))
    labels = [1 if counts is None else counts[row] for row in batch]
    for i in range(count):
        begin, end = len(batch) * i // count, len(batch) * (i + 1) // count
        yield Part(batch[begin:end], sum(labels[begin:end]) / sum(labels), i == 0, i == count - 1)


class BatchSum:
    """Adds up the parts of each batch, those that other processes compute too, to one gradient and one loss.

    Args:
        model: what is trained.
        trained: what of its backbone.
        parameters: of which an update needs gradients: those of ``trained``, and the readout's.
        options: how batches are cut.

    Raises:
        OptionError: numbered parts are asked for, and the model has running statistics, which depend on who computes what.
    """

    def __init__(
        self, model: nn.Module, trained: TrainedParameters, parameters: Iterable[nn.Parameter], options: BatchOptions
    ) -> None:
        self._trained, self._loss = trained, 0.0
        self._numbered = PartSum(parameters, options.parts) if options.parts else None
        for name, module in model.named_modules() if options.parts else ():
            if getattr(module, "track_running_stats", False):
                raise OptionError(
                    f"parts={options.parts} needs a model without running statistics of batches, got "
                    f"{type(module).__name__} at {name!r}. Leave parts and --processes out."
                )

    def add(self, loss: Tensor | float, step: int) -> None:
        """Add a part, after its backward pass: ``loss`` is weighted by its share of the batch."""
        if self._numbered is None:
            self._loss += check_loss(loss, step)
        else:
            self._trained.collect()
            self._numbered.take(loss)

    def finish(self, step: int) -> float:
        """Leave the batch's gradients in the parameters, and return its loss; after its last part.

        Raises:
            TrainingError: the loss is not finite.
        """
        if self._numbered is not None:
            return check_loss(self._numbered.give(), step)
        self._trained.collect()
        loss, self._loss = self._loss, 0.0
        return loss


class NumberedLoss:
    """A batch's loss over numbered parts of its mini-batches, which several processes share; see `BatchLoss`.

    Args:
        loss: of a part.
        parameters: the tensors whose gradients are added up.
        parts: how many parts a batch has.
    """

    at_once = False

    def __init__(self, loss: CrossEntropy, parameters: Iterable[nn.Parameter], parts: int) -> None:
        self._loss, self._parts, self._sum = loss, parts, PartSum(parameters, parts)
        self.scale = loss.scale

    def __call__(self, batch: Sequence[Batch]) -> float:
        """Return the mean loss over all rows of the mini-batches, those of other processes too."""
        rows = sum(len(y) for _, y, _ in batch)
        for i in own_parts(self._parts):
            part = batch[len(batch) * i // self._parts : len(batch) * (i + 1) // self._parts]
            self._sum.take(self._loss.share(part, rows))
        return float(self._sum.give())


def batch_loss(loss: CrossEntropy, parameters: Iterable[nn.Parameter], options: BatchOptions) -> BatchLoss:
    """Return the loss of batches that are cut as the options say; what is not cut is computed by every process."""
    return NumberedLoss(loss, parameters, options.parts) if options.parts and options.parts > 1 else loss


class PartSum:
    """Adds up loss and gradients of a batch's numbered parts, whichever processes compute them.

    Args:
        parameters: whose gradients; they are on one device.
        parts: how many parts a batch has.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], parts: int) -> None:
        self._parameters = list(parameters)
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._sums: list[tuple[int, Tensor]] = []  # of 2ⁿ parts each, as many as the bits of the number of parts so far

    @torch.no_grad()
    def take(self, loss: Tensor | float) -> None:
        """Take the gradients that the next part has left in the parameters, and its weighted loss."""
        gradients = [parameter.grad for parameter in self._parameters]
        first = self._parameters[0]
        # What no part has a gradient for is to have none in the sum: an optimiser leaves it as it is.
        loss_and_flags = first.new_tensor(
            [float(loss), *(gradient is not None for gradient in gradients)], dtype=torch.float32
        )
        flat = [
            parameter.new_zeros(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1)
            for parameter in self._parameters
        ]
        addend, count = torch.cat([*flat, loss_and_flags]), 1
        while self._sums and self._sums[-1][0] == count:
            _, before = self._sums.pop()
            addend, count = before.add_(addend), 2 * count
        self._sums.append((count, addend))
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def give(self) -> Tensor:
        """Give the parameters the sum of the gradients over all parts of all processes, and return that of the losses."""
        ((_, own),) = self._sums
        self._sums.clear()
        total = summed(own)
        *pieces, loss_and_flags = torch.split(total, [*self._sizes, 1 + len(self._sizes)])
        for parameter, piece, has_gradient in zip(self._parameters, pieces, loss_and_flags[1:].tolist(), strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.dtype) if has_gradient else None
        return loss_and_flags[0]
