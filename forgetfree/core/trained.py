"""What a task trains in a backbone: whole tensors, or a region's values as one vector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from forgetfree.core.parameters import ParameterSpace, at_least_float32, entries
from forgetfree.core.regions import Region
from forgetfree.core.sampled_gradients import EntriesOfProduct, sampled


class TrainedParameters(Protocol):
    """What a task trains in the backbone: vectors beside the model, such as the one of `RegionParameters`.

    Attributes:
        parameters: what the optimizer updates.
        touched: the model's tensors that get gradients; an update moves no others.
    """

    parameters: list[nn.Parameter]
    touched: list[nn.Parameter]

    def collect(self) -> None:
        """Take the gradients of ``parameters`` from the tensors' gradients, and free those."""

    def write(self) -> None:
        """Write the values of ``parameters`` into the tensors."""


class WholeTensors:
    """Tensors that are trained in place; of those narrower than float32, which round small steps away, a wider copy is.

    Args:
        tensors: the model's tensors to train.
    """

    def __init__(self, tensors: Iterable[nn.Parameter]) -> None:
        self.touched = list(tensors)
        wide = [at_least_float32(tensor.dtype) for tensor in self.touched]
        self.parameters = [
            tensor if tensor.dtype == dtype else nn.Parameter(tensor.detach().to(dtype))
            for tensor, dtype in zip(self.touched, wide, strict=True)
        ]
        pairs = zip(self.touched, self.parameters, strict=True)
        self._copies = [(tensor, copy) for tensor, copy in pairs if tensor is not copy]

    def collect(self) -> None:
        """Take the copies' gradients from the tensors' own, and free those; other gradients are in place."""
        for tensor, copy in self._copies:
            copy.grad = None if tensor.grad is None else tensor.grad.to(copy.dtype)
            tensor.grad = None

    @torch.no_grad()
    def write(self) -> None:
        """Write the copies into the tensors; other values are in place."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)


class RegionParameters:
    """The values of a region as one trainable vector ``(s,)``, so that no other entry can change.

    The optimizer sees this vector and not the model's tensors: neither weight decay nor momentum nor rounding can reach
    an entry outside the region. Where the tensors are narrower than float32, the vector keeps what they round away. Each
    update: `collect` gradients, step, `write`. Inside `sampling`, a weight matrix gives the gradient of these entries alone.
    """

    def __init__(self, model: nn.Module, space: ParameterSpace, region: Region) -> None:
        tensors = space.parameters(model)
        device = tensors[0].device
        self._pieces = [(tensors[i], local.to(device), where) for i, local, where in space.split(region.indices)]
        self.values = nn.Parameter(space.gather(model, region.indices).to(at_least_float32(space.dtype)))
        #: What the optimizer updates.
        self.parameters = [self.values]
        #: The model's tensors that hold an entry of the region: the only ones that an update moves.
        self.touched = [tensor for tensor, _, _ in self._pieces]
        self._collected = True

    def sampling(self) -> AbstractContextManager[None]:
        """Take the gradients of weight matrices entry by entry inside: there is none of the size of a matrix."""
        return sampled(
            (tensor, self._leaf(where), EntriesOfProduct(tensor.shape, local, self.values.dtype))
            for tensor, local, where in self._pieces
            if type(tensor) is nn.Parameter and tensor.dim() == 2
        )

    def _leaf(self, where: slice) -> Tensor:
        """Return these values as a leaf, whose gradients go on to ``values``."""
        leaf = self.values.detach()[where].requires_grad_()

        @torch.no_grad()
        def hand_on(leaf: Tensor) -> None:
            assert leaf.grad is not None
            self._gradient()[where] += leaf.grad
            leaf.grad = None

        leaf.register_post_accumulate_grad_hook(hand_on)  # type: ignore[no-untyped-call]
        return leaf

    def _gradient(self) -> Tensor:
        """Return the gradient ``(s,)`` that is being added up since the last update."""
        if self._collected or self.values.grad is None:
            self.values.grad = torch.zeros_like(self.values)
            self._collected = False
        return self.values.grad

    @torch.no_grad()
    def collect(self) -> None:
        """Take the region's gradients ``(s,)`` from the model's tensors, beside those sampled, and free those."""
        gradient = self._gradient()
        for tensor, local, where in self._pieces:
            if tensor.grad is not None:
                flat, at = entries(tensor.grad, local)
                gradient[where] += flat[at].to(gradient)
                tensor.grad = None
        self._collected = True

    @torch.no_grad()
    def write(self) -> None:
        """Write the region's values into the model's tensors."""
        for tensor, local, where in self._pieces:
            flat, at = entries(tensor, local)
            flat[at] = self.values[where].to(flat)


@contextmanager
def in_training(
    model: nn.Module, trained: TrainedParameters, readout: Iterable[nn.Parameter], *, sampling: bool = True
) -> Iterator[None]:
    """Let what is trained have gradients inside the block and nothing else; restore the model's flags and mode afterwards.

    With ``sampling``, a region's gradients are taken entry by entry: the model's matrices get none.
    """
    region = trained if sampling and isinstance(trained, RegionParameters) else None
    with trainable(model, [*trained.touched, *readout]), region.sampling() if region else nullcontext():
        yield


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
