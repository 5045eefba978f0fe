"""Taps: every entry of a region gets the same gradient as in plain training, and no other gradient is computed.

A linear layer is tapped at its output y: a node of autograd's graph, the identity on y, keeps the input x, and computes the
entries of ∂L/∂W = (∂L/∂y)ᵀ x in the backward pass. Every other tensor is replaced: its module holds a tensor of the graph as
an attribute, in place of the frozen parameter. The weight of a tapped layer is replaced, too, for all other code that reads
it: only the layer's own call uses the parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.core.families import is_conv1d
from forgetfree.core.parameters import values_at
from forgetfree.core.products import EntriesOfProduct, FlatProducts
from forgetfree.display import listed
from forgetfree.errors import TrainingError


class Hook:
    """A hook that does nothing in copies of the model, so that a copy, such as a reference model, stays as it was copied."""

    def __init__(self, action: Callable[..., Any] | None = None) -> None:
        self._action = action

    def __call__(self, *arguments: Any) -> Any:
        """Call the action; a copy has none."""
        return None if self._action is None else self._action(*arguments)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


class Piece:
    """The trained entries of one tensor.

    Attributes:
        name: the tensor's name in the model.
        tensor: the parameter.
        local: the numbers ``(s,)`` of its entries.
        is_tapped: whether it is the weight or the bias of a tapped layer.
    """

    def __init__(self, name: str, tensor: nn.Parameter, local: Tensor) -> None:
        self.name, self.tensor, self.local = name, tensor, local
        self.is_tapped = False
        self.places: list[tuple[nn.Module, str]] = []  # the modules that hold it, with its name there
        self.leaf: Tensor | None = None  # gets the gradients of the tap
        self.graph: Tensor | None = None  # stands in for the parameter

    @property
    def is_handed_on(self) -> bool:
        """Whether the leaf is the whole tensor, and its gradient is cut later; else leaves get the entries' gradients."""
        return not self.is_tapped and self.tensor.dim() == 1

    def take_part(self, tensor: Tensor | None) -> None:
        """Let modules read a tensor in place of the parameter; ``None``: the parameter itself."""
        for module, name in self.places:
            vars(module).pop(name, None)
            if tensor is not None:
                vars(module)[name] = tensor  # attribute lookup finds it before the parameter


class _Layer:
    """A linear layer, and the pieces that are its weight and its bias."""

    def __init__(self, module: nn.Module) -> None:
        self.transposed = not isinstance(module, nn.Linear)  # transformers' Conv1D keeps (in, out)
        self.weight: Piece | None = None
        self.bias: Piece | None = None
        self._products: EntriesOfProduct | None = None

    @property
    def pieces(self) -> list[Piece]:
        """The pieces of the weight and the bias, if they are trained."""
        return [piece for piece in (self.weight, self.bias) if piece is not None]

    def prepare(self, dtype: torch.dtype) -> None:
        """Find the places of the weight's entries, on their device."""
        if self.weight is not None:
            self._products = EntriesOfProduct(self.weight.tensor.shape, self.weight.local, dtype)

    def places(self) -> tuple[Tensor, Tensor]:
        """Return the rows and columns of the entries, as `FlatProducts` expects them."""
        rows, columns = [], []
        if self.weight is not None:
            width = self.weight.tensor.shape[1]
            place = self.weight.local // width, self.weight.local % width
            rows.append(place[self.transposed])
            columns.append(place[not self.transposed])
        if self.bias is not None:
            rows.append(self.bias.local)
            columns.append(torch.full_like(self.bias.local, -1))
        return torch.cat(rows), torch.cat(columns)

    def gradients(self, x: Tensor, dy: Tensor, flipped: bool) -> list[Tensor]:
        """Return the gradients ``(s,)`` of the weight and the bias, from ``x (N, in)`` and ``dy (N, out)``; see `_Tap`."""
        found = []
        if self.weight is not None:
            assert self._products is not None
            found.append(self._products.of(*((x, dy) if self.transposed != flipped else (dy, x))))
        if self.bias is not None and not flipped:
            found.append(values_at(dy.sum(0), self.bias.local))
        return found


