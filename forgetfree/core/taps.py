"""Taps: every entry of a region has the gradient that plain training gives it, and no other gradient is computed.

A linear layer is tapped at its boundary, whatever its ``forward`` does inside: a node of autograd's graph, the identity of its
output y, keeps its input x, and when ∂L/∂y comes by, gives the entries of ∂L/∂W = (∂L/∂y)ᵀ x. Every other tensor takes part as
a tensor of the graph, which its module has as its attribute in place of the frozen parameter.

In the first backward pass, the tensors of tapped layers take part in both ways. A layer is left to its tap if both agree there:
then no other function reads its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.core.parameters import values_at
from forgetfree.core.products import EntriesOfProduct, FlatProducts
from forgetfree.display import listed
from forgetfree.errors import TrainingError

#: The ways in which the entries of a tensor get their gradients.
TAP, WHOLE, BOTH = "tap", "whole", "both"

#: The difference between both ways that rounding explains, beside the norm of Σ|∂L/∂y|·|x|.
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}


class Hook:
    """A hook that copies of the model do not have: such a copy, a reference model say, stays as it was copied."""

    def __init__(self, action: Callable[..., Any] | None = None) -> None:
        self._action = action

    def __call__(self, *arguments: Any) -> Any:
        """Do it."""
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
        form: the way in which they get their gradients.
        reached: whether one of them has had a gradient other than 0.
    """

    def __init__(self, name: str, tensor: nn.Parameter, local: Tensor) -> None:
        self.name, self.tensor, self.local = name, tensor, local
        self.form, self.reached = WHOLE, False
        self.places: list[tuple[nn.Module, str]] = []  # the modules that hold it, with its name there
        self.leaf: Tensor | None = None  # gets the gradients of the tap
        self.rounding: Tensor | None = None  # that explains a difference between both ways
        self.agreements: list[Tensor] = []  # of backward passes: 1 yes, 0 no, −1 nothing to compare

    @property
    def is_handed_on(self) -> bool:
        """Whether the gradient of the whole tensor comes to the leaf; else that of its entries does."""
        return self.form == WHOLE and self.tensor.dim() == 1

    def take_part(self, tensor: Tensor | None) -> None:
        """Let a tensor take part in the parameter's place, or the parameter itself."""
        for module, name in self.places:
            vars(module).pop(name, None)
            if tensor is not None:
                vars(module)[name] = tensor  # is found before the parameter, which the module still holds

    def compared(self, tap: Tensor | None, whole: Tensor | None) -> Tensor | None:
        """Return the gradient ``(s,)`` of a backward pass: that of the tap where it agrees with plain training's."""
        if tap is None:
            if whole is not None:
                self.agreements.append(-whole.eq(0).all().long())
            return whole
        assert self.rounding is not None
        rounding, self.rounding = self.rounding, None
        plain = torch.zeros_like(tap) if whole is None else whole.to(tap.dtype)
        agree = (tap - plain).norm() <= rounding
        self.agreements.append(torch.where(torch.isfinite(rounding) & (rounding > 0), agree.long(), -1))
        return torch.where(agree, tap, plain)


class _Layer:
    """A linear layer, and the pieces that are its weight and its bias."""

    def __init__(self, module: nn.Module) -> None:
        self.transposed = not isinstance(module, nn.Linear)  # transformers' Conv1D keeps (in, out)
        self.weight: Piece | None = None
        self.bias: Piece | None = None
        self._products: EntriesOfProduct | None = None

    @property
    def pieces(self) -> list[Piece]:
        """The weight's and the bias's, as far as they are trained."""
        return [piece for piece in (self.weight, self.bias) if piece is not None]

    def prepare(self, dtype: torch.dtype) -> None:
        """Find the places of the weight's entries, on the device that they are on."""
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

    def note_rounding(self, x: Tensor, dy: Tensor, flipped: bool) -> None:
        """Note by how much both ways may differ."""
        sums = self.gradients(x.detach().abs(), dy.detach().abs(), flipped)
        for piece, each in zip(self.pieces, sums, strict=False):
            rounding = each.norm() * _ROUNDING[dy.dtype]
            piece.rounding = rounding if piece.rounding is None else piece.rounding + rounding


