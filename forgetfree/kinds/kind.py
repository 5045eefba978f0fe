"""What every kind of tasks is asked for.

A kind is found by name through `forgetfree.registry.kind`, so that no other room asks which one it is. Its file imports no
torch when it is read: the header of a data file is checked before that takes its seconds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from forgetfree import registry
from forgetfree.data.rows import RowKind, Rows
from forgetfree.results.answers import label_answers
from forgetfree.tasks import Scenario, TaskDefinition

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from forgetfree.data.encoding import Encoder
    from forgetfree.data.examples import EncodedRows, Examples
    from forgetfree.models.loading import LoadedModel
    from forgetfree.results.answers import Answers
    from forgetfree.results.metrics import Metric

#: A form of rows: what a row is, and its columns.
Form = tuple[str, tuple[str, ...]]
#: Hears how many tokens were written so far, and of how many that there may be.
Wrote = Callable[[int, int], object]


class TaskKind(RowKind):
    """A kind of tasks: rows of one form with one question.

    Every kind is learned by cross-entropy. A row has one label or several, and each label is read from the logits at one
    position. Of a kind that is answered by texts, the labels are the tokens of a right one. A kind that differs from another
    in a few things is a subclass of it.
    """

    #: What a user may write into ``kind`` of a ``source.json``, and what each is.
    forms: ClassVar[Mapping[str, Form]]
    #: The names of its metrics, the default first.
    metrics: ClassVar[tuple[str, ...]]
    #: Whether answers can be read by a word for each label; else the readout is linear.
    has_label_words: ClassVar[bool] = True
    #: The readout that ``auto`` is for its tasks; ``auto``: that which the model has.
    readout: ClassVar[str] = "auto"
    #: Whether the training rows and the test rows need every label.
    needs_every_label: ClassVar[bool] = False
    #: How its tasks are asked and answered once they are learned: a name in `forgetfree.registry.SERVED`.
    served_as: ClassVar[str] = "classification"
    #: Whether a bag of words can answer its rows.
    has_word_floor: ClassVar[bool] = True
    #: The rows of a learned task that are answered again after each later one, at most, to see whether they keep every bit.
    checked_rows: ClassVar[int] = 32

    # -- Definitions -----------------------------------------------------------------------------------------

    def faults(self, task: TaskDefinition) -> list[str]:
        """Return a phrase for each fault of a definition; none if it can be used with every readout."""
        return task.faults()

    def metric(self, name: str) -> Metric:
        """Return the metric of a name: the kind's own, or else the registered one.

        A kind may compute a registered metric in its own way, as tagging does F1. The name must be registered all the same:
        reports ask the registry alone for the bounds, and for whether higher is better, so those must be the same.

        Raises:
            UnknownNameError: no such metric.
        """
        registered: Metric = registry.metric(name)
        return registered

    # -- Models ----------------------------------------------------------------------------------------------

    def label_words(self, task: TaskDefinition) -> tuple[str, ...]:
        """Return the words that a readout by label words reads; none where there is no such readout."""
        return task.label_words if self.has_label_words else ()

    def check_readout(self, task: TaskDefinition, readout: str) -> None:  # may stay as it is
        """Raise ``UsageError`` if the readout cannot answer the task."""

    def check_scenario(self, tasks: Sequence[TaskDefinition], scenario: Scenario) -> None:  # may stay as it is
        """Raise ``UsageError`` if a stream with these tasks, some of this kind, cannot withhold the task."""

    @abstractmethod
    def encoder(self, task: TaskDefinition, loaded: LoadedModel) -> Encoder:
        """Return what makes token ids of the task's rows, for the model's readout."""

    def numbered(self, labels: Sequence[Any], first: int) -> Sequence[Any]:
        """Return the labels of rows as the readout numbers them: from ``first`` on."""
        return [label + first for label in labels]

    def encode(
        self, task: TaskDefinition, rows: Rows, encoder: Any, *, label: int, pad: int, first: int = 0
    ) -> EncodedRows:
        """Return rows as token ids with their labels.

        Args:
            task: whose rows.
            rows: the rows.
            encoder: what `encoder` returned.
            label: the number of the task in mini-batches.
            pad: the id that fills short rows.
            first: the number of the task's first label.
        """
        from forgetfree.data.examples import EncodedRows

        return EncodedRows.of(encoder(rows), self.numbered(rows.labels, first), label, pad, task.kind)

    def collected(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return what is kept of the logits of a batch ``(n, n_labels)``, a line for each label: by default all."""
        return logits

    @abstractmethod
    def answers(self, task: TaskDefinition, logits: Tensor, labels: Tensor, rows: Examples | None) -> Answers:
        """Return a model's answers.

        Args:
            task: whose rows.
            logits: what was `collected`, one line for each label that was asked for, in the rows' order.
            labels: those labels.
            rows: the rows; ``None`` where a plugin, or a user, put others together.
        """

    def with_texts(
        self, answers: Answers, task: TaskDefinition, model: Any, rows: Any, wrote: Wrote | None = None, **passes: Any
    ) -> Answers:
        """Return answers with what a model writes, where texts are the answers; by default they are complete.

        Args:
            answers: what was read of the logits.
            task: whose rows.
            model: the model.
            rows: the rows.
            wrote: hears how many tokens were written so far, and of how many that there may be.
            passes: see `forgetfree.models.generation.Passes`.
        """
        return answers

    def loss(self, task: TaskDefinition, logits: Tensor, rows: Examples) -> float:
        """Return the mean cross-entropy of the labels of rows, in nats. Arguments and errors as those of `quality`."""
        import torch
        from torch.nn import functional as F

        answers = label_answers(self.answers(task, logits, rows.labels, rows))
        return float(F.cross_entropy(torch.from_numpy(answers.logits), torch.from_numpy(answers.labels)))

    def quality(self, task: TaskDefinition, logits: Tensor, rows: Examples) -> tuple[float, float]:
        """Return how good answers are, larger is better: the score, and minus the `loss`, which decides between equal ones.

        Args:
            task: whose rows.
            logits: what was `collected`, finite.
            rows: the rows.

        Raises:
            MetricError: the answers are no labels.
        """
        score = label_answers(self.answers(task, logits, rows.labels, rows)).score(task.metric)
        return score if self.metric(task.metric).higher_is_better else -score, -self.loss(task, logits, rows)

    def unanswered(self, task: TaskDefinition, train: Examples, rows: Examples, width: int) -> Answers:
        """Return one and the same answer to all rows, for what depends on their labels alone.

        Args:
            task: whose rows.
            train: its training rows, where the answer is to be found in them.
            rows: the rows.
            width: how many labels are told apart, at least.
        """
        import torch

        return self.answers(task, torch.zeros(sum(rows.counts), width, device="cpu"), rows.labels, rows)

    @abstractmethod
    def kept_answers(self, task: TaskDefinition, arrays: Mapping[str, npt.NDArray[Any]]) -> Answers:
        """Return answers from the arrays that `Answers.tensors` gave; raise ``KeyError`` if one is missing."""


def readout_for(readout: str, tasks: Iterable[TaskDefinition]) -> str:
    """Return the readout that was asked for; for ``auto`` that of the first kind of tasks that needs one of its own."""
    needed = [kind_of(task).readout for task in tasks]
    return readout if readout != "auto" else next((each for each in needed if each != "auto"), "auto")


def kind_of(task: TaskDefinition) -> TaskKind:
    """Return the kind of a task; see `forgetfree.registry.kind`."""
    registered: TaskKind = registry.kind(task.kind)
    return registered
