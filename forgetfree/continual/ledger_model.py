"""The model of a strategy on a ledger: what it holds between tasks, while one is trained or answered, and what is saved of it.

It is switched between θ_pre and what tasks are answered with. What is being trained can be taken out of it: for good if
training fails, or while another task is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from forgetfree.continual.strategy import ContinualStrategy, EncodedTask, Training, undo_on_error
from forgetfree.core.parameters import load_tensors_, tensors_of
from forgetfree.core.regions import Region, grafted
from forgetfree.errors import LedgerError
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
from forgetfree.results.unit_folder import LEDGER


class LedgerModel:
    """The model of a strategy, as its ledger says; a `Storage`, which keeps the ledger.

    Args:
        strategy: its model holds θ_pre. It gets an empty ledger, and this as what it keeps.
        composition: what a task is answered with, see `forgetfree.ledger.Composition`.
    """

    def __init__(self, strategy: ContinualStrategy, composition: Composition) -> None:
        loaded = strategy.stream.loaded
        self._binding = loaded.binding()
        self._strategy = strategy
        self._united: str | None = None  # the task by whose union all are answered
        #: Takes what is being trained out of the model; none between tasks.
        self._undo: Callable[[], None] | None = None
        self._moves_anything = False
        self._set(Ledger(strategy.space, loaded.fingerprint, composition, self._binding))
        strategy.storage = self

    def _set(self, ledger: Ledger) -> None:
        self._switch = LedgerSwitch(ledger, self._strategy.model.backbone)  # refuses a ledger of other weights
        self.ledger = self._strategy.ledger = ledger

    def _reset(self) -> None:
        """Put into the model what the next task starts from: the union, where there is one."""
        self._switch.to(self.ledger.last_of_union)

    @contextmanager
    def base(self, *, union: bool) -> Iterator[None]:
        """Inside, the model holds the union of all regions so far, or else θ_pre; after, what the next task starts from."""
        self._switch.to(self.ledger.last_of_union if union else 0)
        try:
            yield
        finally:
            self._reset()

    # -- Learning a task -------------------------------------------------------------------------------------

    def begin(self, task: EncodedTask, free: Region, *, alone: bool, moves_anything: bool = False) -> nn.Module:
        """Put what a task stands on into the model, which is going to change; return the task's readout.

        Args:
            task: the task.
            free: the entries that are trained.
            alone: whether it stands on θ_pre alone.
            moves_anything: whether training may move other entries, too.
        """
        self._switch.to(0 if alone else self.ledger.last_of_union)
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

    def record(self, training: Training, region: Region | None = None) -> Record:
        """Return who owns what after a training, with the values that the model holds.

        Args:
            training: of the task.
            region: γ, where it is known only after training.
        """
        strategy, task, own = self._strategy, training.task, training.region
        assert own is not None, "region_training gives a training its region"
        model, loaded = strategy.model, strategy.stream.loaded
        region = own.region if region is None else region
        return Record(
            task.name,
            region,
            Graft.of(model.backbone, strategy.space, self.ledger.free(region, alone=own.alone)),
            own.sparsity,
            readout=tensors_of(model.readout_module(task.label)),
            buffers=changed_buffers(model.backbone, strategy.pre_trained.buffers),
            definition=None if loaded.tokenizer is None else task.definition,
            classes=task.classes,
            alone=own.alone and self.ledger.composition == "auto",
        )

    def put_alone(self, task: EncodedTask, record: Record) -> None:
        """Put into the model, in place of what is being trained, what was trained on θ_pre alone, ready to be recorded."""
        self.roll_back()
        backbone = self._strategy.model.backbone
        module = self.begin(task, record.region, alone=True)
        self._strategy.space.scatter_(backbone, record.region.indices, record.owned.values)
        load_tensors_(module, record.readout)
        for name, buffer in record.buffers.items():
            backbone.get_buffer(name).copy_(buffer)

    def commit(self, record: Record) -> None:
        """Append what the model holds to the ledger; the model holds what the next task starts from."""
        self.ledger.append(record)
        self._undo = None
        self._switch.commit()
        self._clear()
        self._reset()

    def roll_back(self) -> None:
        """Take what is being trained out of the model, for good, if there is anything."""
        if self._undo is not None:
            self._undo()

    def _clear(self) -> None:
        """Put θ_pre everywhere, where training may have moved any entry."""
        if self._moves_anything:
            self._strategy.space.load_(self._strategy.model.backbone, self._strategy.pre_trained.theta)

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
            self.base(union=False),
            grafted(strategy.model.backbone, strategy.space, graft.region, graft.values),
        ):
            yield

    @contextmanager
    def _without_training(self) -> Iterator[None]:
        """Inside, what is being trained is out of the model, if there is anything."""
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

    def union_scores(self) -> dict[str, list[float | None]]:
        """Return the scores of the one union of all regions on the tasks of the stream, and their calibration errors."""
        self._united = self.ledger.records[self.ledger.last_of_union - 1].task
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
        with self.base(union=False):
            self._set(ledger)
        for record in ledger.records:
            load_tensors_(strategy.model.readout_module(tasks[record.task].label), record.readout)
            strategy.note_learned(tasks[record.task], dict(record.readout))

    def bytes_kept(self) -> int:
        """Count the ledger."""
        return self.ledger.size_in_bytes if self.ledger.records else 0
