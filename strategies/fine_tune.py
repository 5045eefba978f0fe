"""FT: a separate fine-tuned model per task. Nothing is shared, nothing forgotten: the reference row of table 4."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch import Tensor

from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.strategy_parts import Training, tasks_named, undo_on_error
from forgetfree.continual.task_inference import TaskwiseOptions
from forgetfree.display import brief
from forgetfree.errors import RunError
from forgetfree.files import write_json
from forgetfree.json_file import read_json
from forgetfree.models.state import ModelState, StateStore, check_keys
from forgetfree.training.encoded_task import EncodedTask


class FineTune(ContinualStrategy):
    """Fine-tune θ_pre on each task alone and answer for each task with its own model (paper, table 4, row "FT").

    Stores a whole model per task: memory O(T·d). Before a task is learned, θ_pre predicts for it.
    """

    Options = TaskwiseOptions
    forget_free = True
    resumable = True

    def setup(self) -> None:
        """Store a model per task."""
        self.storage = self.models = TaskModels(self)

    def begin(self, task: EncodedTask) -> Training:
        """Train everything from θ_pre; without steps if the store already has the fine-tuned model."""
        self.scope.enter_context(undo_on_error(lambda: self.pre_trained.load_(self.model)))
        known = self.scope.enter_context(self.models.making(task))
        if known:
            self.monitor.log_reused(task.name, task.full_steps(self.options))
        (known or self.pre_trained).load_(self.model)
        steps = 0 if known else task.full_steps(self.options)
        return self.everything(task, steps=steps, phase="fine_tune")

    def commit(self, task: EncodedTask, training: Training) -> None:
        """Store the model; the next task starts from θ_pre again."""
        self.models.keep(task, ModelState.of(self.model, [task.name]), is_new=training.steps > 0)
        self.pre_trained.load_(self.model)

    @contextmanager
    def answering(self, task: EncodedTask) -> Iterator[None]:
        """Answer with the task's own model."""
        at_rest = self.pre_trained if self.training is None else None
        with self.holding(self.models.of(task), at_rest):
            yield

    def changed_by(self, learned: EncodedTask) -> list[EncodedTask] | None:
        """Return the learned task alone, where the task is known: each is answered by its own model."""
        return [learned] if self.stream.scenario == "task" else None


class TaskModels:
    """The fine-tuned model of each task, in the strategy's store, which several strategies may share.

    Args:
        strategy: the strategy. If it has plugins, its store is not shared, because keys do not include their effect.
    """

    def __init__(self, strategy: FineTune) -> None:
        self._strategy = strategy
        self._keys: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._store = StateStore() if strategy.has_plugins else strategy.store
        self._on_disk = strategy.shares_store and not strategy.has_plugins

    def key(self, task: EncodedTask) -> str:
        """Return the key of the task's model; in a shared store, a key of everything that determines the model."""
        strategy = self._strategy
        return strategy.bench(task).key(strategy.options) if strategy.shares_store else task.name

    def making(self, task: EncodedTask) -> AbstractContextManager[ModelState | None]:
        """Return a context with the task's fine-tuned model from the store; else no other process trains it meanwhile."""
        return self._store.making(self.key(task))

    def keep(self, task: EncodedTask, state: ModelState, *, is_new: bool) -> None:
        """Store the task's model, which is new unless `making` returned it."""
        key = self._keys[task.name] = self.key(task)
        self._sizes[task.name] = state.size_in_bytes
        if is_new:
            self._store.put(key, state)

    def of(self, task: EncodedTask) -> ModelState:
        """Return the model that answers for the task: θ_pre if it is not learned."""
        if task.name not in self._keys:
            return self._strategy.pre_trained
        state = self._store.get(self._keys[task.name])
        if state is None:
            raise RunError(
                f"The fine-tuned model of task {task.name!r} is missing from the store, or damaged. Do not touch the "
                "files of a run while it is running; run it again."
            )
        return state

    def save(self, directory: Path) -> None:
        """Write the key of each task's model in the store; also the models, if the store is not shared."""
        if not self._on_disk:
            models = StateStore(directory)
            for task in self._strategy.learned:
                models.put(self._keys[task.name], self.of(task))
        write_json(directory / "fine-tuned.json", self._keys)

    def load(self, directory: Path) -> None:
        """Load the models from the store or the directory."""
        path, strategy = directory / "fine-tuned.json", self._strategy
        keys = read_json(path, RunError, "Restore it from a copy, or run the stream again.", check_keys)
        sizes, readouts = dict[str, int](), dict[str, dict[str, Tensor]]()
        tasks = tasks_named(strategy.stream, keys, path)
        for task in tasks:
            state = self._store.get(keys[task.name])
            if state is None and (state := StateStore(directory).get(keys[task.name])):
                self._store.put(keys[task.name], state)
            if state is None or task.name not in state.readouts:
                raise RunError(
                    f"The fine-tuned model of task {task.name!r}, which {path} calls {brief(keys[task.name])}, is "
                    "missing, damaged or belongs to another task. Restore it from a copy, or run the stream again."
                )
            state.check_fits(strategy.model, [task.name])
            sizes[task.name], readouts[task.name] = state.size_in_bytes, dict(state.readouts[task.name])
        self._keys, self._sizes = keys, sizes
        for task in tasks:
            strategy.note_learned(task, readouts[task.name])

    def bytes_kept(self) -> int:
        """Count a model per task."""
        return sum(self._sizes.values())
