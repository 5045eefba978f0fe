"""BitFit: each task trains its own biases and nothing else (Ben Zaken et al., 2022)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

from forgetfree.continual.regions import RegionStrategy, TaskRegions, check_region_rate
from forgetfree.continual.strategy import Training
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.continual.task_training import Skill
from forgetfree.core.regions import biases


class BitFit(RegionStrategy):
    """Train all biases from θ_pre, those of LayerNorm included (Ben Zaken et al., 2022, arXiv:2106.10199, §3).

    The paper trains one model a task; so does this, and keeps the biases of each. With AdamW the rate is `learning_rate`
    times √(N/s), about 20 to 30 for a transformer: what the paper's rates for biases are to those for whole models.
    Difference: embeddings, pooler and LM head are no part of the parameter space, so that their biases stay.
    """

    resumable: ClassVar[bool] = True

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse a model without a bias."""
        check_region_rate(options)
        biases(stream.model.space())

    def setup(self) -> None:
        """Make an empty ledger, in which each task stands alone."""
        self.regions = TaskRegions(self, "alone")
        self._biases = biases(self.space)

    def begin(self, task: EncodedTask) -> Training:
        """Train all biases."""
        self.regions.ledger.check_new(task.name)
        return self.regions.training(task, Skill(self._biases, len(self._biases) / len(self.space)))

    def commit(self, task: EncodedTask, training: Training) -> None:
        """Record the biases."""
        self.regions.commit(training)

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Answer with the task's own biases."""
        return self.regions.answering(task)
