"""The plan of a run and all its faults, before anything is downloaded or written."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from forgetfree import registry
from forgetfree.core.selection import budget
from forgetfree.data.bad_rows import DataFaults
from forgetfree.data.encoding import drop_bad_rows
from forgetfree.data.rows import TaskRows, few_rows_note
from forgetfree.data.sources import check_stream
from forgetfree.device import device_type, find_device
from forgetfree.errors import (
    Faults,
    ForgetfreeError,
    SeveralFaultsError,
    first_line,
    out_of_memory,
)
from forgetfree.files import check_place
from forgetfree.jobs.config import RunConfig, RunOptions
from forgetfree.jobs.environment import check_precision, free_memory, machine_memory, set_threads
from forgetfree.jobs.run_directory import Json, refuse_used
from forgetfree.jobs.stream_loading import StreamLoader
from forgetfree.kinds.kind import kind_of
from forgetfree.models.loading import LoadedModel
from forgetfree.models.location import locate
from forgetfree.models.state import StateStore
from forgetfree.results.report.page import size as in_units
from forgetfree.training.encoded_task import sampled
from forgetfree.training.held_out_loss import HeldOutTexts
from forgetfree.training.monitor import Monitor, Phase
from forgetfree.training.single_task import mask_options
from forgetfree.training.training_options import MOST_SHOTS, LocalizationOptions, TrainingOptions

if TYPE_CHECKING:
    from forgetfree.continual.stream import Stream
    from forgetfree.core.readout_model import ReadoutModel
    from forgetfree.jobs.revision import Revision

#: Largest memory of a step in multiples of the weights' bytes: weights, gradients, AdamW's two moments, and θ_pre.
_STEP = 5
#: Number of steps to run in each phase; the first, which prepares memory and kernels, is not timed.
_TAKEN = 2


def plan_of(config: RunConfig, *, resume: bool = False, revision: Revision | None = None) -> Json:
    """Return the plan of a run as JSON: model, tasks, units and total, and notes; nothing is written or downloaded.

    Each unit has its updates by task, and its seconds; both are ``None`` if the model or the rows are not on this machine.
    Tasks that are carried over from a finished run need no updates.

    Args:
        config: the requested configuration.
        resume: whether the run is resumed in its directory.
        revision: the finished run that it is based on.

    Raises:
        UsageError: lists every fault of configuration, places, data, model, readouts and budgets.
    """
    look = _Look(config, resume)
    look.faults.report()
    return look.plan(revision)


def with_all_faults(error: ForgetfreeError, config: RunConfig, loader: StreamLoader | None) -> ForgetfreeError:
    """Return the error that stopped a run, or one error with all faults of the run if there are more.

    If ``loader`` is given, it has read the data.
    """
    faults = _Look(config, False, loader).faults
    for fault in getattr(error, "faults", (str(error),)):
        faults.add(fault)
    return error if len(faults) == 1 else SeveralFaultsError(faults, getattr(error, "rows", ()))


class _Look:
    """Checks everything that can be checked, and collects faults."""

    def __init__(self, config: RunConfig, resume: bool, loader: StreamLoader | None = None) -> None:
        self._config, self._objects, self._notes = config, config.objects, list[str]()
        self._fine_tuned = StateStore()  # the strategies share fine-tuned models, as in the run
        self.faults = Faults(ForgetfreeError)
        for fault in config.faults():
            self.faults.add(fault)
        attempt = self.faults.attempt
        known: RunOptions | None = attempt(lambda: config.common)
        self._common = known or RunOptions()
        self._loader = loader or StreamLoader(config if known else config.model_copy(update={"set": {}}))
        self._options: Mapping[str, Any] = {} if len(self.faults) else dict(config.options)
        if config.out:  # a program that only asks for a plan may name none
            attempt(check_place, Path(config.out))
        if self._common.cache:
            attempt(check_place, Path(self._common.cache), "--cache")
        if config.out and not resume:
            attempt(refuse_used, Path(config.out))
        self._device = attempt(find_device, config.device) or "cpu"
        self._free = free_memory(self._device)
        attempt(check_precision, [each.precision for each in self._options.values()], self._device)
        self._rows = {rows.task.name: rows for rows in self._read()}
        self._definitions = {name: each.task for name, each in self._rows.items()}
        for name in config.names:
            if name not in self._rows and (task := registry.tasks().get(name)):
                self._definitions[name] = task
        for kind in dict.fromkeys(map(kind_of, self._definitions.values())):
            attempt(kind.check_scenario, list(self._definitions.values()), self._common.scenario)
        self._loaded: LoadedModel | None = attempt(self._load)
        if self._loaded is not None:
            self._check_against(self._loaded)

    # -- Data and model --------------------------------------------------------------------------------------

    def _read(self) -> list[TaskRows]:
        """Return the rows of the tasks whose data are on this machine."""
        config, attempt = self._config, self.faults.attempt
        if config.data == "hub" and self._objects.data is None:
            for name in config.names:
                attempt(check_stream, [name], config.data)
            self._notes.append("The data is read from the hub when the job starts; it was neither checked nor counted.")
            return []
        tasks, wrong = attempt(lambda: self._loader.read) or ([], DataFaults())
        attempt(wrong.report)
        tasks = [*tasks, *wrong.rest]  # to find their other faults
        for rows in tasks:
            few = few_rows_note(rows.train, rows.task, config.shots) if self._options else ""
            self._notes += filter(None, (*rows.notes, rows.shared_note(self._common.evaluate_on), few))
        for seed, rows in product(config.seed if self._options else (), tasks):
            attempt(sampled, rows, config.shots, seed)
        return tasks

    def _load(self) -> LoadedModel | None:
        """Return the model; ``None`` if its weights are not on this machine, or too large for a training step."""
        config = self._config
        if self._objects.model is None:
            path = Path(locate(config.model))
            if not path.is_dir():
                self._notes.append(f"The weights of {config.model} come from the hub; they were not checked.")
                return None
            if _STEP * sum(each.stat().st_size for each in path.glob("*.safetensors")) > machine_memory():
                self._notes.append("The model was not checked: a training step may need more memory than there is.")
                return None
        if config.fine_tuned is not None and not self._definitions:
            return None
        loaded = self._loader.load(list(self._definitions.values()))
        self._notes += [loaded.note] if loaded.note else []
        return loaded

    def _check_against(self, loaded: LoadedModel) -> None:
        """Check the tasks, the held-out texts and the options against a model."""
        config, attempt = self._config, self.faults.attempt
        attempt(loaded.check_words, self._definitions.values())
        for name, task in self._definitions.items():
            encoder = attempt(loaded.encoder, task)
            if encoder is not None and name in self._rows:
                read = self._rows[name]
                self._rows[name] = attempt(drop_bad_rows, read, encoder, config.skip_bad_rows) or read
                self._notes += self._rows[name].notes[len(read.notes) :]
        for options in self._options.values():
            if isinstance(options, LocalizationOptions):
                attempt(budget, len(loaded.model.space()), options.sparsity)
        if config.held_out is not None:
            limit = self._common.test_limit
            aside = attempt(HeldOutTexts.of, config.held_out, config.rows, loaded, limit, config.read_options)
            self._notes += (aside and attempt(aside.notes, self._rows.values())) or ()
        for name, options in self._options.items():
            with suppress(AttributeError):  # the stream here has only its model
                attempt(config.classes[name].check, options, SimpleNamespace(model=loaded.model))

    # -- The plan --------------------------------------------------------------------------------------------

    def plan(self, revision: Revision | None = None) -> Json:
        """Return the plan, estimated from a few steps of each strategy on the first task."""
        from forgetfree.continual.stream import make_stream

        config, loaded, times = self._config, self._loaded, dict[str, Sequence[_PhaseTime]]()
        carried = dict[tuple[str, int], list[str]]()
        set_threads(self._common.threads)
        if loaded is not None and self._rows.keys() >= set(config.names):
            first: str = config.names[0]
            drawn: Json = {"shots": config.shots, "seed": config.seed[0], "test_limit": 1}
            stream = make_stream(first, [self._rows[first]], loaded, **drawn)
            times = {name: phases for name in config.classes if (phases := self._step_times(name, stream))}
            unlearned = self._loader.answers_unlearned(stream.model)
            if revision:
                for name, seed in product(config.classes, config.seed):
                    prefix = revision.carried(name, seed, unlearned)
                    carried[name, seed] = prefix.tasks if prefix else []
        units = [
            self._unit(name, seed, times.get(name, ()), carried.get((name, seed), []))
            for seed, name in product(config.seed, config.classes)
        ]
        every = [unit["seconds"] for unit in units]
        return {
            "schema": 1,
            "command": "run",
            "out": config.out,
            "device": self._device,
            "model": {
                "name": loaded.name if loaded else config.model,
                "local": loaded is not None,
                "readout": loaded.readout if loaded else config.readout,
                "parameters": sum(each.numel() for each in loaded.model.backbone.parameters()) if loaded else None,
                "graftable": len(loaded.model.space()) if loaded else None,
            },
            "tasks": [
                {
                    **{"task": name, "train": len(each.train), "validation": len(each.validation)},
                    **{"test": len(each.test), "labels": list(each.task.labels)},
                }
                for name, each in self._rows.items()
            ],
            "units": units,
            "total": {
                "units": len(units),
                "updates": sum(updates or 0 for unit in units for updates in unit["updates"].values()),
                "seconds": round(sum(every), 3) if every and None not in every else None,
                "memory_bytes": most_memory(self._device) if times else None,
                "free_bytes": self._free,
            },
            "notes": list(dict.fromkeys(self._notes)),
        }

    def _unit(self, name: str, seed: int, phases: Sequence[_PhaseTime], carried: Sequence[str]) -> Json:
        """Return the updates of a unit by task, and the seconds of all its steps.

        Args:
            name: the name of its strategy.
            seed: the seed of the unit.
            phases: the measured times of its phases; empty if they are unknown.
            carried: the tasks that are carried over from a finished run.
        """
        options, config, seconds = self._options[name], self._config, 0.0
        updates: dict[str, int | None] = dict.fromkeys(config.names, 0 if phases else None)
        for task, rows in self._rows.items() if phases else ():
            if task in carried:
                continue
            drawn = len(sampled(rows, config.shots, seed))
            rarest = min(MOST_SHOTS, *Counter(kind_of(rows.task).groups(rows.train.labels)).values())
            updates_of_task = options.updates(max(1, len(rows.task.labels)), config.shots or rarest, drawn)
            steps = {each: each.steps(options, updates_of_task, drawn) for each in phases}
            updates[task] = sum(count for each, count in steps.items() if each.phase in ("fine_tune", "train"))
            seconds += sum(each.step * count for each, count in steps.items())
        return {
            **{"unit": f"{name}/seed-{seed}", "carried_over": list(carried)},
            **{"updates": updates, "seconds": round(seconds, 3) if phases else None},
        }

    def _step_times(self, name: str, stream: Stream) -> list[_PhaseTime]:
        """Time a few steps of each phase of a strategy; return nothing if a step fails."""
        config, options, times = self._config, self._options[name], _StepTimes()
        few: dict[str, Any] = {"steps": _TAKEN, "mask_steps": _TAKEN}
        few |= {"region_steps": _TAKEN} if getattr(options, "region_steps", None) else {}
        if getattr(options, "mask_steps", None) == 0:
            del few["mask_steps"]
        known = type(options).model_fields
        options = options.model_copy(update={key: each for key, each in few.items() if key in known})
        how: Json = {"seed": config.seed[0], "device": self._device, "store": self._fine_tuned, "monitor": times}
        if (needed := _least_memory(stream.model, options)) > self._free:
            self._notes.append(
                f"{name} needs {in_units(needed)} for weights and optimizer alone, but {self._device} has "
                f"{in_units(self._free)}. Choose another device, or a region_from that needs no fine-tuned model."
            )
            return []
        try:
            config.classes[name](stream=stream, options=options, **how).train(stream.benchmark.train_stream[0])
        except (ForgetfreeError, RuntimeError, MemoryError) as error:
            self._notes.append(f"The first step of {name} failed: {first_line(out_of_memory(error) or error)}")
            return []
        return times.times


# -- Seconds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _PhaseTime:
    """The number of steps timed in a phase, and the seconds of one step."""

    phase: Phase
    taken: int
    step: float

    def steps(self, options: TrainingOptions, updates: int, rows: int) -> int:
        """Return the number of steps of the phase for a task with these numbers of updates and training rows."""
        if self.phase == "localize":
            searches = isinstance(options, LocalizationOptions) and options.region_from == "mask"
            return mask_options(options, rows, updates).steps if searches else max(1, self.taken)  # type: ignore[arg-type]
        if self.phase == "fine_tune" and not getattr(options, "needs_fine_tuned", True):
            return self.taken  # only a readout is trained, always with the same number of steps
        own = getattr(options, "region_steps", None) if self.phase == "train" else None
        return math.ceil((updates if own is None else own) * self.taken / _TAKEN)


class _StepTimes(Monitor):
    """Measures the seconds of a step of each phase."""

    def __init__(self) -> None:
        self.times: list[_PhaseTime] = []

    @contextmanager
    def phase(self, task: str, phase: Phase, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Time a phase of a task."""
        clock = [time.perf_counter()]
        yield lambda step, loss: clock.append(time.perf_counter())
        clock.append(time.perf_counter())
        apart = [after - before for before, after in pairwise(clock[1:-1])]
        # A phase with fewer than two logged steps counts as one step.
        self.times.append(_PhaseTime(phase, steps, min(apart) if apart else clock[-1] - clock[0]))

    def log_reused(self, task: str, steps: int) -> None:
        """Count the steps of a fine-tuned model that another strategy made, as in the run; its time is counted there."""
        self.times.append(_PhaseTime("fine_tune", steps, 0.0))


def _least_memory(model: ReadoutModel, options: TrainingOptions) -> int:
    """Return the minimum bytes of training on its device: weights, and if all are trained, gradients and moments.

    Each weight needs a gradient, two moments with Adam, and in half precision a float32 copy, which has the gradient.
    """
    from forgetfree.continual.region_strategy import RegionOptions

    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    trains_few = isinstance(options, RegionOptions) or hasattr(options, "rank")
    if not getattr(options, "needs_fine_tuned", not trains_few):
        return weights
    moments = 8 if str(options.optimizer).startswith("adam") else 0
    sizes = ((spec.size, spec.dtype.itemsize) for spec in model.space().tensors)
    return weights + sum(size * (moments + (8 if bytes_ < 4 else bytes_)) for size, bytes_ in sizes)


def most_memory(device: str) -> int:
    """Return the peak memory of this process in bytes: for tensors on a GPU, or else for the whole process."""
    if device_type(device) == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
