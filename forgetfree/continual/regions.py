"""The regions of learned tasks in a ledger, so that no later task can reach them: what strategies on a ledger share.

Such a strategy holds `TaskRegions` and says which region a task may train. The region minus what earlier tasks own is trained
as one small vector and recorded; a task is inferred with what the ledger's composition says. The
file of the ledger is `forgetfree.continual.memory.LedgerFile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import nn

from forgetfree.continual.memory import LedgerFile
from forgetfree.continual.strategy import ContinualStrategy, TaskwiseOptions, Training, undo_on_error
from forgetfree.continual.task_training import Skill, skill_of
from forgetfree.core.graft import grafted
from forgetfree.core.regions import Region
from forgetfree.core.tensors import load_tensors_, tensors_of
from forgetfree.core.trained import RegionParameters, TrainedParameters
from forgetfree.errors import OptionError
from forgetfree.ledger import Composition, Ledger, LedgerSwitch, Record, changed_buffers
from forgetfree.ledger.graft import Graft
from forgetfree.models.state import ModelState
from forgetfree.options import Function, name_of_function, option
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.training_options import TrainingOptions, region_rate, sets_rates


@dataclass(frozen=True, kw_only=True)
class RegionOptions(TaskwiseOptions):
    """How a region is trained."""

    region_steps: int | None = option(None, "updates of the region; none: as many as fine-tuning", at_least=0)
    region_optimizer: Literal["sgd", "adamw"] | Function | None = option(None, "none: that of fine-tuning")
    region_learning_rate: float | None = option(
        None,
        "none: that of fine-tuning; with AdamW times √(N/s) for s of N entries, so that an update is as long as there",
        above=0,
    )
    region_rate_factor: float = option(
        1.0,
        "what the rate of a region is multiplied by where region_learning_rate is none: 3 lets each of few entries go further "
        "than in fine-tuning",
        above=0,
    )
    region_dropout: bool | None = option(
        None, "the backbone's own dropout while a region is trained; none: as `dropout`"
    )


def check_region_rate(options: RegionOptions) -> None:
    """Raise ``OptionError`` where the rate of one optimiser would be taken for another's."""
    own, other = options.region_optimizer, options.optimizer
    if own not in (None, other) and not sets_rates(own) and options.region_learning_rate is None:
        shown = [name_of_function(each) if callable(each) else each for each in (own, other)]
        raise OptionError(
            f"region_optimizer={shown[0]} beside optimizer={shown[1]} needs a region_learning_rate of its own. Set it."
        )


def region_training_options(options: RegionOptions, space_size: int, budget: int) -> TrainingOptions:
    """Return the options by which a region is trained.

    Args:
        options: those of the strategy.
        space_size: the N entries of the space.
        budget: the s entries that the region may have.
    """
    own = replace(
        options,
        optimizer=options.region_optimizer or options.optimizer,
        readout_learning_rate=options.readout_learning_rate or options.learning_rate,
        l1=0.0,  # a region is as sparse as it gets
        dropout=options.dropout if options.region_dropout is None else options.region_dropout,
    )
    rate = options.region_learning_rate or options.region_rate_factor * region_rate(own, space_size, budget)
    return replace(own, learning_rate=rate)


class RegionStrategy(ContinualStrategy):
    """Base of strategies on a ledger: what they all claim. Each makes its `regions` in `setup`."""

    Options: ClassVar[type[TrainingOptions]] = RegionOptions
    forget_free: ClassVar[bool] = True
    regions: TaskRegions

    def reuse(self, ledger: Ledger) -> set[str]:
        """Take from the ledger of another stream what depends on no other task, and return of which tasks: of none."""
        return set()

    def changed_by(self, learned: EncodedTask) -> list[EncodedTask] | None:
        """Return the learned tasks, unless tasks share a union: else θ_pre answers for what is not learned yet."""
        apart = self.stream.scenario == "task" and self.regions.ledger.composition in ("alone", "selection")
        return list(self.learned) if apart else None


