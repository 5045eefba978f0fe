"""ContinualFT: train everything on each task in turn. It forgets: the baseline of table 4."""

from __future__ import annotations

from typing import ClassVar

from forgetfree.continual.strategy import ContinualStrategy


class ContinualFT(ContinualStrategy):
    """Fine-tune all graftable parameters on each task, from where the last one left them (paper, table 4).

    The linear readouts belong to their tasks and stay as they were. An ℓ1 penalty pulls towards the weights at the start
    of the task.
    """

    online: ClassVar[bool] = True
