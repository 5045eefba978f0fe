"""Gradient checkpointing: only what enters each layer is kept; the backward pass computes the rest again (arXiv:1604.06174).

Dropout draws the same numbers again, so gradients have the same bits. Models that keep keys and values for writing do without
them inside: there, another order in memory may round otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forgetfree.core.body import body_of
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.errors import OptionError


@contextmanager
def layer_checkpoints(model: ReadoutModel, wanted: bool) -> Iterator[None]:
    """Inside, passes with gradients keep of each layer what enters it, if ``wanted``.

    Transformers' own switch works in training mode alone, and a model without dropout is not in it.

    Args:
        model: whose backbone has lists of layers of one class.
        wanted: else nothing happens.

    Raises:
        OptionError: the backbone has none.
    """
    if not wanted:
        yield
        return
    layers = [layer for stack in stacks_of(model.backbone) for layer in stack]
    if not layers:
        raise OptionError(
            f"gradient_checkpointing needs a list of layers of one class, and {type(model.backbone).__name__} has none. "
            "Leave it out."
        )
    with ExitStack() as undo:
        for layer in layers:
            vars(layer)["forward"] = partial(_recomputed, layer.forward)
            undo.callback(vars(layer).pop, "forward")
        config: Any = getattr(body_of(model), "config", None)
        if getattr(config, "use_cache", False):  # a layer that is computed twice would put its keys there twice
            config.use_cache = False
            undo.callback(setattr, config, "use_cache", True)
        yield


def _recomputed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def stacks_of(backbone: nn.Module) -> list[nn.ModuleList]:
    """Return the outermost lists of at least two modules of one class."""
    if isinstance(backbone, nn.ModuleList) and len(backbone) > 1 and len({type(each) for each in backbone}) == 1:
        return [backbone]
    return [stack for child in backbone.children() for stack in stacks_of(child)]
