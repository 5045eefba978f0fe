"""What every training loop needs: a callback for steps, gradients for some parameters only, a check of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from forgetfree.errors import TrainingError

#: A callback after every step, with its number from 1 and its loss.
OnStep = Callable[[int, float], None]
#: Up to as many tokens, PyTorch's flash attention is slower on CPUs in half precision than its plain formula.
SHORT = 128


def attention_for_training(x: Tensor) -> AbstractContextManager[object]:
    """Compute attention by the plain formula inside, if rows ``x`` are trained on and its gradient is faster that way.

    It is on a CPU under autocast, for token ids ``(B, L)`` of short rows: flash attention's backward pass takes 2 to 10 times
    as long there. In float32, for longer rows and in evaluation, flash attention stays.
    """
    device = x.device.type
    if (
        device == "cpu"
        and x.dim() == 2
        and x.shape[1] <= SHORT
        and torch.is_grad_enabled()
        and torch.is_autocast_enabled(device)
    ):
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


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
