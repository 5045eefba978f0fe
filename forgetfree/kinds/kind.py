"""The contract of a kind of tasks: one class says all that a run, and an answer after it, ask of its tasks.

A kind reads rows, draws samples of them, encodes them, answers and scores them, has floors, and is asked about new texts. It
holds no task: every method gets the definition. Other rooms find it by `kind_of`, and ask it instead of asking which one it is.
Its file imports no torch when it is read: rows are checked before that takes its seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from forgetfree import registry
from forgetfree.data.columns import PAIR, ColumnNames, choose_texts
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.display import brief, escaped, is_blank, is_text
from forgetfree.errors import GraftError, UsageError
from forgetfree.results.answers import label_answers
from forgetfree.tasks import MAX_LENGTH, Scenario, TaskDefinition

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from forgetfree.data.chats import Chat
    from forgetfree.data.encoding import Encoder
    from forgetfree.data.examples import EncodedRows, Examples
    from forgetfree.data.tables import TaskTables
    from forgetfree.kinds.networks import Parts, TaskNetwork
    from forgetfree.models.loading import LoadedModel
    from forgetfree.results.answers import Answers
    from forgetfree.results.metrics import Metric

#: A text, or the two of a pair; a tuple of one is a text, too. A list is the words of a sentence, or the turns of a chat.
Text = str | tuple[str, ...] | list[Any]
#: A form of rows: what a row is, and its columns.
Form = tuple[str, tuple[str, ...]]
#: One label, any number of the labels, a label for each word, or a text.
AnswerForm = Literal["label", "labels", "tags", "text"]
#: Takes how many tokens were written so far, and of how many that there may be.
Wrote = Callable[[int, int], object]


@dataclass(frozen=True)
class GenerationOptions:
    """The end of a text, as far as it is not as its task says.

    Attributes:
        max_tokens: its length, at most; default: the task's ``max_new_tokens``.
        stop: texts before which it ends, beside those of the task.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


AS_LEARNED = GenerationOptions()


