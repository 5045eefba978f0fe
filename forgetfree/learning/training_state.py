"""What the steps of a training phase change, so that it can be kept and gone on from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from forgetfree.core.checkpoint import Checkpoint, Resumable
from forgetfree.core.tensors import persistent_buffers
from forgetfree.core.trained import RegionParameters, Trained, WholeTensors


class TrainingState:
    """Parameters, optimiser, schedule, buffers and generators; see `forgetfree.core.checkpoint.Resumable`.

    Args:
        model: in training.
        trained: what is trained of its backbone.
        update: trains it.
        caches_rows: whether a step depends on the batches in which its rows were read first: nothing is kept then.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Trained,
        update: Resumable,
        caches_rows: bool,
    ) -> None:
        self._model, self._trained, self._update = model, trained, update
        known = isinstance(trained, WholeTensors | RegionParameters)  # other classes may have a state of their own
        self._can_be_kept = known and not caches_rows
        self._checkpoint, self._steps = Checkpoint(), 0

    def begin(self, checkpoint: Checkpoint | None, steps: int, seed: int, *about: Any) -> int:
        """Go on from where ``checkpoint`` has kept the training, and return how many of its steps are done.

        Args:
            checkpoint: keeps it.
            steps: of the training.
            seed: of its draws.
            about: what else tells it from others that start alike, as parts of a state: options, labels.
        """
        if checkpoint is not None and self._can_be_kept:
            self._checkpoint, self._steps = checkpoint, steps
        return self._checkpoint.begin(steps, self, seed, *about)

    def after(self, step: int) -> None:
        """Keep where it stands after a step, now and then."""
        self._checkpoint.after(step, self._steps, self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        buffers = persistent_buffers(self._model)
        return {"update": self._update.state_dict(), "buffers": buffers, "generators": generators()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; the model holds the values of its parameters."""
        self._update.load_state_dict(state["update"])
        self._trained.write()
        for name, buffer in persistent_buffers(self._model).items():
            buffer.copy_(state["buffers"][name])
        set_generators(state["generators"])


def generators() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and PyTorch."""
    name, keys, *rest = np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": devices,
    }


def set_generators(states: dict[str, Any]) -> None:
    """Set the generators to what `generators` returned."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
