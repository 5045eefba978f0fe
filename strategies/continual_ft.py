"""ContinualFT: train everything on each task in turn. It forgets: the baseline of table 4."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.strategy_parts import Training
from forgetfree.training.encoded_task import EncodedTask


class ContinualFT(ContinualStrategy):
    """Fine-tune all graftable parameters on each task in turn (paper, table 4).

    Each task has its own linear readout, which later tasks do not change. An ℓ1 penalty pulls towards the weights at the start
    of the task.
    """

    resumable = True

    def begin(self, task: EncodedTask) -> Training:
        """Train everything."""
        return self.everything(task)

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Answer with the one model, as it is."""
        return nullcontext()
