"""Base class of strategies with a ledger: each task trains a region that no later task can change.

Such a strategy chooses a task's region, and what the task stands on: θ_pre or an earlier task. The region minus what is owned
there is trained as one small vector and recorded. An author meets `RegionStrategy` and its options here; `LedgerModel` below
decides which weights the model holds at each moment; `forgetfree.continual.strategy` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, final

from torch import nn

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.strategy_parts import Answer, TaskRegion, Training, tasks_named, undo_on_error
from forgetfree.continual.stream import Stream
from forgetfree.continual.task_inference import TaskwiseOptions, among_own_labels
from forgetfree.core.parameters import load_tensors_, tensors_of
from forgetfree.core.regions import Region, grafted
from forgetfree.core.selection import budget
from forgetfree.core.trained import RegionParameters, TrainedParameters
from forgetfree.errors import ConformanceError, LedgerError
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Composition, Ledger, Record
from forgetfree.ledger.switch import LedgerSwitch, changed_buffers, check_binding, check_definitions
from forgetfree.ledger.transaction import Transaction
from forgetfree.models.state import ModelState
from forgetfree.options import option
from forgetfree.results.run_folder import LEDGER
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.single_task import SingleTask
from forgetfree.training.training_options import LocalizationOptions, TrainingOptions, region_rate

#: What a strategy's tasks stand on. ``union``: each on the one before it, so that tasks are inferred with unions (paper, C.3);
#: ``alone``: each on θ_pre; ``parents``: on what `RegionStrategy.region_training` is told; ``selection``: a ledger of
#: selections, in which no task stands on another.
StandsOn = Literal["union", "alone", "parents", "selection"]


class RegionOptions(TrainingOptions):
    """Options of training a region that is chosen."""

    region_steps: int | None = option(
        None, "number of updates of the region; none: as many as in fine-tuning", at_least=0
    )
    region_rate_factor: float = option(
        1.0,
        "learning rate of a region as a multiple of that in fine-tuning; with AdamW, it is also multiplied by "
        "√(N/s) for s of N entries, so that the norm of an update stays the same; 3 lets each of the few entries "
        "move further",
        above=0,
    )

    def region_updates(self, full: int) -> int:
        """Return the updates of a region, of a task that fine-tuning gives ``full`` updates."""
        return full if self.region_steps is None else self.region_steps

    def for_region(self, space_size: int, allowed: int) -> Self:
        """Return the options by which a region is trained that may have ``allowed`` of the N entries of the space."""
        changes = {
            "readout_learning_rate": self.readout_learning_rate or self.learning_rate,
            "l1": 0.0,  # a region is as sparse as it gets
            "learning_rate": self.region_rate_factor * region_rate(self, space_size, allowed),
            "dropout": self.dropout is True,
        }
        return self.model_copy(update=changes)


class LedgerOptions(RegionOptions, TaskwiseOptions):
    """Options of training a region, and a model per task."""


class SkillOptions(LedgerOptions, LocalizationOptions):
    """Fine-tuning, then localizing, then training the region."""

    region_start: Literal["fine-tuned", "pre-trained"] = option(
        "fine-tuned", "initial values of the region; always those of θ_pre if region_from needs no θ_ft"
    )


class RegionStrategy(ContinualStrategy):
    """Base class of strategies with a ledger: `setup` opens the ledger, and `begin` returns a `region_training`.

    Between tasks, the model holds the union of all regions if each task stands on the one before it, else θ_pre.
    """

    Options: ClassVar[type[TrainingOptions]] = LedgerOptions
    forget_free: ClassVar[bool] = True
    #: Who owns what, with the values.
    ledger: Ledger
    #: The model as the ledger says.
    ledger_model: LedgerModel

    @final
    def open_ledger(self, stands_on: StandsOn, extra_bytes: int = 0) -> None:
        """Create an empty ledger, which becomes the strategy's `storage`.

        Args:
            stands_on: what the tasks stand on.
            extra_bytes: bytes that learning the next task needs beside it, once one is learned.
        """
        self.ledger_model = LedgerModel(self, stands_on, extra_bytes)

    @contextmanager
    def _bench_on(self, task: EncodedTask, parent: str) -> Iterator[SingleTask]:
        """Yield the bench of a task on top of another, or of θ_pre; the model holds that inside."""
        readout = self.model.readout_module(task.label)
        before = tensors_of(readout)  # of a task that is learned already, this is not the untrained one
        try:
            with self.ledger_model.standing_on(parent):
                readouts = {task.name: self.pre_trained.readouts[task.name]}
                yield self.bench(task, replace(ModelState.of(self.model, []), readouts=readouts) if parent else None)
        finally:
            load_tensors_(readout, before)

    @final
    def fine_tuned(self, task: EncodedTask, parent: str = "", start: ModelState | None = None) -> ModelState:
        """Return θ_ft of ``task``, trained on its rows alone, from θ_pre, once per store; the model does not change.

        If `SkillOptions` choose γ at θ_pre, return θ_pre with a readout trained on it, wherever it starts.

        Args:
            task: the task.
            parent: an earlier task, with whose weights the training begins in the place of θ_pre.
            start: any state, such as θ_ft of another task, with whose weights and buffers it begins instead.
        """
        options = self.options
        with self._bench_on(task, parent) as bench, among_own_labels(self, task):
            if isinstance(options, SkillOptions) and not options.needs_fine_tuned:
                return bench.with_readout(options)
            return bench.fine_tuned(options, start)

    @final
    def localize(self, task: EncodedTask, tuned: ModelState, parent: str | None = None) -> Region:
        """Return γ of ``task`` as its `LocalizationOptions` say: by ``region_from=mask``, eqs. 3 and 4; the model is as before.

        Args:
            task: the task.
            tuned: what `fine_tuned` returned.
            parent: what it was fine-tuned on, and stands on. Except by ``mask``, γ is then chosen among what is free there.
                Default: it was fine-tuned on θ_pre, and stands on what the ledger was opened for.
        """
        options = self.options
        below = self.ledger_model.usual_parent if parent is None else parent
        if parent and options.region_from != "mask":
            options = options.model_copy(update={"among": "free"})
        with self._bench_on(task, parent or "") as bench:
            return bench.region(tuned, options, self.ledger.taken(below))

    @final
    def region_training(
        self,
        task: EncodedTask,
        region: Region,
        start: ModelState | None = None,
        *,
        sparsity: float | None = None,
        parent: str | None = None,
        rate_for: int | None = None,
        steps: int | None = None,
        options: TrainingOptions | None = None,
        trained: Callable[[], TrainedParameters] | None = None,
    ) -> Training:
        """Return the training of the entries of γ that no task below owns, on top of what the task stands on.

        Args:
            task: the task.
            region: γ.
            start: where its free entries and the readout start from, such as θ_ft; default: θ_pre, and the untrained readout.
                With ``region_start=pre-trained`` the entries start from θ_pre all the same.
            sparsity: the share of the space that γ was allowed; default: that of the options, or else what γ has.
            parent: the task that it stands on; empty: θ_pre. Default: what the ledger was opened for; of ``parents``, θ_pre.
            rate_for: how many entries the rate of AdamW is meant for; default: as many as γ was allowed.
            steps: updates; default: `RegionOptions.region_updates`.
            options: how it is trained; default: `RegionOptions.for_region`.
            trained: makes what is trained, which may move any entry of a model between whose tasks θ_pre stands; default: the
                values of the free entries.
        """
        model, space, own = self.model, self.space, self.options
        if sparsity is None and isinstance(own, LocalizationOptions):
            sparsity = own.sparsity
        # Though fewer entries may have moved, the rate is that of as many as γ may have.
        allowed = len(region) if sparsity is None else budget(len(space), sparsity)
        usual = self.ledger_model.usual_parent
        parent = usual if parent is None else parent
        if parent != usual and self.ledger_model.stands_on != "parents":
            ours = self.ledger_model.stands_on
            fault = f"begin(task): expected parent={usual!r}, as open_ledger({ours!r}) says, got {parent!r}. "
            fault += "Call open_ledger('parents') in setup."
            raise ConformanceError(type(self).__name__, [fault])
        free = self.ledger.free(region, parent)
        module = self.ledger_model.begin(task, free, parent, moves_anything=trained is not None)
        load_tensors_(module, (start or self.pre_trained).readouts[task.name])
        if start is not None and not (isinstance(own, SkillOptions) and own.region_start == "pre-trained"):
            space.scatter_(model.backbone, free.indices, start.theta[free.indices])
        what = trained() if trained else RegionParameters(model.backbone, space, free)
        readouts = list(module.parameters())
        if steps is None:
            steps = own.region_updates(task.full_steps(own))
        if not any(parameter.numel() for parameter in (*what.parameters, *readouts)):
            steps = 0
        options = options or own.for_region(len(space), rate_for or allowed)
        task_region = TaskRegion(region, len(region) / len(space) if sparsity is None else sparsity, parent)
        return Training(task, what, readouts, steps, options, region=task_region)

    def commit(self, task: EncodedTask, training: Training) -> None:
        """Record who owns what, with the values that the model holds; after, it holds what the next task starts from."""
        self.ledger_model.commit(self.ledger_model.record(training))

    def answering(self, task: EncodedTask) -> AbstractContextManager[Answer | None]:
        """Answer with what the ledger says for the task."""
        return self.ledger_model.of(task)

    def changed_by(self, learned: EncodedTask) -> list[EncodedTask] | None:
        """Return the learned tasks if θ_pre answers for tasks that are not learned yet; otherwise ``None``, for all."""
        apart = self.forget_free and self.stream.scenario == "task" and self.ledger_model.stands_on != "union"
        return list(self.learned) if apart else None


class LedgerModel:
    """The model of a strategy, as its ledger says; a `Storage`, which keeps the ledger.

    Args:
        strategy: its model holds θ_pre. It gets an empty ledger, and this as what it keeps.
        stands_on: what the strategy's tasks stand on.
        extra_bytes: see `RegionStrategy.open_ledger`.
    """

    def __init__(self, strategy: ContinualStrategy, stands_on: StandsOn, extra_bytes: int = 0) -> None:
        loaded = strategy.stream.loaded
        self._binding = loaded.binding()
        self._strategy = strategy
        self._united: str | None = None  # the task by whose union all are answered
        #: What the training of a task changes, and the block of the switch that it is in; none between tasks.
        self._change: Transaction[Any] | None = None
        self._learning = ExitStack()
        self.stands_on, self._extra_bytes = stands_on, extra_bytes
        composition: Composition = "selection" if stands_on == "selection" else "parents"
        self._set(Ledger(strategy.space, loaded.fingerprint, composition, self._binding))
        strategy.storage = self

    def _set(self, ledger: Ledger) -> None:
        self._switch = LedgerSwitch(ledger, self._strategy.model.backbone)  # refuses a ledger of other weights
        self.ledger = self._strategy.ledger = ledger

    @property
    def usual_parent(self) -> str:
        """The task that the next one stands on, where nothing else is said; empty: θ_pre."""
        return self.ledger.last if self.stands_on == "union" else ""

    def _reset(self) -> None:
        """Put into the model what the next task usually starts from."""
        self._switch.to(self.ledger.stage(self.usual_parent))

    @contextmanager
    def standing_on(self, task: str) -> Iterator[None]:
        """Inside, the model holds what a task is answered with, or θ_pre; after, what the next task usually starts from."""
        self._switch.to(self.ledger.stage(task))
        try:
            yield
        finally:
            self._reset()

    # -- Learning a task -------------------------------------------------------------------------------------

    def begin(self, task: EncodedTask, free: Region, parent: str, *, moves_anything: bool = False) -> nn.Module:
        """Put what a task stands on into the model, which is going to change; return the task's readout.

        Args:
            task: the task.
            free: the entries that are trained.
            parent: the task that it stands on; empty: θ_pre.
            moves_anything: whether training may move other entries, too.
        """
        module = self._strategy.model.readout_module(task.label)
        block = self._switch.learning(free, parent=parent, modules=[module], moves_anything=moves_anything)
        self._change = self._learning.enter_context(block)
        # Nothing is left to undo once it is committed.
        self._strategy.scope.enter_context(undo_on_error(self.roll_back))
        return module

    def record(self, training: Training) -> Record:
        """Return who owns what after a training, with the values that the model holds."""
        strategy, task, own = self._strategy, training.task, training.region
        if own is None:
            fault = "begin(task): expected a Training of a region, got one without. Return self.region_training(task, region)."
            raise ConformanceError(type(strategy).__name__, [fault])
        model, loaded = strategy.model, strategy.stream.loaded
        return Record(
            task.name,
            own.region,
            Graft.of(model.backbone, strategy.space, self.ledger.free(own.region, own.parent)),
            own.sparsity,
            readout=tensors_of(model.readout_module(task.label)),
            buffers=changed_buffers(model.backbone, strategy.pre_trained.buffers),
            definition=None if loaded.tokenizer is None else task.definition,
            classes=task.classes,
            parent=own.parent,
        )

    def commit(self, record: Record) -> None:
        """Append what the model holds to the ledger; the model holds what the next task starts from."""
        self.ledger.append(record)
        self._end()
        self._reset()

    def roll_back(self) -> None:
        """Take what is being trained out of the model, for good, if there is anything."""
        if self._change is not None:
            self._change.roll_back()
            self._end()
            self._reset()

    def _end(self) -> None:
        self._change = None
        self._learning.close()

    # -- Answering -------------------------------------------------------------------------------------------

    @contextmanager
    def of(self, task: EncodedTask) -> Iterator[None]:
        """Inside, the model is what the ledger says for ``task``; for one that is not learned, what the next starts from."""
        name = self._united or task.name
        with self._without_training():
            if name in self.ledger.tasks:
                self._switch.to_task(name)
            else:
                self._reset()
            try:
                yield
            finally:
                self._reset()

    @contextmanager
    def with_graft(self, graft: Graft) -> Iterator[None]:
        """Inside, the model is θ_pre with ``graft``."""
        strategy = self._strategy
        with (
            self._without_training(),
            self.standing_on(""),
            grafted(strategy.model.backbone, strategy.space, graft.region, graft.values),
        ):
            yield

    def _without_training(self) -> AbstractContextManager[None]:
        """Inside, what is being trained is out of the model, if there is anything."""
        return nullcontext() if self._change is None else self._change.suspended()

    def union_scores(self) -> dict[str, list[float | None]]:
        """Return the scores of the one union of all regions on the tasks of the stream, and their calibration errors."""
        self._united = self.ledger.last
        try:
            answers = self._strategy.evaluate()
        finally:
            self._united = None
        tasks = self._strategy.stream.tasks
        return {
            "accuracy": [answers[task.name].score(task.definition.metric) for task in tasks],
            "ece": [answers[task.name].ece for task in tasks],
        }

    # -- Keeping ---------------------------------------------------------------------------------------------

    def save(self, directory: Path, file: str = LEDGER) -> None:
        """Write the ledger."""
        self.ledger.save(directory / file)

    def load(self, directory: Path, file: str = LEDGER) -> None:
        """Read the ledger; the next task may be learned on top of it."""
        path, strategy = directory / file, self._strategy
        ledger, composition = Ledger.load(path), self.ledger.composition
        if ledger.composition != composition:
            raise LedgerError(
                f"{path} has composition {ledger.composition}, but {type(strategy).__name__.lower()} needs "
                f"{composition}. Load it with the strategy that wrote it."
            )
        if ledger.effect != "written":
            raise LedgerError(
                f"The tasks of {path} are stored beside the weights, but a run writes into the weights: expected "
                f"effect 'written', got {ledger.effect!r}. Continue with forgetfree.learning."
            )
        before = ["", *ledger.tasks]
        expected = {"union": before[:-1], "alone": [""] * len(ledger.records)}.get(self.stands_on, ())
        for record, parent in zip(ledger.records, expected, strict=False):
            if record.parent != parent:
                raise LedgerError(
                    f"In {path}, task {record.task!r} stands on {record.parent or 'θ_pre'}, but with this strategy and its "
                    f"options it stands on {parent or 'θ_pre'}. Load it with those that wrote it."
                )
        check_binding(ledger, self._binding, str(path))
        check_definitions(ledger, {task.name: task.definition for task in strategy.stream.tasks}, "the stream")
        learned = tasks_named(strategy.stream, ledger.tasks, path)
        for task, record in zip(learned, ledger.records, strict=True):  # all of it, before anything is changed
            if misfit := strategy.model.readout_of(task.label).misfit(record.readout):
                raise LedgerError(
                    f"{path}: the readout of task {record.task!r} does not fit: {misfit}. Load it with the model and scenario "
                    "of its stream."
                )
        with self.standing_on(""):
            self._set(ledger)
        for task, record in zip(learned, ledger.records, strict=True):
            load_tensors_(strategy.model.readout_module(task.label), record.readout)
            strategy.note_learned(task, dict(record.readout))

    def bytes_kept(self) -> int:
        """Count the ledger once something is learned, and what stands beside it."""
        return self.ledger.size_in_bytes + self._extra_bytes if self.ledger.records else 0


__all__ = [
    "EncodedTask",
    "LedgerOptions",
    "Region",
    "RegionOptions",
    "RegionStrategy",
    "SkillOptions",
    "Stream",
    "Training",
]
