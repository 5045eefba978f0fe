"""What is being trained in a model that a ledger's switch moves, until the ledger has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from forgetfree.continual.strategy import ContinualStrategy, undo_on_error
from forgetfree.continual.streams import EncodedTask
from forgetfree.core.regions import Region
from forgetfree.core.tensors import load_tensors_, tensors_of
from forgetfree.ledger import LedgerSwitch
from forgetfree.models.state import ModelState


class Uncommitted:
    """Takes what is being trained out of the model: for good if training fails, or while another task is answered.

    Args:
        strategy: whose model.
        switch: moves it.
    """

    def __init__(self, strategy: ContinualStrategy, switch: LedgerSwitch) -> None:
        self._strategy, self._switch = strategy, switch
        #: Takes it out; none between tasks.
        self._withdraw: Callable[[], None] | None = None
        self._moves_anything = False

    def enter(self, task: EncodedTask, free: Region, *, moves_anything: bool = False) -> nn.Module:
        """Begin to change the model for a task, so that it can be undone; return the task's readout.

        Args:
            task: the task.
            free: the entries that are trained.
            moves_anything: whether training may move other entries, too.
        """
        self._switch.remember(free)
        module = self._strategy.model.readout_module(task.label)
        untrained = tensors_of(module)

        def withdraw() -> None:
            self._withdraw = None
            self._switch.revert_uncommitted()
            load_tensors_(module, untrained)
            self._clear()

        self._withdraw, self._moves_anything = withdraw, moves_anything
        # Nothing is left to undo once it is committed.
        self._strategy.scope.enter_context(undo_on_error(self.withdraw))
        return module

    def withdraw(self) -> None:
        """Take it out of the model, for good, if there is anything."""
        if self._withdraw is not None:
            self._withdraw()

    def committed(self) -> None:
        """Note that the ledger has it."""
        self._withdraw = None
        self._switch.committed()
        self._clear()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside, it is out of the model, if there is anything."""
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

    def _clear(self) -> None:
        """Put θ_pre everywhere, where training may have moved any entry."""
        if self._moves_anything:
            self._strategy.space.load_(self._strategy.model.backbone, self._strategy.pre_trained.theta)
