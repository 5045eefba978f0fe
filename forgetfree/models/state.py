"""The weights of a model that training may change, as one object that can be loaded, saved and shared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgetfree.core.parameters import load_tensors_, persistent_buffers, tensors_of
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.display import brief
from forgetfree.errors import ModelError
from forgetfree.files import StrPath, locked, remove_unfinished
from forgetfree.json_file import check, parse_json
from forgetfree.tensor_file import StoredTasks, TaskFile, TaskTensors, grouped

_FILE = TaskFile(
    ModelError,
    "Restore it from a copy, or run the stream again.",
    "forgetfree.model",
    groups=("theta", "buffer", "readout"),
)


@dataclass(frozen=True, eq=False)
class ModelState:
    """All graftable entries, the readouts of some tasks, and the persistent buffers: copies, on the CPU.

    Attributes:
        theta: the graftable entries, flat ``(N,)``.
        readouts: task name to its readout's tensors.
        buffers: the backbone's persistent buffers.
    """

    theta: Tensor
    readouts: Mapping[str, Mapping[str, Tensor]]
    buffers: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: ReadoutModel, tasks: Iterable[str] | None = None) -> ModelState:
        """Return the current state of ``model``, with the readouts of ``tasks`` (default: all)."""
        names = model.task_names if tasks is None else list(tasks)
        if model.shared_readout:
            readouts = dict.fromkeys(names, tensors_of(model.readout_module(0)))
        else:
            readouts = {name: tensors_of(model.readout_module(model.task_label(name))) for name in names}
        return cls(
            model.space().flatten(model.backbone, "cpu"),
            readouts,
            {name: buffer.cpu().clone() for name, buffer in persistent_buffers(model.backbone).items()},
        )

    @torch.no_grad()
    def load_(self, model: ReadoutModel, tasks: Iterable[str] | None = None) -> None:
        """Load the state into ``model``, bit for bit, with the readouts of ``tasks`` (default: all it has).

        Raises:
            ModelError: the state is another model's, or lacks a readout; nothing is changed.
        """
        tasks = list(self.readouts if tasks is None else tasks)
        self.load_beside_theta_(model, tasks)
        model.space().load_(model.backbone, self.theta)

    @torch.no_grad()
    def load_beside_theta_(self, model: ReadoutModel, tasks: Iterable[str]) -> None:
        """Load only the readouts and the buffers, which are small; see `load_`."""
        tasks = list(tasks)
        self.check_fits(model, tasks)
        for name in tasks:
            load_tensors_(model.readout_module(model.task_label(name)), self.readouts[name])
        for name, buffer in persistent_buffers(model.backbone).items():
            buffer.copy_(self.buffers[name])

    def check_fits(self, model: ReadoutModel, tasks: Iterable[str]) -> None:
        """Raise ``ModelError`` unless the state fits ``model``: θ, buffers, and the readouts of ``tasks``."""
        expected: dict[str, tuple[int, ...]] = {"theta": (len(model.space()),)}
        got: dict[str, tuple[int, ...]] = {"theta": tuple(self.theta.shape)}
        buffers = persistent_buffers(model.backbone)
        expected |= _shapes("buffer", buffers)
        got |= _shapes("buffer", {name: tensor for name, tensor in self.buffers.items() if name in buffers})
        for task in tasks:
            readout = model.readout_module(model.task_label(task))
            expected |= _shapes(f"readout of {task}", readout.state_dict())
            got |= _shapes(f"readout of {task}", self.readouts.get(task, {}))
        if expected != got:
            name = next(name for name in {**expected, **got} if expected.get(name) != got.get(name))
            raise ModelError(
                f"The saved weights do not fit the model: expected {name!r} of shape {expected.get(name, 'none')}, got "
                f"{got.get(name, 'none')}. Load them into the model and the tasks that they were trained with."
            )

    @property
    def size_in_bytes(self) -> int:
        """The size of all tensors in bytes."""
        readouts = {id(named): named for named in self.readouts.values()}.values()  # a shared one counts once
        tensors = [self.theta, *self.buffers.values(), *(tensor for named in readouts for tensor in named.values())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def save(self, path: StrPath, **about: str) -> None:
        """Write the state, atomically, with metadata ``about`` it, such as its ``key`` in a store."""
        of_all = TaskTensors("", {"theta": self.theta} | grouped(buffer=self.buffers))
        by_task = [TaskTensors(task, grouped(readout=named)) for task, named in self.readouts.items()]
        _FILE.write_tasks(Path(path), [of_all, *by_task], about)

    @classmethod
    def load(cls, path: StrPath, key: str = "") -> ModelState:
        """Read a state that `save` wrote.

        Args:
            path: the file.
            key: its expected key in a store; default: no key is checked.

        Raises:
            ModelError: the file is damaged or missing, not sound, or kept under another key.
        """
        return _FILE.load(Path(path), lambda stored: _state_of(stored, key))


def load_checkpoint(path: Path) -> tuple[ModelState, list[str]]:
    """Return a strategy's one model, and the tasks that were learned until it was written.

    Raises:
        ModelError: the file is damaged or missing, or lacks one of the two.
    """

    def read(stored: StoredTasks) -> tuple[ModelState, list[str]]:
        learned = parse_json(stored.metadata.get("learned", "null"))
        right = isinstance(learned, list) and all(name in stored.tasks[1:] for name in learned)
        check("learned", learned, right, "a list of its tasks")
        return _state_of(stored, ""), list(learned)

    return _FILE.load(path, read)


def _state_of(stored: StoredTasks, key: str) -> ModelState:
    if key and (written := stored.metadata.get("key", "")) != key:
        raise ValueError(f"its key is {brief(written)}, expected {brief(key)}")
    check("tasks", stored.tasks[:1], stored.tasks[:1] == [""], "the model without a name, and the readouts of tasks")
    of_all, *by_task = stored
    theta = of_all.tensors.get("theta")
    if theta is None or theta.dim() != 1 or not theta.is_floating_point():
        raise ValueError(f"theta must be one vector, got {'none' if theta is None else (theta.dtype, *theta.shape)}")
    return ModelState(theta, {each.task: each.group("readout") for each in by_task}, of_all.group("buffer"))


def _shapes(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}, {name}": tuple(tensor.shape) for name, tensor in tensors.items()}


def check_keys(keys: Any) -> None:
    """Raise ``ValueError`` unless fine-tuned.json holds the name of a model for each task."""
    right = isinstance(keys, dict) and all(isinstance(key, str) and key for key in keys.values())
    check("the content", keys, right, "an object of task names with the names of their models")


class StateStore:
    """Model states by key, each made once; in memory, or in files that several runs may share.

    Args:
        directory: the directory of the files; ``None`` keeps states in memory.
    """

    def __init__(self, directory: StrPath | None = None) -> None:
        self._directory = None if directory is None else Path(directory)
        self._memory: dict[str, ModelState] = {}

    def get(self, key: str) -> ModelState | None:
        """Return the state under ``key``, or ``None``; a file that is damaged or has another key counts as none."""
        if self._directory is None:
            return self._memory.get(key)
        path = self._directory / f"{key}.safetensors"
        try:
            return ModelState.load(path, key) if path.is_file() else None
        except (ModelError, OSError, ValueError):  # the last two: the key is not a valid file name
            return None

    def put(self, key: str, state: ModelState) -> None:
        """Keep ``state`` under ``key``, which depends on everything that determines the state."""
        if self._directory is None:
            self._memory[key] = state
        else:
            state.save(self._directory / f"{key}.safetensors", key=key)

    @contextmanager
    def making(self, key: str) -> Iterator[ModelState | None]:
        """Yield the state under ``key``; if there is none, no other process can make it meanwhile."""
        state = self.get(key)
        if state is not None or self._directory is None:
            yield state
            return
        with locked(self._directory / f".{key}.lock"):
            remove_unfinished(self._directory, key)
            yield self.get(key)  # another process may have made it before
