"""What a task trains in a backbone: whole tensors, or a region's values as one vector."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from forgetfree.core.parameters import ParameterSpace, at_least_float32, entries
from forgetfree.core.regions import Region


class TrainedParameters(Protocol):
    """What a task trains in the backbone: vectors beside the model, such as the one of `RegionParameters`.

    Attributes:
        parameters: what the optimizer updates.
        touched: the model's tensors that get gradients; an update moves no others.
    """

    parameters: list[nn.Parameter]
    touched: list[nn.Parameter]

    def collect(self) -> None:
        """Take the gradients of ``parameters`` from the tensors' gradients, and free those."""

    def write(self) -> None:
        """Write the values of ``parameters`` into the tensors."""


class WholeTensors:
    """Tensors that are trained in place; of those narrower than float32, which round small steps away, a wider copy is.

    Args:
        tensors: the model's tensors to train.
    """

    def __init__(self, tensors: Iterable[nn.Parameter]) -> None:
        self.touched = list(tensors)
        wide = [at_least_float32(tensor.dtype) for tensor in self.touched]
        self.parameters = [
            tensor if tensor.dtype == dtype else nn.Parameter(tensor.detach().to(dtype))
            for tensor, dtype in zip(self.touched, wide, strict=True)
        ]
        pairs = zip(self.touched, self.parameters, strict=True)
        self._copies = [(tensor, copy) for tensor, copy in pairs if tensor is not copy]

    def collect(self) -> None:
        """Take the copies' gradients from the tensors' own, and free those; other gradients are in place."""
        for tensor, copy in self._copies:
            copy.grad = None if tensor.grad is None else tensor.grad.to(copy.dtype)
            tensor.grad = None

    @torch.no_grad()
    def write(self) -> None:
        """Write the copies into the tensors; other values are in place."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)


class RegionParameters:
    """The values of a region as one trainable vector ``(s,)``, so that no other entry can change.

    The optimizer sees this vector and not the model's tensors: neither weight decay nor momentum nor rounding can reach
    an entry outside the region. Where the tensors are narrower than float32, the vector keeps what they round away. Each
    update: `collect` gradients, step, `write`. Inside `sampling`, a weight matrix gives the gradient of these entries alone.
    """

    def __init__(self, model: nn.Module, space: ParameterSpace, region: Region) -> None:
        tensors = space.parameters(model)
        device = tensors[0].device
        self._pieces = [(tensors[i], local.to(device), where) for i, local, where in space.split(region.indices)]
        self.values = nn.Parameter(space.gather(model, region.indices).to(at_least_float32(space.dtype)))
        #: What the optimizer updates.
        self.parameters = [self.values]
        #: The model's tensors that hold an entry of the region: the only ones that an update moves.
        self.touched = [tensor for tensor, _, _ in self._pieces]
        self._collected = True

    def sampling(self) -> AbstractContextManager[None]:
        """Take the gradients of weight matrices entry by entry inside: there is none of the size of a matrix."""
        return sampled(
            (tensor, self._leaf(where), local, EntriesOfProduct(tensor.shape, local, self.values.dtype))
            for tensor, local, where in self._pieces
            if type(tensor) is nn.Parameter and tensor.dim() == 2
        )

    def _leaf(self, where: slice) -> Tensor:
        """Return these values as a leaf, whose gradients go on to ``values``."""
        leaf = self.values.detach()[where].requires_grad_()

        @torch.no_grad()
        def hand_on(leaf: Tensor) -> None:
            assert leaf.grad is not None
            self._gradient()[where] += leaf.grad
            leaf.grad = None

        leaf.register_post_accumulate_grad_hook(hand_on)  # type: ignore[no-untyped-call]
        return leaf

    def _gradient(self) -> Tensor:
        """Return the gradient ``(s,)`` that is being added up since the last update."""
        if self._collected or self.values.grad is None:
            self.values.grad = torch.zeros_like(self.values)
            self._collected = False
        return self.values.grad

    @torch.no_grad()
    def collect(self) -> None:
        """Take the region's gradients ``(s,)`` from the model's tensors, beside those sampled, and free those."""
        gradient = self._gradient()
        for tensor, local, where in self._pieces:
            if tensor.grad is not None:
                flat, at = entries(tensor.grad, local)
                gradient[where] += flat[at].to(gradient)
                tensor.grad = None
        self._collected = True

    @torch.no_grad()
    def write(self) -> None:
        """Write the region's values into the model's tensors."""
        for tensor, local, where in self._pieces:
            flat, at = entries(tensor, local)
            flat[at] = self.values[where].to(flat)


@contextmanager
def in_training(
    model: nn.Module, trained: TrainedParameters, readout: Iterable[nn.Parameter], *, sampling: bool = True
) -> Iterator[None]:
    """Let what is trained have gradients inside the block and nothing else; restore the model's flags and mode afterwards.

    With ``sampling``, a region's gradients are taken entry by entry: the model's matrices get none.
    """
    region = trained if sampling and isinstance(trained, RegionParameters) else None
    with trainable(model, [*trained.touched, *readout]), region.sampling() if region else nullcontext():
        yield


@contextmanager
def trainable(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let only ``parameters`` have gradients inside the block; restore flags, mode and gradients afterwards."""
    wanted = {id(parameter) for parameter in parameters}
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    mode = model.training
    try:
        for parameter, _ in before:
            parameter.requires_grad_(id(parameter) in wanted)
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)
            parameter.grad = None
        model.train(mode)


