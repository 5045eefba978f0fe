"""The regions of learned tasks in a ledger, so that no later task can reach them: what strategies on a ledger share.

Such a strategy holds `TaskRegions` and says which region a task may train. The region minus what earlier tasks own is trained
as one small vector and recorded; a task is inferred with what the ledger's composition says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from torch import Tensor, nn

from forgetfree.continual.strategy import ContinualStrategy, TaskwiseOptions, Training, undo_on_error
from forgetfree.continual.streams import EncodedTask
from forgetfree.core.graft import grafted
from forgetfree.core.regions import Region
from forgetfree.core.tensors import load_tensors_, tensors_of
from forgetfree.core.trained import RegionParameters, Trained
from forgetfree.errors import LedgerError, OptionError
from forgetfree.learning.own_optimizers import sets_rates
from forgetfree.learning.training import TrainingOptions
from forgetfree.ledger import (
    Composition,
    Ledger,
    LedgerSwitch,
    Record,
    changed_buffers,
    check_binding,
    check_definitions,
)
from forgetfree.ledger.graft import Graft
from forgetfree.models.state import ModelState
from forgetfree.options import Function, name_of_function, option
from forgetfree.tasks import version_of


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


def region_training(options: RegionOptions, space_size: int, budget: int) -> TrainingOptions:
    """Return the options by which a region is trained.

    Args:
        options: those of the strategy.
        space_size: the N entries of the space.
        budget: the s entries that the region may have.
    """
    optimizer = options.region_optimizer or options.optimizer
    rate = options.region_learning_rate or options.learning_rate
    if options.region_learning_rate is None and optimizer == "adamw":
        # AdamW moves every entry by about its rate, so s of N entries move less far together.
        rate *= math.sqrt(space_size / max(1, budget))
    return replace(
        options,
        optimizer=optimizer,
        learning_rate=rate,
        readout_learning_rate=options.readout_learning_rate or options.learning_rate,
        l1=0.0,  # a region is as sparse as it gets
        dropout=options.dropout if options.region_dropout is None else options.region_dropout,
    )


class RegionStrategy(ContinualStrategy):
    """Base of strategies on a ledger: what they all claim. Each makes its `regions` in `setup`."""

    Options: ClassVar[type[TrainingOptions]] = RegionOptions
    forget_free: ClassVar[bool] = True
    taskwise: ClassVar[bool] = True
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

    Between tasks the model carries the union of all regions where tasks are inferred with unions, else θ_pre.

    Args:
        strategy: a `ContinualStrategy` whose model holds θ_pre; this becomes what it keeps.
        composition: what a task is inferred with, see `forgetfree.ledger.Composition`.

    Attributes:
        ledger: who owns what.
    """

    #: What the ledger's file is called.
    file: ClassVar[str] = "ledger.safetensors"

    def __init__(self, strategy: ContinualStrategy, composition: Composition) -> None:
        loaded = strategy.stream.loaded
        self._strategy = strategy
        self._binding = loaded.binding(strategy.options.precision)
        #: Takes what is being trained out of the model; none between tasks.
        self._withdraw: Callable[[], None] | None = None
        self._moves_anything = self._alone = False
        self._use(Ledger(strategy.space, loaded.fingerprint, composition, self._binding))
        strategy.kept = self

    def _use(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._switch = LedgerSwitch(ledger, self._strategy.model.backbone)

    def _rest(self) -> None:
        """Put into the model what the next task starts from: the union, where there is one."""
        self._switch.to(self.ledger.last_of_union)

    def stands_alone(self, task: EncodedTask) -> bool:
        """Return whether ``task`` is to stand on θ_pre alone, whatever others have: all do, or its last version does."""
        if self.ledger.composition == "alone":
            return True
        met = self._versions(task)
        return bool(met) and met[-1].alone

    def _versions(self, task: EncodedTask) -> list[Record]:
        """Return the records of what is the same task by its name: ``sst2``, ``sst2@2``."""
        base = version_of(task.name)[0]
        return [record for record in self.ledger.records if version_of(record.task)[0] == base]

    # -- Learning a task -------------------------------------------------------------------------------------

    @contextmanager
    def pre_trained(self) -> Iterator[None]:
        """Inside, the model holds θ_pre; after, what the next task starts from."""
        self._switch.to(0)
        try:
            yield
        finally:
            self._rest()

    @contextmanager
    def start_of(self, task: EncodedTask) -> Iterator[ModelState | None]:
        """Inside, the model holds what a task of a union is fine-tuned from: θ_pre, for which ``None`` is given.

        A task that is met again builds on what was learned since: it starts from the union of all regions so far, with the
        readout of its last version; from θ_pre, if that stands alone.
        """
        met = self._versions(task)
        if not met:
            with self.pre_trained():
                yield None
            return
        self._switch.to(0 if self.stands_alone(task) else self.ledger.last_of_union)
        model = self._strategy.model
        module = model.readout_module(task.label)
        untrained = tensors_of(module)
        load_tensors_(module, met[-1].readout)
        try:
            yield ModelState.of(model, [task.name])
        finally:
            load_tensors_(module, untrained)

    def training(
        self,
        task: EncodedTask,
        region: Region,
        *,
        start: Tensor | None = None,
        readout: dict[str, Tensor] | None = None,
        budget: int | None = None,
        steps: int | None = None,
        options: TrainingOptions | None = None,
        trained: Callable[[], Trained] | None = None,
        alone: bool = False,
    ) -> Training:
        """Return the training of what no earlier task owns of ``region``, on top of what the model holds now.

        Args:
            task: the task.
            region: γ.
            start: where its free entries start from, flat ``(N,)``; default: as they are.
            readout: where the readout starts from; default: untrained.
            budget: how many entries the rate of AdamW is meant for; default: those of the region.
            steps: updates; default: ``options.region_steps``, or as many as fine-tuning.
            options: how it is trained; default: as `region_training` says.
            trained: makes what is trained, which may move any entry of a model between whose tasks θ_pre stands; default: the
                values of the free entries.
            alone: the task is to stand on θ_pre alone, which the model holds, though others have a union.
        """
        strategy = self._strategy
        model, space = strategy.model, strategy.space
        free = self.ledger.free(region, alone=alone)
        module = self._enter(task, free, alone=alone)
        self._moves_anything = trained is not None
        load_tensors_(module, readout or strategy.pre_trained.readouts[task.name])
        if start is not None:
            space.scatter_(model.backbone, free.indices, start[free.indices])
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
            options or region_training(strategy.options, len(space), len(region) if budget is None else budget),
        )

    def _enter(self, task: EncodedTask, free: Region, *, alone: bool) -> nn.Module:
        """Begin to change the model for a task, so that it can be undone; return the task's readout."""
        self._switch.remember(free)
        module = self._strategy.model.readout_module(task.label)
        untrained = tensors_of(module)

        def withdraw() -> None:
            self._withdraw = None
            self._switch.revert_uncommitted()
            load_tensors_(module, untrained)
            self._clear()

        self._withdraw, self._alone = withdraw, alone
        # Nothing is left to undo once it is committed.
        self._strategy.scope.enter_context(undo_on_error(lambda: self._withdraw and self._withdraw()))
        return module

    def withdraw(self) -> None:
        """Take what is being trained out of the model, for good."""
        if self._withdraw is not None:
            self._withdraw()

    def put_alone(self, task: EncodedTask, record: Record) -> None:
        """Put into the model, in place of what is being trained, what was trained on θ_pre alone, ready to be recorded."""
        self.withdraw()
        self._switch.to(0)
        model = self._strategy.model
        module = self._enter(task, record.region, alone=True)
        self._strategy.space.scatter_(model.backbone, record.region.indices, record.owned.values)
        load_tensors_(module, record.readout)
        for name, buffer in record.buffers.items():
            model.backbone.get_buffer(name).copy_(buffer)

    def _clear(self) -> None:
        """Put θ_pre everywhere, where training may have moved any entry."""
        if self._moves_anything:
            self._strategy.space.load_(self._strategy.model.backbone, self._strategy.pre_trained.theta)

    def record(self, task: EncodedTask, region: Region, sparsity: float) -> Record:
        """Return who owns what, with the values that the model holds.

        Args:
            task: the task.
            region: γ.
            sparsity: the share of the space that it was allowed.
        """
        strategy = self._strategy
        model, loaded = strategy.model, strategy.stream.loaded
        owned = Graft.of(model.backbone, strategy.space, self.ledger.free(region, alone=self._alone))
        return Record(
            task.name,
            region,
            owned,
            sparsity,
            readout=tensors_of(model.readout_module(task.label)),
            buffers=changed_buffers(model.backbone, strategy.pre_trained.buffers),
            definition=None if loaded.tokenizer is None else task.definition,
            classes=task.classes,
            alone=self._alone and self.ledger.composition == "auto",
        )

    def commit(self, task: EncodedTask, region: Region, sparsity: float) -> None:
        """Record what is being trained, see `record`; the model holds what the next task starts from."""
        self.ledger.append(self.record(task, region, sparsity))
        self._withdraw = None
        self._switch.committed()
        self._clear()
        self._rest()

    # -- Answering -------------------------------------------------------------------------------------------

    @contextmanager
    def answering(self, task: EncodedTask) -> Iterator[None]:
        """Inside, the model is what the ledger says for ``task``; for one that is not learned, what the next starts from."""
        with self._set_aside():
            if task.name in self.ledger.tasks:
                self._switch.to_task(task.name)
            else:
                self._rest()
            try:
                yield
            finally:
                self._rest()

    @contextmanager
    def answering_by(self, graft: Graft) -> Iterator[None]:
        """Inside, the model is θ_pre with ``graft``, whichever task is answered."""
        strategy = self._strategy
        model = strategy.model.backbone
        with self._set_aside(), self.pre_trained(), grafted(model, strategy.space, graft.region, graft.values):
            yield

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Inside, what is being trained is out of the model, if anything is."""
        if (withdraw := self._withdraw) is None:
            yield
            return
        model, stage = self._strategy.model, self._switch.stage
        in_training = ModelState.of(model)
        withdraw()
        try:
            yield
        finally:
            self._switch.to(stage)
            in_training.load_(model)
            self._withdraw = withdraw

    # -- Keeping ---------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the ledger."""
        self.ledger.save(directory / self.file)

    def load(self, directory: Path) -> None:
        """Read the ledger; the next task may be learned on top of it."""
        path, strategy = directory / self.file, self._strategy
        ledger = Ledger.load(path)
        composition = self.ledger.composition
        if ledger.composition != composition:
            raise LedgerError(
                f"{path} has composition {ledger.composition}, and {type(strategy).__name__.lower()} needs {composition}. "
                "Load it by the strategy that wrote it."
            )
        check_binding(ledger, self._binding, str(path))
        tasks = {task.name: task for task in strategy.stream.tasks}
        check_definitions(ledger, {name: task.definition for name, task in tasks.items()}, "the stream")
        for record in ledger.records:  # all of it, before anything is changed
            if record.task not in tasks:
                raise LedgerError(
                    f"{path} holds task {record.task!r}, which this stream lacks. Load it with its stream."
                )
            readout = strategy.model.readout_module(tasks[record.task].label).state_dict()
            expected, got = ({n: tuple(t.shape) for n, t in named.items()} for named in (readout, record.readout))
            if expected != got:
                raise LedgerError(
                    f"{path}: the readout of task {record.task!r} does not fit: expected {expected}, got {got}. Load it with "
                    "the model and scenario of its stream."
                )
        self._switch.to(0)
        self._use(ledger)
        for record in ledger.records:
            load_tensors_(strategy.model.readout_module(tasks[record.task].label), record.readout)
            strategy.note_learned(tasks[record.task], dict(record.readout))
        self._rest()

    def bytes_kept(self) -> int:
        """Count the ledger."""
        return self.ledger.size_in_bytes if self.ledger.records else 0
