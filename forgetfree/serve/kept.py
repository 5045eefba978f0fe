"""What a strategy kept of a stream, as what its model answers with, task by task. Needs no Avalanche.

A strategy's folder in a run holds one of these files, and each has a class that answers from it:

    ledger.safetensors        `KeptLedger`: θ_pre with the records of a task
    checkpoint.safetensors    `KeptModel`: one model for all tasks
    fine-tuned.json           `KeptModels`: a whole model a task
    adapters.safetensors      `forgetfree.strategies.lora.kept`: θ_pre with the adapters of a task
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from forgetfree.core.readout_model import Precision
from forgetfree.core.tensors import persistent_buffers
from forgetfree.display import brief
from forgetfree.errors import LedgerError, ModelError, RunError
from forgetfree.json_file import check, read_json
from forgetfree.ledger import Ledger, LedgerSwitch, check_binding, check_definitions
from forgetfree.ledger.records import rows_of
from forgetfree.models.loading import LoadedModel, config_of
from forgetfree.models.state import ModelState, StateStore
from forgetfree.registry import KEPT_FILES
from forgetfree.results.config_file import check_whole
from forgetfree.results.unit_record import check_own
from forgetfree.tasks import TaskDefinition

LEDGER = "ledger.safetensors"
_REMEDY = "Restore it from a copy, or run the stream again."


@dataclass(frozen=True)
class Source:
    """A file that a strategy kept, and what its run says of it.

    Attributes:
        file: the file.
        tasks: the definitions of the run's tasks, in the order of the stream.
        shared_labels: whether all tasks' labels have one readout (``scenario=class``).
        precision: of forward passes.
        model: what the run's config.json says of the base model.
        stores: directories in which models may lie that the file names.
        task_inference: how the run found out the task of a row; ``last``: it did not.
        lda_layer: the layer that it read for that, see `TaskFeatures`.
    """

    file: Path
    tasks: Sequence[TaskDefinition] = ()
    shared_labels: bool = False
    precision: Precision = "fp32"
    model: Mapping[str, Any] | None = None
    stores: Sequence[Path] = ()
    task_inference: str = "last"
    lda_layer: int | None = None

    def rows(self, task: str, readout: Mapping[str, Tensor], classes: Sequence[int] = ()) -> dict[str, Tensor]:
        """Return the rows of a readout that are a task's own labels.

        Args:
            task: the task.
            readout: its tensors; they may have rows for all tasks' labels.
            classes: the numbers of the task's labels, if they are known; default: by the order of the stream.
        """
        if not classes and self.shared_labels:
            sizes = {each.name: len(each.labels) for each in self.tasks}
            first = sum(list(sizes.values())[: list(sizes).index(task)])
            classes = range(first, first + sizes[task])
        return rows_of(readout, classes)

    def check_model(self, loaded: LoadedModel) -> None:
        """Raise ``ModelError`` unless ``loaded`` is the run's base model, by weights and configuration."""
        described = self.model or {}
        expected, got = str(described.get("fingerprint", "")), loaded.fingerprint
        if expected != got:
            raise ModelError(
                f"{self.file} belongs to other weights: expected fingerprint {expected[:12] or 'none'}, the model's is "
                f"{got[:12]}. Load the very weights the stream was trained from."
            )
        if "config" in described and described["config"] != config_of(loaded.model.backbone):
            raise ModelError(
                f"{self.file} belongs to a model with another configuration. Put back the config.json that the model had when "
                "the stream was trained."
            )


class Kept(Protocol):
    """What answers for the tasks of a stream, beside a base model, which is changed in place.

    Attributes:
        precision: of forward passes.
    """

    precision: Precision

    @property
    def definitions(self) -> Mapping[str, TaskDefinition]:
        """The definitions of the learned tasks, in order."""

    def readout(self, task: str) -> Mapping[str, Tensor]:
        """Return the readout's tensors, a row a label of the task; none for label words."""

    def answering(self, task: str) -> AbstractContextManager[None]:
        """Return a context in which the model answers for a task, bit for bit as in the run."""

    def merged(self, task: str) -> AbstractContextManager[None]:
        """Return a context in which the model's own tensors are the task's, to be written as an ordinary model."""


