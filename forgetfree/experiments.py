"""The paper's experiments by name: work done unit by unit, results.json, tables, claims and a figure.

An experiment is one final class in one file of `forgetfree.benchmarks.paper`. It says what is measured on one unit
(a task, a number of shots, a seed), and what follows from all rows together. Rows are flat and tidy: one number of
each kind a row, whatever the experiment.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from forgetfree import __version__, registry
from forgetfree.data.sampling import representative
from forgetfree.data.sources import TaskRows, load_task
from forgetfree.environment import make_directory, refuse_held
from forgetfree.errors import (
    DataError,
    MetricError,
    ModelError,
    ReportError,
    RunError,
    TrainingError,
    UnknownNameError,
    UsageError,
)
from forgetfree.files import write_atomically, write_json
from forgetfree.grafting import BaseKind, budget
from forgetfree.localization import LocalizationOptions, check_localization
from forgetfree.metrics import Predictions, agreement
from forgetfree.models.loading import load_model
from forgetfree.models.state import ModelState, StateStore
from forgetfree.options import build
from forgetfree.pages import NULL, Page, Table, cell, percent, render_page
from forgetfree.regions import Region, biases
from forgetfree.run_config import CommonOptions, Faults
from forgetfree.single_task import SingleTask
from forgetfree.tasks import MAX_LENGTH, EvaluatedOn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from forgetfree.monitor import Monitor

SCHEMA = 1
#: What ``score`` is called.
SCORE = "Accuracy, or F1 where the task is measured by it"
Row = dict[str, Any]
#: What is measured at once, and kept at once: e.g. ``{"task": "sst2", "shots": 64, "seed": 0}``.
Unit = dict[str, Any]
#: Lists of a preset, and the part of a unit that each gives: a longer list is more units of the same kind.
LISTS = {"tasks": "task", "shots": "shots", "seeds": "seed"}
#: What a setting means that was written before one of these could be chosen.
_DEFAULTS = {"max_length": MAX_LENGTH, "evaluate_on": "test"}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One setting of an experiment.

    Attributes:
        model: as ``--model``.
        readout: as ``--readout``.
        tasks: names.
        shots: training rows per label; of a label that has fewer, all.
        seeds: of sample and training.
        sparsities: of the regions.
        options: of `LocalizationOptions`, where they are not the defaults.
        grid: options to choose from on validation rows, e.g. learning rates; the first of equals wins.
        arms: where ways to train are compared, the grid of each by name.
        fixed: options set by hand, which nothing changes.
        test_limit: test rows per task; all for ``None``.
        max_length: tokens a row is read at, at most.
        evaluate_on: which rows are scored, see `TaskRows.evaluated_on`.
        graftable: regular expression over names of tensors that may be grafted; all for ``None``.
    """

    model: str
    readout: str
    tasks: tuple[str, ...]
    shots: tuple[int, ...]
    seeds: tuple[int, ...]
    sparsities: tuple[float, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    grid: tuple[Mapping[str, Any], ...] = ({},)
    arms: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    test_limit: int | None = None
    max_length: int = MAX_LENGTH
    evaluate_on: EvaluatedOn = "test"
    graftable: str | None = None

    @property
    def sparsity(self) -> float:
        """The first: where an experiment looks at one."""
        return self.sparsities[0]


@dataclass(frozen=True)
class Claim:
    """What the paper says, what it measured, what we measure, and whether the claim holds here.

    Attributes:
        text: the claim.
        paper: its number there; a dash where only the claim is at hand.
        ours: ours.
        holds: ``None`` where the rows do not tell.
    """

    text: str
    paper: str
    ours: str
    holds: bool | None


class Laboratory:
    """What units are measured with: tasks, models, options, and the fine-tuned models made so far.

    Args:
        preset: the setting.
        data: as ``--data``.
        device: where to train.
        store: of fine-tuned models, shared by all experiments.
        cache: its directory, for experiments that run whole streams.
        monitor: makes the monitor of a unit from a title.
    """

    def __init__(
        self, preset: Preset, data: str, device: str, store: StateStore, cache: Path, monitor: Callable[[str], Monitor]
    ) -> None:
        self.preset, self.data, self.device, self.cache = preset, data, device, cache
        self.monitor = monitor
        self._store = store
        self._tasks: dict[str, TaskRows] = {}

    def rows(self, task: str) -> TaskRows:
        """A task and all its rows."""
        if task not in self._tasks:
            self._tasks[task] = load_task(task, self.data, self.preset.evaluate_on)
        return self._tasks[task]

    def missing(self, names: Sequence[str]) -> str:
        """Why a task cannot be had under any of its names; nothing where it can."""
        reason = ""
        for i, name in enumerate(names):
            try:
                self.rows(name)
            except UnknownNameError:
                if i == 0:  # a typo; other names need not be known
                    raise
            except DataError as error:
                reason = reason or str(error)
            else:
                return ""
        return reason

    def first_available(self, names: Sequence[str]) -> str:
        """The first of several names of a task whose data is there."""
        return next(name for name in names if not self.missing([name]))

    def bench(self, unit: Unit) -> SingleTask:
        """The workbench of a unit's task; of a label with fewer rows than ``shots``, all are taken."""
        preset = self.preset
        bench = SingleTask(
            load_model(preset.model, preset.readout, graftable=preset.graftable, max_length=preset.max_length),
            self.rows(unit["task"]),
            shots=unit["shots"],
            or_fewer=True,
            seed=unit["seed"],
            test_limit=preset.test_limit,
            device=self.device,
            store=self._store,
            monitor=self.monitor(" · ".join(f"{key} {value}" for key, value in unit.items() if key != "task")),
        )
        for sparsity in preset.sparsities:  # before anything is trained
            check_localization(self.options(sparsity=sparsity), bench.space)
        return bench

    def options(self, **changes: Any) -> LocalizationOptions:
        """The preset's options, with changes."""
        given = {"sparsity": self.preset.sparsity, **self.preset.options, **changes, **self.preset.fixed}
        return build(LocalizationOptions, given, "the experiment")

    def trial(self, unit: Unit, grid: Sequence[Mapping[str, Any]] | None = None) -> Trial:
        """The unit's task with its fine-tuned model: of a grid of options, the one that scores best on validation rows.

        Of several made here, only the best one's model is kept; of the others the score.

        Args:
            unit: which task, how many shots, which seed.
            grid: options to choose from; default: the preset's.
        """
        bench = self.bench(unit)
        choices = list(dict.fromkeys(self.options(**choice) for choice in grid or self.preset.grid))
        if len(choices) == 1:
            return Trial(bench, bench.fine_tuned(choices[0]), choices[0])
        shared = {options for options in choices if bench.key(options) in self._store}
        scores = [self._validation_score(bench, options) for options in choices]
        if max(scores) == -math.inf:
            raise TrainingError(
                f"Training on {bench.task.name!r} diverged under each of the {len(choices)} choices of options. Set lower "
                "rates, e.g. --set learning_rate=1e-3."
            )
        best = choices[scores.index(max(scores))]
        trial = Trial(bench, bench.fine_tuned(best), best)
        for options in choices:
            if options is not best and options not in shared:
                self._store.discard(bench.key(options))
        return trial

    def _validation_score(self, bench: SingleTask, options: LocalizationOptions) -> float:
        """Of a fine-tuned model, which is not made again where its score is known; −∞ where training diverges."""
        held_out = bench.task.validation
        rows = held_out.subset(representative(held_out.labels.tolist(), options.validation_rows))
        note = self.cache / f"{bench.key(options)}.json"
        known = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
        if known.get("rows") != rows.digest:
            try:
                answers = bench.answers(bench.fine_tuned(options), rows, options)
                score = answers.score(bench.task.definition.metric)
            except (TrainingError, MetricError):
                score = None
            known = {"rows": rows.digest, "validation_score": score}
            write_json(note, known)
        return -math.inf if known["validation_score"] is None else float(known["validation_score"])


class Trial:
    """One task, fine-tuned: what experiments measure around.

    Args:
        bench: the task on its model.
        fine_tuned: θ_ft.
        options: those it was made with.
    """

    def __init__(self, bench: SingleTask, fine_tuned: ModelState, options: LocalizationOptions) -> None:
        self.bench, self.fine_tuned, self.options = bench, fine_tuned, options
        self.pre = bench.pre
        #: The model without a graft: θ_pre, under the fine-tuned readout where that was trained.
        self.readout_alone = replace(fine_tuned, theta=bench.pre.theta)

    @cached_property
    def answers(self) -> Predictions:
        """The fine-tuned model's, on the test rows."""
        return self.bench.answers(self.fine_tuned, options=self.options)

    def answers_of(self, state: ModelState) -> Predictions:
        """A model's, on the test rows."""
        return self.answers if state is self.fine_tuned else self.bench.answers(state, options=self.options)

    def row(self, state: ModelState, **what: Any) -> Row:
        """``what`` it is, with its score, ECE, and agreement with the fine-tuned model, on the test rows."""
        return {**what, **self.measures(self.answers_of(state))}

    def measures(self, answers: Predictions) -> Row:
        """Score, ECE and agreement, in [0, 1]; and what the fine-tuned model was made with."""
        return {
            "train_rows": len(self.bench.task.train),
            "optimizer_used": f"{self.options.optimizer} {self.options.learning_rate:g}",
            "score": answers.score(self.bench.task.definition.metric),
            "ece": answers.ece,
            "agreement": agreement(answers.logits, self.answers.logits),
        }

    def learned(self, *sparsities: float) -> list[Region]:
        """γ by eqs. 3 and 4, one a sparsity."""
        return [each.region for each in self.bench.localized(self.fine_tuned, self.options, sparsities)]

    def base(self, kind: BaseKind, sparsity: float) -> Region:
        """A region that is not learned."""
        return self.bench.base(kind, self.fine_tuned, budget(len(self.bench.space), sparsity), self.options.fisher_rows)

    def biases(self) -> list[Region]:
        """All of them as one region; none where the model has no bias."""
        try:
            return [biases(self.bench.space)]
        except ModelError:
            return []

    def graft(self, region: Region) -> ModelState:
        """θ(γ) of eq. 1."""
        return self.bench.grafted(self.fine_tuned, region)


class Experiment:
    """Base of all experiments. Subclasses are final, and say what they measure and what follows."""

    #: What of the paper it repeats.
    paper: ClassVar[str]
    #: What it asks, in one sentence.
    question: ClassVar[str]
    presets: ClassVar[Mapping[str, Preset]]
    #: What it looks at one of: several numbers of shots, or sparsities, would be taken for seeds.
    single: ClassVar[tuple[str, ...]] = ("shots",)

    def tasks(self, preset: Preset) -> list[tuple[str, ...]]:
        """The tasks whose data it needs, each under one name or several, of which the first that there is counts."""
        return [(task,) for task in preset.tasks]

    def units(self, preset: Preset) -> list[Unit]:
        """What is measured one by one: by default every task, number of shots, and seed."""
        return [
            {"task": task, "shots": shots, "seed": seed}
            for task, shots, seed in product(preset.tasks, preset.shots, preset.seeds)
        ]

    def measure(self, lab: Laboratory, unit: Unit) -> list[Row]:
        """The rows of one unit; the unit's own keys are put before them."""
        raise NotImplementedError

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """Ours in tables."""
        raise NotImplementedError

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """The paper's claims against ours."""
        raise NotImplementedError

    def draw(self, rows: Sequence[Row]) -> Figure:
        """The paper's figure from our rows."""
        raise NotImplementedError


# -- Running ---------------------------------------------------------------------------------------------


def run_experiment(
    name: str,
    preset: Preset,
    *,
    preset_name: str,
    data: str,
    device: str,
    out: Path,
    cache: Path,
    monitor: Callable[[str], Monitor],
    resume: bool = False,
) -> dict[str, Any]:
    """Measure all units, keeping results.json up to date after each, then write report.md and the figure.

    Args:
        name: of the experiment.
        preset: the setting.
        preset_name: what it is called.
        data: as ``--data``.
        device: where to train.
        out: the directory to write.
        cache: directory of fine-tuned models.
        monitor: makes the monitor of a unit from a title.
        resume: keep the units that ``out`` holds already, and add those that it lacks.

    Returns:
        The content of results.json.
    """
    experiment = load_experiment(name)
    for key in experiment.single:
        if len(getattr(preset, key)) > 1:
            raise UsageError(
                f"{name} looks at one of {key}, got {', '.join(map(str, getattr(preset, key)))}. Give one."
            )
    begin = time.perf_counter()
    held = make_directory(out)
    if resume and "results.json" not in held:
        raise UsageError(
            f"There is nothing to resume in {str(out)!r}. Give the --out that was begun, or leave --resume out."
        )
    if not resume:
        refuse_held(out, held, "Give another directory, or --resume to go on with what it holds.")
    lab = Laboratory(preset, data, device, StateStore(cache), cache, monitor)
    needed = experiment.tasks(preset)
    skipped = {names[0]: reason for names in needed if (reason := lab.missing(names))}
    planned = [unit for unit in experiment.units(preset) if unit.get("task") not in skipped]
    if not planned or ("task" not in planned[0] and skipped):
        raise DataError(next(iter(skipped.values())))
    results = _described(name, experiment, lab, preset_name, needed, skipped)
    if held:
        results = _resumed(results, out, planned, own_data=needed == [(task,) for task in preset.tasks])
    before, done = results["seconds"], [unit["unit"] for unit in results["units"]]
    for unit in planned:
        if unit in done:
            continue
        measured = [{**unit, **row} for row in experiment.measure(lab, unit)]
        results["units"].append({"unit": unit, "rows": measured})
        results["seconds"] = round(before + time.perf_counter() - begin, 1)
        write_json(out / "results.json", results)
    results["units"].sort(key=lambda unit: planned.index(unit["unit"]))
    results["complete"] = True
    results["claims"] = [asdict(claim) for claim in experiment.claims(rows_of(results))]
    write_json(out / "results.json", results)
    write_outcome(results, out)
    return results


def _described(
    name: str,
    experiment: Experiment,
    lab: Laboratory,
    preset_name: str,
    needed: Sequence[tuple[str, ...]],
    skipped: Mapping[str, str],
) -> dict[str, Any]:
    """results.json before the first unit."""
    there = [lab.first_available(names) for names in needed if names[0] not in skipped]
    return {
        "schema": SCHEMA,
        "experiment": name,
        "paper": experiment.paper,
        "preset": preset_name,
        "setting": json.loads(json.dumps(asdict(lab.preset))),
        "model": load_model(lab.preset.model, lab.preset.readout).fingerprint,
        "data": {task: lab.rows(task).fingerprint() for task in there},
        "skipped": dict(skipped),
        "versions": {"forgetfree": __version__, **{key: version(key) for key in ("torch", "transformers")}},
        "device": lab.device,
        "complete": False,
        "units": [],
        "seconds": 0.0,
    }


def _resumed(results: dict[str, Any], out: Path, planned: Sequence[Unit], own_data: bool) -> dict[str, Any]:
    """``results`` with the units that ``out`` holds already, if they were begun with the same and are all planned.

    Args:
        results: before the first unit.
        out: the directory.
        planned: all units.
        own_data: whether a unit reads the rows of its own task alone. Else it may lack what was skipped when it was done.

    Raises:
        UsageError: they were not, or are not.
    """
    earlier = load_experiment_results(out)
    lists = [name for name, part in LISTS.items() if part in planned[0]]
    before, now = earlier["setting"], results["setting"]
    differ = [
        "the weights of the model" if key == "model" else f"{key} (was {earlier[key]}, now {results[key]})"
        for key in ("experiment", "preset", "model", "versions", "device")
        if earlier[key] != results[key]
    ]
    # Weights are told by their fingerprint: a directory may be named anew.
    differ += _differences(*({k: v for k, v in each.items() if k not in (*lists, "model")} for each in (before, now)))
    differ += [
        f"{key} (give all there are: {', '.join(map(str, before[key]))})"
        for key in lists
        if not set(before[key]) <= set(now[key])
    ]
    differ += [f"data of {task!r}" for task, sha in earlier["data"].items() if results["data"].get(task) != sha]
    differ += [f"data of {task!r}" for task in earlier["skipped"] if not own_data and task not in results["skipped"]]
    if differ:
        raise UsageError(
            f"--resume needs what {out} was begun with, or more {', '.join(lists)}; different: {', '.join(differ)}. Give "
            "another --out, or the old options."
        )
    return results | {"units": earlier["units"], "seconds": earlier["seconds"]}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What has changed between two settings, options set by hand one by one."""
    found = []
    for key in dict.fromkeys((*before, *now)):
        was, is_now = before.get(key), now.get(key)
        if isinstance(was, dict) and isinstance(is_now, dict):
            found += _differences(was, is_now)
        elif was != is_now:
            found.append(f"{key} (was {was}, now {is_now})")
    return found


def write_outcome(results: Mapping[str, Any], out: Path) -> None:
    """report.md and the figure."""
    write_atomically(out / "report.md", render_page(outcome(results), "markdown"))
    draw_outcome(results, out)


def draw_outcome(results: Mapping[str, Any], out: Path) -> None:
    """The figure, as PNG and SVG."""
    from forgetfree.figures import save_figure

    save_figure(load_experiment(results["experiment"]).draw(rows_of(results)), out / results["experiment"])


# -- Reading ---------------------------------------------------------------------------------------------


def load_experiment(name: str) -> Experiment:
    """The experiment of a name.

    Raises:
        UnknownNameError: no such experiment.
    """
    if name not in registry.EXPERIMENTS:
        raise UnknownNameError("experiment", name, registry.EXPERIMENTS)
    experiment: Experiment = registry.EXPERIMENTS[name].load()()
    return experiment


def load_experiment_results(path: Path) -> dict[str, Any]:
    """The results.json of an experiment.

    Raises:
        ReportError: it cannot be read, or is of another kind.
    """
    file = path / "results.json" if path.is_dir() else path
    try:
        results: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{file} cannot be read: {error}. Give the directory of an experiment.") from error
    whole = isinstance(results, dict) and {"experiment", "setting", "units"} <= results.keys()
    if not whole or results.get("schema") != SCHEMA:
        raise ReportError(f"{file} holds no results of an experiment. Give what `forgetfree experiment --out` wrote.")
    return {**results, "setting": {**_DEFAULTS, **results["setting"]}}


def rows_of(results: Mapping[str, Any]) -> list[Row]:
    """All rows, unit after unit."""
    return [row for unit in results["units"] for row in unit["rows"]]


def outcome(results: Mapping[str, Any]) -> Page:
    """The experiment's report: claims, then tables.

    Raises:
        RunError: nothing is measured yet.
    """
    experiment, rows, setting = load_experiment(results["experiment"]), rows_of(results), results["setting"]
    if not rows:
        raise RunError("The experiment has no rows yet: its first unit is not done. Go on with --resume.")
    seeds = len({row["seed"] for row in rows})
    notes = [
        experiment.question,
        f"preset {results['preset']}: {setting['model']}, readout {setting['readout']}, "
        f"{' and '.join(map(str, setting['shots']))} shots, {seeds} {'seed' if seeds == 1 else 'seeds: mean (std)'}; all in %",
    ]
    if (rows_are := setting.get("evaluate_on", "test")) != "test":
        notes.append(f"scored on {rows_are} rows: to choose options by, not to report")
    if results["skipped"]:
        notes.append(f"no data at hand for: {', '.join(results['skipped'])}")
    if not results["complete"]:
        notes.append("not finished: some units are missing")
    verdicts = {True: "yes", False: "no", None: "not told"}
    claims = Table(
        "What the paper claims",
        ("claim", "paper", "here", "holds here"),
        tuple((c.text, c.paper, c.ours, verdicts[c.holds]) for c in experiment.claims(rows)),
    )
    return Page(f"{results['experiment']}: {experiment.paper}", tuple(notes), (claims, *experiment.tables(rows)))


# -- Rows to tables --------------------------------------------------------------------------------------


def select(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def values(rows: Sequence[Row], key: str, **wanted: Any) -> list[float]:
    """One number of each row that has these values."""
    return [float(row[key]) for row in select(rows, **wanted)]


def mean(rows: Sequence[Row], key: str, **wanted: Any) -> float:
    """Their mean; NaN of none."""
    found = values(rows, key, **wanted)
    return float(np.mean(found)) if found else float("nan")


def sparsities_of(rows: Sequence[Row], **wanted: Any) -> list[float]:
    """Those of the rows that have these values, from the sparsest."""
    return sorted({row["sparsity"] for row in select(rows, **wanted)})


def ratio(part: float, whole: float) -> float:
    """``part / whole``; NaN where there is no telling."""
    return part / whole if whole else math.nan


def kept(rows: Sequence[Row], part: Mapping[str, Any], whole: Mapping[str, Any]) -> float:
    """The score of the rows ``part`` over that of the rows ``whole``, mean over tasks; NaN where a task lacks one."""
    shares = [
        ratio(mean(rows, "score", task=task, **part), mean(rows, "score", task=task, **whole))
        for task in distinct(rows, "task")
    ]
    return sum(shares) / len(shares) if shares else math.nan


def verdict(holds: bool, *numbers: float) -> bool | None:
    """``holds``, unless one of the numbers it rests on is missing."""
    return None if any(map(math.isnan, numbers)) else bool(holds)


def shown(fraction: float) -> str:
    """In percent; a dash where it is missing."""
    return NULL if math.isnan(fraction) else percent(fraction)


def share_of(sparsity: float) -> str:
    """A sparsity as a reader knows it: 0.001 is ``0.1 %``."""
    return f"{100 * sparsity:g} %"


def distinct(rows: Sequence[Row], key: str) -> list[Any]:
    """The values of a key, in the order first met."""
    return list(dict.fromkeys(row[key] for row in rows if key in row))


def pivot(
    title: str, rows: Sequence[Row], by: str | tuple[str, ...], columns: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> Table:
    """A table of mean (std) over seeds, in percent.

    Args:
        title: of the table.
        rows: all.
        by: key, or keys, whose values name its rows.
        columns: header to the key it shows and the values its rows must have.
    """
    keys = (by,) if isinstance(by, str) else by
    groups = list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))
    body = []
    for group in groups:
        those = select(rows, **dict(zip(keys, group, strict=True)))
        cells = [cell(values(those, key, **wanted), percent) for key, wanted in columns.values()]
        body.append((" · ".join(map(str, group)), *cells))
    return Table(title, (" · ".join(keys), *columns), tuple(body))


def adjusted(preset: Preset, changes: Mapping[str, Any], options: Mapping[str, Any]) -> Preset:
    """The preset with other tasks, seeds, …, and with options set by hand, as ``--set`` gives them.

    Raises:
        UsageError: naming every fault.
    """
    faults = Faults()
    own = set(CommonOptions.__dataclass_fields__) - {"cache", "threads"}
    known = LocalizationOptions.__dataclass_fields__
    compared = {name for grid in preset.arms.values() for choice in grid for name in choice}
    for name in options:
        if name not in known and name not in own:
            faults.add(str(UnknownNameError("option", name, [*known, *own])))
        if name in compared:
            faults.add(f"{name} is what this experiment compares. Leave --set {name} out.")
        if name == "sparsity":
            faults.add("--set sparsity has no effect here. Give --sparsity.")
    for kind, flag in (("shots", "shots"), ("sparsities", "sparsity"), ("tasks", "task")):
        faults.check_distinct(flag, changes.get(kind, ()))
    for shots in changes.get("shots", preset.shots):
        faults.check_common(shots, None, changes.get("seeds", preset.seeds))
    for sparsity in changes.get("sparsities", ()):
        if not 0 < sparsity <= 1:
            faults.add(f"--sparsity must be above 0 and at most 1, got {sparsity}.")
    mine = faults.attempt(build, CommonOptions, {k: v for k, v in options.items() if k in own}, "the experiment")
    fixed = {name: value for name, value in options.items() if name in known}
    faults.attempt(build, LocalizationOptions, {**preset.options, **fixed}, "the experiment")
    faults.report()
    given = {name: getattr(mine, name) for name in own if name in options}
    return replace(preset, **changes, **given, fixed={**preset.fixed, **fixed})
