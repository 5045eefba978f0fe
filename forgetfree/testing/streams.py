"""Whether a stream gives what strategies and reports rely on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forgetfree import registry
from forgetfree.continual.stream import Stream, make_stream
from forgetfree.data.examples import Examples
from forgetfree.data.prompts import prompt_of
from forgetfree.data.rows import evenly
from forgetfree.data.sources import default_data, load_tasks
from forgetfree.display import listed
from forgetfree.tasks import SPLITS
from forgetfree.testing.runs import Breaches
from forgetfree.testing.tiny import tiny_model
from forgetfree.training.encoded_task import EncodedTask

#: Above this share of a task's test rows in its training rows, a score says little; of MPQA's short phrases it is 0.1.
TOLERATED = 0.2
#: As long as any stream's rows are cut to.
_POSITIONS = 128
#: Longer, for answers that are texts: they are never cut, and many words fall into letters.
_LONG = 2048


def check_stream(stream: Stream | str, *, data: str | None = None, **arguments: Any) -> None:
    """Raise unless a stream can be learned and its scores mean something.

    Checked are: tasks and their positions; labels, all of them in training and test rows; that no split is empty; test
    rows among the training rows (a fault above 20 %, below that a warning); rows that hold no text; that the model reads
    the rows; the Avalanche benchmark, rows, order and task labels; and metrics.

    Args:
        stream: one that is loaded; or a registered name, or task names separated by commas, which a tiny model reads.
        data: where the rows of named tasks are: ``hub``, ``demo`` or a directory; default: ``FORGETFREE_DATA`` if set,
            else ``hub``.
        arguments: of named tasks, ``shots``, ``seed``, ``test_limit`` and ``scenario`` of
            `forgetfree.continual.stream.load_stream`.

    Raises:
        ConformanceError: names every fault found.
        UsageError, DataError: a stream given by name cannot be loaded.
    """
    faults = Breaches()
    if isinstance(stream, str):
        tasks = load_tasks(stream, data or default_data())
        written = not all(rows.task.labels for rows in tasks)
        own = replace(tiny_model(_LONG, "generate"), max_length=_LONG) if written else tiny_model(_POSITIONS)
        stream = make_stream(stream, tasks, own, **arguments)
    _check_tasks(stream, faults)
    for task in stream.tasks:
        _check_splits(task, faults)
        if all(len(getattr(task, split)) for split in SPLITS):
            _check_rows(stream, task, faults)
            _check_repeated(task, faults)
    if not faults.messages:  # else they would say the same again
        _check_benchmark(stream, faults)
    faults.raise_any(f"Stream {stream.name!r} cannot be relied on")


def _check_tasks(stream: Stream, faults: Breaches) -> None:
    names = [task.name for task in stream.tasks]
    if not names:
        faults.add("tasks: expected one at least, got none.")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        faults.add(f"tasks: expected each once, got {listed(twice)} more than once. Give the data a second name.")
    if [task.label for task in stream.tasks] != list(range(len(names))):
        faults.add(f"tasks: expected labels 0, 1, … by position, got {[task.label for task in stream.tasks]}.")
    for task in stream.tasks:
        for fault in registry.faults_of(task.definition):
            faults.add(f"{task.name}: {fault}.")
        if len(task.classes) != len(task.definition.labels):
            faults.add(f"{task.name}: expected a class a label, got {task.classes} for {task.definition.labels}.")


def _check_splits(task: EncodedTask, faults: Breaches) -> None:
    for split in SPLITS:
        labels = set(getattr(task, split).labels.tolist())
        if not labels:
            faults.add(f"{task.name}: expected rows in the {split} split, got none. Add some, or raise test_limit.")
            continue
        if not task.classes:  # the labels are tokens
            continue
        if beyond := sorted(labels - set(task.classes)):
            faults.add(f"{task.name}: expected labels of {task.classes} in the {split} split, got {beyond} too.")
        missing = sorted(set(task.classes) - labels)
        if missing and split != "validation" and task.kind.needs_every_label:
            faults.add(
                f"{task.name}: expected rows of every label in the {split} split, got none of {missing}. Add some, or drop "
                "the labels."
            )


def _check_rows(stream: Stream, task: EncodedTask, faults: Breaches) -> None:
    """Check that the model reads the longest rows, and that rows hold a text."""
    width = stream.model.heads[task.label].n_labels
    special = set(stream.loaded.tokenizer.all_special_ids) if stream.loaded.tokenizer is not None else set()
    for split in SPLITS:
        rows: Examples = getattr(task, split)
        longest = max(range(len(rows)), key=rows.lengths.__getitem__)
        remedy = "Encode by make_stream with the stream's own model."
        with faults.catching(f"{task.name}: its {split} rows read by the model", remedy), torch.no_grad():
            x, _, t = rows.batch([0, longest])
            logits = stream.model(x, t)
            lines = int(stream.model.counts(x).sum())
            if logits.shape != (lines, width) or not bool(torch.isfinite(logits).all()):
                faults.add(
                    f"{task.name}: expected finite logits ({lines}, {width}) of two {split} rows, got {tuple(logits.shape)}. "
                    f"{remedy}"
                )
        empty = sum(set(_ids(rows, i)) <= special for i in range(len(rows))) if special else 0
        _weigh(
            empty,
            len(rows),
            f"{task.name}: expected words that the tokenizer knows in every row, got {empty} of {len(rows)} {split} rows "
            "without any. Fix or drop the rows, or take a model of their language.",
            faults,
        )


def _check_repeated(task: EncodedTask, faults: Breaches) -> None:
    """Check for test rows that are training rows too."""
    known = {_key(x) for x in _inputs(task, "train")}
    repeated = sum(_key(x) in known for x in _inputs(task, "test"))
    _weigh(
        repeated,
        len(task.test),
        f"{task.name}: expected no test row among the training rows, got {repeated} of {len(task.test)}. Drop them from "
        "the training rows.",
        faults,
    )


def _weigh(count: int, total: int, message: str, faults: Breaches) -> None:
    """Add a fault where it is a large share, else warn."""
    if count > TOLERATED * total:
        faults.add(message)
    elif count:
        warnings.warn(message, UserWarning, stacklevel=4)


def _check_benchmark(stream: Stream, faults: Breaches) -> None:
    """Check that Avalanche's streams hold the tasks' rows, in order, under their task labels."""
    for split in ("train", "test"):
        experiences = list(getattr(stream.benchmark, f"{split}_stream"))
        if [e.current_experience for e in experiences] != list(range(len(stream.tasks))):
            faults.add(f"benchmark: expected one {split} experience a task, in order, got {len(experiences)}.")
            continue
        for task, experience in zip(stream.tasks, experiences, strict=True):
            rows: Examples = getattr(task, split)
            data, task_label = experience.dataset, task.label if stream.scenario == "task" else 0
            where = f"benchmark: expected the {split} experience {task.label} to hold the rows of {task.name}"
            if [int(label) for label in data.targets] != rows.targets:
                faults.add(f"{where} in order, got other labels.")
            elif not all(_same(data[i][0], rows.batch([i])[0][0]) for i in evenly(len(rows), 50)):
                faults.add(f"{where} in order, got other inputs.")
            if (labels := sorted({int(label) for label in experience.task_labels})) != [task_label]:
                faults.add(f"{where} with task label {task_label} (scenario={stream.scenario}), got {labels}.")


# -- Rows ------------------------------------------------------------------------------------------------


def _inputs(task: EncodedTask, split: str) -> Iterable[Tensor]:
    """Yield what is read of each row: of one that is answered by a text, what stands before that."""
    rows: Examples = getattr(task, split)
    read = (rows.batch([i])[0][0] for i in range(len(rows)))
    return read if task.classes else map(prompt_of, read)


def _ids(rows: Examples, i: int) -> Sequence[int]:
    ids: list[int] = [max(token, ~token) for token in rows.batch([i])[0][0].tolist()]  # unmarked
    return ids


def _key(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


def _same(actual: Tensor, expected: Tensor) -> bool:
    """Return whether an input is the expected one, or has the same ids before padding."""
    if actual.dim() == 1:
        actual = actual[: len(expected)]
    return torch.equal(actual, expected)
