"""BitFit: each task trains its own biases and nothing else (Ben Zaken et al., 2022)."""

from __future__ import annotations

from typing import Any

from forgetfree.continual.region_strategy import RegionStrategy
from forgetfree.continual.strategy_parts import Training
from forgetfree.continual.stream import Stream
from forgetfree.core.regions import biases
from forgetfree.training.encoded_task import EncodedTask


class BitFit(RegionStrategy):
    """Train all biases from θ_pre, those of LayerNorm included (Ben Zaken et al., 2022, arXiv:2106.10199, §3).

    As in the paper, each task has its own model; only its biases are stored. With AdamW, the learning rate is `learning_rate`
    times √(N/s), about 20 to 30 for a transformer: the ratio of the paper's rates for biases to those for whole models.
    Difference to the paper: embeddings, pooler and LM head are not in the parameter space, so their biases do not change.
    """

    resumable = True

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse a model without a bias."""
        biases(stream.model.space())

    def setup(self) -> None:
        """Open a ledger in which tasks are independent."""
        self.open_ledger("alone")

    def begin(self, task: EncodedTask) -> Training:
        """Train all biases."""
        return self.region_training(task, biases(self.space))
