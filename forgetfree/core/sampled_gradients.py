"""Sampled gradients: of y = x Wᵀ, only the entries of ∂L/∂W = (∂L/∂y)ᵀ x that a region holds.

Each product takes the matrix as a constant, so PyTorch computes no gradient of its size and back-propagates no further than
to the lowest layer in training. A node of PyTorch's graph behind the product keeps x, and gives the entries when ∂L/∂y comes
by.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from forgetfree.core.parameters import values_at
from forgetfree.errors import TrainingError


class Leaves(torch.autograd.Function):
    """A vector of values ``(s,)`` as leaves that hand their gradients on to it: any number of passes may use them.

    Each is given as ``(None, local)``, a leaf of the values of the entries with the numbers ``local``; or as
    ``(tensor, local)``, a leaf that is this tensor as a whole, and hands on the gradients of these entries.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, pieces: Sequence[tuple[Tensor | None, Tensor]]) -> tuple[Tensor, ...]:
        """Return the leaves, in the memory of the values or of their tensors."""
        ctx.set_materialize_grads(False)
        parts = torch.split(values.data, [len(local) for _, local in pieces])
        leaves = tuple(
            (part if tensor is None else tensor).data for part, (tensor, _) in zip(parts, pieces, strict=True)
        )
        places, start = [], 0
        for leaf, (tensor, local) in zip(leaves, pieces, strict=True):
            places.append(start + (torch.arange(len(local), device=local.device) if tensor is None else local))
            start += leaf.numel()
        ctx.at = torch.cat(places) if any(tensor is not None for tensor, _ in pieces) else None
        ctx.zeros = torch.split(values.new_zeros(start), [leaf.numel() for leaf in leaves])
        return leaves

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Return the gradient ``(s,)`` of the values."""
        pairs = zip(gradients, ctx.zeros, strict=True)
        gradient = torch.cat([zeros if each is None else each.reshape(-1) for each, zeros in pairs])
        return (gradient if ctx.at is None else gradient.index_select(0, ctx.at)).to(ctx.zeros[0].dtype), None


class EntriesOfProduct:
    """Some entries of a product ``leftᵀ right``, computed without the others where that is faster.

    Args:
        shape: ``(rows, columns)`` of the product.
        local: the entries' numbers ``(s,)`` in row-major order, sorted.
        dtype: in which scattered entries are added up.
    """

    def __init__(self, shape: torch.Size, local: Tensor, dtype: torch.dtype = torch.float32) -> None:
        rows, columns = local // shape[1], local % shape[1]
        self._rows, row = torch.unique(rows, return_inverse=True)
        self._columns, column = torch.unique(columns, return_inverse=True)
        self._at = row * len(self._columns) + column
        self._pattern: Tensor | None = None
        # In multiplications for each row of left: regions of skills lie in few rows and columns, random ones anywhere.
        block = len(self._rows) * len(self._columns) + 50 * (len(self._rows) + len(self._columns))
        if local.device.type == "cpu" and block > 25 * sum(shape) + 7 * len(local):
            starts = torch.searchsorted(rows, torch.arange(shape[0] + 1, device="cpu"))
            zeros = torch.zeros(len(local), dtype=dtype, device="cpu")
            with warnings.catch_warnings():  # it warns of being in beta
                warnings.simplefilter("ignore")
                self._pattern = torch.sparse_csr_tensor(starts, columns, zeros, shape, check_invariants=True)

    def of(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the entries ``(s,)`` for ``left (N, rows)`` and ``right (N, columns)``."""
        if self._pattern is not None:
            left, right = (each.to(self._pattern.dtype) for each in (left, right))
            product: Tensor = torch.sparse.sampled_addmm(self._pattern, left.t(), right, beta=0)
            return product.values()
        if left.element_size() < 4:  # index_select is slow on these
            block = left.t()[self._rows] @ right.t()[self._columns].t()
        else:
            block = left.index_select(1, self._rows).t() @ right.index_select(1, self._columns)
        return block.view(-1).index_select(0, self._at)


class _Sampled(torch.autograd.Function):
    """The identity of ``y``, a product of ``x`` with a matrix some entries of which are ``leaf``: it gives those gradients."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, leaf: Tensor, entries: EntriesOfProduct, transposed: bool) -> Tensor:
        """Return ``y`` as a tensor of its own, which the model may change in place."""
        ctx.save_for_backward(x.to(y.dtype))  # under autocast a copy, as PyTorch keeps; else PyTorch notices changes
        ctx.matrix = leaf, entries, transposed
        return y.data

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Return ``dy`` for ``y``, and the entries of ``dyᵀ x`` (or ``xᵀ dy``) for ``leaf``."""
        (x,) = ctx.saved_tensors
        leaf, entries, transposed = ctx.matrix
        left, right = (each.reshape(-1, each.shape[-1]).to(dy.dtype) for each in ((x, dy) if transposed else (dy, x)))
        dx = None  # y passes it on; but who differentiates that, dx = dy W, differentiates by W too
        if torch.is_grad_enabled():
            dx = _Sampled.apply(torch.zeros_like(x), dy, leaf, entries, not transposed)
        return dy, dx, entries.of(left, right).to(leaf.dtype), None, None


