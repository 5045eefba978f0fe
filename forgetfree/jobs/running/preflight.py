"""What a job will do, and all that is wrong with it, before anything is downloaded or written.

A plan is JSON:

    model       name, readout, parameters, graftable, local
    tasks       name, labels, and rows of each split, as far as the data are here
    units       unit, its updates by task, and the seconds they take
    total       units, updates, seconds, and memory_bytes: the most that was held while a few steps were taken
    notes       what could not be checked, and what may go wrong
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forgetfree import registry
from forgetfree.core.base_regions import budget, tiny_region_note
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.precision import faster_precision
from forgetfree.data.bad_rows import DataFaults
from forgetfree.data.encoding import fitting
from forgetfree.data.rows import TaskRows
from forgetfree.data.sampling import evenly
from forgetfree.data.sources import check_task, load_task, read_tasks
from forgetfree.device import find_device
from forgetfree.errors import (
    DataError,
    Faults,
    ForgetfreeError,
    ModelError,
    SeveralFaultsError,
    UsageError,
    first_line,
    out_of_memory,
)
from forgetfree.files import is_place
from forgetfree.jobs.config import InMemory
from forgetfree.jobs.run_config import RunConfig
from forgetfree.jobs.running.environment import check_precision, set_threads, threads_as_before
from forgetfree.jobs.running.unit import Json
from forgetfree.jobs.running.workload import PhaseTime, PlannedUnit, Workload, most_memory, step_times
from forgetfree.kinds.kind import kind_of, readout_for
from forgetfree.models.loading import LoadedModel, load_model, sized
from forgetfree.models.location import locate
from forgetfree.models.module_model import ModuleModel, check_own_dtype
from forgetfree.output import check_place, refuse_used
from forgetfree.tasks import TaskDefinition
from forgetfree.training.encoded_task import sampled
from forgetfree.training.texts_aside import TextsAside
from forgetfree.training.training_options import MOST_SHOTS, TrainingOptions

#: The largest weights that are loaded, checked and timed beforehand, in bytes.
_TIMED = 10**9
#: Training rows of a task that are encoded to see whether texts are cut.
_SAMPLE = 64


def plan_of(config: RunConfig, in_memory: InMemory | None = None, *, resume: bool = False) -> Json:
    """Return the plan of a job; nothing is written or downloaded.

    Args:
        config: what is asked for.
        in_memory: objects in the place of names.
        resume: whether the job is to go on in its directory.

    Raises:
        UsageError: naming every fault of configuration, places, data, model, readouts and budgets.
    """
    findings = _examine(config, in_memory or InMemory(), resume)
    findings.faults.report()
    return _plan(findings)


def with_all_faults(error: ForgetfreeError, config: RunConfig) -> ForgetfreeError:
    """Return the error that keeps a job from beginning, or all that is wrong with it, if that is more."""
    faults = _examine(config, InMemory(), False).faults
    for fault in getattr(error, "faults", (str(error),)):
        faults.add(fault)
    return error if len(faults) == 1 else SeveralFaultsError(faults, getattr(error, "rows", ()))


@dataclass
class _Findings:
    """What was found of a job's tasks and its model; and what is wrong with it."""

    config: RunConfig
    faults: Faults
    notes: list[str]
    workload: Workload
    device: str
    rows: dict[str, TaskRows]
    definitions: dict[str, TaskDefinition]
    model: _Model


