"""The answers of a unit of a run on every task's test rows, in predictions.safetensors: logits and labels.

Where words are labelled, those of all words, and the ``lengths`` of the sentences; where texts are the answers, their token
ids, their losses, and the texts. A kind of a package may keep others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forgetfree.errors import RunError
from forgetfree.results.unit_folder import BEFORE, PREDICTIONS
from forgetfree.tensor_file import TensorFile

if TYPE_CHECKING:
    from forgetfree.results.answers import Answers

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
