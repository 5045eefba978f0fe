"""What a job costs, estimated beforehand: its workload, and the seconds, the memory and the room on the disk that it takes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from forgetfree.core.base_regions import tiny_region_note
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.saliency import is_saliency
from forgetfree.core.tensors import DTYPES
from forgetfree.data.rows import Rows
from forgetfree.device import kind_of_device
from forgetfree.errors import UsageError
from forgetfree.files import existing
from forgetfree.jobs.config import CommonOptions
from forgetfree.jobs.running.unit import Json
from forgetfree.kinds.kind import kind_of
from forgetfree.recipes import ModelDtype
from forgetfree.tasks import TaskDefinition
from forgetfree.terminal import tell_note
from forgetfree.training.cost import Cost, TaskSize, fine_tuning_phase, ledger_bytes, model_bytes, search_phase
from forgetfree.training.localization import LocalizationOptions
from forgetfree.training.loop import fine_tune, predict
from forgetfree.training.monitor import Phase
from forgetfree.training.training_options import TrainingOptions

if TYPE_CHECKING:
    from forgetfree.models.loading import LoadedModel


# -- Workload --------------------------------------------------------------------------------------------


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
        before_learning: how many times more before it learns the task, where the readout needs no training.
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
    before_learning: float = 0.0
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
        [[*([] if tuned else [fine_tuning_phase(options, task)]), search_phase(options, task)] for task in tasks],
        lambda space: ledger_bytes(space, *[int(len(space) * each) for each in sparsities] * len(tasks)),
    )


# -- Seconds ---------------------------------------------------------------------------------------------

#: Rows of a task by which the length of all is estimated.
SAMPLE = 64
#: Steps that are timed; the first, which prepares memory and kernels, does not count.
_TIMED = 3
#: The share of the rate of a large matrix product that training reaches, where the model cannot be timed.
_REACHED = 0.4


@dataclass(frozen=True)
class Rates:
    """What a token costs.

    Attributes:
        train: seconds of a token, padding included, in a training step.
        evaluate: seconds of a token in a forward pass.
        source: how they were found, in words.
    """

    train: float
    evaluate: float
    source: str


def timed_rates(
    loaded: LoadedModel, definition: TaskDefinition, rows: Rows, options: TrainingOptions, device: str
) -> Rates:
    """Return the rates of a model, by a few steps of fine-tuning on rows of a task; the model is not to be used afterwards."""
    model = loaded.model.to(device)
    label = model.add_task(loaded.head(definition))
    encoder = loaded.encoder(definition)
    sample = kind_of(definition).encode(definition, rows, encoder, label=label, pad=loaded.pad)
    clock: list[float] = []
    steps = replace(options, schedule="constant")
    fine_tune(model, sample, steps, steps=_TIMED, seed=0, on_step=lambda step, loss: clock.append(time.perf_counter()))
    train = min(after - before for before, after in pairwise(clock))  # other work on the machine slows single steps
    few, times = sample.subset(range(min(16, len(sample)))), list[float]()
    for _ in range(2):
        begin = time.perf_counter()
        predict(model, few, **options.answering)
        times.append(time.perf_counter() - begin)
    length = padded(sample.lengths, options.batch_size)
    return Rates(
        train / (options.batch_size * length),
        min(times) / sum(few.lengths),
        f"by {_TIMED - 1} training steps of this model on this machine",
    )


def computed_rates(parameters: int, device: str, precision: str) -> Rates:
    """Return the rates of a model that is not here: 6 operations a parameter and token in training, 2 in a forward pass.

    (Kaplan et al., 2020, §2.1.) How many a second the device does is measured by a matrix product.
    """
    size = 1024 if device == "cpu" else 8192
    kind = torch.float32 if precision == "fp32" else torch.bfloat16
    one = torch.ones(size, size, dtype=kind, device=device)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        float((one @ one)[0, 0])  # waits for the device
        times.append(time.perf_counter() - begin)
    rate = _REACHED * 2 * size**3 / min(times)
    source = (
        f"from its {parameters:,} parameters and a matrix product on this machine; expect a factor of two either way"
    )
    return Rates(6 * parameters / rate, 2 * parameters / rate, source)


def padded(lengths: Sequence[int], batch_size: int) -> float:
    """Return the mean length of batches of rows drawn from these lengths, which are padded to their longest."""
    random = Random(0)
    return sum(max(random.choices(lengths, k=batch_size)) for _ in range(64)) / 64


# -- Disk ------------------------------------------------------------------------------------------------


def check_space(workload: Workload, out: str, config: Json, space: ParameterSpace) -> None:
    """Raise ``UsageError`` unless there is room for what a job writes; say, too, where its regions are tiny.

    Args:
        workload: of the job.
        out: its directory.
        config: its config.json.
        space: the graftable tensors of its model.
    """
    tell_note(tiny_region_note(len(space), workload.sparsities))
    definitions = {each["name"]: TaskDefinition.of_fields(each) for each in config["tasks"]}
    tests = {name: rows.get("test", 0) for name, rows in config["data"].items()}
    check_disk_space(out, workload, tests, definitions, space)


def needed_bytes(
    workload: Workload, tests: Mapping[str, int], definitions: Mapping[str, TaskDefinition], space: ParameterSpace
) -> tuple[int, int]:
    """Return about as many bytes as a job writes: of fine-tuned models; of ledgers or models, and predictions.

    Args:
        workload: of the job.
        tests: how many test rows each task answers, where it is known.
        definitions: the tasks, where they are known.
        space: the graftable tensors of the model.
    """
    models, kept = set[Any](), 0
    for unit in workload.units:
        cost = unit.cost([TaskSize()] * len(unit.tasks))
        models |= {
            (task, unit.seed, unit.shots, number)
            for task in unit.tasks
            if cost.fine_tunes
            for number in range(unit.repeats)
        }
        kept += cost.kept(space)
        for task in unit.tasks:
            labels = len(definitions[task].labels) if task in definitions else 2
            kept += tests.get(task, 0) * (4 * labels + 8)
    return model_bytes(space) * len(models), kept


def check_disk_space(
    out: str,
    workload: Workload,
    tests: Mapping[str, int],
    definitions: Mapping[str, TaskDefinition],
    space: ParameterSpace,
) -> None:
    """Raise ``UsageError`` unless there is room for the `needed_bytes`, those that are there already included.

    Of a cache that others may use, only models of this job's tasks are there already.
    """
    (models, kept), cache = needed_bytes(workload, tests, definitions, space), workload.common.cache
    places = [("--out", out, kept + (0 if cache else models), ["*"])]
    if cache:
        places.append(("--cache", cache, models, [f"{task}-*" for task in workload.tasks]))
    disks: dict[int, list[tuple[str, int, int]]] = {}
    for flag, place, needed, ours in places:
        try:
            disk, missing = existing(Path(place)), max(0, needed - _bytes_in(Path(place), ours))
            entry = f"{flag} {place}", missing, shutil.disk_usage(disk).free
            disks.setdefault(disk.stat().st_dev, []).append(entry)
        except OSError:  # a place that cannot be is told by who writes there
            continue
    for on_disk in disks.values():
        names, lacking, free = zip(*on_disk, strict=True)
        if sum(lacking) > free[0]:
            need = "need" if len(names) > 1 else "needs"
            raise UsageError(
                f"{' and '.join(names)} {need} about {sum(lacking):,} more bytes, and {free[0]:,} are free there. "
                "Give a directory on another disk, or ask for fewer strategies or seeds."
            )


def _bytes_in(directory: Path, names: Sequence[str]) -> int:
    total = 0
    for path in {path for name in names for path in directory.rglob(name)}:
        with suppress(OSError):  # it has gone since
            total += path.stat().st_size if path.is_file() else 0
    return total


# -- Memory ----------------------------------------------------------------------------------------------


#: Bytes that a token leaves in a layer for back-propagation, for each number of its hidden state (Korthikanti et al., 2022,
#: eq. 2, in float32 and without the attention's own, which grows with the length).
_ACTIVATIONS = 68
#: The same of a pass without gradients, whose layers' memory is used again.
_PASSING = 32
#: Tokens, and rows, of a pass with gradients for all entries while γ is chosen: see `in_pieces`.
_PIECE_TOKENS, _PIECE_ROWS = 240, 64


@dataclass(frozen=True)
class ModelSize:
    """What memory depends on.

    Attributes:
        parameters: all of them.
        graftable: those that may be grafted, N.
        hidden: the width of hidden states; 0: not known.
        layers: how many; 0: not known.
        width: bytes of a weight.
    """

    parameters: int
    graftable: int
    hidden: int = 0
    layers: int = 0
    width: int = 4

    @classmethod
    def of(cls, config: Any, parameters: int, graftable: int, dtype: ModelDtype = "float32") -> ModelSize:
        """Return the size of a model with a configuration of transformers, or none."""
        hidden, layers = (getattr(config, name, 0) or 0 for name in ("hidden_size", "num_hidden_layers"))
        return cls(parameters, graftable, hidden, layers, DTYPES[dtype].itemsize)


def memory_of_phases(
    model: ModelSize, options: TrainingOptions, length: float, phases: Iterable[Phase], device: str = "cpu"
) -> dict[Phase, int]:
    """Return the most bytes that tensors take in each phase; what is trained and its optimiser are in float32.

    Args:
        model: of what size.
        options: how it is trained.
        length: tokens of a row.
        phases: which.
        device: on a CPU a choice of γ reads fewer rows at once.
    """
    vector, wide = model.width * model.graftable, 4 * model.graftable
    there = model.width * model.parameters + vector  # weights and θ_pre
    rows = -(-options.batch_size // options.accumulation)
    whole = wide * _moments(options) + vector + _kept(model, options, rows * length)
    if vector < wide:  # the optimiser has a wider copy, whose gradients take the place of what a pass keeps
        whole = wide * (1 + _moments(options)) + max(wide, vector + _kept(model, options, rows * length))
    skill = isinstance(options, LocalizationOptions)
    tuned = vector if skill and options.needs_fine_tuned else 0  # type: ignore[attr-defined]
    found: Mapping[Phase, float] = {
        "fine_tune": there + (whole if not skill or tuned else _kept(model, options, rows * length)),
        "localize": there + tuned + _choice(model, options, length, device),
        "train": there + (tuned + _kept(model, options, rows * length) if skill else whole),
        "evaluate": there + tuned + _PASSING * model.width // 4 * options.rows_at_once * length * model.hidden,
    }
    return {phase: round(found[phase]) for phase in found if phase in set(phases)}


def _moments(options: TrainingOptions) -> int:
    """Return how many vectors an optimiser keeps."""
    return 2 if options.optimizer == "adamw" else 1 if options.momentum or callable(options.optimizer) else 0


def _kept(model: ModelSize, options: TrainingOptions, tokens: float) -> float:
    """Return the bytes that a pass over so many tokens keeps for its backward pass."""
    states, narrow = tokens * model.hidden, options.precision != "fp32" or model.width < 4
    layer = _ACTIVATIONS * states / (2 if narrow else 1)
    return layer + model.width * states * model.layers if options.gradient_checkpointing else layer * model.layers


def _choice(model: ModelSize, options: TrainingOptions, length: float, device: str) -> float:
    """Return what the choice of γ takes: S, a whole gradient, and a pass; or scores without a search."""
    if not isinstance(options, LocalizationOptions):
        return 0
    rows = options.mask_micro_batch_size or _PIECE_ROWS
    tokens = min(rows * length, max(length, _PIECE_TOKENS)) if device == "cpu" else rows * length
    source, vector = options.region_from, 4 * model.graftable  # S, or scores
    if not is_saliency(source):
        return vector + model.width * model.graftable + _kept(model, options, tokens)
    scored = {"movement": 1, "taylor": 2, "gallop": 2, "random": 2}.get(source, 1) * vector
    return scored + (0 if source in ("movement", "random") else _kept(model, options, tokens))


def device_memory(device: str) -> int | None:
    """Return the bytes that a job may take on a device; ``None`` where that is not known.

    On a GPU, what other jobs hold is not there for it. What this process holds by now is: the job begins without.
    """
    if kind_of_device(device) == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    if kind_of_device(device) in ("cpu", "mps"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