class TaskRegions:
    """The ledger of a strategy, and its model, which is switched between θ_pre and what the tasks are inferred with.

    Between tasks the model carries the union of all regions where tasks are inferred with unions, else θ_pre. This becomes
    what the strategy keeps, see `LedgerFile`.

    Args:
        strategy: a `ContinualStrategy` whose model holds θ_pre.
        composition: what a task is inferred with, see `forgetfree.ledger.Composition`.

    Attributes:
        ledger: who owns what.
    """

    def __init__(self, strategy: ContinualStrategy, composition: Composition) -> None:
        loaded = strategy.stream.loaded
        self._strategy = strategy
        self._answering_all: str | None = None
        self._set(
            Ledger(
                strategy.space, loaded.fingerprint, composition, loaded.binding(strategy.options.answering["precision"])
            )
        )
        strategy.kept = LedgerFile(strategy, self)

    def _set(self, ledger: Ledger) -> None:
        self._switch = LedgerSwitch(ledger, self._strategy.model.backbone)
        self._transaction = Transaction(self._strategy, self._switch)
        self.ledger = ledger

    def use(self, ledger: Ledger) -> None:
        """Go on with another ledger."""
        self._switch.to(0)
        self._set(ledger)
        self.reset()

    def reset(self) -> None:
        """Put into the model what the next task starts from: the union, where there is one."""
        self._switch.to(self.ledger.last_of_union)

    @contextmanager
    def holding(self, *, union: bool) -> Iterator[None]:
        """Inside, the model holds the union of all regions so far, or else θ_pre; after, what the next task starts from."""
        self._switch.to(self.ledger.last_of_union if union else 0)
        try:
            yield
        finally:
            self.reset()

    def owned_in_model(self) -> Region | None:
        """Return the entries that tasks own and that the model carries now, between tasks; ``None``: it holds θ_pre."""
        return self.ledger.owned() if self._switch.stage else None

    # -- Learning a task -------------------------------------------------------------------------------------

    def training(
        self,
        task: EncodedTask,
        skill: Skill,
        start: ModelState | None = None,
        *,
        budget: int | None = None,
        steps: int | None = None,
        options: TrainingOptions | None = None,
        trained: Callable[[], TrainedParameters] | None = None,
    ) -> Training:
        """Return the training of what no earlier task owns of a region, on top of the union, or on θ_pre where it stands alone.

        Args:
            task: the task.
            skill: γ, and what it is to stand on.
            start: where its free entries and the readout start from; default: θ_pre, and the untrained readout.
            budget: how many entries the rate of AdamW is meant for; default: those of the region.
            steps: updates; default: ``options.region_steps``, or as many as fine-tuning.
            options: how it is trained; default: as `region_training_options` says.
            trained: makes what is trained, which may move any entry of a model between whose tasks θ_pre stands; default: the
                values of the free entries.
        """
        strategy, region = self._strategy, skill.region
        model, space = strategy.model, strategy.space
        free = self.ledger.free(region, alone=skill.alone)
        self._switch.to(0 if skill.alone else self.ledger.last_of_union)
        module = self._transaction.begin(task, free, moves_anything=trained is not None)
        load_tensors_(module, (start or strategy.pre_trained).readouts[task.name])
        if start is not None:
            space.scatter_(model.backbone, free.indices, start.theta[free.indices])
        what = trained() if trained else RegionParameters(model.backbone, space, free)
        readouts = list(module.parameters())
        if steps is None:
            steps = strategy.options.region_steps
        if not any(parameter.numel() for parameter in (*what.parameters, *readouts)):
            steps = 0
        return Training(
            task,
            what,
            readouts,
            strategy.full_steps(task) if steps is None else steps,
            options or region_training_options(strategy.options, len(space), len(region) if budget is None else budget),
            skill=skill,
        )

    def roll_back(self) -> None:
        """Take what is being trained out of the model, for good."""
        self._transaction.roll_back()

    def put_alone(self, task: EncodedTask, record: Record) -> None:
        """Put into the model, in place of what is being trained, what was trained on θ_pre alone, ready to be recorded."""
        self.roll_back()
        self._switch.to(0)
        model = self._strategy.model
        module = self._transaction.begin(task, record.region)
        self._strategy.space.scatter_(model.backbone, record.region.indices, record.owned.values)
        load_tensors_(module, record.readout)
        for name, buffer in record.buffers.items():
            model.backbone.get_buffer(name).copy_(buffer)

    def record(self, training: Training) -> Record:
        """Return who owns what after a training, with the values that the model holds."""
        strategy, task, skill = self._strategy, training.task, skill_of(training)
        model, loaded = strategy.model, strategy.stream.loaded
        owned = Graft.of(model.backbone, strategy.space, self.ledger.free(skill.region, alone=skill.alone))
        return Record(
            task.name,
            skill.region,
            owned,
            skill.sparsity,
            readout=tensors_of(model.readout_module(task.label)),
            buffers=changed_buffers(model.backbone, strategy.pre_trained.buffers),
            definition=None if loaded.tokenizer is None else task.definition,
            classes=task.classes,
            alone=skill.alone and self.ledger.composition == "auto",
        )

    def commit(self, training: Training) -> None:
        """Record what was trained, see `record`; the model holds what the next task starts from."""
        self.ledger.append(self.record(training))
        self._transaction.commit()
        self.reset()

    # -- Answering -------------------------------------------------------------------------------------------

    @contextmanager
    def answering(self, task: EncodedTask) -> Iterator[None]:
        """Inside, the model is what the ledger says for ``task``; for one that is not learned, what the next starts from."""
        name = self._answering_all or task.name
        with self._transaction.suspended():
            if name in self.ledger.tasks:
                self._switch.to_task(name)
            else:
                self.reset()
            try:
                yield
            finally:
                self.reset()

    @contextmanager
    def answering_by(self, graft: Graft) -> Iterator[None]:
        """Inside, the model is θ_pre with ``graft``, whichever task is answered."""
        strategy = self._strategy
        with (
            self._transaction.suspended(),
            self.holding(union=False),
            grafted(strategy.model.backbone, strategy.space, graft.region, graft.values),
        ):
            yield

    @contextmanager
    def answering_all_by_union(self) -> Iterator[None]:
        """Inside, every task is answered by the one union of all regions so far."""
        self._answering_all = self.ledger.records[self.ledger.last_of_union - 1].task
        try:
            yield
        finally:
            self._answering_all = None


