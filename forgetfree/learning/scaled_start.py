"""From how far along fine-tuning's move a region is trained: its values start at θ_pre + c · (θ_ft − θ_pre).

The paper starts at c = 1. A region holds a small share of what fine-tuning moved, so a bare graft moves the model less far
than fine-tuning did; further along the same direction it may answer better before its training has begun.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forgetfree.core.graft import grafted, interpolate
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.core.regions import Region
from forgetfree.data.sampling import representative
from forgetfree.learning.encoded_task import EncodedTask
from forgetfree.learning.localization import LocalizationOptions
from forgetfree.learning.training import quality_of
from forgetfree.learning.training_options import TrainingOptions
from forgetfree.options import option


@dataclass(frozen=True, kw_only=True)
class GraftOptions(LocalizationOptions):
    """How a task is fine-tuned, localized, and grafted without further training."""

    largest_scale: float = option(
        1.0,
        "a graft's values are θ_pre + c·(θ_ft − θ_pre), with the c of 0, 1, 2, 4, … up to this that answers training "
        "rows best; 1: the paper's c, and no other is tried",
        at_least=1,
    )


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
    """Return the c whose graft scores best on training rows; of equal scores, the one with the least loss, then the least c.

    Args:
        model: holds what the region stands on, and the readout; the same afterwards, bit for bit.
        task: its training rows are answered, never its validation or test rows.
        region: the entries that move.
        theta_pre: where fine-tuning started, flat ``(N,)``.
        theta_ft: where it ended ``(N,)``.
        options: precision and batch size of the forward passes.
        largest: the largest c that is tried.
        rows: the most training rows that are answered, spread evenly.
    """
    space = model.space()
    asked = task.train.subset(representative(task.train.targets, rows))
    pre, ft = theta_pre[region.indices], theta_ft[region.indices]

    def rank(scale: float) -> tuple[float, float, float]:
        with grafted(model.backbone, space, region, interpolate(pre, ft, scale)):
            return *quality_of(model, task, asked, options), -scale

    return max(scales(largest), key=rank)
