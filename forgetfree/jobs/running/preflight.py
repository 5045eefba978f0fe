"""What a job will do and cost, and all that is wrong with it, before anything is downloaded or trained.

A plan is JSON:

    model       name, readout, parameters, graftable, local
    tasks       name, rows of each split and tokens a row, as far as the data are here
    units       unit, and its phases: task, phase, steps (of evaluate: rows), seconds; shared: the unit that does it already
    total       steps by phase, seconds, memory_bytes, memory_bytes_by_phase, disk_bytes, disk_free_bytes
    estimated   how the seconds were found
    notes       what could not be checked, and what may go wrong
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from forgetfree.core.readout_model import LINEAR
from forgetfree.data.bad_rows import DataFaults
from forgetfree.data.encoding import fitting
from forgetfree.data.rows import TaskRows
from forgetfree.data.sampling import evenly
from forgetfree.data.sources import check_task, load_task, read_tasks
from forgetfree.device import find_device, kind_of_device
from forgetfree.errors import (
    DataError,
    Faults,
    ForgetfreeError,
    ModelError,
    NoDataError,
    SeveralFaultsError,
    UsageError,
    first_line,
    out_of_memory,
)
from forgetfree.files import existing, is_place
from forgetfree.jobs.config import InMemory, JobConfig
from forgetfree.jobs.job import Job
from forgetfree.jobs.run_config import RunConfig, RunOptions
from forgetfree.jobs.running import costs
from forgetfree.jobs.running.costs import PlannedUnit, Workload, check_disk_space, needed_bytes
from forgetfree.jobs.running.environment import check_precision, set_threads, threads_as_before
from forgetfree.jobs.running.unit import Json
from forgetfree.kinds.kind import kind_of, readout_for
from forgetfree.models.loading import LoadedModel, load_model, sized
from forgetfree.models.location import locate
from forgetfree.models.module_model import ModuleModel, check_own_dtype
from forgetfree.output import check_place, refuse_used
from forgetfree.results.calibration import calibration_rows
from forgetfree.tasks import TaskDefinition, usual_max_length
from forgetfree.training.cost import TaskSize
from forgetfree.training.encoded_task import sampled
from forgetfree.training.localization import LocalizationOptions
from forgetfree.training.monitor import Phase
from forgetfree.training.scaled_start import ScaleOptions
from forgetfree.training.texts_aside import TextsAside
from forgetfree.training.training_options import MOST_SHOTS, TrainingOptions

#: The largest weights that are loaded, checked and timed beforehand, in bytes.
_TIMED = 10**9


def plan_of(config: JobConfig, in_memory: InMemory | None = None, *, resume: bool = False) -> Json:
    """Return the plan of a job; nothing is written, downloaded or trained.

    Args:
        config: what is asked for.
        in_memory: objects in the place of names.
        resume: whether the job is to go on in its directory.

    Raises:
        UsageError: naming every fault of configuration, places, data, model, readouts, budgets and space on the disk.
    """
    findings = _examine(config, in_memory or InMemory(), resume)
    findings.faults.report()
    return _plan(findings)


def with_all_faults(error: ForgetfreeError, config: JobConfig) -> ForgetfreeError:
    """Return the error that keeps a job from beginning, or all that is wrong with it, if that is more."""
    faults = _examine(config, InMemory(), False).faults
    for fault in getattr(error, "faults", (str(error),)):
        faults.add(fault)
    return error if len(faults) == 1 else SeveralFaultsError(faults, getattr(error, "rows", ()))


@dataclass
class _Findings:
    """What was found of a job's tasks, how many test rows of each are answered, and its model; and what is wrong with it."""

    config: JobConfig
    faults: Faults
    notes: list[str]
    workload: Workload
    device: str
    rows: dict[str, TaskRows]
    tests: dict[str, int]
    definitions: dict[str, TaskDefinition]
    model: _Model


