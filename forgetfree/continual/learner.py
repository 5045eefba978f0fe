"""What the parts of a strategy ask of it; they stand below the class, and so cannot name it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from forgetfree.continual.stream import Stream
from forgetfree.continual.task_training import Answer, Training
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.learning.encoded_task import EncodedTask
from forgetfree.learning.task_features import TaskFeatures
from forgetfree.models.state import ModelState


class Learner(Protocol):
    """A strategy, see `forgetfree.continual.strategy.ContinualStrategy` for each of these."""

    options: Any
    learned: list[EncodedTask]
    readouts: dict[str, dict[str, Tensor]]
    training: Training | None
    task_features: TaskFeatures | None

    @property
    def stream(self) -> Stream:
        """The stream that is learned."""

    @property
    def model(self) -> ReadoutModel:
        """The stream's model, with what the strategy left in it."""

    @property
    def pre_trained(self) -> ModelState:
        """θ_pre."""

    @property
    def taskwise(self) -> bool:
        """Whether each task is answered by a model of its own."""

    def answering(self, task: EncodedTask) -> AbstractContextManager[Answer | None]:
        """Inside, the model is the one that answers for ``task``."""

    def note_learned(self, task: EncodedTask, readout: dict[str, Tensor]) -> None:
        """Note that ``task`` can be answered from now on."""
