"""The router: of several tasks' answers to a row, that of the task which is surest, where nobody says which task it is."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def share_of_entropy(logits: Tensor, labels: int) -> Tensor:
    """Return the entropy of each row's answer, as a share of the largest that it could have: ``(rows,)``, in [0, 1].

    Args:
        logits: ``(rows, n)``; labels that do not count have the lowest logit there is.
        labels: how many labels count.
    """
    entropy: Tensor = torch.special.entr(logits.softmax(1)).sum(1)
    return entropy / math.log(max(2, labels))
