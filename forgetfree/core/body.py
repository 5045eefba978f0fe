"""The body of a model: a Hugging Face model without its head, the same in every way of loading it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.errors import ModelError, RegionError

#: A part of BERT's body that some of its models are loaded without.
POOLER = r"(^|\.)pooler\."


def body_of(model: nn.Module) -> nn.Module:
    """Return the body of one of our models or of a Hugging Face model; any other module is its own body."""
    backbone = model.backbone if isinstance(model, ReadoutModel) else model
    body = getattr(backbone, "base_model", backbone)
    return body if isinstance(body, nn.Module) else backbone


def part_named(model: nn.Module, space: ParameterSpace) -> nn.Module:
    """Return the part of a model whose tensors have a space's names: its body, or else the model with its head."""
    backbone = model.backbone if isinstance(model, ReadoutModel) else model
    body, name = body_of(model), space.tensors[0].name
    return body if name in dict(body.named_parameters(remove_duplicate=False)) else backbone


def body_prefix(backbone: nn.Module, body: nn.Module | None = None) -> str:
    """Return the prefix of the body's tensor names in ``backbone``, such as ``bert.``; empty if there is none."""
    body = body_of(backbone) if body is None else body
    name = next(name for name, module in backbone.named_modules() if module is body)
    return f"{name}." if name else ""


def body_fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of the body's weights and persistent buffers, the same with a head or a pooler and without."""
    return fingerprint_of(body_of(model), without=POOLER)


def body_space(backbone: nn.Module, space: ParameterSpace) -> ParameterSpace:
    """Return the space of ``backbone`` with tensors named as in the body; indices stay.

    Raises:
        RegionError: a tensor of the space lies outside the body.
    """
    prefix = body_prefix(backbone)
    if outside := [spec.name for spec in space.tensors if not spec.name.startswith(prefix)]:
        raise RegionError(
            f"A graft of its own lies in the body of its model ({prefix!r}…), got the tensor {outside[0]!r}. Leave it out of "
            "the parameter space."
        )
    return ParameterSpace(tuple(replace(spec, name=spec.name.removeprefix(prefix)) for spec in space.tensors))


def fingerprint_of(model: nn.Module, *, without: str | None = None) -> str:
    """Return the SHA-256 over names, shapes, dtypes and bytes of all weights and persistent buffers.

    Args:
        model: any module.
        without: regular expression; tensors in whose name it is found do not count.

    Raises:
        ModelError: a tensor is quantised, sharded or offloaded, and so has no bytes of its own.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if without and re.search(without, name):
            continue
        if tensor.is_meta or is_traceable_wrapper_subclass(tensor):
            got = "is not in memory" if tensor.is_meta else f"is a {type(tensor).__name__}"
            raise ModelError(
                f"The tensor {name!r} {got}, expected a plain one: the model is quantised, sharded or offloaded. Load it whole "
                "and on one device, without quantization."
            )
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name}{tuple(data.shape)}{data.dtype}".encode())
        digest.update(data.view(-1).view(torch.uint8).numpy().data if data.numel() else b"")
    return digest.hexdigest()