def _examine(config: RunConfig, in_memory: InMemory, resume: bool) -> _Findings:
    """Look at all that can be looked at."""
    faults, notes = Faults(ForgetfreeError), list[str]()
    from forgetfree.jobs.run import RunJob

    job = RunJob
    checked, out = faults.attempt(config.checked, in_memory.strategies), Path(config.out)
    workload = job.workload(config, checked, faults)
    limit = workload.common.test_limit
    faults.attempt(check_place, out)
    if workload.common.cache:
        faults.attempt(check_place, Path(workload.common.cache), "--cache")
    if not resume:
        faults.attempt(refuse_used, out, config.command)
    device = faults.attempt(find_device, config.device) or "cpu"
    faults.attempt(check_precision, [name for each in workload.units for name in each.options.precisions], device)
    rows = _rows(config, workload, in_memory, faults, notes)
    definitions = {name: each.task for name, each in rows.items()}
    definitions |= {name: task for name in workload.tasks if name not in rows and (task := registry.tasks().get(name))}
    model = faults.attempt(_model, workload, in_memory, list(definitions.values()), notes)
    if any("auto" in unit.options.precisions for unit in workload.units):
        workload.units = _with_precision(workload, model and model.loaded, device, notes)
    if model is not None and model.loaded is not None:
        faults.attempt(model.loaded.check_words, definitions.values())
        for name, task in definitions.items():
            encoder = faults.attempt(model.loaded.encoder, task)
            if encoder is not None and name in rows:
                read = rows[name]
                rows[name] = faults.attempt(fitting, read, encoder, config.skip_bad_rows) or read
                notes += rows[name].notes[len(read.notes) :]
        if workload.held_aside is not None:
            data = in_memory.data_or(config.data)
            aside = faults.attempt(TextsAside.of, workload.held_aside, data, model.loaded, limit, config.read_options)
            notes += (aside and faults.attempt(aside.notes, rows.values())) or ()
        for unit in workload.units:
            with suppress(AttributeError):  # of a stream there is no more than its model
                faults.attempt(unit.check, unit.options, SimpleNamespace(model=model.loaded.model))
    if model is not None and model.space:
        for sparsity in workload.sparsities:
            faults.attempt(budget, model.graftable, sparsity)
        notes += filter(None, [tiny_region_note(model.graftable, workload.sparsities)])
    model = model or _Model("", "", 0, None, False)
    return _Findings(config, faults, notes, workload, device, rows, definitions, model)


def _with_precision(workload: Workload, loaded: LoadedModel | None, device: str, notes: list[str]) -> list[PlannedUnit]:
    """Return the units with what ``auto`` means for the model; where it is not here, as if it were fp32."""
    with threads_as_before():
        set_threads(workload.common.threads)
        precision = "fp32" if loaded is None else faster_precision(loaded.model.to(device))
    if loaded is None:
        notes.append("precision=auto is measured when the job starts: time is told for fp32.")
    else:
        loaded.model.to("cpu")  # what else is checked is there
    return [
        replace(unit, options=replace(unit.options, **_auto_as(precision, unit.options))) for unit in workload.units
    ]


def _auto_as(precision: str, options: TrainingOptions) -> Json:
    return {name: precision for name in ("precision", "answer_precision") if getattr(options, name) == "auto"}


# -- Places, data and model -----------------------------------------------------------------------------------


def _rows(
    config: RunConfig, workload: Workload, in_memory: InMemory, faults: Faults, notes: list[str]
) -> dict[str, TaskRows]:
    """Return the rows of the tasks whose data are here."""
    data: Any = in_memory.data_or(config.data)
    if in_memory.reads_tensors:
        return {}
    if data == "hub":
        streams = registry.streams() if isinstance(config, RunConfig) and len(workload.tasks) == 1 else ()
        for name in workload.tasks:
            faults.attempt(check_task, name, data, streams)
        notes.append("The rows are read from the hub when the job starts: they are not checked, nor counted, here.")
        return {}
    options = workload.common.evaluate_on, config.read_options
    if isinstance(config, RunConfig):
        tasks, wrong = faults.attempt(read_tasks, config.stream, data, *options) or ([], DataFaults())
        faults.attempt(wrong.report)
        tasks += wrong.rest  # for what else is wrong
    else:
        rest = list[TaskRows]()

        def load(name: str) -> TaskRows:
            try:
                return load_task(name, data, *options)
            except DataError as error:
                rest.extend(error.rest)
                raise

        tasks = [*filter(None, [faults.attempt(load, name) for name in workload.tasks]), *rest]
    of_tasks = {rows.task.name: rows for rows in tasks}
    for rows in of_tasks.values():
        notes += filter(None, (*rows.notes, rows.shared_note(workload.common.evaluate_on)))
    for shots, seed in sorted({(each.shots, each.seed) for each in workload.units}, key=str):
        for rows in of_tasks.values():
            faults.attempt(sampled, rows, shots, seed, workload.common.or_fewer)
    return of_tasks


