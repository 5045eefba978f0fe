"""The tensors of a module by name: parameters and persistent buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from forgetfree.errors import RegionError

#: The dtypes that files hold, by name.
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    )
}

#: Tensors begin at a multiple of this many bytes, as those that PyTorch allocates do: kernels may round otherwise elsewhere.
ALIGNMENT = 64


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's parameters and persistent buffers, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


@torch.no_grad()
def load_tensors_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors with these names into ``module``, bit for bit."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        tensor.copy_(tensors[name])


@torch.no_grad()
def align_(module: nn.Module) -> None:
    """Let each parameter on the CPU begin at a multiple of `ALIGNMENT`, as those of a file may not."""
    for parameter in module.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to a module's state, such as BatchNorm's: themselves, not copies."""
    persistent = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def digest_of(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, without its shape and dtype."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity, if there is one."""
    for name, tensor in tensors.items():
        numbers = tensor.float() if tensor.itemsize == 1 else tensor  # float8 has no isfinite
        if tensor.is_floating_point() and not bool(torch.isfinite(numbers).all()):
            return name
    return None


def check_buffers(buffers: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise ``RegionError`` unless each of the ``expected`` is among the ``buffers``, in its shape and dtype."""
    for name, buffer in expected.items():
        got = buffers.get(name)
        if got is None or got.shape != buffer.shape or got.dtype != buffer.dtype:
            raise RegionError(f"it has no buffer {name!r} of shape {tuple(buffer.shape)} in {buffer.dtype}.")
