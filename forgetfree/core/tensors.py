"""The tensors of a module by name: parameters and persistent buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of a module's parameters and persistent buffers, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


@torch.no_grad()
def load_tensors_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors of these names into ``module``, bit for bit."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        tensor.copy_(tensors[name])


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to a module's state, such as BatchNorm's: themselves, not copies."""
    persistent = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}
