"""LoRA: low-rank adapters per task, each on θ_pre alone. Nothing is shared, nothing forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from forgetfree.continual.strategy import ContinualStrategy, TaskwiseOptions, Training
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.learning.cost import Cost, TaskSize
from forgetfree.learning.training_options import TrainingOptions
from forgetfree.strategies.lora.task_adapters import AdapterOptions, TaskAdapters, adapters_cost, check_targets


@dataclass(frozen=True, kw_only=True)
class LoRAOptions(AdapterOptions, TaskwiseOptions):
    """Adapters, and a model per task."""


class LoRA(ContinualStrategy):
    """Low-rank adapters per task: W = W_pre + (α/r)·B·A, with W_pre frozen (Hu et al., 2021, arXiv:2106.09685, eq. 3).

    The paper adapts one task; here each task of the stream gets adapters of its own on θ_pre and is answered by them, so
    what other tasks do cannot reach it. A task that is not learned yet is answered by θ_pre. A task met again is refused.
    The layers are PEFT's usual ones, as in the paper query and value.
    """

    Options: ClassVar[type[TrainingOptions]] = LoRAOptions
    forget_free: ClassVar[bool] = True
    resumable: ClassVar[bool] = True

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse a model without layers to adapt."""
        check_targets(cls.__name__, options, stream)

    @classmethod
    def cost(cls, options: Any, tasks: Sequence[TaskSize]) -> Cost:
        """A training a task, which keeps its adapters."""
        return adapters_cost(options, tasks)

    def setup(self) -> None:
        """Make adapters that act alone, none so far."""
        self.adapters = TaskAdapters(self, joint=False)

    def begin(self, task: EncodedTask) -> Training:
        """Train new adapters on θ_pre, and the task's readout."""
        return self.adapters.training(task)

    def commit(self, task: EncodedTask, training: Training) -> None:
        """Keep the adapters for good."""
        self.adapters.commit(task)

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Answer with the task's own adapters."""
        return self.adapters.answering(task)

    def changed_by(self, learned: EncodedTask) -> list[EncodedTask] | None:
        """Return the learned task alone, where the task is known: each is answered by its own adapters."""
        return [learned] if self.stream.scenario == "task" else None
