"""Bottleneck adapters after attention and feed-forward layers (Houlsby et al., 2019), or the latter (Pfeiffer et al., 2021).

PEFT has none, and the library that has them needs another version of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.errors import ModelError

#: The last layer of attention, and of the feed-forward part, by its name in BERT, RoBERTa, GPT-2 and Llama.
ATTENTION = r"(attention\.output\.dense|attn\.c_proj|self_attn\.o_proj)$"
FEED_FORWARD = r"((?<!attention)\.output\.dense|mlp\.c_proj|mlp\.down_proj)$"
PLACES = {"Houlsby": f"{ATTENTION}|{FEED_FORWARD}", "Pfeiffer": FEED_FORWARD}


class Bottleneck(nn.Module):
    """Adds ``up(relu(down(h)))`` to hidden states h ``(…, H)``; ``up`` is 0 at first, so nothing is added."""

    def __init__(self, width: int, size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.down, self.up = (
            nn.Linear(*shape, device="meta").to_empty(device="cpu") for shape in ((width, size), (size, width))
        )
        nn.init.normal_(self.down.weight, std=0.02, generator=generator)
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return h plus the adapter's output, in the shape of h."""
        added: Tensor = self.up(torch.relu(self.down(hidden)))
        return hidden + added


def _after(adapter: Bottleneck, _layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """Return the replacement of a layer's output."""
    adapted: Tensor = adapter(output)
    return adapted


@contextmanager
def bottlenecks(backbone: nn.Module, kind: str, size: int, seed: int) -> Iterator[list[nn.Parameter]]:
    """Put adapters into the backbone inside the block, and yield their parameters; its own tensors stay as they are.

    Raises:
        ModelError: the backbone has none of the layers that adapters follow.
    """
    layers = [module for name, module in backbone.named_modules() if re.search(PLACES[kind], name)]
    if not layers:
        raise ModelError(
            f"{type(backbone).__name__} has no layer to put adapters after. Use BERT, RoBERTa, GPT-2 or Llama."
        )
    generator, parameters = torch.Generator().manual_seed(seed), list[nn.Parameter]()
    with ExitStack() as stack:
        for layer in layers:
            weight: Any = layer.weight
            width = weight.shape[1 if hasattr(layer, "nf") else 0]  # GPT-2's Conv1D holds its weight transposed
            adapter = Bottleneck(width, size, generator).to(weight.device)
            stack.callback(layer.register_forward_hook(partial(_after, adapter)).remove)
            parameters += adapter.parameters()
        yield parameters
