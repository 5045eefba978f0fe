"""Any network that ends in a linear layer, such as Avalanche's own models, with readouts by task."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from forgetfree.core.parameters import ParameterSpace, at_least_float32
from forgetfree.core.readout_model import ReadoutModel, TaskHead
from forgetfree.errors import ModelError, UsageError
from forgetfree.recipes import ModelDtype


class ModuleModel(ReadoutModel):
    """A network whose last linear layer is the readout: one for each task, or one for all.

    Args:
        network: maps inputs to logits. It is copied, and not changed.
        head: the name of the linear layer that is the readout; default: the last linear layer.
        graftable, shared_readout: see `ReadoutModel`. All readouts start from the network's layer.

    Raises:
        ModelError: there is no such layer; or a part of the network is frozen, and ``graftable`` does not say what to train.
    """

    def __init__(
        self,
        network: nn.Module,
        head: str | None = None,
        *,
        graftable: str | None = None,
        shared_readout: bool = False,
    ) -> None:
        layers = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear) and name}
        name = head or next(reversed(layers), "")
        if name not in layers:
            raise ModelError(
                f"{type(network).__name__} has no linear layer {name!r} to read out from. Its linear layers: "
                f"{', '.join(layers) or 'none'}. Name one as head=…"
            )
        backbone = copy.deepcopy(network)
        backbone.set_submodule(name, nn.Identity())
        super().__init__(backbone, "linear", graftable=graftable, shared_readout=shared_readout)
        if graftable is None:
            self.space().check_trainable(backbone, type(network).__name__)
        #: Name of the layer in the network.
        self.head_name = name
        self._head_layer = [copy.deepcopy(layers[name])]  # in a list, so that it is no module of this model

    @property
    def hidden_size(self) -> int:
        """The width of what the readouts read."""
        return self._head_layer[0].in_features

    @property
    def n_labels(self) -> int:
        """The width of every readout: the network's own."""
        return self._head_layer[0].out_features

    def make_linear(self, head: TaskHead, seed: int) -> nn.Linear:
        """Return a copy of the network's own layer, untrained; in float32 at least, so that no small step is rounded away."""
        layer = self._head_layer[0]
        return copy.deepcopy(layer).to(at_least_float32(layer.weight.dtype))

    def space(self) -> ParameterSpace:
        """Return the space of the network without its last layer, and without any tensor excluded by its name."""
        return ParameterSpace.of(self.backbone, include=(self._graftable,), exclude=())

    def features(self, x: Tensor) -> Tensor:
        """Return what the network gives to its last layer: ``(B, H)``."""
        features: Tensor = self.backbone(x)
        return features


def check_own_dtype(network: nn.Module, dtype: ModelDtype) -> None:
    """Raise ``UsageError`` if a network in memory is to be held in another dtype than its own."""
    if dtype != "float32":
        raise UsageError(
            f"dtype={dtype} is for models that are read from files, and a {type(network).__name__} in memory keeps its own "
            "dtype. Leave it out, and give the network in the dtype that you want."
        )
