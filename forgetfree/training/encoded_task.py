"""One task as a model reads it: sampled, tokenised, with its readout added to the model; and the model's answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forgetfree.core.readout_model import LINEAR, ReadoutModel, autocast, evaluating
from forgetfree.data.examples import EncodedRows, Examples
from forgetfree.data.rows import Rows, TaskRows, by_length, few_rows_note, k_shot, representative
from forgetfree.errors import UsageError
from forgetfree.kinds.kind import Kind, kind_of
from forgetfree.models.loading import LoadedModel
from forgetfree.results.answers import Answers
from forgetfree.seeds import derive_seed
from forgetfree.tasks import OF_ALL_LABELS, Scenario, TaskDefinition
from forgetfree.training.training_options import MOST_SHOTS, TrainingOptions


@dataclass(frozen=True)
class EncodedTask:
    """One task of a stream, encoded for its model.

    Attributes:
        definition: the task's definition.
        label: its position in the stream, and its task label in mini-batches unless the stream withholds the task.
        shots: the requested training rows per label; if all are used, the number of rows of the rarest label, at most 512:
            more rows mean no more updates by the paper's rule (`paper_steps`).
        train, validation, test: the encoded rows.
        fingerprint: the fingerprint of all the task's rows, before sampling.
        classes: the numbers of its labels in rows and logits.
        note: a note for the user on rows that exceed the model's maximum length; empty if there is none.
        few_rows: a note for the user on labels with fewer rows than ``shots``; empty if there is none.
    """

    definition: TaskDefinition
    label: int
    shots: int
    train: Examples
    validation: Examples
    test: Examples
    fingerprint: str
    classes: tuple[int, ...]
    note: str = ""
    few_rows: str = ""

    @property
    def name(self) -> str:
        """The task's name."""
        return self.definition.name

    @property
    def kind(self) -> Kind:
        """The task's kind."""
        return kind_of(self.definition)

    def full_steps(self, options: TrainingOptions) -> int:
        """Return the number of updates that the options give the task."""
        return options.updates(max(1, len(self.definition.labels)), self.shots, len(self.train))

    @property
    def unanswered(self) -> Answers:
        """The same placeholder answer to all test rows, to compute the constant floor."""
        return self.kind.unanswered(self.definition, self.train, self.test, 1 + max((*self.classes, 1)))


@dataclass(frozen=True)
class LabelSpace:
    """The numbers of a task's labels among all labels of its readout.

    Attributes:
        width: the width of the logits; ``None``: the number of the task's labels.
        first: the number of the task's first label.
        task_known: whether mini-batches carry the task's label; otherwise 0.
    """

    width: int | None = None
    first: int = 0
    task_known: bool = True


def encode_task(
    rows: TaskRows,
    loaded: LoadedModel,
    *,
    shots: int | None = None,
    seed: int = 0,
    test_limit: int | None = None,
    labels: LabelSpace = LabelSpace(),  # frozen
) -> EncodedTask:
    """Add the task's readout to the model, draw its sample, and tokenize once.

    Args:
        rows: the task and all its rows.
        loaded: the model, to which a readout is added.
        shots: training rows per label, or sentences per kind of entity; default, and if there are fewer: all.
        seed: for the sample and the readout's first weights.
        test_limit: keep at most this many test rows, spread evenly; default: all.
        labels: how its labels are numbered.

    Raises:
        DataError: the task is scored by F1, which its validation or test rows do not determine.
        UsageError: ``shots`` is below 1.
    """
    definition, train = rows.task, sampled(rows, shots, seed)
    kind = kind_of(definition)
    label = loaded.add_task(definition, seed, width=labels.width)
    encoder = loaded.encoder(definition)

    def encode(part: Rows) -> EncodedRows:
        task = label if labels.task_known else 0
        return kind.encode(definition, part, encoder, label=task, pad=loaded.pad, first=labels.first)

    test = rows.test.take(representative(kind.groups(rows.test.labels), test_limit))
    encoded = encode(train), encode(rows.validation), encode(test)
    cut = encoder.cut_note("row", len(train) + len(rows.validation) + len(test))
    return EncodedTask(
        definition,
        label,
        shots or min(MOST_SHOTS, *Counter(kind.groups(train.labels)).values()),
        *encoded,
        rows.fingerprint(),
        tuple(range(labels.first, labels.first + len(definition.labels))),
        f"Task {definition.name!r}: {cut}" if cut else "",
        few_rows_note(rows.train, definition, shots),
    )


def sampled(rows: TaskRows, shots: int | None, seed: int) -> Rows:
    """Return the sampled training rows of a task; arguments and errors as for `encode_task`."""
    task = rows.task
    kind_of(task).check_scored(rows)
    if shots is None:
        return rows.train
    return k_shot(rows.train, task, shots, derive_seed(seed, "shots", task.name))


