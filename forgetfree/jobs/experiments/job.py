"""An experiment measured unit by unit: results.json, report.md and a figure. A unit has a folder in OUT/units/."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from forgetfree.data.rows import TaskRows
from forgetfree.data.sources import check_tasks
from forgetfree.errors import DataError, Faults, ReportError, UsageError
from forgetfree.files import write_atomically
from forgetfree.jobs.config import CommonOptions, with_precision
from forgetfree.jobs.experiment_config import CheckedExperiment, ExperimentConfig
from forgetfree.jobs.experiments.context import ExperimentContext
from forgetfree.jobs.experiments.experiment import draw_outcome, load_experiment, outcome, rows_of
from forgetfree.jobs.job import Job
from forgetfree.jobs.running.costs import PlannedUnit, Workload, grafts_cost
from forgetfree.jobs.running.environment import tell_shared_rows, versions
from forgetfree.jobs.running.unit import Json, Unit
from forgetfree.models.loading import LoadedModel, config_of, load_model
from forgetfree.models.state import StateStore
from forgetfree.options import build
from forgetfree.results.records import ExperimentResults
from forgetfree.results.report.page import render_page
from forgetfree.results.scores import SCORES_FILE, scores_of_rows, write_scores
from forgetfree.terminal import tell_note
from forgetfree.training.localization import LocalizationOptions
from forgetfree.training.monitor import Monitor

if TYPE_CHECKING:
    from forgetfree.core.parameters import ParameterSpace

#: Lists of a preset, and the part of a unit that each gives: a longer list is more units of the same kind.
LISTS = {"tasks": "task", "shots": "shots", "seeds": "seed"}


class ExperimentJob(Job[ExperimentConfig]):
    """An experiment."""

    compared: ClassVar = "setting"
    names_all: ClassVar = True

    def __init__(self, config: ExperimentConfig) -> None:
        config = with_precision(config, model=config.checked().preset.model)
        self.experiment = load_experiment(config.name)
        checked = config.checked()
        self.preset, common = checked.preset, checked.common
        for key in self.experiment.single:
            if len(values := getattr(self.preset, key)) > 1:
                raise UsageError(f"{config.name} looks at one of {key}, got {', '.join(map(str, values))}. Give one.")
        check_tasks([names[0] for names in self.experiment.tasks(self.preset)], config.data)
        precision = {**self.preset.options, **self.preset.fixed}.get("precision", "fp32")
        default_cache = str(Path(config.out).parent / "fine-tuned")
        super().__init__(config, checked, replace(common, cache=common.cache or default_cache), [precision])
        units = self.experiment.units(self.preset)
        self.growing = [name for name, part in LISTS.items() if part in units[0]]

    @classmethod
    def workload(cls, config: ExperimentConfig, checked: CheckedExperiment | None, faults: Faults) -> Workload:
        """Return every unit of the preset, as it is asked for."""
        if checked is None:
            return Workload(config.model or "minilm", config.readout or "auto", config.tasks, CommonOptions())
        preset, experiment = checked.preset, load_experiment(config.name)
        names = tuple(each[0] for each in experiment.tasks(preset))
        own = {key: getattr(preset, key) for key in ("max_length", "test_limit", "evaluate_on", "graftable")}
        common = CommonOptions(**(vars(checked.common) | own | {"or_fewer": True}))
        workload = Workload(preset.model, preset.readout, names, common)
        values = {"sparsity": preset.sparsity, **preset.options, **preset.fixed}
        options = faults.attempt(build, LocalizationOptions, values, "the experiment") or LocalizationOptions()
        for unit in experiment.units(preset):
            workload.units.append(
                PlannedUnit(
                    f"units/{'-'.join(map(str, unit.values()))}",
                    (unit["task"],) if "task" in unit else names,
                    options,
                    partial(grafts_cost, options, preset.sparsities),
                    unit.get("shots", preset.shots[0]),
                    unit.get("seed", preset.seeds[0]),
                    evaluations=2.0 + len(preset.sparsities),
                    repeats=sum(map(len, preset.arms.values())) or len(preset.grid),
                    sparsities=preset.sparsities,
                )
            )
        return workload

    @cached_property
    def context(self) -> ExperimentContext:
        """Return what units are measured with."""
        return ExperimentContext(
            self.preset,
            self.config.data,
            self.device,
            StateStore(self.cache),
            self.cache,
            read_options=self.config.read_options,
            merged=self.experiment.merged,
        )

    @cached_property
    def skipped(self) -> dict[str, str]:
        """Return the tasks without data, and the reason."""
        needed = self.experiment.tasks(self.preset)
        return {names[0]: reason for names in needed if (reason := self.context.missing(names))}

    @cached_property
    def units(self) -> list[Json]:
        """Return what is measured, unit by unit."""
        planned = self.experiment.units(self.preset)
        if "task" not in planned[0] and self.skipped:  # each needs all tasks
            return []
        return [unit for unit in planned if unit.get("task") not in self.skipped]

    def request(self) -> Json:
        """Return the setting in full, the preset's values included."""
        return {"experiment": self.config.name, "preset": self.config.preset, **asdict(self.preset)}

    def keys(self) -> Json:
        """Return every unit, in a folder such as ``units/sst2-shots-64-seed-0``."""
        return {f"units/{_folder(unit)}": unit for unit in self.units}

    def describe(self) -> Json:
        """Describe tasks, model and data."""
        context, preset = self.context, self.preset
        if not self.units:
            raise DataError(next(iter(self.skipped.values())))
        needed = self.experiment.tasks(preset)
        there = [context.first_available(names) for names in needed if names[0] not in self.skipped]
        arguments: Json = {"graftable": preset.graftable, "max_length": preset.max_length}
        loaded = load_model(preset.model, context.readout, tasks=context.definitions, **arguments)
        self._space = loaded.model.space()
        tell_note(loaded.note)
        tell_shared_rows(map(context.rows, there), preset.evaluate_on)
        rows = {task: context.rows(task) for task in there}
        data: Json = {
            task: {"fingerprint": each.fingerprint(), "encoded": _encoded(loaded, each)} for task, each in rows.items()
        }
        tasks, config = {task: each.task.fields for task, each in rows.items()}, config_of(loaded.model.backbone)
        absent: Json = {}
        if needed != [(task,) for task in preset.tasks]:
            # Units read other tasks' rows, too: what they lacked must be lacking when the rest is measured.
            absent = {task: {"fingerprint": None} for task in self.skipped}
        return {
            "experiment": self.config.section(),
            "model": {
                "name": preset.model,
                "readout": loaded.readout,
                "fingerprint": loaded.fingerprint,
                "max_length": loaded.max_length,
                "config": config,
            },
            "tasks": list(tasks.values()),
            "data": data | absent,
            "about": {
                "experiment": self.config.name,
                "paper": self.experiment.paper,
                "preset": self.config.preset,
                "setting": asdict(preset),
                "model": loaded.fingerprint,
                "config": config,
                "data": {task: rows["fingerprint"] for task, rows in data.items()},
                "tasks": tasks,
                "encoded": {task: rows["encoded"] for task, rows in data.items()},
                "skipped": self.skipped,
                "versions": {package: versions()[package] for package in ("forgetfree", "torch", "transformers")},
                "device": self.device,
            },
        }

    def space(self) -> ParameterSpace:
        """Return that of the preset's model."""
        return self._space

    def measure(self, key: Mapping[str, Any], directory: Path, monitor: Monitor) -> Json:
        """Measure the rows of a unit."""
        self.context.monitor = monitor
        rows = [{**key, **row} for row in self.experiment.measure(self.context, dict(key))]
        scores = scores_of_rows(rows, self.experiment.measured)
        write_scores(directory / SCORES_FILE, scores)
        monitor.scored(scores)
        return {"rows": rows}

    @classmethod
    def gather(cls, out: Path, about: Json, units: Sequence[tuple[Unit, Json | None]]) -> Json:
        """Return ``units`` with their rows, and the claims where all units are done."""
        done = [(unit, record) for unit, record in units if record and record["status"] == "done"]
        results = about | {
            "complete": len(done) == len(units),
            "units": [{"unit": unit.key, "rows": record["details"]["rows"]} for unit, record in done],
            "seconds": round(sum(record["seconds"] for _, record in done), 1),
        }
        if results["complete"]:
            claims = load_experiment(about["experiment"]).claims(rows_of(results))
            results["claims"] = [asdict(claim) for claim in claims]
        return results

    @classmethod
    def report(cls, out: Path, results: Json, ended: bool) -> None:
        """Write the claims and tables, and draw the figure."""
        if ended and results["units"]:
            measured = ExperimentResults.of(results)
            write_atomically(out / "report.md", render_page(outcome(measured), "markdown"))
            try:
                draw_outcome(measured, out)
            except ReportError:
                if results["complete"]:  # else what failed may be what the figure shows
                    raise


def _folder(unit: Mapping[str, Any]) -> str:
    """Return the name of a unit's folder: short, and of letters that every file system takes."""
    name = "-".join(str(value) if key == "task" else f"{key}-{value}" for key, value in unit.items())
    if re.fullmatch(r"[\w.-]{1,80}", name, re.ASCII):
        return name
    plain = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII)[:60]
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _encoded(loaded: LoadedModel, rows: TaskRows) -> str:
    """Return the SHA-256 of what the tokenizer makes of a task's first hundred test rows, in its prompt."""
    ids = loaded.encoder(rows.task)(rows.test.take(range(min(100, len(rows.test)))))
    return hashlib.sha256(json.dumps([list(map(int, row)) for row in ids]).encode()).hexdigest()
