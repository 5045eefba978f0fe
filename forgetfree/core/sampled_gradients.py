"""The gradient of a few entries of a weight matrix: of y = x Wᵀ, only those of ∂L/∂W = (∂L/∂y)ᵀ x that a region holds.

The matrix itself needs no gradient, so PyTorch computes none and back-propagates no further than to the lowest layer in
training. Instead, each product with the matrix keeps x, and takes the entries when ∂L/∂y comes by.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

#: Takes ``left (N, rows)`` and ``right (N, columns)``, of whose product ``leftᵀ right`` a matrix's gradient is the sum.
Sample = Callable[[Tensor, Tensor], None]


class Entries:
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


class SampledWeight(nn.Parameter):
    """A matrix ``W`` in ``x Wᵀ`` (`nn.Linear`) or ``x W`` (GPT-2's ``Conv1D``) whose gradient is taken by ``sample``.

    A parameter becomes one by its class, for a time (`sampled`), so that every use of it is seen, in whatever module. A use
    that is no such product makes it need its whole gradient, as any parameter does, beside what was sampled already.
    """

    sample: Sample

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` on tensors among which is such a matrix."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if not torch.is_grad_enabled():
                return func(*args, **kwargs)
            if func is F.linear and _is_factor(args, 1):
                x, weight = args[:2]
                return _watched(func(*args, **kwargs), x, lambda dy, x: weight.sample(dy, x))
            if func is torch.addmm and _is_factor(args, 2) and not kwargs:
                x, weight = args[1:]
                return _watched(func(*args), x, lambda dy, x: weight.sample(x, dy))
            result = func(*args, **kwargs)
            weights = [each for each in tree_leaves((args, kwargs)) if isinstance(each, SampledWeight)]
            derived = any(
                isinstance(each, Tensor) and not isinstance(each, SampledWeight) for each in tree_leaves(result)
            )
            if not derived or all(weight.requires_grad for weight in weights):
                return result
            for weight in weights:
                weight.requires_grad_()
            return func(*args, **kwargs)


def _is_factor(args: tuple[Any, ...], position: int) -> bool:
    """Return whether the only matrix that is sampled is the argument at ``position``."""
    weight = args[position] if len(args) > position else None
    others = [*args[:position], *args[position + 1 :]]
    return (
        isinstance(weight, SampledWeight)
        and not weight.requires_grad
        and not any(isinstance(each, SampledWeight) for each in others)
    )


def _watched(y: Tensor, x: Tensor, sample: Sample) -> Tensor:
    """Return ``y``, whose gradient is given to ``sample`` with ``x``, both as matrices of one row a token."""
    if not y.requires_grad:  # back-propagation ends here; at a copy, which the model may change in place
        y = y.requires_grad_().clone()
    kept = [x.detach()]

    def take(dy: Tensor | None) -> None:
        x = kept.pop()  # the loss lives on until the next one
        if dy is not None:
            sample(dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]).to(dy.dtype))

    y.register_hook(take)  # type: ignore[no-untyped-call]
    return y


@contextmanager
def sampled(samples: Iterable[tuple[nn.Parameter, Sample]]) -> Iterator[None]:
    """Let each matrix give its gradient to its function inside, and need none itself; restore all afterwards."""
    before: list[tuple[Any, bool]] = []
    try:
        for matrix, sample in samples:
            before.append((matrix, matrix.requires_grad))
            weight: Any = matrix.requires_grad_(False)
            weight.__class__ = SampledWeight
            weight.sample = sample
        yield
    finally:
        for weight, flag in before:
            weight.__class__ = nn.Parameter
            weight.__dict__.pop("sample", None)
            weight.requires_grad_(flag)
