"""Labels of texts: how a task of one label a text is asked, and what is said to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from forgetfree.data.columns import PAIR
from forgetfree.data.rows import Rows
from forgetfree.display import brief, escaped, is_text
from forgetfree.errors import UsageError
from forgetfree.serve.label_network import label_network
from forgetfree.serve.network import Parts, TaskNetwork
from forgetfree.serve.served_task import ServedTask, Text, refuse_one_text


@dataclass(frozen=True)
class Answer:
    """What a task's model says of one text.

    Attributes:
        label: the likeliest label.
        probability: its probability.
        probabilities: those of all labels of the task, by name, in the task's order.
        task: the task.
        cut_tokens: how many tokens of the text are beyond the longest that the model reads, and were not read.
    """

    label: str
    probability: float
    probabilities: Mapping[str, float]
    task: str
    cut_tokens: int = 0


class OneAnswer(BaseModel):
    """What a task says of one text."""

    task: str
    label: str
    probability: float
    probabilities: dict[str, float]
    cut_tokens: int = Field(description="tokens of the text that are beyond the model's longest, and were not read")


class LabelTask(ServedTask):
    """A task of one label a text, or a pair of texts."""

    def rows(self, texts: Sequence[Text]) -> Rows:
        """Return texts as rows, see `text_rows`."""
        return text_rows(texts, self.size, f"Task {self.task.name!r}")

    def answers(self, texts: Sequence[Text], logits: Iterable[Tensor], cut: Iterable[int]) -> list[Answer]:
        """Return the likeliest label of each text, with all probabilities."""
        return [self.answer(row, lost) for row, lost in zip(logits, cut, strict=True)]

    def answer(self, logits: Tensor, cut_tokens: int = 0) -> Answer:
        """Return the answer that logits ``(n_labels,)`` are."""
        shares = torch.softmax(logits, dim=0)
        best = int(logits.argmax())  # shares of logits that nearly agree may be equal
        numbers, labels = shares.tolist(), self.task.labels
        return Answer(labels[best], numbers[best], dict(zip(labels, numbers, strict=True)), self.task.name, cut_tokens)

    def network(self, parts: Parts) -> TaskNetwork:
        """Return a sequence classifier, or the model that the labels are read from."""
        return label_network(parts)

    def lines(self, texts: tuple[str, ...], answer: Answer) -> list[str]:
        """Return label, probability, text."""
        return [f"{escaped(answer.label)}\t{answer.probability:.3f}\t{escaped(' | '.join(texts))}"]

    def json(self, texts: tuple[str, ...], answer: Answer) -> dict[str, Any]:
        """Return texts, task, label, and all probabilities."""
        return (
            dict(zip(PAIR if len(texts) == 2 else ("text",), texts, strict=True)) | self.response(answer).model_dump()
        )

    def response(self, answer: Answer) -> OneAnswer:
        """Return the answer as the server sends it."""
        return OneAnswer(**vars(answer))

    def columns(self) -> tuple[str, ...]:
        """Return task, label, and a column for the probability of each label."""
        return ("task", "label", "probability", *map(_column, self.task.labels))

    def cells(self, answer: Answer) -> dict[str, Any]:
        """Return task, label and probabilities."""
        shares = {_column(label): share for label, share in answer.probabilities.items()}
        return {"task": answer.task, "label": answer.label, "probability": answer.probability, **shares}


def _column(label: str) -> str:
    return f"probability of {label}"


def text_rows(texts: Sequence[Text], size: int, asker: str) -> Rows:
    """Return texts as rows.

    Args:
        texts: a tuple for each row; a text alone is a tuple of one.
        size: how many texts a row has.
        asker: what reads them, for messages.

    Raises:
        UsageError: one is no text, or they are more or fewer.
    """
    refuse_one_text(texts)
    rows = [(text,) if isinstance(text, str) else text for text in texts]
    for number, row in enumerate(rows, 1):
        if halves := [text for text in row if not is_text(text)]:
            raise UsageError(
                f"Text {number}, {brief(halves[0])}, holds half of a surrogate pair, which is no character: it was perhaps "
                "not written in UTF-8. Write it in UTF-8."
            )
        if len(row) != size:
            remedy = (
                "Give one."
                if size == 1
                else "Give the two as two arguments or with a tab between, or as a list of two."
            )
            raise UsageError(
                f"{asker} reads {'one text' if size == 1 else 'pairs of texts'}, got {len(row)} text(s) in "
                f"{row[0][:40]!r}. {remedy}"
            )
    columns = [tuple(column) for column in zip(*rows, strict=True)] or [()]
    return Rows(columns[0], columns[1] if size == 2 and rows else (), (0,) * len(rows))
