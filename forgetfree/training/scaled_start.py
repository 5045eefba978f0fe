"""How far along fine-tuning's move a region stands, before it is trained or without: at θ_pre + c · (θ_ft − θ_pre).

The paper has c = 1. A region holds a small share of what fine-tuning moved, so a bare graft moves the model less far than
fine-tuning did; further along the same direction it may answer better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from forgetfree.core.graft import grafted, interpolate
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.core.regions import Region
from forgetfree.data.sampling import representative
from forgetfree.options import option
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.localization import LocalizationOptions
from forgetfree.training.loop import loss_of
from forgetfree.training.training_options import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class ScaleOptions(LocalizationOptions):
    """How a task is fine-tuned and localized, and how many rows choose between ways to go on."""

    choice_rows: int = option(
        512,
        "validation rows, at most, by whose loss the c of a scaled start is chosen, and what composition=auto records",
        at_least=1,
    )

    @property
    def choices(self) -> int:
        """How often validation rows are answered to choose, at most."""
        return 0


def scales(largest: float) -> list[float]:
    """Return 0, 1, 2, 4 and so on, up to ``largest``.

    >>> scales(8), scales(5)
    ([0.0, 1.0, 2.0, 4.0, 8.0], [0.0, 1.0, 2.0, 4.0])
    """
    values = [0.0]
    while (following := max(1.0, 2 * values[-1])) <= largest:
        values.append(following)
    return values


def choose_scale(
    model: ReadoutModel,
    task: EncodedTask,
    region: Region,
    theta_pre: Tensor,
    theta_ft: Tensor,
    options: TrainingOptions,
    *,
    largest: float,
    rows: int,
) -> float:
    """Return the c whose graft has the least loss on validation rows; of equal ones the least.

    Loss falls as c grows, then rises: after two values in a row that are no better, no larger one is tried.

    Args:
        model: holds what the region stands on, and the readout; the same afterwards, bit for bit.
        task: its validation rows are answered, never its test rows.
        region: the entries that move.
        theta_pre: where fine-tuning started, flat ``(N,)``.
        theta_ft: where it ended ``(N,)``.
        options: precision and batch size of the forward passes.
        largest: the largest c that is tried.
        rows: the most validation rows that are answered, spread evenly.
    """
    space = model.space()
    validation_rows = task.validation.subset(representative(task.validation.targets, rows))
    pre, ft = theta_pre[region.indices], theta_ft[region.indices]
    best, least, worse = 0.0, math.inf, 0
    for scale in scales(largest):
        with grafted(model.backbone, space, region, interpolate(pre, ft, scale)):
            loss = loss_of(model, task, validation_rows, options)
        if loss < least:
            best, least, worse = scale, loss, 0
        elif (worse := worse + 1) == 2:
            break
    return best
