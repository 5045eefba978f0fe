"""What lies in the folder of a unit beside its scores, for figures: answers and losses. What is not there is not shown."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forgetfree.display import brief
from forgetfree.errors import MetricError, ReportError, first_line
from forgetfree.files import size_of
from forgetfree.json_file import check, parse_json, read_bounded
from forgetfree.results.answers import LabelAnswers
from forgetfree.results.records import Run
from forgetfree.results.unit_record import check_own

if TYPE_CHECKING:
    import numpy.typing as npt

Json = dict[str, Any]
#: How numpy and torch call the types of numbers in a file of answers.
_TYPES = {"F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64"}
_REMEDY = "Restore it from a copy, or go on with --resume, which makes it again."
#: The losses of a unit.
HISTORY = "history.jsonl"
#: How long each task took to learn.
SECONDS_PER_TASK = "seconds-per-task.json"


@dataclass(frozen=True)
class UnitFiles:
    """What of a unit is shown beside its scores.

    Attributes:
        answers: the last ones on every task whose answers are probabilities; none where the file is missing or not sound.
        losses: the logged steps (``task``, ``phase``, ``step``, ``loss``); none where they are damaged.
        faults: by what is left out, why; nothing of what is not there.
    """

    answers: Mapping[str, LabelAnswers]
    losses: Sequence[Json]
    faults: Mapping[str, str]


def read_unit_files(run: Run, tasks: Sequence[str]) -> UnitFiles:
    """Read what lies in the folder of a run's unit; what is not sound is left out."""
    answers, faults = dict[str, LabelAnswers](), dict[str, str]()
    try:
        answers = _answers(run, tasks)
    except ReportError as error:
        faults["Answers"] = str(error)
    for what, name in (("Losses", HISTORY), ("Seconds per task", SECONDS_PER_TASK)):
        try:
            if (path := run.folder / name).exists():
                check_own(path, ReportError)
        except ReportError as error:
            faults[what] = str(error)
    return UnitFiles(answers, [] if "Losses" in faults else _losses(run.folder / HISTORY), faults)


def _answers(run: Run, tasks: Sequence[str]) -> dict[str, LabelAnswers]:
    """Return the last answers on every task whose answers are probabilities; none where the file is missing.

    Raises:
        ReportError: it is not sound.
    """
    from safetensors import SafetensorError

    path = run.folder / "predictions.safetensors"
    if not path.exists():
        return {}
    check_own(path, ReportError)
    try:
        held = _arrays(path)
        found = {}
        for task, expected in zip(tasks, run.ece[-1], strict=True):
            if expected is None:  # its answers are no probabilities of labels, and no figure shows them
                continue
            found[task] = LabelAnswers(held[f"{task}/logits"], held[f"{task}/labels"])
            right = math.isclose(ece := found[task].ece, expected, abs_tol=1e-6)
            check(f"the ECE of {task!r}", ece, right, f"{expected}, as in the results")
    except KeyError as error:
        raise ReportError(f"{path} lacks the tensor {error}. {_REMEDY}") from error
    except (OSError, ValueError, IndexError, SafetensorError, MetricError) as error:
        raise ReportError(f"{path} cannot be read: {first_line(error).rstrip('.')}. {_REMEDY}") from error
    return found


def _losses(path: Path) -> list[Json]:
    try:
        lines = read_bounded(path).splitlines()
        steps = [parse_json(line) for line in lines]
        named = all(isinstance(each["task"], str) and isinstance(each["phase"], str) for each in steps)
        sound = named and all(math.isfinite(each["loss"]) and each["step"] >= 0 for each in steps)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []
    return steps if sound else []


def _arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read what `forgetfree.tensor_file.TensorFile` wrote, without torch; raise ``ValueError`` where it is another file."""
    from safetensors import deserialize

    size_of(path)
    data = path.read_bytes()
    tensors: dict[str, Any] = dict(deserialize(data))  # type: ignore[no-untyped-call]
    header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")].decode()).get("__metadata__") or {}
    digest = hashlib.sha256()
    for key, value in sorted(header.items()):
        if key != "checksum":
            digest.update(f"{key}={value}\n".encode())
    for name, tensor in sorted(tensors.items()):
        dtype = tensor["dtype"]
        check(f"the type of {brief(name)}", dtype, dtype in _TYPES, f"one of {', '.join(_TYPES)}")
        digest.update(f"{name} torch.{_TYPES[dtype]} {tuple(tensor['shape'])}\n".encode())
        digest.update(tensor["data"])
    if header.get("checksum") != digest.hexdigest():
        raise ValueError("its contents do not match its checksum")
    return {
        name: np.frombuffer(tensor["data"], _TYPES[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in tensors.items()
    }


def made_of(run: Run) -> Json:
    """Return what a unit was computed with, under ``made``; nothing where its unit.json is missing or damaged."""
    if run.made:  # it was read from a file that has it
        return {}
    made = _made(run.folder / "unit.json")
    return {"made": made} if made else {}


def made_of_units(directory: Path) -> Json:
    """Return what the finished units in a directory were computed with, under ``made``: each way once; nothing if untold."""
    made: list[Json] = []
    for path in sorted(directory.glob("*/unit.json")):
        each = _made(path)
        made += [each] if each and each not in made else []
    return {"made": made} if made else {}


def _made(path: Path) -> Json:
    """Return versions, code, command and machine of a unit.json; nothing where it is missing, damaged or of a failure."""
    try:
        record = parse_json(read_bounded(path))
        if record["status"] != "done":
            return {}
        machine = {key: value for key, value in record["machine"].items() if key != "system"}  # no bit depends on that
        return {key: record.get(key) for key in ("versions", "code", "command")} | {"machine": machine}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
