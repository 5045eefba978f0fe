"""Checks the properties of a stream that strategies and reports rely on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forgetfree import registry
from forgetfree.continual.stream import Stream, make_stream
from forgetfree.data.examples import Examples
from forgetfree.data.prompts import prompt_of
from forgetfree.data.sources import default_data, load_tasks
from forgetfree.kinds.kind import kind_of
from forgetfree.tasks import SPLITS
from forgetfree.testing.tiny import tiny_model
from forgetfree.testing.trials import Breaches
from forgetfree.training.encoded_task import EncodedTask

#: Above this share of a task's test rows in its training rows, a score says little; of MPQA's short phrases it is 0.1.
TOLERATED = 0.2
#: The default maximum length of rows.
_POSITIONS = 128
#: Longer, for answers that are texts: they are never cut, and many words are split into letters.
_LONG = 2048


def check_stream(stream: Stream | str, *, data: str | None = None, **arguments: Any) -> None:
    """Raise an error unless a stream can be learned and its scores are meaningful.

    It checks the tasks' definitions; that no split is empty, that labels are valid, and that training and test rows have all of
    them; that the model can read the rows; and that at most a fifth of the test rows are also training rows, and at most a
    fifth of the rows have no text.

    Args:
        stream: a loaded stream; or a registered name, or task names separated by commas, to be read by a tiny model.
        data: where the rows of named tasks are: ``hub``, ``demo`` or a directory; default: ``FORGETFREE_DATA`` if set,
            else ``hub``.
        arguments: for named tasks, ``shots``, ``seed``, ``test_limit`` and ``scenario`` of
            `forgetfree.continual.stream.load_stream`.

    Raises:
        ConformanceError: names every fault found.
        UsageError, DataError: a stream given by name cannot be loaded.
    """
    faults = Breaches()
    if isinstance(stream, str):
        tasks = load_tasks(stream, data or default_data())
        written = any(kind_of(rows.task).answer == "text" for rows in tasks)
        own = replace(tiny_model(_LONG, "generate"), max_length=_LONG) if written else tiny_model(_POSITIONS)
        stream = make_stream(stream, tasks, own, **arguments)
    if not stream.tasks:
        faults.add("tasks: expected one at least, got none.")
    for task in stream.tasks:
        for fault in registry.faults_of(task.definition):
            faults.add(f"{task.name}: {fault}.")
        _check_splits(task, faults)
        if all(len(getattr(task, split)) for split in SPLITS):
            _check_rows(stream, task, faults)
    faults.raise_any(f"Stream {stream.name!r} cannot be relied on")


def _check_splits(task: EncodedTask, faults: Breaches) -> None:
    for split in SPLITS:
        labels = set(getattr(task, split).labels.tolist())
        if not labels:
            faults.add(f"{task.name}: expected rows in the {split} split, got none. Add some, or raise test_limit.")
            continue
        if task.kind.answer == "text":  # the labels are tokens
            continue
        if beyond := sorted(labels - set(task.classes)):
            faults.add(f"{task.name}: expected labels of {task.classes} in the {split} split, got {beyond} too.")
        missing = sorted(set(task.classes) - labels)
        if missing and split != "validation" and task.kind.answer == "label":
            faults.add(
                f"{task.name}: expected rows of every label in the {split} split, got none of {missing}. Add some, or drop "
                "the labels."
            )


def _check_rows(stream: Stream, task: EncodedTask, faults: Breaches) -> None:
    """Check that the model can read the longest rows, that rows have a text, and that test rows are not training rows."""
    tokenizer = stream.loaded.tokenizer
    special = set(tokenizer.all_special_ids) if tokenizer is not None else set[int]()
    for split in SPLITS:
        rows: Examples = getattr(task, split)
        longest = max(range(len(rows)), key=rows.lengths.__getitem__)
        remedy = "Encode by make_stream with the stream's own model."
        with faults.catching(f"{task.name}: its {split} rows read by the model", remedy), torch.no_grad():
            x, _, t = rows.batch([0, longest])
            stream.model(x, t)
        empty = sum({max(token, ~token) for token in _input(rows, i).tolist()} <= special for i in range(len(rows)))
        if special and empty > TOLERATED * len(rows):
            faults.add(
                f"{task.name}: expected words that the tokenizer knows in every row, got {empty} of {len(rows)} {split} rows "
                "without any. Fix or drop the rows, or take a model of their language."
            )
    learned = {_read(task, task.train, i) for i in range(len(task.train))}
    repeated = sum(_read(task, task.test, i) in learned for i in range(len(task.test)))
    if repeated > TOLERATED * len(task.test):
        faults.add(
            f"{task.name}: expected no test row among the training rows, got {repeated} of {len(task.test)}. Drop them from "
            "the training rows."
        )


def _input(rows: Examples, i: int) -> Tensor:
    return rows.batch([i])[0][0]


def _read(task: EncodedTask, rows: Examples, i: int) -> bytes:
    """Return the input of a row as bytes: where texts are the answers, only the prompt."""
    read = prompt_of(_input(rows, i)) if task.kind.answer == "text" else _input(rows, i)
    return read.contiguous().numpy().tobytes()