class _Layout:
    """The order in which the gradients of pieces are computed, and their order in the vector ``values (s,)``."""

    def __init__(self, pieces: Sequence[Piece], layers: Sequence[_Layer], values: Tensor) -> None:
        self._pieces, self._dtype = pieces, values.dtype
        self._sizes = [len(piece.local) for piece in pieces]
        #: On the CPU each layer computes its own products.
        self.numbers = {} if values.device.type == "cpu" else {id(layer): number for number, layer in enumerate(layers)}
        self.flat = FlatProducts([layer.places() for layer in layers], values.dtype) if self.numbers else None
        together = [piece for layer in layers for piece in layer.pieces] if self.numbers else []
        self._no_products = values.new_zeros(sum(len(piece.local) for piece in together))
        order = [*together, *(piece for piece in pieces if piece not in together)]
        starts, end = {}, 0
        for piece in order:
            starts[id(piece)] = end
            end += self._width(piece)
        self._alone = order[len(together) :]
        self._zeros = {id(piece): values.new_zeros(self._width(piece)) for piece in self._alone}
        everything = torch.arange(len(values), device=values.device)
        self._where = dict(zip(map(id, pieces), torch.split(everything, self._sizes), strict=True))
        at = [
            starts[id(piece)] + (piece.local if piece.is_handed_on else everything[: len(piece.local)])
            for piece in pieces
        ]
        self._at = torch.cat(at) if at else everything

    def _width(self, piece: Piece) -> int:
        return piece.tensor.numel() if piece.is_handed_on else len(piece.local)

    def leaves(self, values: Tensor) -> list[Tensor]:
        """Return two leaves for each tapped piece and one for each other, in the memory of the values or of a tensor."""
        leaves = []
        for piece, part in zip(self._pieces, torch.split(values, self._sizes), strict=True):
            leaves += [part, part] if piece.is_tapped else [piece.tensor if piece.is_handed_on else part]
        return [leaf.data for leaf in leaves]

    def gradient(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the gradient ``(s,)`` of the values from the gradients of the leaves."""
        given, found = iter(gradients), {}
        for piece in self._pieces:
            ways = [next(given), next(given)] if piece.is_tapped else [next(given)]
            parts = [each.reshape(-1) for each in ways if each is not None]
            if parts:
                found[id(piece)] = parts[0] if len(parts) == 1 else parts[0] + parts[1].to(parts[0].dtype)
        sums = None if self.flat is None else self.flat.sums()
        sources = [self._no_products if sums is None else sums]
        sources += [found.pop(id(piece), self._zeros[id(piece)]) for piece in self._alone]
        gradient = torch.cat(sources).index_select(0, self._at).to(self._dtype)
        for number, each in found.items():  # of large layers, other reads, second derivatives
            gradient = gradient.index_add(0, self._where[number], each.to(self._dtype))
        return gradient


class _Leaves(torch.autograd.Function):
    """Splits the values ``(s,)`` into leaves and collects the leaves' gradients, from any number of passes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, layout: _Layout) -> tuple[Tensor, ...]:
        """Return the leaves of a layout."""
        ctx.set_materialize_grads(False)
        ctx.layout = layout
        return tuple(layout.leaves(values))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Return the gradient ``(s,)`` of the values."""
        return ctx.layout.gradient(gradients), None


class _Entries(torch.autograd.Function):
    """The identity on a tensor; ``leaf`` gets the gradients of the entries ``local``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, leaf: Tensor, local: Tensor) -> Tensor:
        """Return ``tensor``, without copying it."""
        ctx.at = leaf.dtype, local
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of the entries."""
        dtype, local = ctx.at
        return None, values_at(gradient, local).to(dtype), None


class _Tap(torch.autograd.Function):
    """The identity on a layer's output ``y``; its backward pass gives the gradients of the layer's pieces.

    If ``flipped``, it is the identity on a gradient dx = dy W, with dy as ``x``, and gives the gradient of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, layer: _Layer, layout: _Layout, flipped: bool, *leaves: Tensor
    ) -> Tensor:
        """Return ``y`` as a tensor of its own, which the model may change in place."""
        # Under autocast PyTorch keeps a copy of x in half precision; all products together need none.
        ctx.save_for_backward(x if layout.numbers else x.to(y.dtype))
        ctx.of = layer, layout, flipped, leaves
        return y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Return ``dy`` for ``y``, and the gradients ``(s,)`` for the leaves."""
        (x,), (layer, layout, flipped, leaves) = ctx.saved_tensors, ctx.of
        rows, dy_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        again = torch.is_grad_enabled()  # gradients of these gradients are wanted
        if layout.numbers and not (again or flipped) and layout.flat.add(layout.numbers[id(layer)], dy_rows, rows):
            return dy, *[None] * (4 + len(leaves))
        gradients = layer.gradients(rows.to(dy.dtype), dy_rows, flipped)
        dx = None  # y passes dy on to x; but a second derivative, of dx = dy W, has a term for W, too
        if again and layer.weight is not None:
            dx = _Tap.apply(torch.zeros_like(x), dy, layer, layout, not flipped, leaves[0])
        return dy, dx, None, None, None, *(each.to(leaf.dtype) for leaf, each in zip(leaves, gradients, strict=False))


# -- The taps of a model ------------------------------------------------------------------------------------


class Taps:
    """Gives the gradients of some entries of a model to one vector, in autograd's graph.

    Args:
        model: the model that computes.
        values: the vector ``(s,)``, which requires gradients.
        pieces: the tensors with such entries, each with the entries' numbers, in the order of the values.

    Raises:
        TrainingError: a tensor belongs to a scripted module.
    """

    def __init__(self, model: nn.Module, values: Tensor, pieces: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        self._model, self._values = model, values
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        self.pieces = [Piece(names[id(tensor)], tensor, local) for tensor, local in pieces]
        self._layers = self._find_layers()
        self._layout: _Layout | None = None
        self._watches: list[Any] = []  # hooks of the first pass
        self._is_watched = False  # whether the parameters require gradients now
        self._past: set[str] = set()  # the names of tensors that the model reads by references of its own

    def _find_layers(self) -> dict[nn.Module, _Layer]:
        """Find the modules that hold the pieces, and return the linear layers among them."""
        pieces = {id(piece.tensor): piece for piece in self.pieces}
        for module in self._model.modules():
            for name, tensor in module._parameters.items():
                if (piece := pieces.get(id(tensor))) is None:
                    continue
                if isinstance(module, torch.jit.ScriptModule):
                    raise TrainingError(
                        f"{piece.name!r} stands in a scripted module (torch.jit.script), which reads it by itself. Use the "
                        "module as it was before."
                    )
                piece.places.append((module, name))
        layers: dict[nn.Module, _Layer] = {}
        for piece in self.pieces:
            (module, role), *more = piece.places
            if not more and role in ("weight", "bias") and _is_linear(module):
                setattr(layers.setdefault(module, _Layer(module)), role, piece)
                piece.is_tapped = True
        return layers

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let the model's passes give their gradients to the vector inside the block."""
        with ExitStack() as stack:
            stack.callback(self._detach)
            self._watch()
            for module, layer in self._layers.items():
                for hook in (
                    module.register_forward_pre_hook(Hook(partial(self._step_aside, layer))),
                    module.register_forward_hook(Hook(partial(self._tap, layer)), with_kwargs=True, prepend=True),
                    module.register_forward_hook(Hook(partial(self._step_back, layer)), always_call=True),
                ):
                    stack.callback(hook.remove)
            for module in {module for piece in self.pieces for module, _ in piece.places}:
                vars(module)["__getstate__"] = partial(_state_of, module)
                stack.callback(vars(module).pop, "__getstate__")
            self.renew()
            yield
            self.check()

    def _detach(self) -> None:
        self._end_watch()
        self._layout = None
        for piece in self.pieces:
            piece.take_part(None)
            piece.leaf = piece.graph = None

    def renew(self) -> None:
        """Make the leaves again, after the vector or a tensor has moved in memory."""
        with torch.inference_mode(False), torch.enable_grad():
            for piece in self.pieces:
                piece.local = piece.local.to(self._values.device)
            for layer in self._layers.values():
                layer.prepare(self._values.dtype)
            self._layout = _Layout(self.pieces, list(self._layers.values()), self._values)
            leaves = iter(_Leaves.apply(self._values, self._layout))
            for piece in self.pieces:
                piece.leaf = next(leaves) if piece.is_tapped else None
                piece.graph = next(leaves)
                if not piece.is_handed_on:
                    piece.graph = _Entries.apply(piece.tensor.data, piece.graph, piece.local)
                piece.take_part(piece.graph)

    # -- In a pass ------------------------------------------------------------------------------------------

    def _step_aside(self, layer: _Layer, module: nn.Module, inputs: Any) -> None:
        """Let a layer read its parameters themselves: the tap gives their gradients."""
        for piece in layer.pieces:
            if module._parameters[piece.places[0][1]] is not piece.tensor:
                raise no_transforms()
            piece.take_part(None)
            if self._is_watched:
                piece.tensor.requires_grad_(False)

    def _step_back(self, layer: _Layer, *_: Any) -> None:
        for piece in layer.pieces:
            piece.take_part(piece.graph)
            if self._is_watched:
                piece.tensor.requires_grad_(True)

    def _tap(self, layer: _Layer, module: nn.Module, inputs: Any, named: Mapping[str, Any], y: Any) -> Any:
        """Return the output of a linear layer with a tap."""
        if not torch.is_grad_enabled():
            return None
        if torch._C._are_functorch_transforms_active():
            raise no_transforms()
        (x,) = inputs or named.values()
        if self._layout is not None and self._layout.flat is not None:
            self._layout.flat.forget_unread()
        return _Tap.apply(y, x, layer, self._layout, False, *(piece.leaf for piece in layer.pieces))

    # -- In the first pass: does the model read a tensor by a stored reference? --------------------------

    def _watch(self) -> None:
        """Let the parameters require gradients while the model runs: only such a reference can give them one."""

        def begin(*_: Any) -> None:
            if self._past or self._has_passed:
                self._end_watch()
                self.check()
            elif torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
                require(True)

        def require(flag: bool) -> None:
            self._is_watched = flag
            for piece in self.pieces:
                piece.tensor.requires_grad_(flag)

        def end(*_: Any) -> None:
            if self._is_watched:
                require(False)

        def note(piece: Piece, gradient: Tensor) -> None:
            if bool(values_at(gradient, piece.local).any()):
                self._past.add(piece.name)

        def passed(gradient: Tensor) -> None:
            self._has_passed = True

        self._has_passed = False
        require(True)
        self._watches = [piece.tensor.register_hook(Hook(partial(note, piece))) for piece in self.pieces]  # type: ignore[no-untyped-call]
        require(False)
        self._watches += [
            self._values.register_hook(Hook(passed)),  # type: ignore[no-untyped-call]
            self._model.register_forward_pre_hook(Hook(begin)),
            self._model.register_forward_hook(Hook(end), always_call=True),
        ]

    def _end_watch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            for piece in self.pieces:
                piece.tensor.requires_grad_(False)
        while self._watches:
            self._watches.pop().remove()

    def check(self) -> None:
        """Raise ``TrainingError`` if the model has read a tensor past the module that holds it."""
        if self._past:
            raise TrainingError(
                f"The model reads {listed(sorted(self._past))} by a stored reference and not as an attribute of its module, "
                "so its entries would get no gradient. Let it read the attribute, or leave the tensor out by graftable=…, a "
                "regular expression."
            )


def no_transforms() -> TrainingError:
    """Return the error for a trainer that computes within a transform of ``torch.func``."""
    return TrainingError(
        "The trainer computes within a transform of torch.func (vmap, grad, jvp, functional_call), which hands no gradients on "
        "to a region. Compute by backward(), or under torch.no_grad() where no gradient of the weights is wanted."
    )


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Return the state for a copy of a module, without the tensors that stand in for its parameters."""
    state: Any = type(module).__getstate__(module)  # type: ignore[no-untyped-call]
    return {name: each for name, each in state.items() if name not in module._parameters and name != "__getstate__"}


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module computes ``x Wᵀ + b`` or transformers' ``x W + b``, and uses W and b only for that."""
    return type(module).forward is nn.Linear.forward or is_conv1d(module)
