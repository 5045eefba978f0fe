"""What a task trains in a backbone: whole tensors, or a region's values as one vector."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn

from forgetfree.core.parameters import ParameterSpace, at_least_float32, entries
from forgetfree.core.regions import Region


class Trained(Protocol):
    """What a task trains in the backbone: vectors beside the model, such as the one of `RegionParameters`.

    Attributes:
        parameters: what the optimizer updates.
        touched: the model's tensors that need gradients.
    """

    parameters: list[nn.Parameter]
    touched: list[nn.Parameter]

    def collect(self) -> None:
        """Take the gradients of ``parameters`` from the tensors' gradients, and free those."""

    def write(self) -> None:
        """Write the values of ``parameters`` into the tensors."""


class WholeTensors:
    """Tensors that are trained in place.

    Args:
        tensors: the model's tensors to train.
    """

    def __init__(self, tensors: Iterable[nn.Parameter]) -> None:
        self.parameters = self.touched = list(tensors)

    def collect(self) -> None:
        """Do nothing: the gradients are in place."""

    def write(self) -> None:
        """Do nothing: the values are in place."""


class RegionParameters:
    """The values of a region as one trainable vector ``(s,)``, so that no other entry can change.

    The optimizer sees this vector and not the model's tensors: neither weight decay nor momentum nor rounding can reach
    an entry outside the region. Where the tensors are narrower than float32, the vector keeps what they round away. Each
    update: `collect` gradients, step, `write`.
    """

    def __init__(self, model: nn.Module, space: ParameterSpace, region: Region) -> None:
        tensors = space.parameters(model)
        device = tensors[0].device
        self._pieces = [(tensors[i], local.to(device), where) for i, local, where in space.split(region.indices)]
        self.values = nn.Parameter(space.gather(model, region.indices).to(at_least_float32(space.dtype)))
        #: What the optimizer updates.
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
        """Write the region's values into the model's tensors."""
        for tensor, local, where in self._pieces:
            flat, at = entries(tensor, local)
            flat[at] = self.values[where].to(flat)
