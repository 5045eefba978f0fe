"""What a job of any kind is to learn, unit by unit, as far as it costs: what a plan beforehand is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forgetfree.jobs.config import CommonOptions
from forgetfree.learning.cost import Cost, TaskSize, fine_tuning, ledger_bytes, search
from forgetfree.learning.localization import LocalizationOptions
from forgetfree.learning.training_options import TrainingOptions


@dataclass(frozen=True)
class PlannedUnit:
    """A unit of a job, as far as it costs.

    Attributes:
        name: that of its folder.
        tasks: that it learns, in order.
        options: how.
        cost: from the tasks' sizes to what they take.
        shots: training rows a label.
        seed: of the sample.
        evaluations: how many times it answers the test rows of a task, on average.
        repeats: how many models it fine-tunes for a task.
        sparsities: shares of the space that regions may have.
        check: refuses options that do not go with a stream.
    """

    name: str
    tasks: tuple[str, ...]
    options: TrainingOptions
    cost: Callable[[Sequence[TaskSize]], Cost]
    shots: int | None
    seed: int
    evaluations: float = 1.0
    repeats: int = 1
    sparsities: tuple[float, ...] = ()
    check: Callable[[Any, Any], None] = lambda options, stream: None


@dataclass
class Workload:
    """What a configuration asks for, of any kind of job.

    Attributes:
        model: its name.
        readout: as it is asked for.
        tasks: the names of the tasks.
        common: the job's own options.
        starts: directories of adapters that tasks start from.
        is_stream: whether the tasks are those of a stream; else each stands by itself.
        units: its units.
    """

    model: str
    readout: str
    tasks: tuple[str, ...]
    common: CommonOptions
    starts: Mapping[str, str] = field(default_factory=dict)
    is_stream: bool = False
    units: list[PlannedUnit] = field(default_factory=list)

    @property
    def sparsities(self) -> tuple[float, ...]:
        """The sparsities of all units, each once."""
        return tuple(dict.fromkeys(sparsity for unit in self.units for sparsity in unit.sparsities))


def grafts_cost(
    options: LocalizationOptions, sparsities: Sequence[float], tasks: Sequence[TaskSize], *, tuned: bool = False
) -> Cost:
    """Return what grafts of several sparsities take, a task at a time: one search, and one fine-tuned model.

    Args:
        options: how a task is fine-tuned and localized.
        sparsities: of the grafts.
        tasks: the tasks.
        tuned: whether the fine-tuned model is there already.
    """
    return Cost(
        [[*([] if tuned else [fine_tuning(options, task)]), search(options, task)] for task in tasks],
        lambda space: ledger_bytes(space, *[int(len(space) * each) for each in sparsities] * len(tasks)),
    )
