"""FT: a separate fine-tuned model per task. Nothing is shared, nothing forgotten: the reference row of table 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from forgetfree.continual.strategy import ContinualStrategy, TaskwiseOptions
from forgetfree.continual.streams import EncodedTask
from forgetfree.display import brief
from forgetfree.errors import RunError
from forgetfree.files import StrPath, write_json
from forgetfree.json_file import check, read_json
from forgetfree.learning.monitor import Phase
from forgetfree.learning.training import TrainingOptions
from forgetfree.models.state import ModelState, StateStore


class FineTune(ContinualStrategy):
    """Fine-tune θ_pre on each task alone and answer for each task with its own model (paper, table 4, row "FT").

    Keeps a whole model per task: memory O(T·d). A task that is not learned yet is answered by θ_pre.
    """

    Options: ClassVar[type[TrainingOptions]] = TaskwiseOptions
    forget_free: ClassVar[bool] = True
    taskwise: ClassVar[bool] = True
    training_phase: ClassVar[Phase] = "fine_tune"

    def setup(self) -> None:
        """No task is learned yet."""
        self._keys: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._own = StateStore() if self.has_plugins else self.store

    def prepare(self, task: EncodedTask) -> None:
        """Back to θ_pre; the fine-tuned model itself, where another strategy has made it already."""
        self._known = self._own.get(self.fine_tuned_key(task))
        (self._known or self.pristine).load_(self.task_model)

    def steps(self, task: EncodedTask) -> int:
        """None where the model is known."""
        return 0 if self._known else self.full_steps(task)

    def commit(self, task: EncodedTask) -> None:
        """Keep the model; the next task starts from θ_pre again."""
        self._keys[task.name] = self.fine_tuned_key(task)
        state = self._known or ModelState.of(self.task_model, [task.name])
        self._sizes[task.name] = state.size_in_bytes
        if self._known is None:
            self._own.put(self._keys[task.name], state)
        self.pristine.load_(self.task_model)

    def suspend(self) -> None:
        """θ_pre."""
        self.pristine.load_(self.task_model)

    def enter_evaluation(self, task: EncodedTask) -> None:
        """The task's own model."""
        if task.name in self._keys:
            self._state(task).load_(self.task_model)

    def leave_evaluation(self, task: EncodedTask) -> None:
        """θ_pre."""
        self.pristine.load_(self.task_model)

    def _state(self, task: EncodedTask) -> ModelState:
        return self._state_of(task.name)

    def _state_of(self, name: str) -> ModelState:
        state = self._own.get(self._keys[name])
        if state is None:
            raise RunError(
                f"The fine-tuned model of task {name!r} is gone from the store, or damaged. Leave the files of a "
                "run alone while it lasts; run again."
            )
        return state

    def stale(self, learned: EncodedTask) -> list[EncodedTask]:
        """Each task's result is that of its own model, from the row in which it was learned; if the task is known."""
        return [learned] if self.stream.scenario == "task" else super().stale(learned)

    def save(self, directory: StrPath) -> None:
        """Under which key each task's model stands in the store; the models too, where no store is shared."""
        if not self._keeps_files():
            models = StateStore(directory)
            for name, key in self._keys.items():
                if models.get(key) is None:
                    models.put(key, self._state_of(name))
        write_json(Path(directory) / "fine-tuned.json", self._keys)

    def _keeps_files(self) -> bool:
        return self.shares_store and self._own is self.store

    def load(self, directory: StrPath) -> None:
        """The models, from the store or the directory."""
        path = Path(directory) / "fine-tuned.json"
        keys = read_json(path, RunError, "Restore it from a copy, or run the stream again.", _check_keys)
        sizes, readouts = dict[str, int](), dict[str, dict[str, Tensor]]()
        for task in self.tasks_named(keys, path):
            state = self._own.get(keys[task.name])
            if state is None and (state := StateStore(directory).get(keys[task.name])):
                self._own.put(keys[task.name], state)
            if state is None or task.name not in state.readouts:
                raise RunError(
                    f"The fine-tuned model of task {task.name!r}, which {path} calls {brief(keys[task.name])}, is missing, "
                    "damaged or another task's. Restore it from a copy, or run the stream again."
                )
            state.check_fits(self.task_model, [task.name])
            sizes[task.name], readouts[task.name] = state.size_in_bytes, dict(state.readouts[task.name])
        self._keys, self._sizes = keys, sizes
        for task in self.tasks_named(keys, path):
            self.note_learned(task, readouts[task.name])

    def bytes_kept(self) -> int:
        """A model per task."""
        return sum(self._sizes[task.name] for task in self.learned)


def _check_keys(keys: Any) -> None:
    check("the content", keys, isinstance(keys, dict), "an object of task names with the names of their models")
    for task, key in keys.items():
        check(task, key, isinstance(key, str) and bool(key), "the name of a model")