@dataclass
class _Model:
    """A model as far as it is known beforehand; ``loaded`` where its weights are here and not too large."""

    name: str
    readout: str
    parameters: int
    space: ParameterSpace | None
    local: bool
    loaded: LoadedModel | None = None
    load: Callable[[], LoadedModel] | None = None

    @property
    def graftable(self) -> int:
        """The number of graftable entries; 0: not known."""
        return len(self.space) if self.space else 0


def _model(workload: Workload, in_memory: InMemory, tasks: Sequence[TaskDefinition], notes: list[str]) -> _Model:
    readout = readout_for(workload.readout, tasks)
    common = workload.common
    arguments: Json = {"graftable": common.graftable, "max_length": common.max_length, "dtype": common.dtype}
    if in_memory.reads_tensors:
        check_own_dtype(in_memory.model, common.dtype)
        notes.append("The model reads tensors: it is not timed here.")
        size = sum(parameter.numel() for parameter in in_memory.model.parameters())
        space = ModuleModel(in_memory.model, graftable=common.graftable).space()
        return _Model(type(in_memory.model).__name__, "linear", size, space, True)
    path = None if in_memory.model is not None else locate(workload.model)
    local = path is None or Path(path).is_dir()
    if not local:
        if not is_place(workload.model) and workload.model.count("/") > 1:
            raise UsageError(
                f"--model {workload.model!r} is no hub name, which is OWNER/NAME. Give one, or a directory."
            )
        notes.append(f"The weights of {workload.model} come from the hub: they are not checked here.")
    weights = sum(each.stat().st_size for each in Path(path).glob("*.safetensors")) if path and local else 0
    if local and weights <= _TIMED:
        load = partial(
            load_model,
            *(in_memory.model_or(workload.model), readout),
            **{"tasks": tasks, **arguments, **in_memory.model_arguments},
        )
        loaded = load()
        notes += [loaded.note] if loaded.note else []
        size = sum(parameter.numel() for parameter in loaded.model.backbone.parameters())
        return _Model(loaded.name, loaded.readout, size, loaded.model.space(), True, loaded, load)
    notes.append("The model is not timed here: its weights are large, or come from the hub.")
    try:
        arguments = {"graftable": common.graftable, "dtype": common.dtype, "tasks": tasks if local else ()}
        found, _, size, space = sized(str(path), workload.model, readout, **arguments)
        return _Model(workload.model, found, size, space, local)
    except ModelError as error:
        if local:
            raise
        notes.append(f"Its configuration cannot be read either, so that nothing is known of it: {first_line(error)}.")
        return _Model(workload.model, readout, 0, None, False)


# -- The plan -------------------------------------------------------------------------------------------------