def scores_of_union(strategy: RegionStrategy) -> dict[str, list[float | None]]:
    """Return the scores of the one union of all regions on the tasks of the stream, and their calibration errors."""
    with strategy.regions.answering_all_by_union():
        answers = strategy.evaluate()
    tasks = strategy.stream.tasks
    return {
        "accuracy": [answers[task.name].score(task.definition.metric) for task in tasks],
        "ece": [answers[task.name].ece for task in tasks],
    }


class Transaction:
    """Takes what is being trained out of the model: for good if training fails, or while another task is answered.

    Args:
        strategy: whose model.
        switch: moves it.
    """

    def __init__(self, strategy: ContinualStrategy, switch: LedgerSwitch) -> None:
        self._strategy, self._switch = strategy, switch
        #: Takes it out; none between tasks.
        self._undo: Callable[[], None] | None = None
        self._moves_anything = False

    def begin(self, task: EncodedTask, free: Region, *, moves_anything: bool = False) -> nn.Module:
        """Begin to change the model for a task, so that it can be undone; return the task's readout.

        Args:
            task: the task.
            free: the entries that are trained.
            moves_anything: whether training may move other entries, too.
        """
        self._switch.begin(free, moves_anything=moves_anything)
        module = self._strategy.model.readout_module(task.label)
        untrained = tensors_of(module)

        def undo() -> None:
            self._undo = None
            self._switch.roll_back()
            load_tensors_(module, untrained)
            self._clear()

        self._undo, self._moves_anything = undo, moves_anything
        # Nothing is left to undo once it is committed.
        self._strategy.scope.enter_context(undo_on_error(self.roll_back))
        return module

    def roll_back(self) -> None:
        """Take it out of the model, for good, if there is anything."""
        if self._undo is not None:
            self._undo()

    def commit(self) -> None:
        """Note that the ledger has it."""
        self._undo = None
        self._switch.commit()
        self._clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, it is out of the model, if there is anything."""
        if (undo := self._undo) is None:
            yield
            return
        model, stage = self._strategy.model, self._switch.stage
        in_training = ModelState.of(model)
        undo()
        try:
            yield
        finally:
            self._switch.to(stage)
            in_training.load_(model)
            self._undo = undo

    def _clear(self) -> None:
        """Put θ_pre everywhere, where training may have moved any entry."""
        if self._moves_anything:
            self._strategy.space.load_(self._strategy.model.backbone, self._strategy.pre_trained.theta)
