"""The answers of a unit of a run: logits and labels on every task's test rows, in predictions.safetensors.

Where words are labelled, those of all words, and the ``lengths`` of the sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgetfree.errors import RunError
from forgetfree.json_file import check
from forgetfree.results import metrics
from forgetfree.tensor_file import TensorFile

if TYPE_CHECKING:
    from torch import Tensor

    from forgetfree.results.answers import Answers

PREDICTIONS = "predictions.safetensors"
PREDICTION_FILE = TensorFile(RunError, "Go on with --resume, which makes it again.")


def save_predictions(directory: Path, predictions: Mapping[str, Answers]) -> None:
    """Keep the answers on every task in the folder of a unit."""
    import torch

    from forgetfree.results.answers import tensors_by_task

    tensors = {name: torch.tensor(array) for name, array in tensors_by_task(predictions).items()}
    PREDICTION_FILE.write(directory / PREDICTIONS, tensors)


def load_logits(directory: Path, tasks: Sequence[str], rows: Mapping[str, int]) -> dict[str, Any]:
    """Read the logits of every task.

    Args:
        directory: the folder of a unit.
        tasks: their names.
        rows: how many test rows each has.

    Returns:
        Arrays ``(n, n_labels)`` by task; n counts words where they are labelled.

    Raises:
        RunError: the file is missing or damaged, or of other tasks or rows.
    """
    import torch

    path = directory / PREDICTIONS
    _, tensors = PREDICTION_FILE.read(path)
    try:
        keys = {f"{task}/{part}" for task in tasks for part in ("logits", "labels")}
        beside = {key for task in tasks if (key := f"{task}/lengths") in tensors}
        right = tensors.keys() == keys | beside
        check("its tensors", sorted(tensors), right, f"logits and labels of {', '.join(tasks)}")
        for task in tasks:
            count, lengths = rows.get(task), tensors.get(f"{task}/lengths")
            if lengths is not None:
                sound = lengths.dtype == torch.int64 and lengths.dim() == 1 and bool((lengths > 0).all())
                right = sound and count in (None, len(lengths))
                check(f"lengths of {task!r}", tuple(lengths.shape), right, f"the words of each of {count} sentences")
                count = int(lengths.sum())
            _check_predictions(task, tensors[f"{task}/logits"], tensors[f"{task}/labels"], count)
    except ValueError as error:
        raise RunError(f"{path}: {error}. {PREDICTION_FILE.remedy}") from error
    return {task: tensors[f"{task}/logits"].numpy() for task in tasks}


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


def agreement(directory: Path, reference: Path, tasks: Sequence[str], rows: Mapping[str, int]) -> list[float]:
    """Return the share of each task's test rows on which two units answer alike.

    Args:
        directory: the folder of one unit.
        reference: the folder of the other.
        tasks: their names.
        rows: how many test rows each has.

    Raises:
        RunError: a file of answers is missing or damaged, or of other tasks or rows.
    """
    times = tuple((each / PREDICTIONS).stat().st_mtime_ns for each in (directory, reference))
    return list(_agreement(directory, reference, times, tuple(tasks), tuple(rows.items())))


@lru_cache(maxsize=4096)  # results are made anew whenever a unit has ended
def _agreement(
    directory: Path, reference: Path, times: tuple[int, ...], tasks: tuple[str, ...], rows: tuple[tuple[str, int], ...]
) -> tuple[float, ...]:
    logits, others = (load_logits(each, tasks, dict(rows)) for each in (directory, reference))
    return tuple(metrics.agreement(logits[task], others[task]) for task in tasks)