def _examine(config: JobConfig, in_memory: InMemory, resume: bool) -> _Findings:
    """Look at all that can be looked at."""
    faults, notes = Faults(ForgetfreeError), list[str]()
    job: type[Job[Any]] = registry.JOBS[config.command].job.load()
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
            if encoder is not None and task.writes and name in rows:
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
    tests = {name: min(len(each.test), limit or len(each.test)) for name, each in rows.items()}
    if model is not None and model.space:
        for sparsity in workload.sparsities:
            faults.attempt(budget, model.graftable, sparsity)
        notes += filter(None, [tiny_region_note(model.graftable, workload.sparsities)])
        faults.attempt(check_disk_space, config.out, workload, tests, definitions, model.space)
    model = model or _Model("", "", None, 0, None, False)
    return _Findings(config, faults, notes, workload, device, rows, tests, definitions, model)


def _with_precision(workload: Workload, loaded: LoadedModel | None, device: str, notes: list[str]) -> list[PlannedUnit]:
    """Return the units with what ``auto`` means for the model; where it is not here, as if it were fp32."""
    with threads_as_before():
        set_threads(workload.common.threads)
        precision = "fp32" if loaded is None else faster_precision(loaded.model.to(device))
    if loaded is None:
        notes.append("precision=auto is measured when the job starts: memory and time are told for fp32.")
    else:
        loaded.model.to("cpu")  # what else is checked is there
    return [
        replace(unit, options=replace(unit.options, **_auto_as(precision, unit.options))) for unit in workload.units
    ]


def _auto_as(precision: str, options: TrainingOptions) -> Json:
    return {name: precision for name in ("precision", "answer_precision") if getattr(options, name) == "auto"}


# -- Places, data and model -----------------------------------------------------------------------------------


def _rows(
    config: JobConfig, workload: Workload, in_memory: InMemory, faults: Faults, notes: list[str]
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
    if not isinstance(config, RunConfig):
        learned, rest = {name for unit in workload.units for name in unit.tasks}, list[TaskRows]()

        def load(name: str) -> TaskRows | None:
            try:
                return load_task(name, data, *options)
            except NoDataError as error:
                if name in learned:
                    raise
                notes.append(f"Left out: {error}")  # such as another data set that an experiment answers
                return None
            except DataError as error:
                rest.extend(error.rest)
                raise

        tasks = [faults.attempt(load, name) for name in workload.tasks]  # each tells its own faults
        tasks += rest
    else:
        tasks, wrong = faults.attempt(read_tasks, config.stream, data, *options) or ([], DataFaults())
        faults.attempt(wrong.report)
        tasks += wrong.rest  # for what else is wrong
    of_tasks = {rows.task.name: rows for rows in tasks if rows}
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
    config: Any
    parameters: int
    space: ParameterSpace | None
    local: bool
    loaded: LoadedModel | None = None

    @property
    def graftable(self) -> int:
        """The number of graftable entries; 0: not known."""
        return len(self.space) if self.space else 0

    @property
    def trains_readouts(self) -> bool:
        """Whether tasks have readouts that are drawn at random."""
        return (self.loaded.readout if self.loaded else self.readout) in LINEAR


def _model(workload: Workload, in_memory: InMemory, tasks: Sequence[TaskDefinition], notes: list[str]) -> _Model:
    readout = readout_for(workload.readout, tasks)
    common = workload.common
    arguments: Json = {"graftable": common.graftable, "max_length": common.max_length, "dtype": common.dtype}
    if in_memory.reads_tensors:
        check_own_dtype(in_memory.model, common.dtype)
        notes.append("The model reads tensors: it is not timed here.")
        size = sum(parameter.numel() for parameter in in_memory.model.parameters())
        space = ModuleModel(in_memory.model, graftable=common.graftable).space()
        return _Model(type(in_memory.model).__name__, "linear", None, size, space, True)
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
        loaded = load_model(
            in_memory.model_or(workload.model), readout, tasks=tasks, **arguments, **in_memory.model_arguments
        )
        notes += [loaded.note] if loaded.note else []
        backbone = loaded.model.backbone
        size = sum(parameter.numel() for parameter in backbone.parameters())
        return _Model(
            loaded.name,
            loaded.readout,
            getattr(backbone, "config", None),
            size,
            loaded.model.space(),
            True,
            loaded,
        )
    try:
        arguments = {"graftable": common.graftable, "dtype": common.dtype, "tasks": tasks if local else ()}
        return _Model(workload.model, *sized(str(path), workload.model, readout, **arguments), local)
    except ModelError as error:
        if local:
            raise
        notes.append(f"Its configuration cannot be read either, so that nothing is estimated: {first_line(error)}.")
        return _Model(workload.model, readout, None, 0, None, False)


# -- The plan -------------------------------------------------------------------------------------------------


def _plan(findings: _Findings) -> Json:
    config, workload, notes = findings.config, findings.workload, findings.notes
    rows, model, device = findings.rows, findings.model, findings.device
    set_threads(workload.common.threads)
    lengths = {name: _lengths(findings, each) for name, each in rows.items()}
    limit = workload.common.max_length or usual_max_length(findings.definitions.values())
    rates = _rates(findings)
    units, made, total = list[Json](), dict[Any, str](), Counter[Phase]()
    for unit in workload.units:
        phases = list(_phases(unit, findings, lengths, limit, rates, made))
        units.append({"unit": unit.name, "phases": phases})
        for phase in phases:
            total[phase["phase"]] += phase["steps"] or 0
        if any(phase["steps"] is None for phase in phases):
            notes.append("Without --steps or --shots, the steps depend on the rows, which are not here.")
    seconds = [phase["seconds"] for unit in units for phase in unit["phases"]]
    longest = max((max(each) for each in lengths.values()), default=limit)
    size = costs.ModelSize.of(model.config, model.parameters, model.graftable, workload.common.dtype)
    memory, where = Counter[Phase](), kind_of_device(device)
    for each, planned in zip(workload.units, units, strict=True):
        named = {phase["phase"] for phase in planned["phases"]}
        memory |= Counter(costs.memory_of_phases(size, each.options, min(longest, limit), named, where))
    most, there = max(memory.values(), default=0), costs.device_memory(device)
    if there is not None and most > there:
        notes.append(
            f"About {most:,} bytes of memory are needed on {device}, which has {there:,} for it: training may fail."
        )
    _note_full_space(findings, units)
    known = bool(seconds) and None not in seconds and model.parameters > 0
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
                "tokens_a_row": round(sum(lengths[name]) / len(lengths[name]), 1),
            }
            for name, each in rows.items()
        ],
        "units": units,
        "total": {
            "units": len(units),
            "steps": dict(total),
            "seconds": round(sum(seconds), 1) if known else None,
            "memory_bytes": most,
            "memory_bytes_by_phase": dict(memory),
            "disk_bytes": sum(needed_bytes(workload, findings.tests, findings.definitions, model.space))
            if model.space
            else 0,
            "disk_free_bytes": shutil.disk_usage(existing(Path(config.out))).free,
        },
        "estimated": rates.source if rates else "not at all",
        "notes": list(dict.fromkeys(notes)),
    }


