"""Storage of what a strategy answers with later: the one model of all tasks, or a ledger."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from forgetfree.continual.stream import Stream
from forgetfree.continual.task_training import Learner
from forgetfree.core.tensors import load_tensors_, tensors_of
from forgetfree.display import brief
from forgetfree.errors import LedgerError, RunError
from forgetfree.ledger import Ledger, check_binding, check_definitions
from forgetfree.models.state import ModelState, learned_in
from forgetfree.training.encoded_task import EncodedTask


class Storage(Protocol):
    """Writes, reads and counts what a strategy has learned: set as `ContinualStrategy.storage`."""

    def save(self, directory: Path) -> None:
        """Write all that is needed to answer later."""

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, into a new strategy, and call its `note_learned` for each task.

        Raises:
            ForgetfreeError: a file is missing or damaged, or of another model or stream; nothing is changed.
        """

    def bytes_kept(self) -> int:
        """Return the bytes kept to answer for the tasks learned so far and to learn the next, beside θ_pre itself."""


class ModelStorage:
    """The one model that answers all tasks: all that training may change of it.

    Args:
        strategy: whose model.
        extra_bytes: bytes that are kept beside the model, a memory of rows, say.
    """

    def __init__(self, strategy: Learner, extra_bytes: Callable[[], int] = lambda: 0) -> None:
        self._strategy, self._extra_bytes = strategy, extra_bytes

    def save(self, directory: Path) -> None:
        """Write the model, and the names of the tasks."""
        learned = json.dumps([task.name for task in self._strategy.learned])
        ModelState.of(self._strategy.model).save(directory / "checkpoint.safetensors", learned=learned)

    def load(self, directory: Path) -> None:
        """Put the saved model into the stream's."""
        strategy, path = self._strategy, directory / "checkpoint.safetensors"
        names = learned_in(path)
        learned = tasks_named(strategy.stream, names, path)
        state = ModelState.load(path)
        state.check_fits(strategy.model, names)
        state.load_(strategy.model)
        for task in learned:
            strategy.note_learned(task, tensors_of(strategy.model.readout_module(task.label)))

    def bytes_kept(self) -> int:
        """Count the model once something is learned, and what stands beside it."""
        # All that a state of the model holds is as large as it was before training.
        return self._strategy.pre_trained.size_in_bytes + self._extra_bytes() if self._strategy.learned else 0


def tasks_named(stream: Stream, names: Iterable[str], path: Path) -> list[EncodedTask]:
    """Return the stream's tasks of these names, which a file says were learned.

    Raises:
        RunError: the stream lacks one.
    """
    tasks = {task.name: task for task in stream.tasks}
    if missing := [name for name in names if name not in tasks]:
        raise RunError(
            f"{path} says that task {brief(missing[0])} was learned, which this stream lacks: it has {', '.join(tasks)}. "
            "Load it with its stream."
        )
    return [tasks[name] for name in names]


# -- A ledger -------------------------------------------------------------------------------------------


#: What its file is called.
LEDGER = "ledger.safetensors"


class LedgerUser(Protocol):
    """Answers by a ledger, and can go on with another: `forgetfree.continual.ledger_model.LedgerModel`."""

    ledger: Ledger

    def use(self, ledger: Ledger) -> None:
        """Go on with ``ledger``."""


class LedgerStorage:
    """The ledger of a strategy.

    Args:
        strategy: its model holds θ_pre.
        user: answers by the ledger.
        file: what the ledger's file is called.
    """

    def __init__(self, strategy: Learner, user: LedgerUser, file: str = LEDGER) -> None:
        self._strategy, self._user, self._file = strategy, user, file

    def save(self, directory: Path) -> None:
        """Write the ledger."""
        self._user.ledger.save(directory / self._file)

    def load(self, directory: Path) -> None:
        """Read the ledger; the next task may be learned on top of it."""
        path, strategy = directory / self._file, self._strategy
        ledger, composition = Ledger.load(path), self._user.ledger.composition
        if ledger.composition != composition:
            raise LedgerError(
                f"{path} has composition {ledger.composition}, and {type(strategy).__name__.lower()} needs {composition}. "
                "Load it by the strategy that wrote it."
            )
        check_binding(ledger, strategy.stream.loaded.binding(strategy.options.answering["precision"]), str(path))
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
        self._user.use(ledger)
        for record in ledger.records:
            load_tensors_(strategy.model.readout_module(tasks[record.task].label), record.readout)
            strategy.note_learned(tasks[record.task], dict(record.readout))

    def bytes_kept(self) -> int:
        """Count the ledger."""
        ledger = self._user.ledger
        return ledger.size_in_bytes if ledger.records else 0