class _Entries(torch.autograd.Function):
    """The identity of a tensor some entries of which are ``leaf``: it gives those gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, leaf: Tensor, local: Tensor) -> Tensor:
        """Return ``tensor``, which is not copied."""
        ctx.at = leaf, local
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of the entries."""
        leaf, local = ctx.at
        return None, values_at(gradient, local).to(leaf.dtype), None


#: Where the products have their matrix among their arguments, after x.
_PLACES = {F.linear: 1, torch.addmm: 2}


class SampledWeight(nn.Parameter):
    """A tensor of which some entries are trained; ``leaf (s,)`` gets their gradients, that of a vector is the vector itself.

    A matrix ``W`` takes part in ``x Wᵀ`` (`nn.Linear`) and ``x W`` (GPT-2's ``Conv1D``) as a constant, of whose gradient these
    entries alone are computed. In all else it takes part as any parameter, which gets its whole gradient; or, where it hands
    on, it is a constant that hands the gradient of its entries on to the leaf. A parameter becomes one by its class, for a
    time (`sampled`), so that it is seen in whatever module. Copies of it, and what is pickled, are parameters.
    """

    leaf: Tensor
    local: Tensor
    entries: EntriesOfProduct | None
    hands_on: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` on tensors among which is such a tensor."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return func(*args, **kwargs)
            if torch._C._are_functorch_transforms_active():
                if not _reads_or_sets_itself(func):
                    tree_map(_refuse_transform, (args, kwargs))
                return func(*args, **kwargs)
            at = _PLACES.get(func, len(args))
            weight = args[at] if at < len(args) else None
            sampled = isinstance(weight, SampledWeight) and weight.entries is not None
            if not sampled or (func is torch.addmm and kwargs):  # β, α
                weight = None
            if not _reads_or_sets_itself(func):
                args = [each if each is weight else _handing_on(each) for each in args]
                kwargs = {name: _handing_on(each) for name, each in kwargs.items()}
            if weight is None:
                return func(*args, **kwargs)
            y = func(*args[:at], weight.detach(), *args[at + 1 :], **kwargs)
            return _Sampled.apply(y, args[at - 1], weight.leaf, weight.entries, func is torch.addmm)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return deepcopy(self._as_parameter(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_parameter().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _as_parameter(self) -> nn.Parameter:
        return nn.Parameter(self.detach(), self.requires_grad)


def _refuse_transform(value: Any) -> None:
    """Raise ``TrainingError`` for a tensor that hands on, which a transform does not."""
    if isinstance(value, SampledWeight) and value.hands_on:
        raise TrainingError(
            "The trainer computes within a transform of torch.func (vmap, grad, jvp), which hands no gradients on to a region. "
            "Compute by backward(), or under torch.no_grad() where no gradient of the weights is wanted."
        )


def _reads_or_sets_itself(func: Any) -> bool:
    """Return whether a function asks for a property of a tensor, or changes the tensor itself."""
    name = getattr(func, "__name__", "")
    return name in ("__get__", "__set__", "__delete__") or (name.endswith("_") and not name.endswith("__"))


def _handing_on(value: Any) -> Any:
    """Return a tensor that hands on as one that does so in the graph, also within a list; anything else as it is."""
    if isinstance(value, SampledWeight) and value.hands_on:
        return value.leaf if value.dim() == 1 else _Entries.apply(value.detach(), value.leaf, value.local)
    return tree_map(_handing_on, value) if type(value) in (list, tuple, dict) else value


@contextmanager
def sampled(
    tensors: Iterable[tuple[nn.Parameter, Tensor, Tensor, EntriesOfProduct | None]], *, hands_on: bool = False
) -> Iterator[None]:
    """Let each tensor, inside, give the gradients of its entries to a leaf.

    Args:
        tensors: each with its leaf ``(s,)``, the entries' numbers ``(s,)``, and, of a matrix, these entries of a product.
        hands_on: where a tensor takes part in something else than such a product, hand the gradients of its entries on to the
            leaf, too; else it gets a gradient of its own.
    """
    made: list[Any] = []
    try:
        for tensor, leaf, local, entries in tensors:
            weight: Any = tensor
            made.append(weight)
            weight.__class__ = SampledWeight
            weight.leaf, weight.local, weight.entries, weight.hands_on = leaf, local, entries, hands_on
        yield
    finally:
        for weight in made:
            weight.__class__ = nn.Parameter
            for name in SampledWeight.__annotations__:
                weight.__dict__.pop(name, None)
