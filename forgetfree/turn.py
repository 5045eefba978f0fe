"""Several strategies on one stream share its model, and take turns in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from forgetfree.errors import RunError
from forgetfree.models.state import ModelState

if TYPE_CHECKING:
    from forgetfree.models.readout_model import ReadoutModel


class Turn:
    """Which strategy the stream's model belongs to now. What the others left in it is set aside, by them, until they need it.

    Args:
        model: the stream's.
        pristine: what a strategy finds in it at first: θ_pre and untrained readouts.
    """

    def __init__(self, model: ReadoutModel, pristine: ModelState) -> None:
        self._model, self._pristine = model, pristine
        self._holder: Callable[[], Any] = _nobody

    def take(self, strategy: Any) -> None:
        """The model holds what ``strategy`` left in it, from now on.

        Raises:
            RunError: another strategy is training or evaluating with it.
        """
        holder = self._holder()
        if holder is strategy:
            return
        if holder is not None:
            if holder.is_busy:
                raise RunError(
                    f"{type(holder).__name__} is training or evaluating on this stream, and {type(strategy).__name__} needs "
                    "the same model. Use one after the other, or give each a stream of its own."
                )
            holder.set_aside = ModelState.of(self._model)
        self._model.to(strategy.device)
        (strategy.set_aside or self._pristine).load_(self._model)
        strategy.set_aside = None
        self._holder = weakref.ref(strategy)

    def __deepcopy__(self, memo: dict[int, Any]) -> Turn:
        """Of a strategy that is copied with its stream: the copy holds the copied model as the strategy does the model."""
        turn = Turn(deepcopy(self._model, memo), deepcopy(self._pristine, memo))
        if (copied := memo.get(id(self._holder()))) is not None:
            turn._holder = weakref.ref(copied)
        return turn


def _nobody() -> None:
    return None