def _lengths(findings: _Findings, rows: TaskRows) -> list[int]:
    """Return the lengths of a sample of training rows in tokens; without the model's tokenizer, 4 tokens for 3 words."""
    sample = rows.train.take(evenly(len(rows.train), costs.SAMPLE))
    if findings.model.loaded is not None:
        encoder = findings.model.loaded.encoder(rows.task)
        lengths = [len(ids) for ids in encoder(sample)]
        if cut := encoder.cut_note("training row", len(sample)):
            all_rows = len(sample) == len(rows.train)
            findings.notes.append(f"Task {rows.task.name!r}{'' if all_rows else ', of a sample'}: {cut}")
        return lengths
    texts = zip(sample.first, sample.second, strict=True) if sample.second else ((text,) for text in sample.first)
    return [2 + round(4 / 3 * sum(len(text.split()) for text in each)) for each in texts]


def _rates(findings: _Findings) -> costs.Rates | None:
    workload, model = findings.workload, findings.model
    if not workload.units or not model.parameters or model.config is None:
        return None
    options = workload.units[0].options
    if model.loaded is None or not findings.rows:
        narrow = workload.common.dtype != "float32"
        return costs.computed_rates(model.parameters, findings.device, "bf16" if narrow else options.precision)
    first = next(iter(findings.rows.values()))
    sample = first.train.take(evenly(len(first.train), costs.SAMPLE))
    try:
        return costs.timed_rates(model.loaded, first.task, sample, options, findings.device)
    except (ForgetfreeError, RuntimeError, MemoryError) as error:
        findings.notes.append(f"A first step of training fails: {first_line(out_of_memory(error) or error)}.")
        return None


