"""What each kind of tasks says of its use: how a text is asked about, what is answered, how that is shown, what is exported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel
from torch import Tensor

from forgetfree import registry
from forgetfree.data.chats import Chat
from forgetfree.data.columns import PAIR, ColumnNames, choose_texts
from forgetfree.data.rows import Rows
from forgetfree.display import brief
from forgetfree.errors import UsageError
from forgetfree.kinds.kind import kind_of
from forgetfree.serve.network import Parts, TaskNetwork
from forgetfree.tasks import Decoding, TaskDefinition
from forgetfree.training.loop import predict

#: A text, or the two of a pair; a tuple of one is a text, too. A list is the words of a sentence, or the turns of a chat.
Text = str | tuple[str, ...] | list[Any]


@dataclass(frozen=True)
class Ending:
    """Where a text that answers is to end, beside where it ends by itself, and how it is written.

    Attributes:
        max_tokens: after how many tokens; default: the task's ``max_new_tokens``.
        stop: before which texts, beside those of the task.
        decoding: how it is written; default: as the task's texts were in the run.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    decoding: Decoding | None = None


UNTIL_THE_END = Ending()


def check_texts(texts: Sequence[object], *, chats: bool = False) -> None:
    """Raise ``UsageError`` for what is no text, and for one text in place of a list, whose letters would be answered each.

    Args:
        texts: strings, or several in a row: a tuple, a list, a row of NumPy.
        chats: whether the turns of a chat are a text, too.
    """
    if isinstance(texts, str):
        raise UsageError(f"Expected a list of texts, got the text {brief(texts)}. Give [{brief(texts)}].")
    for number, text in enumerate(texts, 1):
        parts: Iterable[object] = [text]
        if isinstance(text, Collection) and not isinstance(text, str | bytes | Mapping):
            parts = text if len(text) else [text]
        if wrong := [part for part in parts if not isinstance(part, str | list | Mapping if chats else str)]:
            raise UsageError(f"Text {number}: expected a text, got {brief(wrong[0])}. Give one, or leave it out.")


class ServedTask(ABC):
    """A task in use: one subclass a kind, by `forgetfree.registry.SERVED`.

    Args:
        task: the task.
    """

    #: Whether a text has one answer from one position: such tasks share a forward pass, and a router can choose among them.
    is_routed: ClassVar[bool] = True
    #: Whether each word has an answer of its own.
    of_words: ClassVar[bool] = False
    #: What the task does where it is not routed, for messages: ``labels words``.
    deed: ClassVar[str] = ""
    #: Whether the answers are texts, which can be asked for by chats.
    writes: ClassVar[bool] = False
    #: What a text may be in a file's row, for messages.
    cell: ClassVar[str] = "a text"

    def __init__(self, task: TaskDefinition) -> None:
        self.task = task

    @property
    def size(self) -> int:
        """How many texts a row has."""
        return len(self.task.text_columns)

    @property
    def names(self) -> tuple[str, ...]:
        """What the texts of a row are called beside its answer."""
        return PAIR if self.size == 2 else ("text",)

    def columns_of_texts(self, where: str, header: Sequence[str], named: ColumnNames) -> tuple[str, ...]:
        """Return a file's columns of texts; none where no name is recognised.

        Raises:
            DataError: a column that was named is missing, or several may be meant.
        """
        return choose_texts(where, header, named, self.task.form)

    def texts_of(self, record: Mapping[str, object], columns: Sequence[str]) -> tuple[str | None, ...]:
        """Return the texts that a file's row has in some columns; nothing in place of a cell that holds none.

        Raises:
            UsageError: a column beside them belongs to what is asked, and cannot be read.
        """
        return tuple(self.written(record.get(column)) for column in columns)

    def written(self, value: object) -> str | None:
        """Return a cell of a file as a text; nothing where it is none."""
        return value if isinstance(value, str) else None

    @abstractmethod
    def rows(self, texts: Sequence[Text]) -> Rows:
        """Return texts as rows.

        Raises:
            UsageError: one is no text, or does not fit the task.
        """

    def check(self, ending: Ending) -> None:
        """Raise ``UsageError`` for what the task does not do of how a text is to be written, and to end."""
        if ending != UNTIL_THE_END:
            raise UsageError(
                f"Task {self.task.name!r} is answered by labels, and max_tokens, stop and decoding are "
                "for texts. Leave them out."
            )

    def chat(self, chat: Chat) -> Text:
        """Return a chat as a text of the task.

        Raises:
            UsageError: the task does not answer chats, or not this one.
        """
        raise UsageError(f"Task {self.task.name!r} is answered by labels. Ask it by POST /predict.")

    def read(self, model: Any, rows: Any, *, batch_size: int, precision: str, ending: Ending = UNTIL_THE_END) -> Any:
        """Return what a model says of rows, for `answers`: by default the logits of all their labels.

        Args:
            model: answers for the task.
            rows: as its kind encodes them.
            batch_size: rows in a forward pass.
            precision: of forward passes.
            ending: where texts end, for tasks that are answered by texts alone.

        Raises:
            UsageError: it is for texts.
        """
        self.check(ending)
        logits: Tensor = rows.answered(predict(model, rows, batch_size=batch_size, precision=precision))
        return logits

    @abstractmethod
    def answers(self, texts: Sequence[Text], said: Any, cut: Iterable[int]) -> list[Any]:
        """Return an answer for each text; each has ``cut_tokens``.

        Args:
            texts: the texts.
            said: what `read` returned of their rows: logits ``(n, n_labels)``, where a row is asked for several labels, these
                one after another.
            cut: how many tokens of each text were not read.
        """

    @abstractmethod
    def network(self, parts: Parts) -> TaskNetwork:
        """Return the task's model as transformers has it.

        Raises:
            GraftError: transformers has none, or the readout does not fit.
        """

    # -- What is shown ---------------------------------------------------------------------------------------

    @abstractmethod
    def lines(self, texts: tuple[str, ...], answer: Any) -> list[str]:
        """Return an answer as lines of text, with what was asked."""

    @abstractmethod
    def json(self, texts: tuple[str, ...], answer: Any) -> dict[str, Any]:
        """Return an answer as an object of JSON, with what was asked."""

    @abstractmethod
    def response(self, answer: Any) -> BaseModel:
        """Return an answer as the server sends it."""

    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Return the columns of a table of answers.

        Raises:
            UsageError: an answer is no row of a table.
        """

    @abstractmethod
    def cells(self, answer: Any) -> Mapping[str, Any]:
        """Return an answer as a row of a table, by column."""


def served(task: TaskDefinition) -> ServedTask:
    """Return a task in use, by what its kind says."""
    task_class: type[ServedTask] = registry.SERVED[kind_of(task).served_as].load()
    return task_class(task)