class _Layout:
    """The pieces of a vector in the forms that they have at one time, and the order of their gradients."""

    def __init__(self, pieces: Sequence[Piece], layers: Sequence[_Layer], values: Tensor) -> None:
        self.pieces, self.forms = pieces, [piece.form for piece in pieces]
        flat = [layer for layer in layers if all(piece.form == TAP for piece in layer.pieces)]
        self.flat_numbers: dict[int, int] = {}
        self.flat: FlatProducts | None = None
        together: list[Piece] = []
        if values.device.type != "cpu" and flat:
            self.flat_numbers = {id(layer): number for number, layer in enumerate(flat)}
            self.flat = FlatProducts([layer.places() for layer in flat], values.dtype)
            together = [piece for layer in flat for piece in layer.pieces]
        inside = {id(piece) for piece in together}
        self.alone = [number for number, piece in enumerate(pieces) if id(piece) not in inside]
        self._no_flat = values.new_zeros(sum(len(piece.local) for piece in together))
        self._zeros = {}
        starts, end = {}, 0
        for piece in together:
            starts[id(piece)] = end
            end += len(piece.local)
        for number in self.alone:
            piece = pieces[number]
            starts[id(piece)] = end
            self._zeros[number] = values.new_zeros(piece.tensor.numel() if piece.is_handed_on else len(piece.local))
            end += len(self._zeros[number])
        at = [
            starts[id(piece)]
            + (piece.local if piece.is_handed_on else torch.arange(len(piece.local), device=values.device))
            for piece in pieces
        ]
        self._at = torch.cat([torch.empty(0, dtype=torch.long, device=values.device), *at])
        self._dtype = values.dtype
        ends = torch.tensor([0, *(len(piece.local) for piece in pieces)], device="cpu").cumsum(0).tolist()
        self._together = [
            (number, torch.arange(ends[number], ends[number + 1], device=values.device))
            for number, piece in enumerate(pieces)
            if id(piece) in inside
        ]

    def leaves(self, values: Tensor) -> list[Tensor]:
        """Return a leaf for each way of each piece, in the memory of the values or of a tensor."""
        leaves = []
        for piece, part in zip(
            self.pieces, torch.split(values, [len(piece.local) for piece in self.pieces]), strict=True
        ):
            leaves += [part] if piece.form in (TAP, BOTH) else []
            leaves += [piece.tensor.data if piece.is_handed_on else part] if piece.form in (WHOLE, BOTH) else []
        return [leaf.data for leaf in leaves]

    def gradient(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the gradient ``(s,)`` of the values from those of the leaves."""
        given = iter(gradients)
        found: list[Tensor | None] = []
        for piece, form in zip(self.pieces, self.forms, strict=True):
            tap = next(given) if form in (TAP, BOTH) else None
            whole = next(given) if form in (WHOLE, BOTH) else None
            found.append(piece.compared(tap, whole) if form == BOTH else tap if form == TAP else whole)
            piece.reached = piece.reached or (found[-1] is not None and bool(found[-1].any()))
        sums = None if self.flat is None else self.flat.sums()
        sources = [self._no_flat if sums is None else sums]
        for number in self.alone:
            each = found[number]
            sources.append(self._zeros[number] if each is None else each.reshape(-1))
        gradient = torch.cat(sources).index_select(0, self._at).to(self._dtype)
        for number, where in self._together:  # gradients of gradients come by themselves
            if (each := found[number]) is not None:
                gradient = gradient.index_add(0, where, each)
        return gradient


class _Leaves(torch.autograd.Function):
    """The values ``(s,)`` as leaves that hand their gradients on to them: any number of passes may use them."""

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
    """The identity of a tensor some entries of which are ``leaf``: it gives those gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, leaf: Tensor, local: Tensor) -> Tensor:
        """Return ``tensor``, which is not copied."""
        ctx.at = leaf.dtype, local
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of the entries."""
        dtype, local = ctx.at
        return None, values_at(gradient, local).to(dtype), None


class _Tap(torch.autograd.Function):
    """The identity of a layer's output ``y``: it gives the gradients of the layer's pieces.

    ``flipped``, it is the identity of a gradient dx = dy W, where ``x`` is dy: it gives that of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, layer: _Layer, layout: _Layout, flipped: bool, *leaves: Tensor
    ) -> Tensor:
        """Return ``y`` as a tensor of its own, which the model may change in place."""
        # Under autocast PyTorch keeps a copy of x in half precision; all products together need none.
        ctx.save_for_backward(x if id(layer) in layout.flat_numbers else x.to(y.dtype))
        ctx.of = layer, layout, flipped, leaves
        return y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Return ``dy`` for ``y``, and the gradients ``(s,)`` for the leaves."""
        (x,), (layer, layout, flipped, leaves) = ctx.saved_tensors, ctx.of
        rows, dy_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        again = torch.is_grad_enabled()  # gradients of these gradients are wanted
        if id(layer) in layout.flat_numbers and not (again or flipped):
            layout.flat.add(layout.flat_numbers[id(layer)], dy_rows, rows)
            return dy, *[None] * (4 + len(leaves))
        rows = rows.to(dy.dtype)
        gradients = layer.gradients(rows, dy_rows, flipped)
        if any(piece.form == BOTH for piece in layer.pieces):
            layer.note_rounding(rows, dy_rows, flipped)
        dx = None  # y passes dy on to x; but who differentiates that, dx = dy W, differentiates by W, too
        if again and layer.weight is not None:
            dx = _Tap.apply(torch.zeros_like(x), dy, layer, layout, not flipped, leaves[0])
        return dy, dx, None, None, None, *(each.to(leaf.dtype) for leaf, each in zip(leaves, gradients, strict=False))


# -- The taps of a model ------------------------------------------------------------------------------------


class Taps:
    """The gradients of some entries of a model as those of one vector, in autograd's graph.

    Args:
        model: whose modules compute.
        values: the vector ``(s,)``, which requires gradients.
        pieces: each tensor that has such entries, with their numbers in it, in the order of the values.

    Raises:
        TrainingError: a tensor stands in a scripted module.
    """

    def __init__(self, model: nn.Module, values: Tensor, pieces: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        self._model, self._values = model, values
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        self.pieces = [Piece(names[id(tensor)], tensor, local) for tensor, local in pieces]
        self._layers = self._find_layers()
        self._layout: _Layout | None = None
        self._watches: list[Any] = []  # hooks of the first pass
        self._past: set[str] = set()  # the names of tensors that got a gradient past what takes part in their place

    def _find_layers(self) -> dict[nn.Module, _Layer]:
        """Find where the pieces stand, and return the linear layers that can be tapped."""
        pieces = {id(piece.tensor): piece for piece in self.pieces}
        parents: dict[nn.Module, nn.Module] = {}
        for module in self._model.modules():
            parents |= dict.fromkeys(module.children(), module)
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
            if not more and role in ("weight", "bias") and _is_linear(module, parents.get(module)):
                setattr(layers.setdefault(module, _Layer(module)), role, piece)
                piece.form = BOTH
        return layers

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let the model's passes hand their gradients on to the vector inside."""
        with ExitStack() as stack:
            stack.callback(self._detach)
            for module, layer in self._layers.items():
                tap = Hook(partial(self._tap, layer))
                stack.callback(module.register_forward_hook(tap, with_kwargs=True, prepend=True).remove)
            for module in {module for piece in self.pieces for module, _ in piece.places}:
                vars(module)["__getstate__"] = partial(_state_of, module, {name for name in module._parameters})
                stack.callback(vars(module).pop, "__getstate__")
            stack.callback(self._model.register_forward_pre_hook(Hook(self._settle)).remove)
            self._watch()
            self.renew()
            yield
            self.check()

    def _detach(self) -> None:
        self._end_watch()
        self._layout = None
        for piece in self.pieces:
            piece.leaf = None
            piece.take_part(None)

    def renew(self) -> None:
        """Make the leaves anew: the vector, a tensor or the form of a piece is another one now."""
        for piece in self.pieces:
            piece.local = piece.local.to(self._values.device)
        for layer in self._layers.values():
            layer.prepare(self._values.dtype)
        with torch.inference_mode(False), torch.enable_grad():
            self._layout = _Layout(self.pieces, list(self._layers.values()), self._values)
            leaves = iter(_Leaves.apply(self._values, self._layout))
            for piece in self.pieces:
                piece.leaf = None if piece.form == WHOLE else next(leaves)
                leaf = None if piece.form == TAP else next(leaves)
                if leaf is not None and not piece.is_handed_on:
                    leaf = _Entries.apply(piece.tensor.data, leaf, piece.local)
                piece.take_part(leaf)

    @property
    def unreached(self) -> list[str]:
        """The names of the tensors of which no entry has had a gradient other than 0."""
        return [piece.name for piece in self.pieces if not piece.reached]

    # -- In a pass ------------------------------------------------------------------------------------------

    def _tap(self, layer: _Layer, module: nn.Module, inputs: Any, named: Mapping[str, Any], y: Any) -> Any:
        """Return the output of a linear layer with a tap."""
        if not torch.is_grad_enabled():
            return None
        leaves = [piece.leaf for piece in layer.pieces if piece.leaf is not None]
        x = inputs[0] if inputs else next(iter(named.values()), None)
        if not (leaves and isinstance(x, Tensor) and isinstance(y, Tensor)):
            return None
        if torch._C._are_functorch_transforms_active():
            raise TrainingError(
                "The trainer computes within a transform of torch.func (vmap, grad, jvp), which hands no gradients on to a "
                "region. Compute by backward(), or under torch.no_grad() where no gradient of the weights is wanted."
            )
        return _Tap.apply(y, x, layer, self._layout, False, *leaves)

    def _settle(self, *_: Any) -> None:
        """Leave pieces to their taps, if a backward pass has shown that these give the gradients of plain training."""
        compared = [piece for piece in self.pieces if piece.agreements]
        if not compared or torch._C._current_graph_task_id() != -1:  # in which a checkpoint calls the model again
            return
        self._end_watch()
        self.check()
        found = iter(torch.stack([each for piece in compared for each in piece.agreements]).tolist())
        for piece in compared:
            agreements = {next(found) for _ in piece.agreements}
            piece.agreements = []
            if agreements != {-1}:
                piece.form = WHOLE if 0 in agreements else TAP
        for layer in self._layers.values():
            if any(piece.form == WHOLE for piece in layer.pieces):  # what reads one of them may read the other
                for piece in layer.pieces:
                    piece.form = WHOLE
        self.renew()

    # -- In the first pass: does the model read a tensor by a reference of its own? --------------------------

    def _watch(self) -> None:
        """Let the parameters require gradients while the model runs: only such a reference can give them one."""

        def require(flag: bool, *_: Any) -> None:
            if self._watches and not torch._C._are_functorch_transforms_active():
                for piece in self.pieces:
                    piece.tensor.requires_grad_(flag)

        def note(piece: Piece, gradient: Tensor) -> None:
            if bool(values_at(gradient, piece.local).any()):
                self._past.add(piece.name)

        for piece in self.pieces:
            piece.tensor.requires_grad_(True)
            self._watches.append(piece.tensor.register_hook(Hook(partial(note, piece))))  # type: ignore[no-untyped-call]
            piece.tensor.requires_grad_(False)
        self._watches.append(self._model.register_forward_pre_hook(Hook(partial(require, True))))
        self._watches.append(self._model.register_forward_hook(Hook(partial(require, False)), always_call=True))

    def _end_watch(self) -> None:
        if self._watches:
            for piece in self.pieces:
                piece.tensor.requires_grad_(False)
        while self._watches:
            self._watches.pop().remove()

    def check(self) -> None:
        """Raise ``TrainingError`` if the model has read a tensor past the module that holds it."""
        if self._past:
            raise TrainingError(
                f"The model reads {listed(sorted(self._past))} by a reference of its own, past the module that holds it, so "
                "its entries would get no gradient. Let it read an attribute of the module; or leave the tensor out by "
                "graftable=…, a regular expression."
            )


def _state_of(module: nn.Module, names: Collection[str]) -> dict[str, Any]:
    """Return what a copy of a module takes over: not what takes part in the place of its parameters."""
    return {name: each for name, each in vars(module).items() if name not in names and name != "__getstate__"}


#: Modules of PyTorch that only call what they hold.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _is_linear(module: nn.Module, parent: nn.Module | None) -> bool:
    """Return whether a module is a linear layer by whose call its weight is read.

    PyTorch's own modules, such as ``nn.TransformerEncoderLayer``, read those of their layers by themselves, now and then.
    """
    if type(parent).__module__.startswith("torch.nn.") and not isinstance(parent, _CONTAINERS):
        return False
    return (
        isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    )  # of transformers, which is not imported here
