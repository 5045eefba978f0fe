"""The gradient of a few entries of a weight matrix: of y = x Wᵀ, only those of ∂L/∂W = (∂L/∂y)ᵀ x that a region holds.

Each product takes the matrix as a constant, so PyTorch computes no gradient of its size and back-propagates no further than to
the lowest layer in training. A node of PyTorch's graph behind the product keeps x, and gives the entries when ∂L/∂y comes by.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
            starts = torch.searchsorted(rows, torch.arange(shape[0] + 1))
            zeros = torch.zeros(len(local), dtype=dtype)
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
        return block.flatten()[self._at]


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


#: Where the products have their matrix among their arguments, after x.
_PLACES = {F.linear: 1, torch.addmm: 2}


class SampledWeight(nn.Parameter):
    """A matrix ``W`` of which some entries are trained; ``leaf (s,)`` gets their gradients.

    It takes part in ``x Wᵀ`` (`nn.Linear`) and ``x W`` (GPT-2's ``Conv1D``) as a constant, and in all else as any parameter,
    which gets its whole gradient. A parameter becomes one by its class, for a time (`sampled`), so that these products are
    seen in whatever module. Copies of it, and what is pickled, are parameters.
    """

    leaf: Tensor
    entries: EntriesOfProduct

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` on tensors among which is such a matrix."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            at = _PLACES.get(func, len(args))
            weight = args[at] if at < len(args) else None
            if (
                not isinstance(weight, SampledWeight)
                or not (weight.requires_grad and torch.is_grad_enabled())
                or (func is torch.addmm and kwargs)  # β, α
                or torch.compiler.is_compiling()
                or torch._C._are_functorch_transforms_active()
            ):
                return func(*args, **kwargs)
            y = func(*args[:at], weight.detach(), *args[at + 1 :], **kwargs)
            return _Sampled.apply(y, args[at - 1], weight.leaf, weight.entries, func is torch.addmm)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return copy.deepcopy(self._as_parameter(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_parameter().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _as_parameter(self) -> nn.Parameter:
        return nn.Parameter(self.detach(), self.requires_grad)


@contextmanager
def sampled(matrices: Iterable[tuple[nn.Parameter, Tensor, EntriesOfProduct]]) -> Iterator[None]:
    """Let each matrix, inside, give the gradients of its entries to the leaf beside it."""
    made: list[Any] = []
    try:
        for matrix, leaf, entries in matrices:
            weight: Any = matrix
            made.append(weight)
            weight.__class__ = SampledWeight
            weight.leaf, weight.entries = leaf, entries
        yield
    finally:
        for weight in made:
            weight.__class__ = nn.Parameter
            for name in SampledWeight.__annotations__:
                weight.__dict__.pop(name, None)