# -- Sampled gradients: of y = x Wᵀ, only the entries of ∂L/∂W = (∂L/∂y)ᵀ x that a region holds -----------
#
# Each product takes the matrix as a constant, so PyTorch computes no gradient of its size and back-propagates no further than
# to the lowest layer in training. A node of PyTorch's graph behind the product keeps x, and gives the entries when ∂L/∂y comes
# by.


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
        flat, at = entries(gradient, local)
        return None, flat[at].to(leaf.dtype), None


#: Where the products have their matrix among their arguments, after x.
_PLACES = {F.linear: 1, torch.addmm: 2}


class SampledWeight(nn.Parameter):
    """A tensor of which some entries are trained; ``leaf (s,)`` gets their gradients.

    A matrix ``W`` takes part in ``x Wᵀ`` (`nn.Linear`) and ``x W`` (GPT-2's ``Conv1D``) as a constant, of whose gradient these
    entries alone are computed. In all else it takes part as any parameter, which gets its whole gradient; one that is frozen
    hands on that of its entries. A parameter becomes one by its class, for a time (`sampled`), so that it is seen in whatever
    module. Copies of it, and what is pickled, are parameters.
    """

    leaf: Tensor
    local: Tensor
    entries: EntriesOfProduct | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` on tensors among which is such a tensor."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if not torch.is_grad_enabled() or torch.compiler.is_compiling() or _transformed():
                return func(*args, **kwargs)
            at = _PLACES.get(func, len(args))
            weight = args[at] if at < len(args) else None
            sampled = isinstance(weight, SampledWeight) and weight.entries is not None
            if not sampled or (func is torch.addmm and kwargs):  # β, α
                weight = None
            if not _reads_or_sets_itself(func):
                args, kwargs = tree_map(
                    lambda each: each if each is weight else _handing_on(each), (tuple(args), kwargs)
                )
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


def _transformed() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


def _reads_or_sets_itself(func: Any) -> bool:
    """Return whether a function asks for a property of a tensor, or changes the tensor itself."""
    name = getattr(func, "__name__", "")
    return name in ("__get__", "__set__", "__delete__") or (name.endswith("_") and not name.endswith("__"))


def _handing_on(value: Any) -> Any:
    """Return a frozen tensor as one that hands its entries' gradients on to their leaf; anything else as it is."""
    if isinstance(value, SampledWeight) and not value.requires_grad:
        return _Entries.apply(value.detach(), value.leaf, value.local)
    return value


@contextmanager
def sampled(tensors: Iterable[tuple[nn.Parameter, Tensor, Tensor, EntriesOfProduct | None]]) -> Iterator[None]:
    """Let each tensor, inside, give the gradients of its entries to a leaf.

    Args:
        tensors: each with its leaf ``(s,)``, the entries' numbers ``(s,)``, and, of a matrix, these entries of a product.
    """
    made: list[Any] = []
    try:
        for tensor, leaf, local, entries in tensors:
            weight: Any = tensor
            made.append(weight)
            weight.__class__ = SampledWeight
            weight.leaf, weight.local, weight.entries = leaf, local, entries
        yield
    finally:
        for weight in made:
            weight.__class__ = nn.Parameter
            for name in SampledWeight.__annotations__:
                weight.__dict__.pop(name, None)
