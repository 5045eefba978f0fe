"""The checkpoint of a unit, in ``.checkpoint`` in its folder, which goes when the unit has ended.

A phase of training has a file of its own, until the task is learned, and is known by the digest of all that it starts from. So
none goes on from another's state, and one that ended is passed over: its last state is kept, too.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from forgetfree.checkpoint import Checkpoint, Resumable
from forgetfree.errors import RunError
from forgetfree.files import write_json
from forgetfree.json_file import read_json
from forgetfree.tensor_file import TensorFile, checksum

#: The folder.
CHECKPOINT = ".checkpoint"
_CIRCUMSTANCES = "circumstances.json"
_FILE = TensorFile(RunError, "", "forgetfree.checkpoint")
#: Seconds between two writes of a phase, at least.
INTERVAL = 60.0
#: The share of the time that writing may take.
SHARE = 0.02
#: Bytes a second that a file is taken to be written at, before one was; and the seconds that any takes.
_SPEED, _LEAST = 2e8, 0.02


class FileCheckpoint(Checkpoint):
    """Keeps where each phase of a unit stands.

    Args:
        directory: of the unit.
        circumstances: what the bits depend on beside the unit itself.

    Attributes:
        directory: of the checkpoints.
        goes_on: whether there were checkpoints of the same circumstances.
    """

    def __init__(self, directory: Path, circumstances: Mapping[str, Any]) -> None:
        self.directory: Path = directory / CHECKPOINT
        self.goes_on = _read(self.directory) == json.loads(json.dumps(circumstances))
        self._circumstances = circumstances
        self._path: Path | None = None  # of the phase that is under way
        self._begun, self._begin = set[Path](), 0.0  # those begun here, and when that was
        self._written, self._seconds = time.monotonic(), 0.0

    def start(self) -> None:
        """Make the folder; an empty one, unless the unit goes on."""
        if not self.goes_on:
            shutil.rmtree(self.directory, ignore_errors=True)
            write_json(self.directory / _CIRCUMSTANCES, self._circumstances)

    def begin(self, steps: int, state: Resumable, *about: Any) -> int:
        """Bring the phase to where it was kept."""
        try:  # without the generators: what they are started from stands in ``about``
            text, tensors = pack([steps, state.state_dict() | {"generators": None}, about])
        except TypeError:  # an optimiser with a state of another kind: nothing is kept
            self._path = None
            return 0
        self._path = self.directory / f"{checksum(tensors, {'state': text})[:24]}.safetensors"
        self._seconds = max(_LEAST, sum(tensor.nbytes for tensor in tensors.values()) / _SPEED)
        step, self._begin = 0, self.clock()
        try:
            header, tensors = _FILE.read(self._path)
            done, kept, seconds = unpack(header["state"], tensors)
        except (RunError, ValueError):  # none, or damaged: the phase starts again
            pass
        else:
            step = int(done)
            state.load_state_dict(kept)
            self.earlier += 0.0 if self._path in self._begun else seconds
        self._begun.add(self._path)
        return step

    def after(self, step: int, steps: int, state: Resumable) -> None:
        """Write the state, if a minute has passed or the phase is done, and writing takes at most its share of the time."""
        if self._path is None:
            return
        since, least = time.monotonic() - self._written, INTERVAL if step < steps else 0.0
        if since >= max(least, self._seconds / SHARE):
            begin = time.monotonic()
            text, tensors = pack([step, state.state_dict(), self.clock() - self._begin])
            _FILE.write(self._path, tensors, {"state": text})
            self._written = time.monotonic()
            self._seconds = max(_LEAST, self._written - begin)

    def forget(self) -> None:
        """Remove the states of all phases."""
        for path in self.directory.glob("*.safetensors"):
            path.unlink()

    def end(self) -> None:
        """Remove the folder: the unit has ended."""
        remove_checkpoint(self.directory.parent)


def remove_checkpoint(directory: Path) -> None:
    """Remove a unit's checkpoints from its folder."""
    shutil.rmtree(directory / CHECKPOINT, ignore_errors=True)


def _read(directory: Path) -> Any:
    try:
        return read_json(directory / _CIRCUMSTANCES, RunError, "")
    except RunError:
        return None


# -- A state as tensors and one text ---------------------------------------------------------------------


def pack(state: Any) -> tuple[str, dict[str, Tensor]]:
    """Return a state as JSON, in which tensors stand as their numbers, and those tensors.

    Raises:
        TypeError: it holds something else than tensors, numbers, texts and ``None`` in dictionaries, lists and tuples.
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = str(len(tensors))
            tensors[name] = value.detach().cpu()
            return {"tensor": name}
        if isinstance(value, Mapping):
            return {"dict": [[plain(key), plain(each)] for key, each in value.items()]}
        if isinstance(value, tuple):
            return {"tuple": [plain(each) for each in value]}
        return [plain(each) for each in value] if isinstance(value, list) else value

    return json.dumps(plain(state)), tensors


def unpack(text: str, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `pack` was given."""

    def rich(value: Any) -> Any:
        if isinstance(value, list):
            return [rich(each) for each in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            return tensors[content]
        return tuple(map(rich, content)) if kind == "tuple" else {rich(key): rich(each) for key, each in content}

    return rich(json.loads(text))
