"""Several strategies on one model take turns in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from forgetfree.errors import RunError
from forgetfree.models.state import ModelState


class Turn:
    """Which strategy a model belongs to now. What the others left in it is set aside, by them, until they need it."""

    def __init__(self) -> None:
        self._holder: Callable[[], Any] = _nobody

    def take(self, strategy: Any) -> None:
        """Put into the model what ``strategy`` left in it; at its first turn, what the stream's model held.

        Raises:
            RunError: another strategy is training or evaluating with it.
        """
        holder = self._holder()
        if holder is strategy:
            return
        if holder is not None:
            if holder.is_busy:
                raise RunError(
                    f"{type(holder).__name__} is training or evaluating with the model that {type(strategy).__name__} needs. "
                    "Use one after the other, or give each a model of its own."
                )
            holder.set_aside = ModelState.of(holder.stream.model)
        stream = strategy.stream
        stream.model.to(strategy.device)
        (strategy.set_aside or stream.pre_trained).load_(stream.model)
        strategy.set_aside = None
        self._holder = weakref.ref(strategy)

    def __deepcopy__(self, memo: dict[int, Any]) -> Turn:
        """Of a strategy that is copied with its stream: the copy holds the copied model as the strategy does the model."""
        turn = Turn()
        if (copied := memo.get(id(self._holder()))) is not None:
            turn._holder = weakref.ref(copied)
        return turn


#: By the backbone, which several streams may share.
_TURNS: WeakKeyDictionary[nn.Module, Turn] = WeakKeyDictionary()


def turn_of(backbone: nn.Module) -> Turn:
    """Whose turn it is in a model."""
    return _TURNS.setdefault(backbone, Turn())


def _nobody() -> None:
    return None
