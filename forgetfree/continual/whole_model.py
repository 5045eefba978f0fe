"""What a strategy keeps to answer later: by default the one model that answers all tasks, as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from forgetfree.continual.learner import Learner
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.core.tensors import tensors_of
from forgetfree.display import brief
from forgetfree.errors import RunError
from forgetfree.files import write_json
from forgetfree.json_file import check, read_json
from forgetfree.models.state import ModelState


class Kept(Protocol):
    """What a strategy keeps of the tasks that it has learned: set as `ContinualStrategy.kept`."""

    def save(self, directory: Path) -> None:
        """Write all that is needed to answer later."""

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, into a new strategy, and call its `note_learned` for each task.

        Raises:
            ForgetfreeError: a file is missing or damaged, or of another model or stream; nothing is changed.
        """

    def bytes_kept(self) -> int:
        """Return the bytes kept to answer for the tasks learned so far and to learn the next, beside θ_pre itself."""


class WholeModel:
    """The one model that answers all tasks: all that training may change of it.

    Args:
        strategy: whose model.
        beside: bytes that are kept beside the model, a memory of rows, say.
    """

    def __init__(self, strategy: Learner, beside: Callable[[], int] = lambda: 0) -> None:
        self._strategy, self._beside = strategy, beside

    def save(self, directory: Path) -> None:
        """Write the model, and the names of the tasks."""
        ModelState.of(self._strategy.model).save(directory / "checkpoint.safetensors")
        write_json(directory / "learned.json", [task.name for task in self._strategy.learned])

    def load(self, directory: Path) -> None:
        """Put the saved model into the stream's."""
        strategy, path = self._strategy, directory / "learned.json"
        names = read_json(path, RunError, "Restore it from a copy, or run the stream again.", _check_learned)
        learned = tasks_named(strategy.stream, names, path)
        state = ModelState.load(directory / "checkpoint.safetensors")
        state.check_fits(strategy.model, names)
        state.load_(strategy.model)
        for task in learned:
            strategy.note_learned(task, tensors_of(strategy.model.readout_module(task.label)))

    def bytes_kept(self) -> int:
        """Count the model once something is learned, and what stands beside it."""
        # All that a state of the model holds is as large as it was before training.
        return self._strategy.pre_trained.size_in_bytes + self._beside() if self._strategy.learned else 0


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


def _check_learned(names: Any) -> None:
    right = isinstance(names, list) and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    check("the content", names, right, "a list of different task names")
