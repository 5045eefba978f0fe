"""One task as a model reads it: sampled, tokenised, with its readout added to the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from forgetfree.core.examples import Examples
from forgetfree.core.readout_model import LINEAR
from forgetfree.data.encoding import EncodedRows
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.data.sampling import k_shot, representative
from forgetfree.display import counted
from forgetfree.errors import DataError, UsageError
from forgetfree.learning.training import MOST_SHOTS
from forgetfree.models.loading import LoadedModel
from forgetfree.results.entities import Sentences
from forgetfree.results.metrics import Predictions
from forgetfree.seeds import derive_seed
from forgetfree.tasks import Scenario, TaskDefinition, version_of


@dataclass(frozen=True)
class EncodedTask:
    """One task of a stream, encoded for its model.

    Attributes:
        definition: the task's definition.
        label: its position in the stream; in mini-batches its task label, unless the stream withholds that.
        shots: the training rows per label that were asked for; if all are used, those of the rarest label, at most 512:
            more rows mean no more updates (`paper_steps`).
        train, validation, test: the encoded rows.
        fingerprint: that of all the task's rows, before sampling.
        classes: the numbers of its labels in rows and logits.
        note: what a user should know of rows that are longer than the model reads; empty if none is.
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

    @property
    def name(self) -> str:
        """The task's name."""
        return self.definition.name

    def sentences(self, rows: Examples) -> Sentences | None:
        """Return how the words of ``rows`` make up sentences; ``None`` unless words are labelled."""
        words: Tensor | None = getattr(rows, "words", None)
        return None if words is None else Sentences(self.definition.labels, words.diff().numpy())

    def predictions(self, logits: Tensor, rows: Examples) -> Predictions:
        """Return a model's answers on ``rows`` from its logits of what it read; words that were cut off are answered by O."""
        if isinstance(rows, EncodedRows):
            logits = rows.answered(logits)
        return Predictions(logits.numpy(), rows.labels.numpy(), self.sentences(rows))


@dataclass(frozen=True)
class LabelSpace:
    """How a task's labels are numbered among those that its readout distinguishes.

    Attributes:
        width: the width of the logits; ``None``: the number of the task's labels.
        first: the number of the task's first label.
        task_known: whether mini-batches carry the task's label, or 0.
    """

    width: int | None = None
    first: int = 0
    task_known: bool = True


def encode_task(
    rows: TaskRows,
    loaded: LoadedModel,
    *,
    shots: int | None = None,
    or_fewer: bool = False,
    seed: int = 0,
    test_limit: int | None = None,
    labels: LabelSpace = LabelSpace(),  # frozen
) -> EncodedTask:
    """Add the task's readout to the model, draw its sample, and tokenize once.

    Args:
        rows: the task and all its rows.
        loaded: the model, to which a readout is added.
        shots: training rows per label, or sentences per kind of entity; default: all.
        or_fewer: accept labels with fewer rows, and take all of those.
        seed: for the sample and the readout's first weights.
        test_limit: keep at most this many test rows, spread evenly; default: all.
        labels: how its labels are numbered.

    Raises:
        DataError: the task is measured by F1, and its validation or test rows cannot tell it.
        UsageError: a label has fewer than ``shots`` rows.
    """
    definition, train = rows.task, sampled(rows, shots, seed, or_fewer)
    head = loaded.head(definition)
    label = loaded.model.add_task(replace(head, n_labels=labels.width or head.n_labels), seed)
    encoder = loaded.encoder(definition)

    def encode(part: Rows) -> EncodedRows:
        task = label if labels.task_known else 0
        numbers = part.labels if part.tagged else [y + labels.first for y in part.labels]
        return EncodedRows.of(encoder(part), numbers, task, loaded.pad)

    groups = set(train.groups) if train.tagged else range(len(definition.labels))
    test = rows.test.take(representative(rows.test.groups, test_limit))
    encoded = encode(train), encode(rows.validation), encode(test)
    cut = encoder.cut_note("row", len(train) + len(rows.validation) + len(test))
    return EncodedTask(
        definition,
        label,
        shots or min(MOST_SHOTS, *(Counter(train.groups)[group] for group in groups)),
        *encoded,
        rows.fingerprint(),
        tuple(range(labels.first, labels.first + len(definition.labels))),
        f"Task {definition.name!r}: {cut}" if cut else "",
    )


