"""What is kept of a model's layers between the passes of training: less than usual, or more.

*Gradient checkpointing* keeps only what enters each layer; the backward pass computes the rest again (arXiv:1604.06174).
Dropout draws the same numbers again, so gradients have the same bits. Models that keep keys and values for writing do without
them inside: there, another order in memory may round otherwise.

*The cache of lower layers* computes the layers below all that is trained once for each row: what leaves them is kept, and later
passes start there. Without dropout, a row's hidden states below the lowest trained layer are the same at every step, up to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from forgetfree.core.body import body_of
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.errors import OptionError


@contextmanager
def layer_checkpoints(model: ReadoutModel, wanted: bool) -> Iterator[None]:
    """Inside, passes with gradients keep of each layer what enters it, if ``wanted``.

    Transformers' own switch works in training mode alone, and a model without dropout is not in it.

    Args:
        model: whose backbone has lists of layers of one class.
        wanted: else nothing happens.

    Raises:
        OptionError: the backbone has none.
    """
    if not wanted:
        yield
        return
    layers = [layer for stack in stacks_of(model.backbone) for layer in stack]
    if not layers:
        raise OptionError(
            f"gradient_checkpointing needs a list of layers of one class, and {type(model.backbone).__name__} has none. "
            "Leave it out."
        )
    with ExitStack() as undo:
        for layer in layers:
            vars(layer)["forward"] = partial(_recomputed, layer.forward)
            undo.callback(vars(layer).pop, "forward")
        config: Any = getattr(body_of(model), "config", None)
        if getattr(config, "use_cache", False):  # a layer that is computed twice would put its keys there twice
            config.use_cache = False
            undo.callback(setattr, config, "use_cache", True)
        yield


def _recomputed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def stacks_of(backbone: nn.Module) -> list[nn.ModuleList]:
    """Return the outermost lists of at least two modules of one class."""
    if isinstance(backbone, nn.ModuleList) and len(backbone) > 1 and len({type(each) for each in backbone}) == 1:
        return [backbone]
    return [stack for child in backbone.children() for stack in stacks_of(child)]


# -- The cache of lower layers ---------------------------------------------------------------------------


@contextmanager
def lower_layer_cache(model: ReadoutModel, wanted: bool) -> Iterator[None]:
    """Inside, passes with gradients compute the layers below all that is trained once for each row, if ``wanted``.

    What is trained is found by the first pass; no other tensor may change inside. Passes without gradients, such as those of
    evaluation, compute all layers.

    Args:
        model: a model of token ids, not in training mode.
        wanted: else nothing happens.

    Raises:
        OptionError: it is not such a model, or its layers are none of those that `LowerLayers` can answer for.
    """
    if not wanted:
        yield
        return
    vars(model)["features"] = LowerLayers(model).features
    try:
        yield
    finally:
        del vars(model)["features"]


class LowerLayers:
    """What leaves the layers below all that is trained, for each row: its hidden states ``(L, H)`` without padding.

    It answers for a stack of layers of one class that are called in turn, each once, with hidden states ``(B, L, H)``, and
    return them and nothing else. The first pass shows whether they are, and compares what the model computes with them and
    without.

    Args:
        model: the model; its `features` are computed by those of this class.
    """

    def __init__(self, model: ReadoutModel) -> None:
        self._tokens: Any = getattr(model, "tokens", None)
        layers = next(iter(stacks_of(model.backbone)), None)
        if self._tokens is None:
            raise _refusal(f"rows of token ids, and {type(model).__name__} reads others")
        if layers is None:
            raise _refusal(f"a list of layers of one class, and {type(model.backbone).__name__} has none")
        self._compute: Callable[[Tensor], Tensor] = model.features
        self._layers = layers
        self._kind = type(model.backbone).__name__
        #: What each of the layers below returns beside hidden states: nothing, or a tuple; none before the first pass.
        self._extras: list[tuple[None, ...] | None] | None = None
        self._states: dict[bytes, Tensor] = {}

    def features(self, x: Tensor) -> Tensor:
        """Return the model's features for token ids ``(B, L)``; where it keeps all rows, from the lowest trained layer on."""
        if not torch.is_grad_enabled():
            return self._compute(x)
        if any(module.training for module in self._layers.modules()):
            raise _refusal("layers that are not in training mode, whose dropout or statistics change what leaves them")
        if self._extras is None:
            return self._first(x)
        if all(row in self._states for row in self._rows(x)):
            return self._from_cache(x)
        return self._keep(x)

    def _lengths(self, x: Tensor) -> list[int]:
        lengths: list[int] = self._tokens.attention_mask(x).sum(1).tolist()
        return lengths

    def _rows(self, x: Tensor) -> list[bytes]:
        """Return what names each row: its ids without padding."""
        return [row[:length].numpy().tobytes() for row, length in zip(x.cpu(), self._lengths(x), strict=True)]

    def _with_a_shorter_row(self, x: Tensor) -> Tensor:
        """Return ``(B + 1, L)``: no batch of one row, or without padding, would show what rows or padding do to others."""
        lengths = self._lengths(x)
        row = x[lengths.index(max(lengths))]
        left_out = 2 if row[1:2].eq(-1 if self._tokens.mask is None else self._tokens.mask).any() else 1
        shorter = torch.cat([row[:left_out], row[left_out + 1 :]])
        return pad_sequence([*x, shorter], batch_first=True, padding_value=float(self._tokens.pad))

    def _first(self, x: Tensor) -> Tensor:
        """Find what lies below all that is trained, keep the rows one by one, and compare features with computed ones."""
        features, calls = self._watch(x, list(self._layers))
        if [layer for layer, _ in calls] != list(self._layers):
            raise _refusal(f"layers that are called in turn, each once, and those of {self._kind} are not")
        longest = max(self._lengths(x))
        self._extras = []
        for layer, output in calls:
            hidden, *extras = output if isinstance(output, tuple) else (output,)
            shape = hidden.shape[:-1] if isinstance(hidden, Tensor) else None
            if shape != (len(x), longest) or any(each is not None for each in extras):
                raise _refusal(f"layers that return hidden states and nothing else, and those of {self._kind} do not")
            if hidden.requires_grad or any(parameter.requires_grad for parameter in layer.parameters()):
                break
            self._extras.append(tuple(extras) if isinstance(output, tuple) else None)
        if not self._extras:
            raise _refusal(
                "a first layer in which, and before which, nothing is trained", "Narrow graftable=… to upper layers"
            )
        with torch.no_grad():
            x = self._with_a_shorter_row(x)
            for row, length in zip(x, self._lengths(x), strict=True):
                self._keep(row[None, :length])
            expected, got = self._compute(x).float(), self._from_cache(x).float()
            difference = (got - expected).norm() / expected.norm()
        device = x.device.type
        rounded = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
        if not bool(difference <= torch.finfo(rounded).eps ** 0.5):
            raise _refusal(
                "rows whose hidden states depend on nothing else, and with them kept the output of the first batch is off by "
                f"{float(difference):.1%}"
            )
        return features

    def _watch(self, x: Tensor, layers: list[nn.Module]) -> tuple[Tensor, list[tuple[nn.Module, Any]]]:
        """Return the features, and what ``layers`` returned, in the order of their calls."""
        calls: list[tuple[nn.Module, Any]] = []
        with ExitStack() as hooks:
            for layer in dict.fromkeys(layers):
                handle = layer.register_forward_hook(lambda layer, _, output: calls.append((layer, output)))
                hooks.callback(handle.remove)
            return self._compute(x), calls

    def _keep(self, x: Tensor) -> Tensor:
        """Compute all layers, and keep what leaves those below."""
        assert self._extras is not None
        features, [(_, output)] = self._watch(x, [self._layers[len(self._extras) - 1]])
        hidden = (output[0] if isinstance(output, tuple) else output).detach()
        for row, states in zip(self._rows(x), hidden, strict=True):
            length = len(row) // x.element_size()
            self._states.setdefault(row, states[:length].clone())
        return features

    def _from_cache(self, x: Tensor) -> Tensor:
        """Compute the layers above on what left those below."""
        assert self._extras is not None
        hidden = pad_sequence([self._states[row] for row in self._rows(x)], batch_first=True)
        with ExitStack() as stack:
            for layer, extras in zip(self._layers, self._extras, strict=False):
                stack.enter_context(_answering(layer, hidden if extras is None else (hidden, *extras)))
            return self._compute(x)


@contextmanager
def _answering(layer: nn.Module, answer: Any) -> Iterator[None]:
    """Inside, ``layer`` returns ``answer`` whatever it is called with."""
    own = vars(layer)
    before = {"forward": own["forward"]} if "forward" in own else {}
    own["forward"] = lambda *_, **__: answer
    try:
        yield
    finally:
        del own["forward"]
        own.update(before)


def _refusal(needs: str, remedy: str = "") -> OptionError:
    return OptionError(f"cache_lower_layers needs {needs}. {remedy or 'Leave it out'}.")
