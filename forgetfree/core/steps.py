"""What every training loop needs: a callback for steps, gradients for some parameters only, a check of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from forgetfree.errors import TrainingError

#: A callback after every step, with its number from 1 and its loss.
OnStep = Callable[[int, float], None]


def check_loss(loss: Tensor, step: int) -> float:
    """Return the loss as a number.

    Raises:
        TrainingError: it is not finite.
    """
    value = float(loss.detach())
    if value != value or value in (float("inf"), float("-inf")):
        raise TrainingError(
            f"The loss became {value} at step {step}. Lower the learning rate (--set learning_rate=…) or the weight "
            "of a penalty, or train in fp32."
        )
    return value


@contextmanager
def trainable(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let only ``parameters`` have gradients inside the block; restore flags, mode and gradients afterwards."""
    wanted = {id(parameter) for parameter in parameters}
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    mode = model.training
    try:
        for parameter, _ in before:
            parameter.requires_grad_(id(parameter) in wanted)
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)
            parameter.grad = None
        model.train(mode)
