"""One training step: the loss of a batch, and the trained parameters: whole tensors, or a region's values as one vector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree.core.parameters import ParameterSpace, at_least_float32, packed, unpack_, values_at, write_
from forgetfree.core.readout_model import ReadoutModel, autocast, keeping_mode
from forgetfree.core.regions import Region
from forgetfree.core.taps import Taps
from forgetfree.errors import TrainingError

#: Inputs ``(B, …)``, labels ``(B,)``, task labels ``(B,)``; several labels and task labels per row if words are labelled.
Batch = tuple[Tensor, Tensor, Tensor]
#: A callback after every step, with its number from 1 and its loss.
OnStep = Callable[[int, float], None]


class CrossEntropy:
    """The loss of a step: the cross-entropy of the logits, averaged over the rows of a batch.

    It leaves its gradients in the model's tensors, multiplied by ``scale``.

    Args:
        forward: maps ``(x, t)`` to logits, such as a model.
        device: the device of ``forward``.
        precision: the precision of forward and backward passes.
        summed: take the sum over the rows in place of their mean.
    """

    def __init__(
        self,
        forward: Callable[[Any, Tensor], Tensor],
        device: torch.device,
        precision: str = "fp32",
        *,
        summed: bool = False,
    ) -> None:
        self._forward, self._device, self._precision, self._summed = forward, device, precision, summed
        # float16 gradients of a mean over many rows would vanish without it.
        self.scale = 1024.0 if precision == "fp16" else 1.0

    def __call__(self, batch: Sequence[Batch]) -> float:
        """Return the loss over the mini-batches, and add their gradients to those in the tensors."""
        losses, rows = list[Tensor](), 1 if self._summed else sum(len(y) for _, y, _ in batch)
        for each in batch:
            if isinstance(self._forward, ReadoutModel):
                x, y, t = self._forward.on_device(each)
            else:
                x, y, t = (tensor.to(self._device) for tensor in each)
            with autocast(self._precision, self._device.type):
                logits = self._forward(x, t)
            loss = F.cross_entropy(logits.float(), y, reduction="sum") / rows
            (loss * self.scale).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return sum(torch.stack(losses).tolist(), 0.0) if losses else 0.0  # read once


class Reading:
    """A number that a GPU computes, to be read later: it is copied while the processor goes on.

    Args:
        value: a tensor of one number.
    """

    def __init__(self, value: Tensor) -> None:
        self.is_there = value.device.type == "cpu"
        self._value, self._copied = value.detach(), None
        if value.device.type == "cuda":
            self._value = self._value.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(value.device))

    def __float__(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._value)


def check_loss(loss: Reading | float, step: int) -> float:
    """Return the loss as a number.

    Raises:
        TrainingError: it is not finite.
    """
    value = float(loss)
    if value != value or value in (float("inf"), float("-inf")):
        raise TrainingError(
            f"The loss became {value} at step {step}. Lower the learning rate (--set learning_rate=…) or the weight "
            "of a penalty, or train in fp32."
        )
    return value


class TrainedParameters(Protocol):
    """The parameters that a task trains in the backbone, such as the vector of `RegionParameters`, beside the model.

    Attributes:
        parameters: the parameters that the optimizer updates.
        touched: the model's tensors that get gradients; an update moves no others.
    """

    parameters: list[nn.Parameter]
    touched: list[nn.Parameter]

    def collect(self) -> None:
        """Take the gradients of ``parameters`` from the tensors' gradients, and free the latter."""

    def write(self) -> None:
        """Write the values of ``parameters`` into the tensors."""