def label_spaces(
    tasks: Sequence[TaskDefinition], loaded: LoadedModel, scenario: Scenario
) -> tuple[list[TaskDefinition], list[LabelSpace]]:
    """Return definitions and label numbers of each task for the scenario.

    Raises:
        UsageError: the scenario needs a linear readout, or (``domain``) tasks with the same number of labels. Where texts are
            the answers, there are no labels to number: only the task is withheld.
    """
    sizes = [len(task.labels) for task in tasks]
    for kind in dict.fromkeys(map(kind_of, tasks)):
        kind.check_scenario(tasks, scenario)
    if scenario == "task":
        return list(tasks), [LabelSpace()] * len(tasks)
    if all(kind_of(task).answer == "text" for task in tasks):
        return list(tasks), [LabelSpace(task_known=False)] * len(tasks)
    if loaded.readout not in LINEAR:
        raise UsageError(
            f"scenario={scenario} needs --readout linear, got {loaded.readout}: label words and prompts would reveal "
            "the task."
        )
    if scenario == "domain":
        if len(set(sizes)) > 1:
            counts = ", ".join(f"{task.name}: {len(task.labels)}" for task in tasks)
            raise UsageError(
                f"scenario=domain needs tasks with the same number of labels, got {counts}. Use scenario=class, "
                "or other tasks."
            )
        return list(tasks), [LabelSpace(task_known=False)] * len(tasks)
    return (
        # F1 is defined for one label of two; these metrics also compare among the labels of all tasks.
        [replace(task, metric=task.metric if task.metric in OF_ALL_LABELS else "accuracy") for task in tasks],
        [LabelSpace(sum(sizes), sum(sizes[:i]), task_known=False) for i in range(len(tasks))],
    )


# -- The answers of a model ----------------------------------------------------------------------------


def answers_of(model: ReadoutModel, task: EncodedTask, rows: Examples, options: TrainingOptions) -> Answers:
    """Return a model's answers to rows of a task, in batches of the options' size."""
    kind = task.kind
    size = options.evaluation_batch_size
    logits = predict(model, rows, batch_size=size, collected=kind.collected)
    answers = kind.answers(task.definition, logits, rows.labels, rows)
    return kind.with_texts(answers, task.definition, model, rows, batch_size=size, precision="fp32")


def quality_of(model: ReadoutModel, task: EncodedTask, rows: Examples, options: TrainingOptions) -> tuple[float, float]:
    """Return the quality of a model's answers to rows of a task: larger is better, and the second number breaks ties.

    For labels, these are the score by the task's metric and minus the loss; for texts, minus the loss.
    """
    logits = predict(model, rows, batch_size=options.evaluation_batch_size, collected=task.kind.collected)
    if not bool(logits.isfinite().all()):  # the weights moved too far
        return -math.inf, -math.inf
    return task.kind.quality(task.definition, logits, rows)


def predict(
    model: ReadoutModel,
    rows: Examples,
    *,
    batch_size: int = 64,
    precision: str = "fp32",
    collected: Callable[[Tensor, Tensor], Tensor] = lambda logits, labels: logits,
) -> Tensor:
    """Return the logits of every row in the rows' order: float32 ``(n, n_labels)`` on the CPU, in evaluation mode.

    Where words are labelled, they are the logits of all words that are read; where a row has several labels, there is a line
    (0, z) for each.

    Args:
        model: the model in its current state.
        rows: the rows.
        batch_size: rows per forward pass.
        precision: the precision of forward passes.
        collected: maps the logits and labels of a batch to the tensor that is returned in place of the logits.
    """
    lines = model.readout_of(rows.task).lines
    return _of_all_rows(model, lambda x, y, t: collected(model(x, t), y), rows, batch_size, precision, lines)


def features_of(
    model: ReadoutModel,
    rows: Examples,
    read: Callable[[Tensor], Tensor],
    *,
    batch_size: int = 64,
    precision: str = "fp32",
) -> Tensor:
    """Return the features of every row by ``read``, a method of the model, as `predict` returns logits: float32 ``(n, H)``."""
    return _of_all_rows(model, lambda x, y, t: read(x), rows, batch_size, precision)


def token_losses(model: ReadoutModel, rows: Examples, batch_size: int) -> Tensor:
    """Return the cross-entropy of every predicted token, in nats: float32 ``(n,)``."""

    def read(x: Any, y: Tensor, _: Tensor) -> Tensor:
        return F.cross_entropy(model.features(x).float(), y, reduction="none")

    return _of_all_rows(model, read, rows, batch_size, "fp32")


def counts_tokens(model: ReadoutModel) -> bool:
    """Return whether batches of evaluation are sized by tokens: on a GPU, where each operation costs more than its rows.

    They are not where the model writes texts: the logits of each token over the vocabulary would take too much memory.
    """
    return next(model.parameters()).device.type != "cpu" and model.readout != "generate"


@torch.no_grad()
def _of_all_rows(
    model: ReadoutModel,
    read: Callable[[Any, Tensor, Tensor], Tensor],
    rows: Examples,
    batch_size: int,
    precision: str,
    lines: int = 1,
) -> Tensor:
    pieces: list[tuple[Tensor, Tensor]] = []  # outputs, and the row of each
    with evaluating(model, precision):
        batches = by_length(rows.lengths, batch_size, by_tokens=counts_tokens(model))
        for numbers in reversed(batches):  # longest rows first, so that the largest memory is allocated once
            batch = rows.batch(numbers)
            x, y, t = model.on_device(batch)
            with autocast(precision, y.device.type):
                outputs = read(x, y, t).float()
            counts = lines * model.counts(batch[0])
            pieces.append((outputs, torch.tensor(numbers, device="cpu").repeat_interleave(counts)))
    outputs, order = map(torch.cat, zip(*pieces, strict=True))
    return outputs.cpu()[torch.argsort(order, stable=True)]


def share_of_entropy(logits: Tensor, labels: int) -> Tensor:
    """Return the entropy of each row's answer ``(rows,)``, as a share of its maximum log(``labels``).

    Other columns of the logits ``(rows, n)`` hold the lowest number, so they add nothing.
    """
    entropy: Tensor = torch.special.entr(logits.softmax(1)).sum(1)
    return entropy / math.log(max(2, labels))
