"""What a job is going to do, as far as it is looked at beforehand: its units, and how long a step of each takes."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from forgetfree.data.rows import TaskRows
from forgetfree.device import kind_of_device
from forgetfree.jobs.config import CommonOptions
from forgetfree.training.localization import LocalizationOptions, mask_options
from forgetfree.training.monitor import Monitor, Phase
from forgetfree.training.training_options import TrainingOptions

if TYPE_CHECKING:
    from forgetfree.models.loading import LoadedModel

#: Learns a task with a freshly loaded model, options and a device, and tells the monitor.
Learn = Callable[["LoadedModel", TaskRows, Any, str, Monitor], None]


@dataclass(frozen=True)
class PlannedUnit:
    """A unit of a job, before it begins.

    Attributes:
        name: that of its folder.
        way: what units that differ by seed alone have in common, such as the strategy.
        tasks: that it learns, in order.
        options: how.
        learn: learns one task so.
        shots: training rows a label.
        seed: of the sample.
        sparsities: shares of the space that regions may have.
        check: refuses options that do not go with a stream.
    """

    name: str
    way: str
    tasks: tuple[str, ...]
    options: TrainingOptions
    learn: Learn
    shots: int | None
    seed: int
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
        units: its units.
        held_aside: where texts are that no task trains, if any are named.
    """

    model: str
    readout: str
    tasks: tuple[str, ...]
    common: CommonOptions
    units: list[PlannedUnit] = field(default_factory=list)
    held_aside: str | None = None

    @property
    def sparsities(self) -> tuple[float, ...]:
        """The sparsities of all units, each once."""
        return tuple(dict.fromkeys(sparsity for unit in self.units for sparsity in unit.sparsities))


# -- Seconds ---------------------------------------------------------------------------------------------

#: Steps that are taken of each phase; the first, which prepares memory and kernels, does not count.
_TAKEN = 4


@dataclass(frozen=True)
class PhaseTime:
    """What a phase of a task takes.

    Attributes:
        phase: which.
        taken: the steps that were taken of it.
        step: seconds of one.
    """

    phase: Phase
    taken: int
    step: float

    def steps(self, options: TrainingOptions, updates: int, rows: int) -> int:
        """Return how many steps it has where a task has so many updates and training rows."""
        if self.phase == "localize":
            searches = isinstance(options, LocalizationOptions) and options.region_from in ("mask", "midpoint")
            return mask_options(options, rows, updates).steps if searches else max(1, self.taken)  # type: ignore[arg-type]
        name = "region_steps" if self.phase == "train" else "readout_steps"
        own = (
            getattr(options, name, None)
            if self.phase == "train" or not getattr(options, "needs_fine_tuned", True)
            else None
        )
        return math.ceil((updates if own is None else own) * self.taken / _TAKEN)


class StepTimes(Monitor):
    """Hears how long the steps of each phase take."""

    def __init__(self) -> None:
        self.times: list[PhaseTime] = []

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Time a phase of a task."""
        clock = [time.perf_counter()]
        yield lambda step, loss: clock.append(time.perf_counter())
        clock.append(time.perf_counter())
        apart = [after - before for before, after in pairwise(clock[1:-1])]
        # Where no step is told apart from others, the phase is one.
        self.times.append(PhaseTime(phase, steps, min(apart) if apart else clock[-1] - clock[0]))


def step_times(unit: PlannedUnit, loaded: LoadedModel, rows: TaskRows, device: str) -> list[PhaseTime]:
    """Return what the phases of a unit take, by a few steps of each on one task; the model is not to be used afterwards."""
    few: dict[str, Any] = {"steps": _TAKEN, "mask_steps": _TAKEN, "mask_evaluations": 1}
    few |= {name: _TAKEN for name in ("region_steps", "readout_steps") if getattr(unit.options, name, None)}
    known = {each.name for each in fields(unit.options)}
    if getattr(unit.options, "mask_steps", None) == 0:
        del few["mask_steps"]
    heard = StepTimes()
    options = replace(unit.options, **{name: each for name, each in few.items() if name in known})
    unit.learn(loaded, rows, options, device, heard)
    return heard.times


def most_memory(device: str) -> int:
    """Return the most bytes that this process has held: on a GPU those of tensors there, else all of its memory."""
    if kind_of_device(device) == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
