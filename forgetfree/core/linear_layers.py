"""The linear layers of a model, whatever the format of their weights: a region can take effect beside them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forgetfree.core.families import NOT_GRAFTABLE, is_conv1d, never_grafted
from forgetfree.core.parameters import ParameterSpace, TensorSpec
from forgetfree.core.taps import Hook
from forgetfree.core.trained import trainable
from forgetfree.errors import ModelError, RegionError

#: Parameter classes of bitsandbytes; their dtype is the storage type of the codes.
_PACKED = ("Params4bit", "Int8Params")


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes ``x Wᵀ + b``: a subclass of `nn.Linear`, ``Conv1D``, or a quantised layer like these."""
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return True
    sizes = (getattr(module, name, None) for name in ("in_features", "out_features"))
    own = [holds_floats(each) and each.dim() > 1 for each in module._parameters.values() if each is not None]
    return not any(own) and all(isinstance(size, int) for size in sizes) and next(module.children(), None) is None


def shape_of(module: Any) -> tuple[int, int]:
    """Return ``(out, in)`` of a linear layer."""
    return (module.nf, module.nx) if is_conv1d(module) else (module.out_features, module.in_features)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor stores its own floats: it is not quantised, sharded or offloaded."""
    is_packed = is_traceable_wrapper_subclass(tensor) or type(tensor).__name__ in _PACKED
    return tensor.is_floating_point() and not is_packed and not tensor.is_meta


def holds_floats(tensor: Any) -> bool:
    """Return whether a tensor stores floats, by itself or sharded over processes."""
    return hasattr(tensor, "full_tensor") or (isinstance(tensor, Tensor) and is_plain(tensor))


def keep_scales_(model: nn.Module) -> None:
    """Let 4-bit layers of bitsandbytes keep their scales.

    On CPUs with AVX512-BF16, such a layer rounds its scales at its first call in evaluation mode, and uses another kernel there
    than in training.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def full_tensor(tensor: Any) -> Any:
    """Return a tensor with all its entries; if FSDP2 has sharded it, all processes must call this together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_quantised(model: nn.Module) -> bool:
    """Return whether a linear layer of a model has a weight that is packed in fewer bits."""
    weights = (getattr(module, "weight", None) for module in model.modules() if is_linear(module))
    return any(not holds_floats(weight) for weight in weights)


def dtype_of_rest(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's unquantised tensors: of its first tensor of floats."""
    return next((each.dtype for each in model.parameters() if holds_floats(each)), torch.float32)


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has sharded a model's weights (``torch.distributed.fsdp.fully_shard``)."""
    return any("FSDPModule" in (kind.__name__ for kind in type(module).__mro__) for module in model.modules())


@torch.no_grad()
def dense_weight(module: nn.Module) -> Tensor:
    """Return W ``(out, in)`` of a linear layer as plain numbers: quantised ones dequantised, sharded ones gathered.

    Raises:
        ModelError: the weight cannot be read.
    """
    layer: Any = module
    weight: Any = full_tensor(getattr(module, "weight", None))
    dense: Tensor
    if isinstance(weight, Tensor) and is_plain(weight):
        return weight.detach().t() if is_conv1d(module) else weight.detach()
    if type(weight).__name__ == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit

        dense = dequantize_4bit(weight.data, weight.quant_state)
    elif type(weight).__name__ == "Int8Params":
        from bitsandbytes.functional import int8_vectorwise_dequant

        dense = int8_vectorwise_dequant(weight.data, layer.state.SCB if weight.SCB is None else weight.SCB)
    elif hasattr(weight, "dequantize"):
        dense = weight.dequantize()
    else:
        dense = _weight_by_answers(layer)
    return dense


def _weight_by_answers(layer: Any) -> Tensor:
    """Return the weight of a layer from an unknown library: its outputs for the rows of the identity, without hooks."""
    width = shape_of(layer)[1]
    device = next((each.device for each in (*layer.parameters(), *layer.buffers())), torch.device("cpu"))
    identity = torch.eye(width, device=device)
    try:
        dense = torch.cat([layer.forward(identity[first : first + 1024]) for first in range(0, width, 1024)]).t()
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"The weight of a {type(layer).__name__} cannot be read: {error}.") from error
    bias = getattr(layer, "bias", None)
    return dense - bias.unsqueeze(1) if isinstance(bias, Tensor) else dense


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer of a space, with the numbers of its weight and its bias there."""

    module: nn.Module
    weight: int | None
    bias: int | None


class LinearLayers:
    """The linear layers of a model that hold the weights and biases of a space.

    Args:
        model: the body to which the space belongs.
        space: made by `space_of_layers`.

    Raises:
        RegionError: the model lacks a layer, or the layer has another size.
    """

    def __init__(self, model: nn.Module, space: ParameterSpace) -> None:
        self.model, self.space = model, space
        keep_scales_(model)
        modules = dict(model.named_modules())
        places: dict[str, dict[str, int]] = {}
        for number, spec in enumerate(space.tensors):
            name, _, role = spec.name.rpartition(".")
            places.setdefault(name, {})[role] = number
        self.layers: list[LinearLayer] = []
        self._modules: dict[int, nn.Module] = {}
        for name, own in places.items():
            module = modules.get(name)
            sizes = shape_of(module) if module is not None and is_linear(module) else None
            for number in own.values():
                shape = space.tensors[number].shape
                got = "no such layer" if sizes is None else sizes[: len(shape)]  # of a bias: (out,)
                if module is None or got != shape:
                    raise RegionError(
                        f"{type(model).__name__} does not fit this parameter space: expected {space.tensors[number].name!r} of "
                        f"shape {shape}, got {got}. Use the model the space was made from."
                    )
                self._modules[number] = module
            assert module is not None
            self.layers.append(LinearLayer(module, own.get("weight"), own.get("bias")))

    def module(self, number: int) -> nn.Module:
        """Return the layer that holds a tensor of the space."""
        return self._modules[number]

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    def theta(self, number: int) -> Tensor:
        """Return a tensor of the space as plain numbers."""
        module: Any = self._modules[number]
        if len(self.space.tensors[number].shape) == 2:
            return dense_weight(module)
        bias: Tensor = full_tensor(module.bias).detach()
        return bias

    def is_frozen(self, number: int) -> bool:
        """Return whether a user has frozen a tensor; quantised ones have no gradients in any case."""
        name = "weight" if len(self.space.tensors[number].shape) == 2 else "bias"
        tensor = getattr(self._modules[number], name, None)
        return tensor is not None and holds_floats(tensor) and not tensor.requires_grad

    @contextmanager
    def gradients(self, receive: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Pass the gradient of each weight ``(out, in)`` and bias ``(out,)`` to ``receive`` inside the block."""
        with trainable(self.model, []), ExitStack() as hooks:
            leaf = torch.zeros((), device=self.device, requires_grad=True)
            for layer in self.layers:
                hook = Hook(partial(_watch, leaf, layer, receive))
                hooks.callback(layer.module.register_forward_hook(hook, with_kwargs=True).remove)
            yield


