"""The ledger as what a strategy keeps: written, read, counted."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.core.tensors import load_tensors_
from forgetfree.errors import LedgerError
from forgetfree.ledger import Ledger, check_binding, check_definitions

#: What its file is called.
LEDGER = "ledger.safetensors"


class UsesLedger(Protocol):
    """Answers by a ledger, and can go on with another."""

    ledger: Ledger

    def use(self, ledger: Ledger) -> None:
        """Go on with ``ledger``."""


class KeptLedger:
    """Writes a strategy's ledger, and reads one that it goes on with.

    Args:
        strategy: its model holds θ_pre.
        regions: what answers by the ledger: `forgetfree.continual.regions.TaskRegions`.
        file: what it is called.
    """

    def __init__(self, strategy: ContinualStrategy, regions: UsesLedger, file: str = LEDGER) -> None:
        self._strategy, self._regions, self._file = strategy, regions, file

    @property
    def ledger(self) -> Ledger:
        """The ledger."""
        return self._regions.ledger

    def save(self, directory: Path) -> None:
        """Write the ledger."""
        self.ledger.save(directory / self._file)

    def load(self, directory: Path) -> None:
        """Read the ledger; the next task may be learned on top of it."""
        path, strategy = directory / self._file, self._strategy
        ledger, composition = Ledger.load(path), self.ledger.composition
        if ledger.composition != composition:
            raise LedgerError(
                f"{path} has composition {ledger.composition}, and {type(strategy).__name__.lower()} needs {composition}. "
                "Load it by the strategy that wrote it."
            )
        check_binding(ledger, strategy.stream.loaded.binding(strategy.options.precision), str(path))
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
        self._regions.use(ledger)
        for record in ledger.records:
            load_tensors_(strategy.model.readout_module(tasks[record.task].label), record.readout)
            strategy.note_learned(tasks[record.task], dict(record.readout))

    def bytes_kept(self) -> int:
        """Count the ledger."""
        return self.ledger.size_in_bytes if self.ledger.records else 0
