"""What units are measured with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forgetfree.core.base_regions import BaseKind, budget
from forgetfree.core.regions import Region, biases
from forgetfree.data.columns import READ_DEFAULTS, ReadOptions
from forgetfree.data.rows import TaskRows, put_together
from forgetfree.data.sampling import representative
from forgetfree.data.sources import Data, load_task
from forgetfree.errors import MetricError, ModelError, NoDataError, RunError, TrainingError, UnknownNameError
from forgetfree.files import write_json
from forgetfree.jobs.experiment_config import Preset
from forgetfree.jobs.experiments.rows import Row, Unit
from forgetfree.json_file import check, check_fields, is_number, read_json
from forgetfree.kinds.kind import readout_for
from forgetfree.models.loading import LoadedModel, load_model
from forgetfree.models.state import ModelState, StateStore
from forgetfree.options import build, recorded
from forgetfree.results.answers import LabelAnswers, label_answers
from forgetfree.tasks import TaskDefinition
from forgetfree.training.localization import LocalizationOptions, check_localization
from forgetfree.training.monitor import Monitor
from forgetfree.training.single_task import SingleTask


class ExperimentContext:
    """Holds what units are measured with: tasks, models, options, and the fine-tuned models made so far.

    Args:
        preset: the setting.
        data: as ``--data``.
        device: where to train.
        store: of fine-tuned models, shared by all experiments.
        cache: its directory, for experiments that run whole streams.
        monitor: hears of the unit at hand; default: silence.
        columns: of texts and labels in the data, as far as they are named.
        merged: tasks made of the rows of several, by name.
    """

    def __init__(
        self,
        preset: Preset,
        data: Data,
        device: str,
        store: StateStore,
        cache: Path,
        monitor: Monitor | None = None,
        read_options: ReadOptions = READ_DEFAULTS,
        merged: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.preset, self.data, self.device, self.cache = preset, data, device, cache
        self.monitor, self.read_options, self.merged = monitor or Monitor(), read_options, merged
        self._store = store
        self._tasks: dict[str, TaskRows] = {}

    def rows(self, task: str) -> TaskRows:
        """Return a task and all its rows."""
        if task in self.merged and task not in self._tasks:
            self._tasks[task] = put_together(
                task, [self.rows(each) for each in self.merged[task] if not self.missing([each])]
            )
        if task not in self._tasks:
            self._tasks[task] = load_task(task, self.data, self.preset.evaluate_on, self.read_options)
        return self._tasks[task]

    @cached_property
    def definitions(self) -> list[TaskDefinition]:
        """The tasks of the preset that there are rows of."""
        return [self.rows(task).task for task in self.preset.tasks if not self.missing([task])]

    @cached_property
    def readout(self) -> str:
        """Return the kind of readout of all tasks."""
        return readout_for(self.preset.readout, self.definitions)

    def missing(self, names: Sequence[str]) -> str:
        """Say why a task has no data under any of its names; an empty text where it has some."""
        reason = ""
        for i, name in enumerate(names):
            try:
                self.rows(name)
            except UnknownNameError:
                if i == 0:  # a typo; other names need not be known
                    raise
            except NoDataError as error:
                reason = reason or str(error)
            else:
                return ""
        return reason

    def first_available(self, names: Sequence[str]) -> str:
        """Return the first of several names of a task under which there is data."""
        return next(name for name in names if not self.missing([name]))

    def model(self, readout: str | None = None) -> LoadedModel:
        """Return the preset's model, loaded anew and without tasks; ``readout`` if not the preset's."""
        preset = self.preset
        return load_model(
            preset.model,
            readout or self.readout,
            graftable=preset.graftable,
            max_length=preset.max_length,
            tasks=self.definitions,
        )

    def bench(self, unit: Unit, loaded: LoadedModel | None = None) -> SingleTask:
        """Return the single task of a unit; of a label with fewer rows than ``shots``, all are taken.

        Args:
            unit: which task, how many shots, which seed; which readout, if not the preset's.
            loaded: the model, where several tasks share one; default: its own.
        """
        preset = self.preset
        bench = SingleTask.of(
            loaded or self.model(unit.get("readout")),
            self.rows(unit["task"]),
            shots=unit["shots"],
            or_fewer=True,
            seed=unit["seed"],
            test_limit=preset.test_limit,
            device=self.device,
            store=self._store,
            monitor=self.monitor,
        )
        for sparsity in preset.sparsities:  # before anything is trained
            check_localization(self.options(sparsity=sparsity), bench.space)
        return bench

    def options(self, **changes: Any) -> LocalizationOptions:
        """Return the preset's options, with changes."""
        values = {"sparsity": self.preset.sparsity, **self.preset.options, **changes, **self.preset.fixed}
        return build(LocalizationOptions, values, "the experiment")

    def tuned(self, unit: Unit, grid: Sequence[Mapping[str, Any]] | None = None) -> TunedTask:
        """Return the unit's task with its fine-tuned model: of a grid of options, the one that scores best on validation rows.

        Of several made here, only the best one's model is kept; of the others the score.

        Args:
            unit: which task, how many shots, which seed.
            grid: options to choose from; default: the preset's.
        """
        bench = self.bench(unit)
        choices = list(dict.fromkeys(self.options(**choice) for choice in grid or self.preset.grid))
        if len(choices) == 1:
            return TunedTask(bench, bench.fine_tuned(choices[0]), choices[0])
        shared = {options for options in choices if bench.key(options) in self._store}
        scores = [self._validation_score(bench, options) for options in choices]
        if max(scores) == -math.inf:
            raise TrainingError(
                f"Training on {bench.task.name!r} diverged under each of the {len(choices)} choices of options. Set lower "
                "rates, e.g. --set learning_rate=1e-3."
            )
        best = choices[scores.index(max(scores))]
        tuned = TunedTask(bench, bench.fine_tuned(best), best)
        for options in choices:
            if options is not best and options not in shared:
                self._store.discard(bench.key(options))
        return tuned

    def _validation_score(self, bench: SingleTask, options: LocalizationOptions) -> float:
        """Return the score of a fine-tuned model, −∞ where training diverges; only a new model is made for it."""
        held_out = bench.task.validation
        rows = held_out.subset(representative(held_out.targets, options.validation_rows))
        note = self.cache / f"{bench.key(options)}.json"
        if (known := read_score(note, rows.digest)) is not None:
            return known
        try:
            answers = bench.answers(bench.fine_tuned(options), rows, options)
            score = answers.score(bench.task.definition.metric)
        except (TrainingError, MetricError):
            score = None
        write_json(note, {"rows": rows.digest, "validation_score": score})
        return -math.inf if score is None else score


