"""BitFit: each task trains its own biases and nothing else (Ben Zaken et al., 2022)."""

from __future__ import annotations

from typing import Any, ClassVar

from forgetfree.continual.ledger_strategy import LedgerStrategy, RegionToTrain
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.core.regions import biases
from forgetfree.ledger import Composition


class BitFit(LedgerStrategy):
    """Train all biases from θ_pre, those of LayerNorm included (Ben Zaken et al., 2022, arXiv:2106.10199, §3).

    The paper trains one model a task; so does this, and keeps the biases of each. With AdamW the rate is `learning_rate`
    times √(N/s), about 20 to 30 for a transformer: what the paper's rates for biases are to those for whole models.
    Difference: embeddings, pooler and LM head are no part of the parameter space, so that their biases stay.
    """

    composition: ClassVar[Composition] = "alone"

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """There must be a bias."""
        super().check(options, stream)
        biases(stream.model.space())

    def localize(self, task: EncodedTask) -> RegionToTrain:
        """The same for every task."""
        region = biases(self.space)
        return RegionToTrain(region, len(region) / len(self.space))
