"""The body of a model: a Hugging Face model without its head. It is the same in every way of loading it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

import torch
from torch import nn

from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.errors import RegionError

#: A part of BERT's body that some of its models are loaded without.
POOLER = r"(^|\.)pooler\."


def body_of(model: nn.Module) -> nn.Module:
    """Return the body of one of our models or of a Hugging Face model; any other module is its own body."""
    backbone = model.backbone if isinstance(model, ReadoutModel) else model
    body = getattr(backbone, "base_model", backbone)
    return body if isinstance(body, nn.Module) else backbone


def body_prefix(backbone: nn.Module) -> str:
    """Return the prefix of the body's tensor names in ``backbone``, such as ``bert.``; empty if there is none."""
    body = body_of(backbone)
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
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if without and re.search(without, name):
            continue
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name}{tuple(data.shape)}{data.dtype}".encode())
        digest.update(data.view(-1).view(torch.uint8).numpy().data if data.numel() else b"")
    return digest.hexdigest()