class Kind(ABC):
    """A kind of tasks: rows of one form with one question.

    Every kind is learned by cross-entropy. A row has one label or several, and each is compared with a line of logits. Where
    a row has any number of labels, a line is no and yes for one of them; of a kind that is answered by texts, the labels are
    the tokens of a right one. A kind that differs from another in a few things is a subclass of it.
    """

    #: What a user may write into ``kind`` of a ``source.json``, and what each is.
    forms: ClassVar[Mapping[str, Form]]
    #: The names of its metrics, the default first; those of packages fit every kind.
    metrics: ClassVar[tuple[str, ...]]
    #: What has a label of its own, for messages: a ``text``, or a part of one.
    label_of: ClassVar[str] = "text"
    #: What answers a row. Tasks of one ``label`` share a forward pass, and a router can choose among them.
    answer: ClassVar[AnswerForm] = "label"
    #: The readout that ``auto`` is for its tasks; ``auto``: that which the model has.
    readout: ClassVar[str] = "auto"
    #: The longest row that a model reads of its tasks, in tokens, where nothing else is said.
    max_length: ClassVar[int] = MAX_LENGTH
    #: The group that ``--shots`` may find few rows of, or none.
    optional_group: ClassVar[int | None] = None
    #: The floors that its tasks can have, see `forgetfree.training.floors`.
    floors: ClassVar[tuple[str, ...]] = ("bag_of_words", "linear_probe", "mean_probe")
    #: The rows of a learned task that are answered again after each later one, at most, to see whether they keep every bit.
    checked_rows: ClassVar[int] = 32
    #: What else than labels may be said of its tasks in `forgetfree.learning`.
    settings: ClassVar[tuple[str, ...]] = ("metric", "max_length")

    # -- Rows ------------------------------------------------------------------------------------------------

    def recognises(self, task: TaskTables) -> bool:
        """Return whether tables look like those of this kind, where nothing names the kind; asked of our own kinds alone."""
        return False

    @abstractmethod
    def read(self, task: TaskTables) -> TaskRows:
        """Return a task with its rows.

        Raises:
            BadDataError: with all that is wrong with its tables.
        """

    def faults(self, task: TaskDefinition) -> list[str]:
        """Return a phrase for each fault of a definition."""
        faults = []
        if len(set(task.labels)) != len(task.labels) or len(task.labels) < 2:
            faults.append(f"labels must be at least two names, all different, got {brief(task.labels, 200)}")
        if task.hub and len(task.hub.columns) != len(task.text_columns):
            faults.append(
                f"hub.columns must be one for each text, {len(task.text_columns)}, got {brief(task.hub.columns, 200)}"
            )
        return faults

    def check_splits(self, task: TaskDefinition, rows: Mapping[str, Rows], before: Rows) -> None:  # noqa: B027  # may stay as it is
        """Raise ``DataError`` if a split lacks what learning and scoring need.

        Args:
            task: whose rows.
            rows: of its three splits, none empty.
            before: the training rows before validation rows were split off from them.
        """

    def check_scored(self, rows: TaskRows) -> None:  # noqa: B027  # may stay as it is
        """Raise ``DataError`` if the metric cannot be measured on the validation or test rows."""

    # -- Samples ---------------------------------------------------------------------------------------------

    @abstractmethod
    def groups_of(self, label: Any) -> Collection[int]:
        """Return the numbers of the groups that a row belongs to, from its label or labels: one group at least."""

    def groups(self, labels: Sequence[Any]) -> list[int]:
        """Return for each row the smallest of its groups: samples are spread over groups evenly."""
        groups = list(map(self.groups_of, labels))
        rows = Counter(group for of_row in groups for group in of_row)
        return [min(of_row, key=lambda group: (rows[group], group)) for of_row in groups]

    def members(self, labels: Sequence[Any]) -> dict[int, list[int]]:
        """Return what ``--shots`` counts: the numbers of the rows of each group, in the order in which groups are drawn.

        Where a row may be in several groups, the smallest group is drawn first.
        """
        members: dict[int, list[int]] = {}
        for row, label in enumerate(labels):
            for group in self.groups_of(label):
                members.setdefault(group, []).append(row)
        return dict(sorted(members.items(), key=lambda item: (self.answer != "label" and len(item[1]), item[0])))

    def group_name(self, task: TaskDefinition, group: int, count: int) -> str:
        """Return what so many training rows of a group are called in messages, such as "rows of label 'positive'"."""
        return f"row{'s' * (count > 1)} of group {group}"

    # -- Models ----------------------------------------------------------------------------------------------

    def check_scenario(self, tasks: Sequence[TaskDefinition], scenario: Scenario) -> None:  # noqa: B027  # may stay as it is
        """Raise ``UsageError`` if a stream with these tasks, some of this kind, cannot withhold the task."""

    def check_readout(self, task: TaskDefinition, readout: str) -> None:  # noqa: B027  # may stay as it is
        """Raise ``UsageError`` if the readout cannot answer the task."""

    def outputs(self, task: TaskDefinition, loaded: LoadedModel) -> int:
        """Return how many logits there are at a position: one for each label."""
        return len(task.labels)

    def encoder(self, task: TaskDefinition, loaded: LoadedModel) -> Encoder:
        """Return what makes token ids of the task's rows, for the model's readout; by default of texts as they are."""
        from forgetfree.data.encoding import Encoder

        return Encoder(loaded.tokenizer, None, loaded.max_length, closed=True)

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

        labels = [each + first for each in rows.labels] if first else rows.labels
        return EncodedRows.of(encoder(rows), labels, label, pad, task.kind)

    # -- Answers and scores ----------------------------------------------------------------------------------

    def metric(self, name: str) -> Metric:
        """Return the metric of a name: the kind's own, or else the registered one.

        A kind may compute a registered metric in its own way, as tagging does F1. The name must be registered all the same:
        reports ask the registry alone for the bounds, and for whether higher is better, so those must be the same.

        Raises:
            UnknownNameError: no such metric.
        """
        registered: Metric = registry.metric(name)
        return registered

    def choices(self, task: TaskDefinition) -> tuple[str, ...]:
        """Return the names of what the answers to whole rows are chosen among: labels, or closed answers."""
        return task.closed_answers or (() if self.answer == "tags" else task.labels)

    def collected(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return what is kept of the logits of a batch ``(n, n_labels)``, a line for each label: by default all."""
        return logits

    @abstractmethod
    def answers(self, task: TaskDefinition, logits: Tensor, labels: Tensor, rows: Examples | None) -> Answers:
        """Return a model's answers to a task's rows.

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
            wrote: see `Wrote`.
            passes: see `forgetfree.kinds.decoding.Passes`.
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
    def kept_answers(
        self, task: TaskDefinition, arrays: Mapping[str, npt.NDArray[Any]], rows: int | None = None
    ) -> Answers:
        """Return answers from the arrays that `Answers.tensors` gave.

        Args:
            task: whose answers.
            arrays: what was kept.
            rows: the number of its test rows, if that is known.

        Raises:
            KeyError: an array is missing.
            ValueError: they are no answers to such rows.
        """

    # -- In use ----------------------------------------------------------------------------------------------

    def names(self, task: TaskDefinition) -> tuple[str, ...]:
        """Return what the texts of a row are called beside its answer."""
        return PAIR if len(task.text_columns) == 2 else ("text",)

    def columns_of_texts(
        self, task: TaskDefinition, where: str, header: Sequence[str], named: ColumnNames
    ) -> tuple[str, ...]:
        """Return a file's columns of texts; none where no name is recognised.

        Raises:
            DataError: a column that was named is missing, or several may be meant.
        """
        return choose_texts(where, header, named, task.form)

    def texts_of(
        self, task: TaskDefinition, record: Mapping[str, object], columns: Sequence[str]
    ) -> tuple[str | None, ...]:
        """Return the texts that a file's row has in some columns; nothing in place of a cell that holds none.

        Raises:
            UsageError: a column beside them belongs to what is asked, and cannot be read.
        """
        return tuple(self.text_of_cell(task, record.get(column)) for column in columns)

    def text_of_cell(self, task: TaskDefinition, value: object) -> str | None:
        """Return a cell of a file as a text; nothing where it is none."""
        return value if isinstance(value, str) else None

    def cell_type(self, task: TaskDefinition) -> str:
        """Return what a cell of texts may be in a file, for messages."""
        return "a text"

    def rows(self, task: TaskDefinition, texts: Sequence[Text]) -> Rows:
        """Return texts as rows, by default with label 0.

        Raises:
            UsageError: one is no text, or does not fit the task.
        """
        return text_rows(texts, len(task.text_columns), f"Task {task.name!r}")

    def text_of_chat(self, task: TaskDefinition, chat: Chat) -> Text:
        """Return a chat as a text of the task.

        Raises:
            TaskError: the task does not answer chats.
            UsageError: not this one.
        """
        raise UsageError(f"Task {task.name!r} is answered by labels. Ask it by POST /predict.")

    def output(
        self,
        task: TaskDefinition,
        model: Any,
        rows: Any,
        logits: Callable[[], Tensor],
        *,
        options: GenerationOptions = AS_LEARNED,
        **passes: Any,
    ) -> Any:
        """Return what a model says of rows, for `replies`: by default the logits of all their labels.

        Args:
            task: the task.
            model: answers for it.
            rows: as `encode` gives them.
            logits: puts the rows through the model.
            options: of texts.
            passes: see `forgetfree.kinds.decoding.Passes`.

        Raises:
            UsageError: the options are not for this task.
        """
        if options != AS_LEARNED:
            raise UsageError(
                f"Task {task.name!r} is answered by labels, and max_tokens and stop are for texts. Leave them out."
            )
        found: Tensor = rows.answered(logits())
        return found

    @abstractmethod
    def replies(self, task: TaskDefinition, texts: Sequence[Text], output: Any, cut: Iterable[int]) -> list[Any]:
        """Return the answer to each text as a user gets it: a dataclass that has ``cut_tokens``.

        Args:
            task: the task.
            texts: the texts.
            output: what `output` returned of their rows: logits ``(n, n_labels)``, where a row is asked for several labels,
                these one after another.
            cut: how many tokens of each text were not read.
        """

    def network(self, task: TaskDefinition, parts: Parts) -> TaskNetwork:
        """Return the task's model as transformers has it.

        Raises:
            GraftError: transformers has none, or the readout does not fit.
        """
        raise GraftError(
            f"Task {task.name!r} is of the kind {task.kind!r}, which no network of transformers answers. Answer from the run "
            "itself: forgetfree predict."
        )

    # -- What is shown ---------------------------------------------------------------------------------------

    @abstractmethod
    def fields(self, task: TaskDefinition) -> tuple[str, ...]:
        """Return the fields of an answer that a line of text, and a row of a table, have beside task and texts.

        Raises:
            UsageError: an answer is no row of a table.
        """

    def json(self, task: TaskDefinition, answer: Any, texts: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return an answer as an object of JSON, with what was asked, if that is given."""
        names = PAIR if len(texts) == 2 else ("text",)  # a router may ask a task about pairs for a single text
        return dict(zip(names, texts, strict=False)) | asdict(answer)

    def lines(self, task: TaskDefinition, texts: tuple[str, ...], answer: Any) -> list[str]:
        """Return an answer as lines of text, with what was asked."""
        shown = self.json(task, answer)
        return ["\t".join([*(_in_line(shown[name]) for name in self.fields(task)), escaped(" | ".join(texts))])]

    def columns(self, task: TaskDefinition) -> tuple[str, ...]:
        """Return the columns of a table of answers: task, `fields`, and one for each probability. Errors as of `fields`."""
        return ("task", *self.fields(task), *map(probability_column, task.closed_answers or task.labels))


def _in_line(value: Any) -> str:
    """Return a field of an answer as a line of text has it."""
    if isinstance(value, float):
        return f"{value:.3f}"
    return escaped(value if isinstance(value, str) else "|".join(value) or "-")


def probability_column(label: str) -> str:
    """Return the name of the column for the probability of a label."""
    return f"probability of {label}"


def readout_for(readout: str, tasks: Iterable[TaskDefinition]) -> str:
    """Return the readout that was asked for; for ``auto`` that of the first kind of tasks that needs one of its own."""
    needed = [kind_of(task).readout for task in tasks]
    return readout if readout != "auto" else next((each for each in needed if each != "auto"), "auto")


def kind_of(task: TaskDefinition) -> Kind:
    """Return the kind of a task; see `forgetfree.registry.kind`."""
    registered: Kind = registry.kind(task.kind)
    return registered


# -- Texts that a task in use is asked about --------------------------------------------------------------


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


def text_rows(texts: Sequence[Text], size: int, reader: str) -> Rows:
    """Return texts as rows, all with label 0.

    Args:
        texts: a tuple for each row; a text alone is a tuple of one.
        size: how many texts a row has.
        reader: what reads them, for messages.

    Raises:
        UsageError: one is empty, or no text, or they are more or fewer.
    """
    check_texts(texts)
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
                f"{reader} reads {'one text' if size == 1 else 'pairs of texts'}, got {len(row)} text(s) in "
                f"{row[0][:40]!r}. {remedy}"
            )
        if any(map(is_blank, row)):
            raise UsageError(f"Text {number} is empty. Write it, or leave it out.")
    columns = [tuple(column) for column in zip(*rows, strict=True)] or [()]
    return Rows(columns[0], columns[1] if size == 2 and rows else (), (0,) * len(rows))
