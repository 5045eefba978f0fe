"""A region that takes effect beside the weights: linear layers add its differences δ to their outputs, y + x Δᵀ.

No weight is read or written, so they may be quantised, sharded or compiled. An entry of W at row r and column c adds δ x_c to
y_r, an entry of the bias at r adds δ. The gradient of δ needs only x and ∂L/∂y.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.core.linear_layers import LinearLayer, LinearLayers, input_of
from forgetfree.core.products import FlatProducts
from forgetfree.core.regions import Region
from forgetfree.core.taps import Hook, no_transforms
from forgetfree.errors import TrainingError


class _Places:
    """The entries of one layer: first its weight's, then its bias's.

    Attributes:
        rows, columns: the places of the weight's entries ``(n,)``.
        bias_rows: the places of the bias's entries ``(m,)``.
    """

    def __init__(self, rows: Tensor, columns: Tensor, bias_rows: Tensor) -> None:
        self.rows, self.columns, self.bias_rows = rows, columns, bias_rows
        self.sizes = [len(rows), len(bias_rows)]

    def __len__(self) -> int:
        return sum(self.sizes)

    def to(self, device: torch.device) -> _Places:
        """Return these places on a device."""
        return _Places(*(each.to(device) for each in (self.rows, self.columns, self.bias_rows)))

    def add(self, y: Tensor, x: Tensor, delta: Tensor) -> Tensor:
        """Return y + x Δᵀ, in the dtype of ``y``."""
        weights, biases = torch.split(delta, self.sizes)
        if len(weights):
            y = add_at(y, self.rows, x.index_select(-1, self.columns) * weights)
        return add_at(y, self.bias_rows, biases) if len(biases) else y

    def of_products(self) -> tuple[Tensor, Tensor]:
        """Return the rows and columns of all entries, as `FlatProducts` expects them."""
        return torch.cat([self.rows, self.bias_rows]), torch.cat([self.columns, torch.full_like(self.bias_rows, -1)])


class Adder:
    """A forward hook of a linear layer that adds the differences of the task that the model answers.

    A copy of the model keeps the hook, and answers the same task.
    """

    def __init__(self, differences: Differences, number: int) -> None:
        self._differences, self._number = differences, number

    def __call__(self, module: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any], y: Tensor) -> Tensor:
        """Return the output of the layer plus the contribution of its differences."""
        return self._differences.add(self._number, module, inputs, named, y)


def answers_beside(model: nn.Module) -> bool:
    """Return whether layers of a model add the differences of a task, see `Adder`."""
    return any(isinstance(hook, Adder) for module in model.modules() for hook in module._forward_hooks.values())


class Differences:
    """The differences of a region's entries, which a model's linear layers add to their outputs inside `applied`.

    >>> with Differences(LinearLayers(model, space), region, deltas).applied():  # doctest: +SKIP
    ...     logits = model(**batch).logits

    Args:
        layers: the model's linear layers.
        region: the entries.
        values: δ ``(s,)`` in float32; they get gradients if they require gradients.
    """

    def __init__(self, layers: LinearLayers, region: Region, values: Tensor) -> None:
        self.values = values
        self._modules: list[nn.Module] = []
        self._places: list[_Places] = []
        found = {number: local for number, local, _ in layers.space.split(region.indices)}
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        for layer in layers.layers:  # in the order of the space, where a bias follows its weight
            if (places := _places_of(layer, layers, found, none)) is not None:
                self._modules.append(layer.module)
                self._places.append(places)
        self._sizes = [len(places) for places in self._places]
        self._memory: tuple[torch.device, int] | None = None  # device and address of the leaves' memory
        self._leaves: tuple[Tensor, ...] = ()
        self._flat: FlatProducts | None = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the layers add the differences inside the block."""
        _guard_hooks()
        with ExitStack() as hooks:
            hooks.callback(_guard_hooks)
            for number, module in enumerate(self._modules):
                # A copy made during training computes without the differences.
                training = self.values.requires_grad
                hook: Any = Hook(partial(self.add, number)) if training else Adder(self, number)
                # Runs before other hooks, so that they get the output of the task.
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True, prepend=True).remove)
            hooks.callback(setattr, self, "_memory", None)
            yield

    def renew(self) -> None:
        """Make places and leaves again after the values have moved in memory."""
        device = self.values.device
        self._places = [places.to(device) for places in self._places]
        with torch.inference_mode(False), torch.enable_grad():
            if self.values.requires_grad:
                self._flat = FlatProducts([places.of_products() for places in self._places], self.values.dtype)
                self._leaves = _Leaves.apply(self.values, self)
            else:
                self._leaves = torch.split(self.values, self._sizes)
        self._memory = device, self.values.data_ptr()

    def add(self, number: int, module: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any], y: Tensor) -> Tensor:
        """Return the output of a layer plus the contribution of its differences, as a forward hook."""
        x = input_of(module, inputs, named, y)
        if torch.compiler.is_compiling():  # the compiler differentiates and fuses only plain operations
            start = sum(self._sizes[:number])
            return self._places[number].to(y.device).add(y, x, self.values[start : start + self._sizes[number]])
        if torch._C._are_functorch_transforms_active():
            raise no_transforms()
        if self._memory != (self.values.device, self.values.data_ptr()):
            self.renew()
        if self._flat is not None:
            self._flat.forget_unread()
        result: Tensor = _Add.apply(y, x, self._leaves[number], number, self)
        return result

    def leaves(self) -> list[Tensor]:
        """Return the values of each layer, in the memory of the vector."""
        return [part.data for part in torch.split(self.values.detach(), self._sizes)]

    def gradient(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the gradient ``(s,)`` of the vector: products of this backward pass plus the leaves' own gradients."""
        assert self._flat is not None
        sums = self._flat.sums()
        total = torch.zeros_like(self.values) if sums is None else sums
        if any(each is not None for each in gradients):
            parts = [
                total.new_zeros(size) if each is None else each
                for each, size in zip(gradients, self._sizes, strict=True)
            ]
            total = total + torch.cat(parts)
        return total


def _places_of(layer: LinearLayer, layers: LinearLayers, found: dict[int, Tensor], none: Tensor) -> _Places | None:
    """Return where the entries of a layer are; ``None`` if it has none."""
    weight, bias = (none if each is None else found.get(each, none) for each in (layer.weight, layer.bias))
    if not len(weight) and not len(bias):
        return None
    width = 1 if layer.weight is None else layers.space.tensors[layer.weight].shape[1]
    return _Places(weight // width, weight % width, bias)


def _guard_hooks() -> None:
    """Let compiled models notice added and removed hooks; models compiled before are compiled again."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.config.skip_nnmodule_hook_guards:
        dynamo.config.skip_nnmodule_hook_guards = False
        dynamo.reset()


class _Leaves(torch.autograd.Function):
    """Splits the values ``(s,)`` into one leaf per layer and collects the leaves' gradients, from any number of passes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, differences: Differences) -> tuple[Tensor, ...]:
        """Return the leaves."""
        ctx.set_materialize_grads(False)
        ctx.differences = differences
        return tuple(differences.leaves())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Return the gradient ``(s,)``."""
        if torch.is_grad_enabled():
            raise no_second_derivatives()
        return ctx.differences.gradient(gradients), None


class _Add(torch.autograd.Function):
    """y + x Δᵀ for the entries of one layer."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, delta: Tensor, number: int, differences: Differences) -> Tensor:
        """Return the sum, in the dtype of ``y``."""
        ctx.save_for_backward(x)
        ctx.of = delta, number, differences
        return differences._places[number].add(y, x, delta)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Return the gradients of ``y``, of ``x`` through the differences, and of the differences."""
        if torch.is_grad_enabled():
            raise no_second_derivatives()
        (x,), (delta, number, differences) = ctx.saved_tensors, ctx.of
        places, dx, ddelta = differences._places[number], None, None
        weights = delta[: len(places.rows)]
        if ctx.needs_input_grad[1] and len(weights):
            terms = dy.index_select(-1, places.rows) * weights
            dx = torch.zeros_like(x).index_add_(-1, places.columns, terms.to(x.dtype))
        if ctx.needs_input_grad[2]:
            left, right = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
            if not differences._flat.add(number, left, right):
                products = left.index_select(1, places.rows).to(delta.dtype) * right.index_select(1, places.columns)
                ddelta = torch.cat([products.sum(0), left.index_select(1, places.bias_rows).to(delta.dtype).sum(0)])
        return dy, dx, ddelta, None, None


def no_second_derivatives() -> TrainingError:
    """Return the error for a trainer that differentiates gradients."""
    return TrainingError(
        "The trainer differentiates gradients (create_graph=True, a gradient penalty), which differences beside the weights do "
        "not follow. Let tasks be written: Ledger.of_model(model, effect='written'), on a model in float32 or bfloat16."
    )


def add_at(y: Tensor, rows: Tensor, terms: Tensor) -> Tensor:
    """Return ``y (…, out)`` with terms added at rows, which may repeat.

    The result is bitwise reproducible on any device if all items have the same rows.

    Args:
        y: the output of a layer.
        rows: ``(n,)`` for all items; or ``(B, 1, n)``, one set for each of the B items of ``y (B, L, out)``.
        terms: ``(n,)`` or ``(…, n)``, in any dtype.
    """
    terms = terms.to(y.dtype).expand(*y.shape[:-1], -1)
    if rows.dim() > 1:
        return y.scatter_add(-1, rows.expand_as(terms), terms)
    if y.device.type == "cpu":
        return y.index_add(-1, rows, terms)
    # CUDA's index_add adds in any order; this sorts the rows first.
    flat: Tensor = torch.ops.aten.index_put(
        y.reshape(-1, y.shape[-1]), [None, rows], terms.reshape(-1, len(rows)), True
    )
    return flat.view(y.shape)
