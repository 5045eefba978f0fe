"""What learning tasks costs, said before anything is trained: phases with their steps, and bytes that are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.saliency import is_saliency
from forgetfree.training.localization import LocalizationOptions, mask_options
from forgetfree.training.monitor import Phase
from forgetfree.training.training_options import TrainingOptions


@dataclass(frozen=True)
class TaskSize:
    """What the phases of a task depend on.

    Attributes:
        steps: updates of fine-tuning it; ``None``: not known without its rows.
        rows: training rows; ``None``: not known.
        trains_readout: whether its readout has weights; label words have none.
    """

    steps: int | None = None
    rows: int | None = None
    trains_readout: bool = True


@dataclass(frozen=True)
class PhaseCost:
    """A phase of a task, beside evaluation.

    Attributes:
        phase: what it is called.
        steps: how many; ``None``: not known.
        rows: that a step reads.
        shared: whether it makes θ_ft, fine-tuned on the task alone, which units of one job make once.
    """

    phase: Phase
    steps: int | None
    rows: int
    shared: bool = False


@dataclass(frozen=True)
class Cost:
    """What tasks take.

    Attributes:
        phases: of each task, in order.
        kept: from the graftable tensors to the bytes that are kept of all tasks, beside fine-tuned models that are shared.
    """

    phases: Sequence[Sequence[PhaseCost]]
    kept: Callable[[ParameterSpace], int]

    @property
    def fine_tunes(self) -> bool:
        """Whether tasks are fine-tuned alone."""
        return any(phase.shared for phases in self.phases for phase in phases)


def fine_tuning_phase(options: TrainingOptions, task: TaskSize) -> PhaseCost:
    """Return the phase that makes θ_ft."""
    return PhaseCost("fine_tune", task.steps, options.batch_size, shared=True)


def search_phase(options: LocalizationOptions, task: TaskSize) -> PhaseCost:
    """Return the phase that chooses γ."""
    if is_saliency(options.region_from):
        reads = {"movement": 0, "random": 0, "fisher": options.fisher_rows}
        return PhaseCost("localize", 1, reads.get(options.region_from, options.gradient_rows))
    if task.steps is None:
        return PhaseCost("localize", None, options.batch_size)
    mask = mask_options(options, task.rows or options.mask_batch_size, task.steps)
    return PhaseCost("localize", mask.steps, mask.batch_size)


def training_phase(options: TrainingOptions, task: TaskSize, steps: int | None = None) -> PhaseCost:
    """Return the phase that Avalanche's loop trains.

    Args:
        options: how.
        task: of what size.
        steps: updates; default: as many as fine-tuning has.
    """
    return PhaseCost("train", task.steps if steps is None else steps, options.batch_size)


def cost_of(strategy: Any, options: TrainingOptions, tasks: Sequence[TaskSize]) -> Cost:
    """Return what tasks take by a strategy's class, see `ContinualStrategy.cost`."""
    cost: Cost | None = strategy.cost(options, tasks)
    return Cost([[training_phase(options, task)] for task in tasks], model_bytes) if cost is None else cost


def model_bytes(space: ParameterSpace) -> int:
    """Return the bytes of one whole model."""
    return space.dtype.itemsize * len(space)


def ledger_bytes(space: ParameterSpace, *entries: int) -> int:
    """Return about as many bytes as records of a ledger take: a value, and log2 C(N, s) bits for where it is, an entry.

    Args:
        space: of N entries.
        entries: that each record has.
    """
    bits = 8 * space.dtype.itemsize
    return sum(round(each * (bits + math.log2(math.e * len(space) / each)) / 8) for each in entries if each)
