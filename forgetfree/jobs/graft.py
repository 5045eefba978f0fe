"""One task grafted: fine-tune (or take a fine-tuned model), localize, answer, write the grafts. A unit is one seed.

OUT/results.json                see docs/grafts.md
OUT/report.md                   the tables
OUT/graft.safetensors           the graft; of several seeds or sparsities, graft-seed-S-sparsity-F.safetensors each
OUT/fine-tuned/                 the fine-tuned models, unless ``--cache DIR`` shares them
OUT/seed-S/                     a unit: its grafts are the files above, once more
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forgetfree.core.body import body_space
from forgetfree.core.readout_model import LINEAR
from forgetfree.core.regions import Region, distribution, kind_of, layer_of
from forgetfree.data.encoding import fitting
from forgetfree.data.rows import TaskRows
from forgetfree.data.sources import load_task
from forgetfree.errors import Faults, UsageError
from forgetfree.files import link_or_copy, sha256, write_atomically
from forgetfree.jobs.config import CommonOptions, InMemory, with_precision
from forgetfree.jobs.graft_config import CheckedGraft, GraftConfig
from forgetfree.jobs.job import Job
from forgetfree.jobs.running.directory import model_and_data
from forgetfree.jobs.running.environment import left_out_of, tell_shared_rows
from forgetfree.jobs.running.unit import Json, Unit
from forgetfree.jobs.running.workload import PlannedUnit, Workload
from forgetfree.kinds.kind import readout_for
from forgetfree.ledger.graft import Graft, find_graft
from forgetfree.models.fine_tuned_directory import FineTunedModel, load_fine_tuned, readout_of
from forgetfree.models.loading import LoadedModel, load_model
from forgetfree.models.state import ModelState, StateStore
from forgetfree.options import recorded
from forgetfree.results.answers import Answers
from forgetfree.results.records import GraftResults
from forgetfree.results.report.graft_report import lay_out_graft
from forgetfree.results.report.page import render_page
from forgetfree.results.scores import SCORES_FILE, Score, read_scores, write_scores
from forgetfree.tasks import TaskDefinition
from forgetfree.terminal import tell_note
from forgetfree.training.localization import LocalizationOptions, check_localization
from forgetfree.training.loop import answers_of
from forgetfree.training.monitor import PHASES, Monitor, Stopwatch, told_seconds
from forgetfree.training.single_task import SingleTask

if TYPE_CHECKING:
    from forgetfree.core.parameters import ParameterSpace

#: The file of the only graft.
_ONLY = "graft"


@dataclass(frozen=True)
class _Subject:
    """What one seed works on: the workbench, and the fine-tuned model where it is given."""

    bench: SingleTask
    tuned: FineTunedModel | None
    base: Graft | None

    def fine_tuned(self, options: LocalizationOptions) -> ModelState:
        """Return θ_ft with its readout."""
        if self.tuned is None:
            return self.bench.fine_tuned(options)
        return ModelState(self.tuned.theta, {self.bench.task.name: self.tuned.head}, self.bench.pre.buffers)

    def fine_tuned_answers(self, fine_tuned: ModelState, options: LocalizationOptions) -> Answers:
        """Return the fine-tuned model's answers; a model that is given answers with all of its own tensors."""
        if self.tuned is None:
            return self.bench.answers(fine_tuned, options=options)
        rows = self.bench.task.test
        return answers_of(self.tuned.model.to(self.bench.device), self.bench.task, rows, options)

    def regions(self, fine_tuned: ModelState, all_options: Sequence[LocalizationOptions]) -> dict[float, Region]:
        """Return γ by sparsity, from the base of the graft that is given, or from a base of the options' kind."""
        sparsities = [options.sparsity for options in all_options]
        base = None if self.base is None else self.base.region
        regions = self.bench.regions(fine_tuned, all_options[0], sparsities, base)
        return dict(zip(sparsities, regions, strict=True))


