"""The parts of a strategy: `Training`, which its `begin` returns, and `Storage`, which saves what it has learned."""

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

#: A function from inputs ``(B, …)`` and task labels ``(B,)`` to logits ``(B, n)`` in float32, such as the model itself.
Answer = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class TaskRegion:
    """The region of a task, for a strategy on a ledger: it is recorded beside the values.

    Attributes:
        region: γ; its free entries are trained.
        sparsity: the allowed size of γ, as a share of the space.
        parent: the task that it stands on; empty: θ_pre.
    """

    region: Region
    sparsity: float
    parent: str = ""


@dataclass(frozen=True)
class Training:
    """The training of one task: the trained parameters and the number of steps. It starts from the weights after `begin`.

    Attributes:
        task: the task.
        trained: the trained parameters of the backbone: gradients are collected before each update, values written after it.
        readout: the trained parameters of the readouts.
        steps: the number of updates.
        options: the learning rate, batches, schedule, precision and so on.
        phase: the name of the steps in progress and timings.
        answer: maps inputs to logits in training, in place of the model: for prompts, for other readouts.
        loss: maps logits and labels to the loss, in place of cross-entropy: for penalties.
        optimizer: maps PyTorch's parameter groups (the backbone's, the readout's) to an optimiser, in place of the options'.
        schedule: maps the number of updates done to the factor on the learning rate, in place of the options' schedule.
        learns: the tasks that are learned by it; default: ``task`` alone.
        region: if a region is trained, `commit` records it beside the values.
        finish: called after the last update; `commit` gets the training that it returns, and the model as it leaves it.
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
    """Return the current training of a strategy."""
    assert training is not None, "only available between `begin` and `commit`"
    return training


@contextmanager
def undo_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` if an error, or an interrupt, passes through: an unfinished training must not stay in the model."""
    try:
        yield
    except BaseException:
        undo()
        raise


# -- Storage ---------------------------------------------------------------------------------------------


class Storage(Protocol):
    """Saves, loads and measures what a strategy has learned; set as `ContinualStrategy.storage`."""

    def save(self, directory: Path) -> None:
        """Write everything that later predictions need."""

    def load(self, directory: Path) -> None:
        """Load the files of `save` into a new strategy, and call its `note_learned` for each task.

        Raises:
            ForgetfreeError: a file is missing or damaged, or belongs to another model or stream; nothing is changed.
        """

    def bytes_kept(self) -> int:
        """Return the bytes stored to predict for the tasks learned so far and to learn the next, in addition to θ_pre."""


class ModelStorage:
    """Stores the one model that answers all tasks: everything in it that training may change.

    Args:
        strategy: a strategy, for its model.
        extra_bytes: returns the bytes that are stored in addition to the model, such as a memory of rows.
    """

    def __init__(self, strategy: Any, extra_bytes: Callable[[], int] = lambda: 0) -> None:
        self._strategy, self._extra_bytes = strategy, extra_bytes

    def save(self, directory: Path) -> None:
        """Write the model, and the names of the tasks."""
        learned = json.dumps([task.name for task in self._strategy.learned])
        ModelState.of(self._strategy.model).save(directory / "checkpoint.safetensors", learned=learned)

    def load(self, directory: Path) -> None:
        """Load the saved weights into the stream's model."""
        strategy, path = self._strategy, directory / "checkpoint.safetensors"
        state, names = load_checkpoint(path)
        learned = tasks_named(strategy.stream, names, path)
        state.check_fits(strategy.model, names)
        state.load_(strategy.model)
        for task in learned:
            strategy.note_learned(task, tensors_of(strategy.model.readout_module(task.label)))

    def bytes_kept(self) -> int:
        """Count the model once a task is learned, and the extra bytes."""
        # A state of the model is as large as before training.
        return self._strategy.pre_trained.size_in_bytes + self._extra_bytes() if self._strategy.learned else 0


def tasks_named(stream: Stream, names: Iterable[str], path: Path) -> list[EncodedTask]:
    """Return the stream's tasks with these names, which a file lists as learned.

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
