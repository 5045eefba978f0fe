"""Base class of strategies with a ledger: each task trains a region that no later task can change.

Such a strategy chooses a task's region, and whether the task stands on θ_pre or on an earlier task. The region minus the
entries owned there is trained as one small vector and recorded. The author of a strategy uses `RegionStrategy` and its options;
`LedgerModel` below decides which weights the model holds at each moment; `forgetfree.continual.strategy` has the rest.
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

#: The parent that a strategy's tasks stand on. ``union``: the task before, so that tasks are inferred with unions (paper, C.3);
#: ``alone``: θ_pre; ``parents``: the ``parent`` given to `RegionStrategy.region_training`; ``selection``: a ledger of
#: selections, in which no task stands on another.
StandsOn = Literal["union", "alone", "parents", "selection"]


class RegionOptions(TrainingOptions):
    """Options of training a given region."""

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
        """Return the number of updates of a region, for a task with ``full`` updates in fine-tuning."""
        return full if self.region_steps is None else self.region_steps

    def for_region(self, space_size: int, allowed: int) -> Self:
        """Return the options of training a region that may have ``allowed`` of the N entries of the space."""
        changes = {
            "readout_learning_rate": self.readout_learning_rate or self.learning_rate,
            "l1": 0.0,  # a region is sparse already
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
    #: The owner of each entry, with the values.
    ledger: Ledger
    #: Switches the model between the tasks of the ledger.
    ledger_model: LedgerModel

    @final
    def open_ledger(self, stands_on: StandsOn, extra_bytes: int = 0) -> None:
        """Create an empty ledger, which becomes the strategy's `storage`.

        Args:
            stands_on: see `StandsOn`.
            extra_bytes: bytes in addition to the ledger that learning the next task needs, once a task is learned.
        """
        self.ledger_model = LedgerModel(self, stands_on, extra_bytes)

    @contextmanager
    def _bench_on(self, task: EncodedTask, parent: str) -> Iterator[SingleTask]:
        """Yield the bench of a task on top of another task or of θ_pre; inside, the model holds the weights below."""
        readout = self.model.readout_module(task.label)
        before = tensors_of(readout)  # if the task is learned already, this readout is trained
        try:
            with self.ledger_model.standing_on(parent):
                readouts = {task.name: self.pre_trained.readouts[task.name]}
                yield self.bench(task, replace(ModelState.of(self.model, []), readouts=readouts) if parent else None)
        finally:
            load_tensors_(readout, before)

    @final
    def fine_tuned(self, task: EncodedTask, parent: str = "", start: ModelState | None = None) -> ModelState:
        """Return θ_ft of ``task``, trained on its rows alone, from θ_pre, once per store; the model does not change.

        If `SkillOptions` choose γ without θ_ft, return θ_pre (or the parent's weights) with a readout trained on it; ``start``
        is then ignored.

        Args:
            task: the task.
            parent: an earlier task, whose weights the training starts from in place of θ_pre.
            start: any state, such as θ_ft of another task, whose weights and buffers the training starts from instead.
        """
        options = self.options
        with self._bench_on(task, parent) as bench, among_own_labels(self, task):
            if isinstance(options, SkillOptions) and not options.needs_fine_tuned:
                return bench.with_readout(options)
            return bench.fine_tuned(options, start)

    @final
    def localize(self, task: EncodedTask, tuned: ModelState, parent: str | None = None) -> Region:
        """Return γ of ``task`` by its `LocalizationOptions`: with ``region_from=mask``, by eqs. 3 and 4. The model is restored.

        Args:
            task: the task.
            tuned: the state that `fine_tuned` returned.
            parent: the task on whose weights it was fine-tuned, and that it stands on; except with ``mask``, γ is then chosen
                among the entries free there. Default: it was fine-tuned on θ_pre, and its parent is set by `open_ledger`.
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
        """Return the training of the free entries of γ, which no task below owns, on top of the tasks below.

        Args:
            task: the task.
            region: γ.
            start: initial values of the free entries and the readout, such as θ_ft; default: θ_pre and the untrained readout.
                With ``region_start=pre-trained`` the entries start from θ_pre all the same.
            sparsity: the allowed size of γ, as a share of the space; default: the options' sparsity, or else γ's own share.
            parent: the task that it stands on; empty: θ_pre. Default: as set by `open_ledger`; with ``parents``, θ_pre.
            rate_for: the number of entries that sets AdamW's learning rate; default: the allowed size of γ.
            steps: number of updates; default: `RegionOptions.region_updates`.
            options: options of the training; default: `RegionOptions.for_region`.
            trained: returns the trained parameters, which may move any entry; only for ledgers whose model holds θ_pre between
                tasks. Default: the values of the free entries.
        """
        model, space, own = self.model, self.space, self.options
        if sparsity is None and isinstance(own, LocalizationOptions):
            sparsity = own.sparsity
        # The rate is set by the allowed size of γ, though γ may have fewer entries.
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
        """Record the task's region with the model's values; then load the weights that the next task starts from."""
        self.ledger_model.commit(self.ledger_model.record(training))

    def answering(self, task: EncodedTask) -> AbstractContextManager[Answer | None]:
        """Answer with the weights that the ledger has for the task."""
        return self.ledger_model.of(task)

    def changed_by(self, learned: EncodedTask) -> list[EncodedTask] | None:
        """Return the learned tasks if θ_pre answers for tasks that are not learned yet; otherwise ``None``, for all."""
        apart = self.forget_free and self.stream.scenario == "task" and self.ledger_model.stands_on != "union"
        return list(self.learned) if apart else None


class LedgerModel:
    """Switches a strategy's model between the tasks of its ledger; a `Storage`, which saves the ledger.

    Args:
        strategy: its model holds θ_pre. It gets an empty ledger, and this object as its `storage`.
        stands_on: see `StandsOn`.
        extra_bytes: see `RegionStrategy.open_ledger`.
    """

    def __init__(self, strategy: ContinualStrategy, stands_on: StandsOn, extra_bytes: int = 0) -> None:
        loaded = strategy.stream.loaded
        self._binding = loaded.binding()
        self._strategy = strategy
        self._united: str | None = None  # the task whose union answers all tasks
        #: The changes of a task's training, in a block of the switch; none between tasks.
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
        """The default parent of the next task; empty: θ_pre."""
        return self.ledger.last if self.stands_on == "union" else ""

    def _reset(self) -> None:
        """Load the weights of `usual_parent` into the model: the next task starts from them by default."""
        self._switch.to(self.ledger.stage(self.usual_parent))

    @contextmanager
    def standing_on(self, task: str) -> Iterator[None]:
        """Inside, the model holds the weights of a task (empty: θ_pre); afterwards, those of `usual_parent`."""
        self._switch.to(self.ledger.stage(task))
        try:
            yield
        finally:
            self._reset()

    # -- Learning a task -------------------------------------------------------------------------------------

    def begin(self, task: EncodedTask, free: Region, parent: str, *, moves_anything: bool = False) -> nn.Module:
        """Load the weights that a task stands on, so that they can be trained; return the task's readout.

        Args:
            task: the task.
            free: the entries to train.
            parent: the task that it stands on; empty: θ_pre.
            moves_anything: whether training may move other entries, too.
        """
        module = self._strategy.model.readout_module(task.label)
        block = self._switch.learning(free, parent=parent, modules=[module], moves_anything=moves_anything)
        self._change = self._learning.enter_context(block)
        # After the commit, nothing is left to undo.
        self._strategy.scope.enter_context(undo_on_error(self.roll_back))
        return module

    def record(self, training: Training) -> Record:
        """Return the record of a trained task, with the values that the model holds."""
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
        """Append a record to the ledger, and load the weights that the next task starts from."""
        self.ledger.append(record)
        self._end()
        self._reset()

    def roll_back(self) -> None:
        """Remove an unfinished training from the model for good, if there is one."""
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
        """Inside, the model has the weights of ``task``; for a task that is not learned, those of `usual_parent`."""
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
        """Inside, an unfinished training is out of the model, if there is one."""
        return nullcontext() if self._change is None else self._change.suspended()

    def union_scores(self) -> dict[str, list[float | None]]:
        """Return the scores and calibration errors of the final union of all regions on the tasks of the stream."""
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
        """Load the ledger; the next task may be learned on top of it."""
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
        """Count the ledger once a task is learned, and the extra bytes."""
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
