"""The loss of a batch that is read in mini-batches, which a step descends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from forgetfree.core.readout_model import autocast
from forgetfree.errors import TrainingError

#: Inputs ``(B, …)``, labels ``(B,)``, task labels ``(B,)``; several labels and task labels a row where words are labelled.
Batch = tuple[Tensor, Tensor, Tensor]
#: A callback after every step, with its number from 1 and its loss.
OnStep = Callable[[int, float], None]


class BatchLoss(Protocol):
    """The loss that a step descends: the mean over the rows of a batch; its gradients are left in the model's tensors."""

    @property
    def scale(self) -> float:
        """The factor that those gradients have."""

    def __call__(self, batch: Sequence[Batch]) -> float:
        """Return the loss over the mini-batches, and add their gradients to those in the tensors."""


class CrossEntropy:
    """The cross-entropy of ``forward``'s logits, see `BatchLoss`.

    Args:
        forward: ``(x, t)`` to logits.
        device: where it computes.
        precision: of forward and backward passes.
        summed: take the sum over the rows in place of their mean.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
        precision: str = "fp32",
        *,
        summed: bool = False,
    ) -> None:
        self._forward, self._device, self._precision, self._summed = forward, device, precision, summed
        # float16 gradients of a mean over many rows would vanish without it.
        self.scale = 1024.0 if precision == "fp16" else 1.0

    def __call__(self, batch: Sequence[Batch]) -> float:
        """Return the loss over all rows of the mini-batches."""
        total, rows = 0.0, 1 if self._summed else sum(len(y) for _, y, _ in batch)
        for x, y, t in batch:
            with autocast(self._precision, self._device.type):
                logits = self._forward(x.to(self._device), t.to(self._device))
            loss = F.cross_entropy(logits.float(), y.to(self._device), reduction="sum") / rows
            (loss * self.scale).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total


def check_loss(loss: Tensor | float, step: int) -> float:
    """Return the loss as a number.

    Raises:
        TrainingError: it is not finite.
    """
    value = float(loss.detach() if isinstance(loss, Tensor) else loss)
    if value != value or value in (float("inf"), float("-inf")):
        raise TrainingError(
            f"The loss became {value} at step {step}. Lower the learning rate (--set learning_rate=…) or the weight "
            "of a penalty, or train in fp32."
        )
    return value