def _plan(findings: _Findings) -> Json:
    config, workload, notes, rows = findings.config, findings.workload, findings.notes, findings.rows
    model, device = findings.model, findings.device
    set_threads(workload.common.threads)
    _note_cut_texts(findings)
    times = _step_times(findings)
    units, shared = list[Json](), set[Any]()
    for unit in workload.units:
        updates, seconds = dict[str, int | None](), list[float | None]()
        for task in unit.tasks:
            asked, drawn = _updates(task, unit, findings)
            phases = times.get(unit.way)
            if phases is None or asked is None:
                updates[task] = asked
                seconds.append(None)
                continue
            steps = [(each, each.steps(unit.options, asked, drawn)) for each in phases]
            updates[task] = sum(count for each, count in steps if each.phase in ("fine_tune", "train"))
            for each, count in steps:
                made = task, unit.seed, unit.options.learning_rate, unit.options.optimizer, count
                if each.phase != "fine_tune" or made not in shared:  # a fine-tuned model is made once
                    seconds.append(each.step * count)
                shared |= {made} if each.phase == "fine_tune" else set()
        if None in updates.values():
            notes.append("Without --steps or --shots, the updates depend on the rows, which are not here.")
        known = [each for each in seconds if each is not None]
        units.append(
            {
                "unit": unit.name,
                "updates": updates,
                "seconds": None if None in seconds else round(sum(known), 1),
            }
        )
    _note_full_space(findings)
    every = [unit["seconds"] for unit in units]
    return {
        "schema": 1,
        "command": config.command,
        "out": config.out,
        "device": device,
        "model": {
            **{"name": model.name, "readout": model.readout, "local": model.local},
            **{"parameters": model.parameters, "graftable": model.graftable},
        },
        "tasks": [
            {
                **{"task": name, "train": len(each.train), "validation": len(each.validation), "test": len(each.test)},
                "labels": list(each.task.labels),
            }
            for name, each in rows.items()
        ],
        "units": units,
        "total": {
            "units": len(units),
            "updates": sum(updates or 0 for unit in units for updates in unit["updates"].values()),
            "seconds": round(sum(every), 1) if every and None not in every else None,
            "memory_bytes": most_memory(device) if times else None,
        },
        "notes": list(dict.fromkeys(notes)),
    }


def _step_times(findings: _Findings) -> dict[str, list[PhaseTime]]:
    """Return what the phases of each way to learn take, by a few steps on its first task that is here."""
    found = dict[str, list[PhaseTime]]()
    for unit in findings.workload.units:
        task = next((name for name in unit.tasks if name in findings.rows), None)
        if unit.way in found or task is None or findings.model.load is None:
            continue
        try:
            found[unit.way] = step_times(unit, findings.model.load(), findings.rows[task], findings.device)
        except (ForgetfreeError, RuntimeError, MemoryError) as error:
            findings.notes.append(f"A first step of {unit.way} fails: {first_line(out_of_memory(error) or error)}")
    return found


def _updates(task: str, unit: PlannedUnit, findings: _Findings) -> tuple[int | None, int]:
    """Return the updates that are asked for of a task, as far as they are known, and its training rows."""
    rows, definition = findings.rows.get(task), findings.definitions.get(task)
    drawn = None if rows is None else len(sampled(rows, unit.shots, unit.seed, findings.workload.common.or_fewer))
    rarest = unit.shots or (rows and min(MOST_SHOTS, *Counter(kind_of(rows.task).groups(rows.train.labels)).values()))
    labels = 2 if definition is None else max(1, len(definition.labels))
    known = rarest or isinstance(unit.options.steps, int)
    drawn = drawn or labels * (rarest or 0)
    return (unit.options.updates(labels, rarest or 0, drawn) if known else None), drawn


def _note_cut_texts(findings: _Findings) -> None:
    """Note which training texts are longer than the model reads, as a sample has it."""
    if (loaded := findings.model.loaded) is None:
        return
    for name, rows in findings.rows.items():
        sample = rows.train.take(evenly(len(rows.train), _SAMPLE))
        encoder = loaded.encoder(rows.task)
        encoder(sample)
        if cut := encoder.cut_note("training row", len(sample)):
            findings.notes.append(f"Task {name!r}{', of a sample' * (len(sample) < len(rows.train))}: {cut}")


def _note_full_space(findings: _Findings) -> None:
    """Note where the regions of all tasks are more than there is."""
    for unit in findings.workload.units:
        if len(unit.tasks) * max(unit.sparsities, default=0) > 1:
            findings.notes.append(
                f"{unit.name}: {len(unit.tasks)} regions of {max(unit.sparsities):g} of the {findings.model.graftable:,} "
                "graftable entries are more than there are. Later tasks train what earlier ones left. Set a lower sparsity."
            )
