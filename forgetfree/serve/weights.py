"""The weights that answer for each task of a stream, from a strategy's saved file. Does not need Avalanche.

A strategy's folder in a run has one of these files, and each has a class that answers from it:

    ledger.safetensors        `LedgerWeights`: θ_pre with the records of a task
    checkpoint.safetensors    `ModelWeights`: one model for all tasks
    fine-tuned.json           `ModelWeights`: a model per task, by its name in a store
    adapters.safetensors      `forgetfree.strategies.adapter_file`: θ_pre with the adapters of a task
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from forgetfree.core.parameters import persistent_buffers
from forgetfree.display import brief
from forgetfree.errors import LedgerError, ModelError, RunError
from forgetfree.json_file import read_json
from forgetfree.ledger.binding import Binding
from forgetfree.ledger.ledger import Ledger, rows_of
from forgetfree.ledger.switch import LedgerSwitch, check_binding
from forgetfree.models.loading import LoadedModel, missing_definition
from forgetfree.models.state import ModelState, StateStore, check_keys, load_checkpoint
from forgetfree.results.run_folder import check_own
from forgetfree.serve.source import Source
from forgetfree.tasks import TaskDefinition

_REMEDY = "Restore it from a copy, or run the stream again."


class TaskWeights(ABC):
    """The weights that answer for the tasks of a stream, beside a base model, which is changed in place.

    Attributes:
        binding: the settings of the loaded model that answers depend on, in addition to the weights.
        definitions: the definitions of the learned tasks, in order.
    """

    binding: Binding
    definitions: Mapping[str, TaskDefinition]

    @abstractmethod
    def readout(self, task: str) -> Mapping[str, Tensor]:
        """Return the readout's tensors, with a row per label of the task; none for label words."""

    @abstractmethod
    def answering(self, task: str) -> AbstractContextManager[None]:
        """Return a context in which the model answers for a task, bit for bit as in the run."""

    def merged(self, task: str) -> AbstractContextManager[None]:
        """Return a context in which the model's own tensors have the task's values, to be written as an ordinary model."""
        return self.answering(task)


class RunWeights(TaskWeights):
    """Weights whose tasks are defined in their run. A subclass takes only the source and the base model as arguments.

    Args:
        source: the file, and the run's settings for it.
        loaded: the base model.
        learned: the tasks in the file, in order.

    Raises:
        RunError: the run does not define a task.
    """

    def __init__(self, source: Source, loaded: LoadedModel, learned: Iterable[str]) -> None:
        known = {task.name: task for task in source.tasks}
        if unknown := [name for name in learned if name not in known]:
            raise RunError(
                f"{source.file} says that task {brief(unknown[0])} was learned, which its unit.json does not define. The "
                "two belong to different runs."
            )
        self.source, self.binding = source, loaded.binding()
        if source.binding and (differ := source.binding.differences(self.binding)):
            raise RunError(
                f"{source.file} would not answer as it did: {'; '.join(differ)}. Use the model's own config.json and "
                "tokenizer, and the options that the stream was trained with."
            )
        self.definitions = {name: known[name] for name in learned}

    def own_rows(self, task: str, readout: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of a readout for a task's own labels; if all tasks share it, they are in the order of the stream."""
        if not self.source.shared_labels:
            return dict(readout)
        sizes = {each.name: len(each.labels) for each in self.source.tasks}
        first = sum(list(sizes.values())[: list(sizes).index(task)])
        return rows_of(readout, range(first, first + sizes[task]))


class LedgerWeights(TaskWeights):
    """Answers with those records of a ledger that have the definition of their task.

    Args:
        loaded: the base model.
        ledger: the ledger.

    Raises:
        LedgerError: the ledger belongs to another model, or has no definition of any task; the message says which.
    """

    def __init__(self, loaded: LoadedModel, ledger: Ledger) -> None:
        self.ledger = ledger
        self.definitions = {each.task: each.definition for each in ledger.records if each.definition is not None}
        if ledger.tasks and not self.definitions:
            raise LedgerError(missing_definition(ledger.tasks[0]))
        self.binding = loaded.binding()
        self.switch = LedgerSwitch(ledger, loaded.model.backbone, fingerprint=loaded.fingerprint)
        check_binding(ledger, self.binding, "The ledger")

    def readout(self, task: str) -> Mapping[str, Tensor]:
        """Return the record's readout."""
        return self.ledger.records[self.ledger.position(task)].own_readout

    @contextmanager
    def answering(self, task: str) -> Iterator[None]:
        """Switch the model to the task; it holds θ_pre again afterwards."""
        with self.switch.task(task):
            yield


class ModelWeights(RunWeights):
    """Answers for each task with a whole model: the final model for all tasks, or each task's own.

    Models stay in memory once they are used.

    Raises:
        ModelError: they belong to another base model.
        RunError: one is missing.
    """

    def __init__(self, source: Source, loaded: LoadedModel) -> None:
        expected, got = source.fingerprint, loaded.fingerprint
        if expected != got:
            raise ModelError(
                f"{source.file} belongs to other weights: expected fingerprint {expected[:12] or 'none'}, the model's is "
                f"{got[:12]}. Load the very weights the stream was trained from."
            )
        self._loaded, self._states = loaded, dict[str, ModelState]()
        #: The names of the tasks' models in the store; empty for the one model of all tasks.
        self._keys: Mapping[str, str]
        if source.file.suffix == ".json":
            self._keys = read_json(source.file, RunError, _REMEDY, check_keys)
        else:
            state, learned = load_checkpoint(source.file)
            self._keys, self._states[""] = dict.fromkeys(learned, ""), state
            state.check_fits(loaded.model, [])
        #: The name of the model that is in place, if there is one.
        self._present: str | None = None
        super().__init__(source, loaded, self._keys)

    def readout(self, task: str) -> Mapping[str, Tensor]:
        """Return the readout of the task's model."""
        return self.own_rows(task, self._state(task).readouts.get(task, {}))

    @contextmanager
    def answering(self, task: str) -> Iterator[None]:
        """Load the task's model, and keep it in place for the next call."""
        if self._present != self._keys[task]:
            self._present = None
            model, state = self._loaded.model, self._state(task)
            model.space().load_(model.backbone, state.theta)
            for name, buffer in persistent_buffers(model.backbone).items():
                buffer.copy_(state.buffers[name])
            self._present = self._keys[task]
        yield

    def _state(self, task: str) -> ModelState:
        key, stores = self._keys[task], self.source.stores
        if key not in self._states:
            sound = ((store, state) for store in stores if (state := StateStore(store).get(key)))
            store, state = next(sound, (None, None))
            if store is None or state is None:
                places = " or ".join(map(str, stores))
                raise RunError(
                    f"The model of task {task!r} is missing or damaged, or another one has its name: {self.source.file} calls "
                    f"it {brief(key)}, and {places} holds no sound {brief(f'{key}.safetensors')}. {_REMEDY}"
                )
            check_own(store / f"{key}.safetensors", unit=self.source.file.absolute().parent)
            state.check_fits(self._loaded.model, [])
            self._states[key] = state
        return self._states[key]