def sampled(rows: TaskRows, shots: int | None, seed: int, or_fewer: bool = False) -> Rows:
    """Return the training rows of a task that are drawn; arguments and errors as `encode_task`."""
    _check_metric(rows)
    definition, train = rows.task, rows.train
    if shots is None:
        return train
    names = ("", *definition.entities) if train.tagged else definition.labels
    return k_shot(train, shots, derive_seed(seed, "shots", definition.name), definition.name, or_fewer, names)


def _check_metric(rows: TaskRows) -> None:
    """Raise ``DataError`` if F1 cannot be measured: it is 0 for every model on rows without label 1."""
    for split in ("validation", "test"):
        if rows.task.metric == "f1" and rows.task.kind != "tokens" and 1 not in getattr(rows, split).labels:
            held = counted(len(getattr(rows, split)), f"{split} row")
            raise DataError(
                f"Task {rows.task.name!r} is measured by the F1 of label 1 ({rows.task.labels[1]!r}), and none of its "
                f"{held} has that label. Add such rows, or set metric to 'accuracy' in its "
                "source.json."
            )


def label_spaces(
    tasks: Sequence[TaskDefinition], loaded: LoadedModel, scenario: Scenario
) -> tuple[list[TaskDefinition], list[LabelSpace]]:
    """Return definitions and label numbers of each task for the scenario.

    Raises:
        UsageError: the scenario needs a linear readout, or (``domain``) tasks with as many labels each.
    """
    sizes = [len(task.labels) for task in tasks]
    tagged = [task.name for task in tasks if task.kind == "tokens"]
    if tagged and scenario == "class":
        raise UsageError(
            f"scenario=class tells all tasks' labels apart, and in {tagged[0]!r} O means none of the task's own entities, "
            "which would be wrong for those of other tasks. Use scenario=task; or scenario=domain, where entities are the same."
        )
    if scenario == "task":
        return list(tasks), [LabelSpace()] * len(tasks)
    if scenario == "class" and (again := [task.name for task in tasks if version_of(task.name)[1] > 1]):
        raise UsageError(
            f"scenario=class tells all tasks' labels apart, and those of {again[0]!r} are an earlier task's. Use scenario=task."
        )
    if loaded.readout not in LINEAR:
        raise UsageError(
            f"scenario={scenario} needs --readout linear, got {loaded.readout}: label words and prompts would give the task "
            "away."
        )
    if scenario == "domain":
        if len(set(sizes)) > 1:
            counts = ", ".join(f"{task.name}: {len(task.labels)}" for task in tasks)
            raise UsageError(
                f"scenario=domain needs tasks that share their labels, got {counts}. Use scenario=class, or other tasks."
            )
        if tagged and len({task.labels if task.kind == "tokens" else () for task in tasks}) > 1:
            kinds = "; ".join(f"{task.name}: {', '.join(task.entities) or 'no words to label'}" for task in tasks)
            raise UsageError(
                f"scenario=domain needs tasks that share their labels: the same kinds of entities in the same order, got "
                f"{kinds}. "
                'Name them in each source.json, such as {"kind": "tokens", "entities": ["PER", "LOC"]}, or use scenario=task.'
            )
        return list(tasks), [LabelSpace(task_known=False)] * len(tasks)
    return (
        # F1 is about one label of two; among the labels of all tasks, accuracy is what compares.
        [replace(task, metric="accuracy") for task in tasks],
        [LabelSpace(sum(sizes), sum(sizes[:i]), task_known=False) for i in range(len(tasks))],
    )
