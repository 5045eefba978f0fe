"""The context of units: tasks, models, options, and a fine-tuned task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.paper.rows import Row, Unit
from benchmarks.paper.setting import Setting
from forgetfree.core.regions import Region, biases
from forgetfree.data.rows import TaskRows, representative
from forgetfree.data.sources import load_task
from forgetfree.errors import ModelError, NoDataError, UnknownNameError
from forgetfree.kinds.kind import readout_for
from forgetfree.models.loading import LoadedModel, load_model
from forgetfree.models.state import ModelState, StateStore
from forgetfree.options import build, recorded
from forgetfree.recipes import Saliency
from forgetfree.results.answers import LabelAnswers, label_answers
from forgetfree.tasks import TaskDefinition
from forgetfree.training.single_task import SingleTask, check_localization
from forgetfree.training.training_options import LocalizationOptions


class Context:
    """Tasks, models and options of a setting, and the fine-tuned models made so far.

    Args:
        setting: the requested setting.
        data: as ``--data``.
        device: the device to train on.
        out: the directory of the experiment.
        cache: the directory of fine-tuned models, which experiments share.
    """

    def __init__(self, setting: Setting, data: str, device: str, out: Path, cache: Path) -> None:
        self.setting, self.data, self.device, self.out, self.cache = setting, data, device, out, cache
        self._store = StateStore(cache)
        self._tasks: dict[str, TaskRows] = {}

    def rows(self, task: str) -> TaskRows:
        """Return a task and all its rows."""
        if task not in self._tasks:
            self._tasks[task] = load_task(task, self.data, self.setting.evaluate_on)
        return self._tasks[task]

    @cached_property
    def definitions(self) -> list[TaskDefinition]:
        """The tasks of the setting that have rows."""
        return [self.rows(task).task for task in self.setting.tasks if not self.missing([task])]

    def missing(self, names: Sequence[str]) -> str:
        """Return why a task has no data under any of its names; an empty text if it has some."""
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
        """Return the first of several names of a task that has data."""
        return next(name for name in names if not self.missing([name]))

    def model(self) -> LoadedModel:
        """Return the model, loaded anew and without tasks."""
        setting = self.setting
        readout = readout_for(setting.readout, self.definitions)
        arguments: dict[str, Any] = {"graftable": setting.graftable, "max_length": setting.max_length}
        return load_model(setting.model, readout, tasks=self.definitions, **arguments)

    def bench(self, unit: Unit, loaded: LoadedModel | None = None) -> SingleTask:
        """Return the single task of a unit; a label with fewer rows than ``shots`` gets all of them.

        Args:
            unit: the task, the number of shots and the seed.
            loaded: the model, if several tasks share one; default: its own.
        """
        bench = SingleTask.of(
            loaded or self.model(),
            self.rows(unit["task"]),
            shots=unit["shots"],
            seed=unit["seed"],
            test_limit=self.setting.test_limit,
            device=self.device,
            store=self._store,
        )
        kept = representative(bench.task.validation.targets, self.setting.validation_limit)
        bench.task = replace(bench.task, validation=bench.task.validation.subset(kept))
        for sparsity in self.setting.sparsities:  # before anything is trained
            check_localization(self.options(sparsity=sparsity), bench.space)
        return bench

    def options(self, **changes: Any) -> LocalizationOptions:
        """Return the setting's options, with changes."""
        values = {"sparsity": self.setting.sparsity, **self.setting.options, **changes, **self.setting.fixed}
        return build(LocalizationOptions, values, "the experiment")

    def tuned(self, unit: Unit, optimizer: Mapping[str, Any] | None = None) -> TunedTask:
        """Return the unit's task with its fine-tuned model.

        Args:
            unit: the task, the number of shots and the seed.
            optimizer: options of fine-tuning; default: the setting's.
        """
        bench, options = self.bench(unit), self.options(**(optimizer or self.setting.optimizer))
        return TunedTask(bench, bench.fine_tuned(options), options)


class TunedTask:
    """One fine-tuned task, with the measurements of experiments.

    Args:
        bench: the task on its model.
        fine_tuned: θ_ft.
        options: the options of fine-tuning.
    """

    def __init__(self, bench: SingleTask, fine_tuned: ModelState, options: LocalizationOptions) -> None:
        self.bench, self.fine_tuned, self.options = bench, fine_tuned, options
        self.pre = bench.pre
        #: The model without a graft: θ_pre with the fine-tuned readout, if it was trained.
        self.readout_alone = replace(fine_tuned, theta=bench.pre.theta)

    @cached_property
    def answers(self) -> LabelAnswers:
        """The fine-tuned model's answers on the test rows."""
        return label_answers(self.bench.answers(self.fine_tuned, options=self.options))

    def answers_of(self, state: ModelState) -> LabelAnswers:
        """Return a model's answers on the test rows."""
        if state is self.fine_tuned:
            return self.answers
        return label_answers(self.bench.answers(state, options=self.options))

    def row(self, state: ModelState, **what: Any) -> Row:
        """Return ``what`` with its score, ECE, and agreement with the fine-tuned model, on the test rows."""
        return {**what, **self.measures(self.answers_of(state))}

    def measures(self, answers: LabelAnswers) -> Row:
        """Return score, constant score, ECE and agreement, in [0, 1]; numbers of rows; and the optimizer of fine-tuning."""
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
        """Return γ by eqs. 3 and 4, or by ``region_from``, one for each sparsity."""
        return [
            self.bench.region(self.fine_tuned, self.options.model_copy(update={"sparsity": each}))
            for each in sparsities
        ]

    def salient(self, kind: Saliency, sparsity: float) -> Region:
        """Return a region that is not learned."""
        return self.bench.region(
            self.fine_tuned, self.options.model_copy(update={"region_from": kind, "sparsity": sparsity})
        )

    def biases(self) -> list[Region]:
        """Return all biases as one region, in a list; an empty list if the model has none."""
        try:
            return [biases(self.bench.space)]
        except ModelError:
            return []

    def graft(self, region: Region) -> ModelState:
        """Return θ(γ) of eq. 1."""
        return self.bench.grafted(self.fine_tuned, region)
