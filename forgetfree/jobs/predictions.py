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
from forgetfree.tasks import KIND_OF_FORM, TaskDefinition
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

    if task.kind in KIND_OF_FORM and not task.writes:  # what others keep, they alone know
        _check_labels(task, tensors, rows.get(task.name))
    try:
        answers = kind_of(task).kept_answers(task, {part: tensor.numpy() for part, tensor in tensors.items()})
    except KeyError as error:
        raise ValueError(f"answers on {task.name!r} lack {error}") from error
    if task.writes:
        count = len(answers.right)  # type: ignore[attr-defined]
        check(f"texts of {task.name!r}", count, rows.get(task.name, count) == count, f"{rows.get(task.name)} rows")
    return answers


def _check_labels(task: TaskDefinition, tensors: Mapping[str, Tensor], count: int | None) -> None:
    """Raise ``ValueError`` unless they are logits and labels, of as many rows as there are or of the words in these."""
    import torch

    right = {"logits", "labels"} <= tensors.keys() <= {"logits", "labels", "lengths"}
    check(
        f"tensors of {task.name!r}", sorted(tensors), right, "logits and labels, and lengths where words are labelled"
    )
    if (lengths := tensors.get("lengths")) is not None:
        sound = lengths.dtype == torch.int64 and lengths.dim() == 1 and bool((lengths > 0).all())
        right = sound and count in (None, len(lengths))
        check(f"lengths of {task.name!r}", tuple(lengths.shape), right, f"the words of each of {count} sentences")
        count = int(lengths.sum())
    _check_predictions(task.name, tensors["logits"], tensors["labels"], count)


def _check_predictions(task: str, logits: Tensor, labels: Tensor, rows: int | None) -> None:
    """Raise ``ValueError`` unless they are finite logits of labels, one row each, of as many test rows as there are."""
    import torch

    shapes = tuple(logits.shape), tuple(labels.shape)
    count = len(labels) if labels.dim() == 1 and rows is None else rows
    right = logits.dim() == 2 and len(logits) == count and shapes[1] == (count,)
    check(f"logits and labels of {task!r}", shapes, right, f"one row for each of {count} test rows")
    finite = logits.is_floating_point() and bool(logits.isfinite().all())
    check(f"logits of {task!r}", str(logits.dtype), finite, "finite numbers")
    within = labels.dtype == torch.int64 and bool(((labels >= 0) & (labels < logits.shape[1])).all())
    check(f"labels of {task!r}", str(labels.dtype), within, f"whole numbers below {logits.shape[1]}")


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