def input_of(module: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any], y: Any) -> Tensor:
    """Return the input of a linear layer, from the arguments of its forward hook.

    Raises:
        ModelError: the layer returns no tensor.
    """
    if not isinstance(y, Tensor):
        raise ModelError(
            f"A layer {type(module).__name__} returns a {type(y).__name__}, expected a tensor, to which differences can be "
            "added. Leave its kind out by graftable=…, a regular expression over names."
        )
    x: Tensor = inputs[0] if inputs else next(iter(named.values()))
    return x


def _watch(
    leaf: Tensor,
    layer: LinearLayer,
    receive: Callable[[int, Tensor], None],
    module: nn.Module,
    inputs: Sequence[Any],
    named: Mapping[str, Any],
    y: Tensor,
) -> Any:
    return _Gradients.apply(y, input_of(module, inputs, named, y), leaf, layer, receive)


class _Gradients(torch.autograd.Function):
    """The identity on a linear layer's output; its backward pass gives the gradients of weight and bias to ``receive``."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, leaf: Tensor, layer: LinearLayer, receive: Any) -> Tensor:
        """Return ``y``."""
        ctx.save_for_backward(x)
        ctx.of = layer, receive
        return y.detach()  # the model may change it in place

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Return ``dy`` for ``y``, and nothing else."""
        (x,), (layer, receive) = ctx.saved_tensors, ctx.of
        rows = dy.reshape(-1, dy.shape[-1])
        if layer.weight is not None:
            receive(layer.weight, rows.t() @ x.reshape(-1, x.shape[-1]).to(rows.dtype))
        if layer.bias is not None:
            receive(layer.bias, rows.sum(0))
        return dy, None, None, None, None


def space_of_layers(model: nn.Module, graftable: str = ".") -> ParameterSpace:
    """Return the space of the linear layers of a model: weights ``(out, in)`` and biases ``(out,)``, of float32 differences.

    Args:
        model: the body.
        graftable: regular expression; only tensors with a matching name are in the space, and never embeddings, heads or
            poolers.

    Raises:
        RegionError: no layer is left.
        ModelError: a module reads the weight of such a layer without calling its ``forward``; two layers share one weight; or
            the model is scripted.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ModelError(
            f"This {type(model).__name__} is scripted (torch.jit.script), and reads its weights by itself. Give the model as "
            "it was before."
        )
    keep_scales_(model)
    outside = never_grafted(model)
    specs: list[TensorSpec] = []
    offset, weights = 0, dict[int, str]()
    for name, module in model.named_modules():
        if not is_linear(module) or any(id(each) in outside for each in module.parameters()):
            continue
        shape = shape_of(module)
        roles = {"weight": shape} | ({"bias": shape[:1]} if isinstance(getattr(module, "bias", None), Tensor) else {})
        for role, size in roles.items():
            full = f"{name}.{role}"
            if any(re.search(pattern, full) for pattern in NOT_GRAFTABLE) or not re.search(graftable, full):
                continue
            if type(module).__name__ == "NonDynamicallyQuantizableLinear":
                raise ModelError(
                    f"{full!r} is read by its nn.MultiheadAttention past the layer's forward, so nothing can take effect "
                    "beside it. Leave it out by graftable=…, a regular expression, or write into the weights: effect='written'."
                )
            tensor = getattr(module, role, None)
            if tensor is not None and weights.setdefault(id(tensor), full) != full:
                raise ModelError(
                    f"{weights[id(tensor)]!r} and {full!r} are one tensor, and differences stand beside one layer. Leave both "
                    "out by graftable=…, a regular expression, or write into the weights: effect='written'."
                )
            specs.append(TensorSpec(full, tuple(size), torch.float32, offset))
            offset += torch.Size(size).numel()
    if not specs:
        raise RegionError(
            f"No linear layer in {type(model).__name__}, beside which a region could take effect: expected a name matching "
            f"{graftable!r} outside of embeddings and heads."
        )
    return ParameterSpace(tuple(specs))