def read_score(note: Path, rows: str) -> float | None:
    """Return the validation score in a note, −∞ where training diverged; ``None`` if it is of other rows, or missing."""
    try:
        known = read_json(note, RunError, "", _check_note)
    except RunError:  # it is computed again, as a damaged model is
        return None
    if known["rows"] != rows:
        return None
    return -math.inf if known["validation_score"] is None else float(known["validation_score"])


def _check_note(known: Any) -> None:
    check_fields("", known, {"rows": str})
    score = known.get("validation_score", "nothing")
    check("validation_score", score, score is None or is_number(score, 0.0, 1.0), "a number in [0, 1], or null")


class TunedTask:
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
    def answers(self) -> LabelAnswers:
        """Return the fine-tuned model's answers on the test rows."""
        return label_answers(self.bench.answers(self.fine_tuned, options=self.options))

    def answers_of(self, state: ModelState) -> LabelAnswers:
        """Return a model's answers on the test rows."""
        if state is self.fine_tuned:
            return self.answers
        return label_answers(self.bench.answers(state, options=self.options))

    def row(self, state: ModelState, **what: Any) -> Row:
        """Return ``what`` was measured with its score, ECE, and agreement with the fine-tuned model, on the test rows."""
        return {**what, **self.measures(self.answers_of(state))}

    def measures(self, answers: LabelAnswers) -> Row:
        """Score, that of a constant answer, ECE and agreement, in [0, 1]; and what the fine-tuned model was made with."""
        return {
            "train_rows": len(self.bench.task.train),
            "test_rows": len(self.bench.task.test),
            "optimizer_used": f"{recorded(self.options)['optimizer']} {self.options.learning_rate:g}",
            "score": answers.score(self.bench.task.definition.metric),
            "constant": answers.constant_score(self.bench.task.definition.metric),
            "ece": answers.ece,
            "agreement": answers.agreement(self.answers),
        }

    def learned(self, *sparsities: float) -> list[Region]:
        """Return γ by eqs. 3 and 4, or as ``region_from`` says, one for each sparsity."""
        return self.bench.regions(self.fine_tuned, self.options, sparsities)

    def base(self, kind: BaseKind, sparsity: float) -> Region:
        """Return a region that is not learned."""
        return self.bench.base(kind, self.fine_tuned, budget(len(self.bench.space), sparsity), self.options.fisher_rows)

    def biases(self) -> list[Region]:
        """Return all biases as one region, in a list; an empty list where the model has none."""
        try:
            return [biases(self.bench.space)]
        except ModelError:
            return []

    def graft(self, region: Region) -> ModelState:
        """Return θ(γ) of eq. 1."""
        return self.bench.grafted(self.fine_tuned, region)