class KeptLedger:
    """Answers with the records of a ledger.

    Args:
        loaded: the base model.
        ledger: the records.
        source: where the ledger is from, if it is from a run.

    Raises:
        LedgerError: the ledger belongs to another model or run; the message says what differs.
    """

    def __init__(self, loaded: LoadedModel, ledger: Ledger, source: Source) -> None:
        self.ledger, self._source = ledger, source
        self.precision = ledger.binding.precision if ledger.binding else source.precision
        self.switch = LedgerSwitch(ledger, loaded.model.backbone, fingerprint=loaded.fingerprint)
        check_binding(ledger, loaded.binding(self.precision), "The ledger")
        given = {task.name: task for task in source.tasks}
        check_definitions(ledger, given, "the run's config.json")
        self.definitions: dict[str, TaskDefinition] = {}
        for record in ledger.records:
            definition = record.definition or given.get(record.task)
            if definition is None:
                raise LedgerError(
                    f"The ledger holds task {record.task!r}, which the run's config.json does not define. "
                    "The two belong to different runs."
                )
            self.definitions[record.task] = definition

    def readout(self, task: str) -> Mapping[str, Tensor]:
        """Return the record's readout."""
        record = self.ledger.records[self.ledger.position(task)]
        return self._source.rows(task, record.readout, record.classes)

    @contextmanager
    def answering(self, task: str) -> Iterator[None]:
        """Switch the model to the task; it holds θ_pre again afterwards."""
        with self.switch.task(task):
            yield

    @contextmanager
    def merged(self, task: str) -> Iterator[None]:
        """Switch the model to the task, with a storage of its own for each tensor."""
        with self.switch.task(task):
            self.switch.release()
            yield


class KeptModel:
    """Answers for all tasks with one model, as the last task left it.

    Raises:
        ModelError: it is another model's.
    """

    def __init__(self, loaded: LoadedModel, state: ModelState, learned: Sequence[str], source: Source) -> None:
        source.check_model(loaded)
        state.check_fits(loaded.model, [])
        load_state_(loaded, state)
        self.precision, self._readouts, self._source = source.precision, state.readouts, source
        self.definitions = defined(learned, source)

    @classmethod
    def read(cls, source: Source, loaded: LoadedModel) -> KeptModel:
        """Return what the file holds."""
        path = source.file.with_name("learned.json")
        learned = read_json(path, RunError, _REMEDY, _check_names)
        check_own(path)
        return cls(loaded, ModelState.load(source.file), learned, source)

    def readout(self, task: str) -> Mapping[str, Tensor]:
        """Return the task's readout."""
        return self._source.rows(task, self._readouts.get(task, {}))

    def answering(self, task: str) -> AbstractContextManager[None]:
        """Leave the model as it is."""
        return nullcontext()

    merged = answering


class KeptModels:
    """Answers for each task with a model of its own; those that were asked for stay in memory.

    Raises:
        ModelError: they are another model's.
        RunError: one is missing.
    """

    def __init__(self, loaded: LoadedModel, keys: Mapping[str, str], source: Source) -> None:
        source.check_model(loaded)
        self._loaded, self._keys, self._source = loaded, keys, source
        self._states: dict[str, ModelState] = {}
        self._held = ""
        self.precision = source.precision
        self.definitions = defined(list(keys), source)

    @classmethod
    def read(cls, source: Source, loaded: LoadedModel) -> KeptModels:
        """Return what the file holds."""
        return cls(loaded, read_json(source.file, RunError, _REMEDY, _check_keys), source)

    def readout(self, task: str) -> Mapping[str, Tensor]:
        """Return the readout of the task's model."""
        return self._source.rows(task, self._state(task).readouts.get(task, {}))

    @contextmanager
    def answering(self, task: str) -> Iterator[None]:
        """Put the task's model into place, and leave it there for the next question."""
        if self._held != task:
            self._held = ""
            load_state_(self._loaded, self._state(task))
            self._held = task
        yield

    merged = answering

    def _state(self, task: str) -> ModelState:
        if task not in self._states:
            key = self._keys[task]
            place, found = next(
                ((each, state) for each in self._source.stores if (state := StateStore(each).get(key))), (None, None)
            )
            if place is None or found is None:
                places = " or ".join(map(str, self._source.stores))
                raise RunError(
                    f"The model of task {task!r} is missing or damaged, or another one has its name: {self._source.file} calls "
                    f"it {brief(key)}, and {places} holds no sound {brief(f'{key}.safetensors')}. {_REMEDY}"
                )
            check_own(place / f"{key}.safetensors", unit=self._source.file.absolute().parent)
            found.check_fits(self._loaded.model, [])
            self._states[task] = found
        return self._states[task]