def _phases(
    unit: PlannedUnit,
    findings: _Findings,
    lengths: Mapping[str, list[int]],
    max_length: int,
    rates: costs.Rates | None,
    made: dict[Any, str],
) -> Iterator[Json]:
    """Yield the phases of a unit; a fine-tuned model that another unit makes costs nothing, and ``shared`` names that unit."""
    options, common, model = unit.options, findings.workload.common, findings.model
    evaluations = unit.evaluations + (0 if model.trains_readouts else unit.before_learning)
    sizes = [replace(_size(task, unit, findings), trains_readout=model.trains_readouts) for task in unit.tasks]
    for task, size, phases in zip(unit.tasks, sizes, unit.cost(sizes).phases, strict=True):
        tokens = lengths.get(task) or [max_length // 2]
        length = min(costs.padded(tokens, options.batch_size), max_length)
        phase = partial(_phase, task, rates)
        for each in phases:
            steps, maker = each.steps, unit.name
            if each.shared:
                key = task, unit.seed, unit.shots, options.learning_rate, options.optimizer, steps
                maker = made.setdefault(key, unit.name)
                steps = steps and steps * unit.repeats if maker == unit.name else 0
            shared = {} if maker == unit.name else {"shared": maker}
            yield phase(each.phase, steps, (steps or 0) * each.rows * length) | shared
        if (rows := findings.rows.get(task)) is not None:
            tests = findings.tests[task]
            answered = written = round(tests * evaluations)
            if isinstance(options, LocalizationOptions) and options.region_from in ("mask", "midpoint"):
                answered += min(len(rows.validation), options.validation_rows) * options.mask_evaluations
            if isinstance(options, ScaleOptions):
                answered += min(len(rows.validation), options.choice_rows) * options.choices
            if isinstance(common, RunOptions) and not rows.task.writes:
                if common.temperature_scaling:
                    answered += min(len(rows.validation), calibration_rows(tests))
                if common.floors == "probe" and made.setdefault(("probe", task, unit.seed), unit.name) == unit.name:
                    answered += (size.rows or 0) + tests
            mean = sum(tokens) / len(tokens)
            # After its loss is known, a prompt is read again, and as long a text as may be is written after it.
            more = written * (mean + rows.task.max_new_tokens) if rows.task.writes else 0
            yield phase("evaluate", answered, answered * mean + more)


def _size(task: str, unit: PlannedUnit, findings: _Findings) -> TaskSize:
    """Return the size of a task, as far as it is known."""
    rows, definition = findings.rows.get(task), findings.definitions.get(task)
    drawn = None if rows is None else len(sampled(rows, unit.shots, unit.seed, findings.workload.common.or_fewer))
    rarest = unit.shots or (rows and min(MOST_SHOTS, *Counter(kind_of(rows.task).groups(rows.train.labels)).values()))
    labels = 2 if definition is None else max(1, len(definition.labels))
    known = rarest or isinstance(unit.options.steps, int)
    steps = unit.options.updates(labels, rarest or 0, drawn or labels * (rarest or 0)) if known else None
    return TaskSize(steps, drawn)


def _phase(task: str, rates: costs.Rates | None, name: Phase, steps: int | None, tokens: float) -> Json:
    seconds = None
    if rates and steps is not None:
        seconds = round(tokens * (rates.evaluate if name == "evaluate" else rates.train), 2)
    return {"task": task, "phase": name, "steps": steps, "seconds": seconds}


def _note_full_space(findings: _Findings, planned: Sequence[Json]) -> None:
    """Note where the regions of all tasks are more than there is."""
    for unit, about in zip(findings.workload.units, planned, strict=True):
        share = len(unit.tasks) * max(unit.sparsities, default=0)
        if share > 1 and any(phase["phase"] == "train" for phase in about["phases"]):
            findings.notes.append(
                f"{unit.name}: {len(unit.tasks)} regions of {max(unit.sparsities):g} of the {findings.model.graftable:,} "
                "graftable entries are more than there are. Later tasks train what earlier ones left. Set a lower sparsity."
            )
