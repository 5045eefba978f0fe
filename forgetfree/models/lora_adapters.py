"""LoRA adapters by the PEFT library, beside a backbone that keeps its own modules and tensors.

An adapter adds (α/r)·B·A to the weight of a linear layer, with A ``(r, in)`` drawn at random and B ``(out, r)`` zero at
first (Hu et al., 2021, eq. 3).
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig
from peft.functional import (
    delete_adapter,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_adapter,
    set_peft_model_state_dict,
)
from peft.tuners.lora import LoraLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL_TARGETS
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from forgetfree.core.parameters import ParameterSpace
from forgetfree.errors import RunError

# -- Which layers ----------------------------------------------------------------------------------------


def linear_layers(backbone: nn.Module, space: ParameterSpace) -> list[str]:
    """Return the names of the linear layers with a trainable weight: neither embeddings nor heads."""
    weights = {spec.name for spec in space.tensors}
    # In evaluation torch's own encoder reads the weights of its layers without calling them: past any adapter.
    passed_by = {
        id(inner)
        for module in backbone.modules()
        if isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer))
        for inner in module.modules()
    }
    return [
        name
        for name, module in backbone.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and f"{name}.weight" in weights and id(module) not in passed_by
    ]


def targets(backbone: nn.Module, space: ParameterSpace, pattern: str | None = None) -> list[str]:
    """Return the linear layers that get adapters.

    Args:
        backbone: the model.
        space: its entries that may be trained.
        pattern: regular expression; a layer with a matching name gets an adapter. Default: the layers that PEFT chooses for
            the architecture (query and value in BERT and RoBERTa), or all if it knows none.
    """
    layers = linear_layers(backbone, space)
    if pattern is not None:
        return [name for name in layers if re.search(pattern, name)]
    config: Any = getattr(backbone, "config", None)
    usual = USUAL_TARGETS.get(getattr(config, "model_type", ""), [])
    expression = usual if isinstance(usual, str) else rf"(.*\.)?({'|'.join(map(re.escape, usual))})"
    return [name for name in layers if usual and re.fullmatch(expression, name)] or layers


# -- Adapters --------------------------------------------------------------------------------------------


class LoraAdapters:
    """Adapters by name, for one backbone.

    PEFT replaces the layers that it adapts. So that the backbone keeps its modules and the names of its tensors, this happens
    in `model`, a copy of the modules that shares every tensor with the backbone: it replaces the backbone when adapters act.
    """

    def __init__(self, backbone: nn.Module) -> None:
        shared = {id(tensor): tensor for tensor in (*backbone.parameters(), *backbone.buffers())}
        self.model = copy.deepcopy(backbone, shared)

    def add(self, name: str, config: LoraConfig, seed: int) -> None:
        """Add an adapter, in place of one of the same name; its initial weights are drawn with ``seed``, on the CPU."""
        with self._flags_kept(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # Several adapters are intended; PEFT detects GPT-2's transposed layers itself.
            warnings.filterwarnings("ignore", "Already found a `peft_config`|fan_in_fan_out is set to")
            torch.default_generator.manual_seed(seed)
            if name in getattr(self.model, "peft_config", {}):
                delete_adapter(self.model, name, prefix="lora_")
            inject_adapter_in_model(config, self.model, name)

    def activate(self, names: Sequence[str]) -> nn.Module:
        """Return `model` with the sum of these adapters."""
        with self._flags_kept():
            set_adapter(self.model, list(names))
        return self.model

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Return A ``(r, in)`` and B ``(out, r)`` of every layer."""
        return [part[name].weight for layer in self._layers(name).values() for part in (layer.lora_A, layer.lora_B)]

    def projections(self, name: str) -> dict[str, Tensor]:
        """Return A ``(r, in)`` of every layer, by its name."""
        return {key: layer.lora_A[name].weight for key, layer in self._layers(name).items()}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return A and B of all layers, as PEFT names them: the tensors themselves, not copies."""
        state: dict[str, Tensor] = get_peft_model_state_dict(self.model, adapter_name=name)
        return state

    def load_(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors from `tensors` into the adapter, bit for bit.

        Raises:
            RunError: their names or shapes are not this adapter's.
        """
        check_shapes("the adapter", self.tensors(name), tensors)
        with torch.no_grad():
            set_peft_model_state_dict(self.model, dict(tensors), adapter_name=name)

    def _layers(self, name: str) -> dict[str, Any]:
        return {
            key: layer
            for key, layer in self.model.named_modules()
            if isinstance(layer, LoraLayer) and name in layer.lora_A
        }

    @contextmanager
    def _flags_kept(self) -> Iterator[None]:
        """Restore ``requires_grad`` after the block: PEFT sets it for every tensor, the backbone's included."""
        before = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        try:
            yield
        finally:
            for parameter, flag in before:
                parameter.requires_grad_(flag)


def overlap(earlier: Mapping[str, Tensor], newest: Mapping[str, Tensor]) -> Tensor:
    """Return the overlap of two subspaces, 0 if they are orthogonal: Σ_jk (A_i·A_tᵀ)²_jk, summed over layers.

    Args:
        earlier: A_i ``(r_i, in)`` by layer; several tasks' may be stacked, which sums their overlaps.
        newest: A_t ``(r, in)`` by layer. PEFT's A is the transpose of A in Wang et al. (2023), with the product A_iᵀ·A_t.
    """
    shared = [key for key in newest if key in earlier]
    return torch.stack([(earlier[key] @ newest[key].T).square().sum() for key in shared]).sum()


def check_shapes(what: str, expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> None:
    """Raise ``RunError`` unless both have tensors of the same names and shapes."""
    shapes = [{name: tuple(tensor.shape) for name, tensor in each.items()} for each in (expected, got)]
    if shapes[0] != shapes[1]:
        raise RunError(
            f"The saved tensors do not fit {what}: expected {shapes[0]}, got {shapes[1]}. Load the model, readout and tasks "
            "they were trained with."
        )