@torch.no_grad()
def load_state_(loaded: LoadedModel, state: ModelState) -> None:
    """Put the weights and buffers of a state into a model, without its readouts."""
    loaded.model.space().load_(loaded.model.backbone, state.theta)
    for name, buffer in persistent_buffers(loaded.model.backbone).items():
        buffer.copy_(state.buffers[name])


def defined(learned: Sequence[str], source: Source) -> dict[str, TaskDefinition]:
    """Return the definitions of the learned tasks.

    Raises:
        RunError: the run does not define one.
    """
    given = {task.name: task for task in source.tasks}
    if unknown := [name for name in learned if name not in given]:
        raise RunError(
            f"{source.file} says that task {brief(unknown[0])} was learned, which the run's config.json does not define. The "
            "two belong to different runs."
        )
    return {name: given[name] for name in learned}


def find_kept(run: Path, seed: int | None = None, strategy: str | None = None) -> Path:
    """Return the file that a strategy kept, as `kept_file` does, after comparing it with what its unit.json says of it.

    Raises:
        RunError: the run holds none, or it is that of another seed or run.
    """
    file = kept_file(run, seed, strategy)
    check_own(file)
    return file


def kept_file(run: Path, seed: int | None = None, strategy: str | None = None) -> Path:
    """Return the file that a strategy kept: by default grafting-continual's, else a ledger, else the first.

    Args:
        run: the run's directory.
        seed: the seed; default: the first.
        strategy: the strategy.

    Raises:
        RunError: the run holds none.
    """
    check_whole(run)
    held = [
        [folder / name for name in (LEDGER, *KEPT_FILES) if (folder / name).is_file()]
        for folder in run.glob("*/seed-*")
    ]
    found = sorted((files[0] for files in held if files), key=_preference)
    fitting = [
        file
        for file in found
        if strategy in (None, file.parts[-3]) and (seed is None or file.parts[-2] == f"seed-{seed}")
    ]
    if fitting:
        return fitting[0]
    of_strategy = "" if strategy is None else f" of {strategy}"
    of_seed = "" if seed is None else f" of seed {seed}"
    names = ", ".join(sorted(f"{file.parts[-3]} ({file.parts[-2]})" for file in found))
    remedy = "Give one of these by --strategy and --seed."
    if not found and not all((folder / "unit.json").is_file() for folder in run.glob("*/seed-*")):
        config, out = shlex.quote(str(run / "config.json")), shlex.quote(str(run))
        remedy = f"It was cut short: forgetfree run --config {config} --out {out} --resume goes on."
    elif not found:
        remedy = "Run one of forgetfree's own strategies, or one of yours that keeps its model or a ledger."
    raise RunError(
        f"{run} holds nothing{of_strategy}{of_seed} to answer from. It holds what these kept: {names or 'none'}. {remedy}"
    )


def _preference(file: Path) -> tuple[Any, ...]:
    strategy, seed = file.parts[-3], file.parts[-2].removeprefix("seed-")
    number = int(seed) if seed.isdecimal() else 0
    return strategy != "grafting-continual", file.name != LEDGER, strategy, number, seed


def _check_names(names: Any) -> None:
    right = isinstance(names, list) and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    check("the content", names, right, "a list of different task names")


def _check_keys(keys: Any) -> None:
    right = isinstance(keys, dict) and all(isinstance(key, str) and key for key in keys.values())
    check("the content", keys, right, "an object of task names with the names of their models")
