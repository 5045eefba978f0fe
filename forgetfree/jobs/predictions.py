"""The answers of a unit of a run on every task's test rows, in predictions.safetensors: logits and labels.

Where words are labelled, those of all words, and the ``lengths`` of the sentences; where texts are the answers, their token
ids, their losses, and the texts. A kind of a package may keep others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from forgetfree.errors import RunError
from forgetfree.json_file import check
from forgetfree.results.unit_folder import BEFORE
from forgetfree.tasks import TaskDefinition
from forgetfree.tensor_file import TensorFile

if TYPE_CHECKING:
    from torch import Tensor

    from forgetfree.results.answers import Answers

PREDICTIONS = "predictions.safetensors"
PREDICTION_FILE = TensorFile(RunError, "Go on with --resume, which makes it again.")


def save_predictions(directory: Path, predictions: Mapping[str, Answers], before: Mapping[str, Sequence[str]]) -> None:
    """Keep the answers on every task in the folder of a unit.

    Args:
        directory: the folder.
        predictions: the answers.
        before: by task, the texts before training of the rows that a report shows.
    """
    import torch

    from forgetfree.results.answers import array_of, tensors_by_task

    arrays = tensors_by_task(predictions) | {f"{task}/{BEFORE}": array_of(texts) for task, texts in before.items()}
    tensors = {name: torch.tensor(array, device="cpu") for name, array in arrays.items()}
    PREDICTION_FILE.write(directory / PREDICTIONS, tensors)


def load_answers(directory: Path, tasks: Sequence[TaskDefinition], rows: Mapping[str, int]) -> dict[str, Answers]:
    """Read the answers on every task, as its kind keeps them.

    Args:
        directory: the folder of a unit.
        tasks: their definitions.
        rows: how many test rows each has.

    Raises:
        RunError: the file is missing or damaged, or of other tasks or rows.
    """
    path = directory / PREDICTIONS
    _, tensors = PREDICTION_FILE.read(path)
    try:
        task_and_part = {key: key.rpartition("/")[::2] for key in tensors}
        names = [task.name for task in tasks]
        right = {task for task, _ in task_and_part.values()} == set(names)
        check("its tensors", sorted(tensors), right, f"answers on {', '.join(names)}")
        of_task = {
            task.name: {part: key for key, (name, part) in task_and_part.items() if name == task.name} for task in tasks
        }
        return {
            task.name: _answers(task, {part: tensors[key] for part, key in of_task[task.name].items()}, rows)
            for task in tasks
        }
    except ValueError as error:
        raise RunError(f"{path}: {error}. {PREDICTION_FILE.remedy}") from error


def _answers(task: TaskDefinition, tensors: Mapping[str, Tensor], rows: Mapping[str, int]) -> Answers:
    """Return the answers on a task; raise ``ValueError`` where they are none of its kind, or not on its rows."""
    from forgetfree.kinds.kind import kind_of

    arrays = {part: tensor.numpy() for part, tensor in tensors.items()}
    try:
        return kind_of(task).kept_answers(task, arrays, rows.get(task.name))
    except KeyError as error:
        raise ValueError(f"answers on {task.name!r} lack {error}") from error
    except ValueError as error:
        raise ValueError(f"answers on {task.name!r}: {error}") from error


def agreement(
    directory: Path, reference: Path, tasks: Sequence[TaskDefinition], rows: Mapping[str, int]
) -> list[float]:
    """Return the share of each task's test rows on which two units answer alike.

    Args:
        directory: the folder of one unit.
        reference: the folder of the other.
        tasks: their definitions.
        rows: how many test rows each has.

    Raises:
        RunError: a file of answers is missing or damaged, or of other tasks or rows.
    """
    times = tuple((each / PREDICTIONS).stat().st_mtime_ns for each in (directory, reference))
    return list(_agreement(directory, reference, times, tuple(tasks), tuple(rows.items())))


@lru_cache(maxsize=4096)  # results are made anew whenever a unit has ended
def _agreement(
    directory: Path,
    reference: Path,
    times: tuple[int, ...],
    tasks: tuple[TaskDefinition, ...],
    rows: tuple[tuple[str, int], ...],
) -> tuple[float, ...]:
    own, others = (load_answers(each, tasks, dict(rows)) for each in (directory, reference))
    return tuple(own[task.name].agreement(others[task.name]) for task in tasks)
