"""The parts of a strategy: `Training`, which its `begin` returns, and `Storage` of what it has learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from forgetfree.continual.stream import Stream
from forgetfree.core.parameters import tensors_of
from forgetfree.core.regions import Region
from forgetfree.core.trained import TrainedParameters
from forgetfree.display import brief
from forgetfree.errors import RunError
from forgetfree.models.state import ModelState, load_checkpoint
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.monitor import Phase
from forgetfree.training.training_options import TrainingOptions

#: From inputs ``(B, …)`` and task labels ``(B,)`` to logits ``(B, n)`` in float32; the model itself is one.
Answer = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class TaskRegion:
    """The region of a task, for a strategy on a ledger: what is recorded beside the values.

    Attributes:
        region: γ, of which what is free is trained.
        sparsity: the share of the space that γ was allowed.
        parent: the task that it stands on; empty: θ_pre.
    """

    region: Region
    sparsity: float
    parent: str = ""


@dataclass(frozen=True)
class Training:
    """The training of one task: what is trained, from the weights that the model holds when `begin` returns, and for how long.

    Attributes:
        task: the task.
        trained: what is trained of the backbone: it takes the gradients before each update and writes the values after it.
        readout: the readouts' parameters that are trained.
        steps: updates.
        options: how: rate, batches, schedule, precision and so on.
        phase: what the steps are called in progress and timings.
        answer: from inputs to logits in training, in place of the model: for prompts, for other readouts.
        loss: from logits and labels to the loss, in place of cross-entropy: for penalties.
        optimizer: from PyTorch's parameter groups (the backbone's, the readout's) to an optimiser, in place of the options'.
        schedule: from the number of updates done to the factor on the learning rate, in place of the options'.
        learns: the tasks that are learned by it; default: ``task`` alone.
        region: what `commit` records beside the values, where a region is trained.
        finish: called after the last update; `commit` gets the training that it returns, with what it leaves in the model.
    """

    task: EncodedTask
    trained: TrainedParameters
    readout: Sequence[nn.Parameter]
    steps: int
    options: TrainingOptions
    phase: Phase = "train"
    answer: Answer | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None
    schedule: Callable[[int], float] | None = None
    learns: tuple[EncodedTask, ...] = ()
    region: TaskRegion | None = None
    finish: Callable[[], Training] | None = None


def training_of(training: Training | None) -> Training:
    """Return what a strategy trains now."""
    assert training is not None, "only available between `begin` and `commit`"
    return training


@contextmanager
def undo_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` if an error, or an interrupt, passes through: what training left in the model must not stay there."""
    try:
        yield
    except BaseException:
        undo()
        raise


# -- Storage ---------------------------------------------------------------------------------------------


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

    def __init__(self, strategy: Any, extra_bytes: Callable[[], int] = lambda: 0) -> None:
        self._strategy, self._extra_bytes = strategy, extra_bytes

    def save(self, directory: Path) -> None:
        """Write the model, and the names of the tasks."""
        learned = json.dumps([task.name for task in self._strategy.learned])
        ModelState.of(self._strategy.model).save(directory / "checkpoint.safetensors", learned=learned)

    def load(self, directory: Path) -> None:
        """Put the saved model into the stream's."""
        strategy, path = self._strategy, directory / "checkpoint.safetensors"
        state, names = load_checkpoint(path)
        learned = tasks_named(strategy.stream, names, path)
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
    names, tasks = list(names), {task.name: task for task in stream.tasks}
    if missing := [name for name in names if name not in tasks]:
        raise RunError(
            f"{path} contains the task {brief(missing[0])}, which is not in this stream: {', '.join(tasks)}. Load it "
            "with the stream that it was trained on."
        )
    return [tasks[name] for name in names]
