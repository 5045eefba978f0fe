"""A strategy and a stream of your own, for forgetfree."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.strategy_parts import Training
from forgetfree.options import option
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.training_options import TrainingOptions

#: Task names, in order.
STREAM = ("sst2", "qnli")


class MyOptions(TrainingOptions):
    """Options of `MyStrategy`, in addition to those of training."""

    pull: float = option(0.01, "share of the way back to θ_pre at the end of each step", at_least=0, at_most=1)


class MyStrategy(ContinualStrategy):
    """Train everything on each task in turn, pulled back towards θ_pre (as L2-SP does, Li et al., 2018; here decoupled)."""

    Options: ClassVar[type[TrainingOptions]] = MyOptions

    def begin(self, task: EncodedTask) -> Training:
        """Train every tensor, and pull each one back after every update."""
        anchors = self.space.views(self.pre_trained.theta.to(self.device))
        return self.everything(
            task, trained=Leashed(self.space.parameters(self.model.backbone), anchors, self.options.pull)
        )

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Answer with the one model, as it is."""
        return nullcontext()


class Leashed:
    """Tensors that are trained in place and pulled back towards their anchors after each update."""

    def __init__(self, tensors: list[nn.Parameter], anchors: list[Tensor], pull: float) -> None:
        self.parameters = self.touched = tensors
        self._anchors, self._pull = anchors, pull

    def collect(self) -> None:
        """Do nothing: the optimiser reads the gradients from the tensors themselves."""

    @torch.no_grad()
    def write(self) -> None:
        """Pull each tensor towards its anchor."""
        for tensor, anchor in zip(self.touched, self._anchors, strict=True):
            tensor.lerp_(anchor, self._pull)