class GraftJob(Job[GraftConfig]):
    """A graft of one task, for each sparsity and seed."""

    def __init__(self, config: GraftConfig, in_memory: InMemory | None = None) -> None:
        config = with_precision(config, in_memory)
        checked = config.checked()
        if config.fine_tuned is not None:
            _check_readout(config.readout, config.fine_tuned)
        self.options, self.common = checked.options, checked.common
        super().__init__(
            config, checked, self.common, [name for options in self.options for name in options.precisions], in_memory
        )
        self._subjects: dict[int, _Subject] = {}

    @classmethod
    def workload(cls, config: GraftConfig, checked: CheckedGraft | None, faults: Faults) -> Workload:
        """Return every seed; its sparsities share a fine-tuned model and a search."""
        tasks = (config.task,)
        if checked is None:
            return Workload(config.model, config.readout, tasks, CommonOptions())
        workload = Workload(config.model, config.readout, tasks, checked.common)
        sparsities = tuple(options.sparsity for options in checked.options)
        learn = partial(_graft_first, sparsities, config.fine_tuned is not None, config.shots, checked.common.or_fewer)
        for seed in config.seeds:
            workload.units.append(
                PlannedUnit(
                    *(f"seed-{seed}", config.task, tasks, checked.options[0], learn, config.shots, seed),
                    sparsities=sparsities,
                )
            )
        return workload

    def keys(self) -> Json:
        """Return every seed."""
        return {f"seed-{seed}": {"seed": seed} for seed in self.config.seeds}

    def describe(self) -> Json:
        """Describe task, model and data, and check the options against the model."""
        tell_shared_rows([self.rows], self.common.evaluate_on)
        subject = self._subject(self.config.seeds[0])
        bench, tuned, base_file = subject.bench, subject.tuned, self.config.base_file
        task, test, metric = bench.task, bench.task.test, bench.task.definition.metric
        tell_note(bench.loaded.note)
        tell_note(task.note)
        description, about = model_and_data(self.config.model, self.request()["model"], bench.loaded, [task])
        fine_tuned = {"architecture": tuned.architecture, "fingerprint": tuned.fingerprint} if tuned else None
        return description | {
            "options": [recorded(options) for options in self.options],
            "fine_tuned": fine_tuned,
            "base_file": base_file and sha256(find_graft(base_file)),
            "about": {
                "task": task.name,
                "evaluated_on": self.common.evaluate_on,
                "model": about,
                "data": {
                    "shots": self.config.shots,
                    **({"or_fewer": True} if self.common.or_fewer else {}),
                    "steps": None if tuned else self.options[0].steps,
                    "fingerprint": task.fingerprint,
                    "test_rows": len(test),
                    **left_out_of([self.rows]),
                },
                "metric": metric,
                "floors": {"constant": task.unanswered.constant_score(metric)},
                "base": _chosen_by(self.options[0]) if base_file is None else base_file.name,
                "fine_tuned": fine_tuned and fine_tuned | {"left_out": list(tuned.left_out) if tuned else []},
                "space": _distributions(Region(torch.arange(len(bench.space), device="cpu")), bench),
                "shared_rows": self.rows.shared,
            },
        }

    def space(self) -> ParameterSpace:
        """Return that of the model that is grafted onto."""
        return self._subject(self.config.seeds[0]).bench.space

    # -- A unit ----------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> TaskRows:
        """Return the task and all its rows."""
        rows = load_task(
            self.config.task,
            self.in_memory.data_or(self.config.data),
            self.common.evaluate_on,
            self.config.read_options,
        )
        if not rows.task.writes:
            return rows
        return fitting(rows, self._model(rows.task).encoder(rows.task), self.config.skip_bad_rows)

    def _model(self, task: TaskDefinition) -> LoadedModel:
        """Load the model that is grafted onto."""
        return load_model(
            self.in_memory.model_or(self.config.model),
            readout_for(self.config.readout, [task]),
            tasks=[task],
            graftable=self.common.graftable,
            max_length=self.common.max_length,
            dtype=self.common.dtype,
            **self.in_memory.model_arguments,
        )

    def _subject(self, seed: int) -> _Subject:
        """Load the models, and check what only they can tell: before any training."""
        if seed in self._subjects:
            return self._subjects[seed]
        config, tuned = self.config, None
        arguments: Json = {"graftable": self.common.graftable, "max_length": self.common.max_length}
        if config.fine_tuned is not None:
            tuned = load_fine_tuned(config.fine_tuned, config.model, self.rows.task, **arguments)
            tuned.add_task(self.rows.task)
        bench = SingleTask.of(
            tuned.loaded if tuned else self._model(self.rows.task),
            self.rows,
            shots=config.shots,
            or_fewer=self.common.or_fewer,
            seed=seed,
            test_limit=self.common.test_limit,
            device=self.device,
            store=StateStore(self.cache),
        )
        for options in self.options:
            check_localization(options, bench.space)
        self._subjects[seed] = _Subject(bench, tuned, _load_base(config, bench))
        return self._subjects[seed]

    def measure(self, key: Mapping[str, Any], directory: Path, monitor: Monitor) -> Json:
        """Fine-tune, localize, answer, and write scores and grafts."""
        subject = self._subject(key["seed"])
        self._subjects.clear()
        bench, first = subject.bench, self.options[0]
        bench.monitor = watch = Stopwatch(monitor)
        task, metric = bench.task, bench.task.definition.metric
        fine_tuned = subject.fine_tuned(first)
        regions = subject.regions(fine_tuned, self.options)
        under_head = bench.grafted(fine_tuned, Region.empty())
        # The head of a model that is given is fine-tuned, and there is no other.
        states = {"pre-trained": under_head if subject.tuned else bench.pre}
        if bench.loaded.readout in LINEAR and not subject.tuned:
            states["readout alone"] = under_head
        scores: list[Score] = []
        with watch.phase(task.name, "evaluate", 1 + len(states) + len(regions)) as on_step:
            reference = subject.fine_tuned_answers(fine_tuned, first)

            def add(model: str, answers: Answers, sparsity: float | None = None, entries: int | None = None) -> None:
                of = {**key, "model": model, "sparsity": sparsity, "entries": entries}
                measured = {"score": answers.score(metric)} | ({} if answers.ece is None else {"ece": answers.ece})
                measured["agreement"] = answers.agreement(reference)
                scores.extend(Score(of, task.name, 1, name, value, len(task.test)) for name, value in measured.items())
                on_step(len(scores) // len(measured), float("nan"))

            for model, state in states.items():
                add(model, bench.answers(state, options=first))
            add("fine-tuned", reference)
            for sparsity, region in regions.items():
                graft = bench.grafted(fine_tuned, region)
                add("grafted", bench.answers(graft, options=first), sparsity, len(region))
        write_scores(directory / SCORES_FILE, scores)
        monitor.scored(scores)
        for sparsity, region in regions.items():
            bench.graft(fine_tuned, region, sparsity).save(directory / _file(sparsity))
        return {
            "regions": [
                {**key, "sparsity": sparsity, **_distributions(region, bench)} for sparsity, region in regions.items()
            ],
            "seconds": told_seconds(watch.seconds, [phase for phase in PHASES if phase in watch.seconds]),
        }

    # -- Results ---------------------------------------------------------------------------------------------

    @classmethod
    def gather(cls, out: Path, about: Json, units: Sequence[tuple[Unit, Json | None]]) -> Json:
        """Return ``rows``, ``regions``, ``grafts`` and ``seconds``, and put the grafts beside results.json."""
        results: Json = about | {"rows": [], "regions": [], "grafts": [], "seconds": {}}
        done = [(unit, record) for unit, record in units if record and record["status"] == "done"]
        if len(units) > 1:
            (out / f"{_ONLY}.safetensors").unlink(missing_ok=True)  # the one seed's, before there were more
        for unit, record in done:
            details, files = record["details"], record["files"]
            seed, rows = unit.key["seed"], dict[str, Json]()
            for score in read_scores(unit.directory / SCORES_FILE):
                of = {key: score.of[key] for key in ("seed", "model", "sparsity", "entries")}
                rows.setdefault(repr(of), of)[score.metric] = score.value
            results["rows"] += rows.values()
            results["regions"] += details["regions"]
            for region in details["regions"]:
                single = len(units) == len(details["regions"]) == 1
                name = _ONLY if single else f"graft-seed-{seed}-sparsity-{region['sparsity']}"
                path = out / f"{name}.safetensors"
                link_or_copy(unit.directory / _file(region["sparsity"]), path)
                graft = {"seed": seed, "sparsity": region["sparsity"], "file": path.name}
                results["grafts"].append(graft | files[_file(region["sparsity"])])
            for phase, seconds in details["seconds"].items():
                so_far = results["seconds"].get(phase, 0.0)
                results["seconds"][phase] = None if None in (so_far, seconds) else round(so_far + seconds, 3)
        return results

    @classmethod
    def report(cls, out: Path, results: Json, ended: bool) -> None:
        """Write the tables."""
        if results["rows"]:
            write_atomically(out / "report.md", render_page(lay_out_graft(GraftResults.of(results)), "markdown"))


def _chosen_by(options: LocalizationOptions) -> str:
    return options.base if options.region_from == "mask" else options.region_from


def _file(sparsity: float) -> str:
    return f"graft-sparsity-{sparsity}.safetensors"


def _distributions(region: Region, bench: SingleTask) -> Json:
    return {
        "layers": distribution(region, bench.space, layer_of),
        "kinds": distribution(region, bench.space, kind_of),
    }


def _load_base(config: GraftConfig, bench: SingleTask) -> Graft | None:
    """Return the graft whose region is γ_base, if there is one.

    Raises:
        UsageError: it belongs to another model.
    """
    if config.base_file is None:
        return None
    graft = Graft.load(find_graft(config.base_file))
    assert graft.space is not None  # of every file
    space = body_space(bench.model.backbone, bench.space)
    if graft.space.layout_hash != space.layout_hash:
        ours, theirs = ([(t.name, t.shape) for t in each.tensors] for each in (space, graft.space))
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        expected, got = (each[at] if at < len(each) else "no further tensor" for each in (ours, theirs))
        raise UsageError(
            f"The graft {str(config.base_file)!r} is of another parameter space than {config.model!r} has: expected "
            f"{expected}, got {got}. Give a graft of this model to --base, or its model to --model."
        )
    return graft


def _check_readout(readout: str, directory: str) -> None:
    """Raise ``UsageError`` if a readout is asked for that the fine-tuned model does not have."""
    kind = readout_of(directory)
    if readout not in ("auto", kind):
        reader = "its own head" if kind == "classifier" else f"--readout {kind}"
        raise UsageError(
            f"--readout {readout} does not suit {directory!r}, which is read by {reader}. Leave --readout out."
        )


def _graft_first(
    sparsities: Sequence[float],
    tuned: bool,
    shots: int | None,
    or_fewer: bool,
    loaded: LoadedModel,
    rows: TaskRows,
    options: LocalizationOptions,
    device: str,
    monitor: Monitor,
) -> None:
    """Fine-tune a task, unless that is done already, find its regions, and keep nothing."""
    bench = SingleTask.of(loaded, rows, shots=shots, or_fewer=or_fewer, test_limit=1, device=device, monitor=monitor)
    bench.regions(bench.pre if tuned else bench.fine_tuned(options), options, sparsities)
