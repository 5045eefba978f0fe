"""A strategy and a stream of your own, for forgetfree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.streams import EncodedTask
from forgetfree.learning.training import TrainingOptions
from forgetfree.options import option

#: Task names, in order.
STREAM = ("sst2", "qnli")


@dataclass(frozen=True, kw_only=True)
class MyOptions(TrainingOptions):
    """What `MyStrategy` takes beside the options of training."""

    pull: float = option(0.01, "share of the way back to θ_pre at the end of each step", at_least=0, at_most=1)


class MyStrategy(ContinualStrategy):
    """Train everything on each task in turn, pulled back towards θ_pre (as L2-SP does, Li et al., 2018; here decoupled)."""

    Options: ClassVar[type[TrainingOptions]] = MyOptions

    def prepare(self, task: EncodedTask) -> None:
        """θ_pre tensor by tensor."""
        self._anchors = self.space.views(self.pristine.theta.to(self.device))

    @torch.no_grad()
    def after_step(self) -> None:
        """Some of the way back."""
        for parameter, anchor in zip(self.space.parameters(self.task_model.backbone), self._anchors, strict=True):
            parameter.lerp_(anchor, self.options.pull)