class WholeTensors:
    """Tensors that are trained in place; for tensors narrower than float32, which lose small steps, a wider copy is trained.

    Args:
        tensors: the model's tensors to train.
        frozen: tensors, each with the numbers of its entries that keep their present values.
    """

    def __init__(self, tensors: Iterable[nn.Parameter], frozen: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self.touched = list(tensors)
        self._frozen = [
            (tensor, local.to(tensor.device), values_at(tensor.detach(), local)) for tensor, local in frozen
        ]
        wide = [at_least_float32(tensor.dtype) for tensor in self.touched]
        self.parameters = [
            tensor if tensor.dtype == dtype else nn.Parameter(tensor.detach().to(dtype))
            for tensor, dtype in zip(self.touched, wide, strict=True)
        ]
        pairs = zip(self.touched, self.parameters, strict=True)
        self._copies = [(tensor, copy) for tensor, copy in pairs if tensor is not copy]

    def collect(self) -> None:
        """Take the copies' gradients from the tensors' gradients, and free the latter; other gradients are in place."""
        for tensor, copy in self._copies:
            copy.grad = None if tensor.grad is None else tensor.grad.to(copy.dtype)
            tensor.grad = None

    @torch.no_grad()
    def write(self) -> None:
        """Write the copies into the tensors, and restore the frozen entries; other values are in place."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        for whole, local, values in self._frozen:  # momentum and decay move them without a gradient
            write_([(whole, local)], values)


class RegionParameters:
    """The values of a region as one trainable vector ``(s,)``, so that no other entry can change.

    The optimizer sees this vector and not the model's tensors: neither weight decay nor momentum nor rounding can reach
    an entry outside the region. If the tensors are narrower than float32, the vector keeps the digits that they lose. Each
    update: `collect` gradients, step, `write`. Inside `sampling`, only the gradients of these entries are computed.

    Args:
        model: its tensors hold the initial values of the vector.
        space: the model's space.
        region: the trained entries.
        whole: the model with ``model`` as its body, if passes begin there.

    Attributes:
        values: the vector, in float32 or wider.
        parameters: the parameters that the optimizer updates: the vector.
        touched: the model's tensors that hold an entry: the only ones that an update moves.
        taps: give the gradients inside `sampling`.
    """

    def __init__(self, model: nn.Module, space: ParameterSpace, region: Region, whole: nn.Module | None = None) -> None:
        tensors = space.parameters(model)
        device = tensors[0].device
        self._pieces = [(tensors[i], local.to(device)) for i, local, _ in space.split(region.indices)]
        self._written: Sequence[tuple[Tensor, Tensor]] = self._pieces  # the memory that `write` writes into
        self.values = nn.Parameter(space.gather(model, region.indices).to(at_least_float32(space.dtype)))
        self.parameters = [self.values]
        self.touched = [tensor for tensor, _ in self._pieces]
        self.taps = Taps(whole or model, self.values, self._pieces)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Let the model's passes give their gradients to the vector inside the block, and to no tensor of the model."""
        try:
            self._written = packed(self._pieces)
            with self.taps.attached():
                yield
        finally:
            buffers, self._written = list(self._written), self._pieces
            unpack_(self._pieces, buffers)

    def renew(self) -> None:
        """Update the references to tensors that have moved in memory, inside `sampling`."""
        self._pieces = [(tensor, local.to(tensor.device)) for tensor, local in self._pieces]
        self._written = packed(self._pieces)
        self.taps.renew()

    @torch.no_grad()
    def collect(self) -> None:
        """Take the gradients ``(s,)`` from the tensors of a model trained outside of `sampling`, and free the latter."""
        if any(tensor.grad is not None for tensor in self.touched):
            pieces = list(torch.split(torch.zeros_like(self.values), [len(local) for _, local in self._pieces]))
            for number, (tensor, local) in enumerate(self._pieces):
                if tensor.grad is not None:
                    pieces[number] = values_at(tensor.grad, local).to(self.values.dtype)
                    tensor.grad = None
            self.values.grad = torch.cat(pieces)
        elif self.values.grad is None:
            self.values.grad = torch.zeros_like(self.values)

    @torch.no_grad()
    def write(self) -> None:
        """Write the region's values into the model's tensors."""
        write_(self._written, self.values)


@contextmanager
def in_training(
    model: nn.Module, trained: TrainedParameters, readout: Iterable[nn.Parameter], *, sampling: bool = True
) -> Iterator[None]:
    """Let only the trained parameters have gradients inside the block; restore the model's flags and mode afterwards.

    With ``sampling``, a region's gradients are taken entry by entry: the model's matrices get none.
    """
    region = trained if sampling and isinstance(trained, RegionParameters) else None
    with (
        trainable(model, [*([] if region else trained.touched), *readout]),
        region.sampling() if region else nullcontext(),
    ):
        yield


@contextmanager
def trainable(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let only ``parameters`` have gradients inside the block; restore flags, modes and gradients afterwards."""
    wanted = {id(parameter) for parameter in parameters}
    before = [(name, parameter, parameter.requires_grad) for name, parameter in model.named_parameters()]
    with keeping_mode(model):
        try:
            for parameter in model.parameters():
                parameter.requires_grad_(id(parameter) in wanted)
            yield
        finally:
            now = dict(model.named_parameters())  # FSDP may have replaced some
            for name, parameter, flag in before:
                for each in (parameter, now.get(name, parameter)):
                    each.requires_grad_(flag)
                    each.grad = None
