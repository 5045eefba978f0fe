"""LoRA: low-rank adapters per task, each on θ_pre alone. Nothing is shared, nothing forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forgetfree.continual.strategy import TaskwiseOptions, Training
from forgetfree.continual.stream import EncodedTask
from forgetfree.strategies.lora.task_adapters import AdapterOptions, AdapterStrategy, TaskAdapters
from forgetfree.training.training_options import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class LoRAOptions(AdapterOptions, TaskwiseOptions):
    """Adapters, and a model per task."""


class LoRA(AdapterStrategy):
    """Low-rank adapters per task: W = W_pre + (α/r)·B·A, with W_pre frozen (Hu et al., 2021, arXiv:2106.09685, eq. 3).

    The paper adapts one task; here each task of the stream gets adapters of its own on θ_pre and is answered by them, so
    what other tasks do cannot reach it. A task that is not learned yet is answered by θ_pre. A task met again is refused.
    The layers are PEFT's usual ones, as in the paper query and value.
    """

    Options: ClassVar[type[TrainingOptions]] = LoRAOptions
    forget_free: ClassVar[bool] = True

    def setup(self) -> None:
        """Make adapters that act alone, none so far."""
        self.adapters = TaskAdapters(self, joint=False)

    def begin(self, task: EncodedTask) -> Training:
        """Train new adapters on θ_pre, and the task's readout."""
        return self.adapters.training(task)

    def changed_by(self, learned: EncodedTask) -> list[EncodedTask] | None:
        """Return the learned task alone, where the task is known: each is answered by its own adapters."""
        return [learned] if self.stream.scenario == "task" else None
