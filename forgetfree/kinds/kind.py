"""The interface of a kind of tasks: one class has all methods that a run, and predictions after it, call for its tasks.

A kind reads, samples, encodes, answers and scores rows, has floors, and answers new texts. It holds no task: every method takes
the definition. Other packages get the kind from `kind_of` and call its methods; they do not check which kind it is. The file of
a kind imports torch only inside methods: rows are checked before the seconds that this import takes.
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

#: A text, or the two texts of a pair; a tuple of one is a text, too. A list holds a sentence's words, or a chat's turns.
Text = str | tuple[str, ...] | list[Any]
#: A form of rows: the description of a row, and its columns.
Form = tuple[str, tuple[str, ...]]
#: One label, any number of the labels, a label for each word, or a text.
AnswerForm = Literal["label", "labels", "tags", "text"]
#: Called with the number of tokens written so far, and the largest number possible.
Wrote = Callable[[int, int], object]


@dataclass(frozen=True)
class GenerationOptions:
    """Options of a request on where a generated text ends.

    Attributes:
        max_tokens: the maximum length in tokens; default: the task's ``max_new_tokens``.
        stop: texts before which it ends, in addition to the task's.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


AS_LEARNED = GenerationOptions()


class Kind(ABC):
    """A kind of tasks, whose rows have one form and one form of answer.

    Every kind is trained by cross-entropy. A row has one label or several, and each is compared with one line of logits. In
    multi-label classification, a line has the logits of no and yes for one label; where texts are the answers, the labels are
    the tokens of a right text. A kind that differs little from another is a subclass of it.
    """

    #: The values of ``kind`` in a ``source.json``, each with its form of rows.
    forms: ClassVar[Mapping[str, Form]]
    #: The names of its metrics, the default first; metrics from plug-in packages fit every kind.
    metrics: ClassVar[tuple[str, ...]]
    #: The unit that has one label, for messages: a ``text``, or a part of one.
    label_of: ClassVar[str] = "text"
    #: The form of an answer to a row. Tasks with the form ``label`` share a forward pass, and a router can choose among them.
    answer: ClassVar[AnswerForm] = "label"
    #: The readout that ``auto`` selects for its tasks; ``auto``: the model's own.
    readout: ClassVar[str] = "auto"
    #: The default ``max_length`` of its tasks, in tokens.
    max_length: ClassVar[int] = MAX_LENGTH
    #: The group that may have fewer rows than ``--shots`` without a note, if there is one.
    optional_group: ClassVar[int | None] = None
    #: The floors of its tasks, see `forgetfree.training.floors`.
    floors: ClassVar[tuple[str, ...]] = ("bag_of_words", "linear_probe", "mean_probe")
    #: The most rows of a learned task that are answered again after each later task, to check that no bit changes.
    checked_rows: ClassVar[int] = 32
    #: The arguments of `forgetfree.learning` that its tasks accept, beside the labels.
    settings: ClassVar[tuple[str, ...]] = ("metric", "max_length")

    # -- Rows ------------------------------------------------------------------------------------------------

    def recognises(self, task: TaskTables) -> bool:
        """Return whether tables look like this kind's, where no kind is named; called for the built-in kinds alone."""
        return False

    @abstractmethod
    def read(self, task: TaskTables) -> TaskRows:
        """Return a task with its rows.

        Raises:
            BadDataError: with all faults of its tables.
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

    def check_splits(self, task: TaskDefinition, rows: Mapping[str, Rows], before: Rows) -> None:  # noqa: B027  # optional hook
        """Raise ``DataError`` if a split lacks what learning and scoring need.

        Args:
            task: the task.
            rows: the rows of its three splits, none empty.
            before: the training rows before validation rows were split off from them.
        """

    def check_scored(self, rows: TaskRows) -> None:  # noqa: B027  # optional hook
        """Raise ``DataError`` if the metric cannot be measured on the validation or test rows."""

    # -- Samples ---------------------------------------------------------------------------------------------

    @abstractmethod
    def groups_of(self, label: Any) -> Collection[int]:
        """Return the numbers of the groups that a row belongs to, from its label or labels: one group at least."""

    def groups(self, labels: Sequence[Any]) -> list[int]:
        """Return the smallest group of each row: samples are spread evenly over these groups."""
        groups = list(map(self.groups_of, labels))
        rows = Counter(group for of_row in groups for group in of_row)
        return [min(of_row, key=lambda group: (rows[group], group)) for of_row in groups]

    def members(self, labels: Sequence[Any]) -> dict[int, list[int]]:
        """Return the groups that ``--shots`` counts, each with its row numbers, in the order in which groups are drawn.

        Where a row may be in several groups, the smallest group is drawn first.
        """
        members: dict[int, list[int]] = {}
        for row, label in enumerate(labels):
            for group in self.groups_of(label):
                members.setdefault(group, []).append(row)
        return dict(sorted(members.items(), key=lambda item: (self.answer != "label" and len(item[1]), item[0])))

    def group_name(self, task: TaskDefinition, group: int, count: int) -> str:
        """Return a phrase for ``count`` training rows of a group, for messages, such as "rows of label 'positive'"."""
        return f"row{'s' * (count > 1)} of group {group}"

    # -- Models ----------------------------------------------------------------------------------------------

    def check_scenario(self, tasks: Sequence[TaskDefinition], scenario: Scenario) -> None:  # noqa: B027  # optional hook
        """Raise ``UsageError`` if the scenario does not fit a stream with these tasks, of which some are of this kind."""

    def check_readout(self, task: TaskDefinition, readout: str) -> None:  # noqa: B027  # optional hook
        """Raise ``UsageError`` if the readout cannot answer the task."""

    def outputs(self, task: TaskDefinition, loaded: LoadedModel) -> int:
        """Return the number of logits at a position: by default one for each label."""
        return len(task.labels)

    def encoder(self, task: TaskDefinition, loaded: LoadedModel) -> Encoder:
        """Return the encoder of the task's rows for the model's readout; by default it adds no prompt."""
        from forgetfree.data.encoding import Encoder

        return Encoder(loaded.tokenizer, None, loaded.max_length, closed=True)

    def encode(
        self, task: TaskDefinition, rows: Rows, encoder: Any, *, label: int, pad: int, first: int = 0
    ) -> EncodedRows:
        """Return rows as token ids with their labels.

        Args:
            task: the task.
            rows: the rows.
            encoder: the encoder from `encoder`.
            label: the number of the task in mini-batches.
            pad: the id that fills short rows.
            first: the number of the task's first label.
        """
        from forgetfree.data.examples import EncodedRows

        labels = [each + first for each in rows.labels] if first else rows.labels
        return EncodedRows.of(encoder(rows), labels, label, pad, task.kind)

    # -- Answers and scores ----------------------------------------------------------------------------------

    def metric(self, name: str) -> Metric:
        """Return the metric with a name: the kind's own, or else the registered one.

        A kind may compute a registered metric in its own way, as tagging computes F1. The name must be registered all the same,
        with the same bounds and direction: reports take these from the registry alone.

        Raises:
            UnknownNameError: there is no such metric.
        """
        registered: Metric = registry.metric(name)
        return registered

    def choices(self, task: TaskDefinition) -> tuple[str, ...]:
        """Return the names among which the answer to a whole row is chosen: labels, or closed answers."""
        return task.closed_answers or (() if self.answer == "tags" else task.labels)

    def collected(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the values to keep from a batch's logits ``(n, n_labels)``, one line for each label: by default, all."""
        return logits

    @abstractmethod
    def answers(self, task: TaskDefinition, logits: Tensor, labels: Tensor, rows: Examples | None) -> Answers:
        """Return a model's answers to a task's rows.

        Args:
            task: the task.
            logits: the values from `collected`, one line for each label that was read, in the rows' order.
            labels: the right labels.
            rows: the rows; ``None`` where a plug-in or a user evaluates other rows.
        """

    def with_texts(
        self, answers: Answers, task: TaskDefinition, model: Any, rows: Any, wrote: Wrote | None = None, **passes: Any
    ) -> Answers:
        """Return answers with the texts that a model writes, where texts are the answers; by default, return them unchanged.

        Args:
            answers: the answers read from the logits.
            task: the task.
            model: the model.
            rows: the rows.
            wrote: see `Wrote`.
            passes: see `forgetfree.kinds.decoding.Passes`.
        """
        return answers

    def quality(self, task: TaskDefinition, logits: Tensor, rows: Examples) -> tuple[float, float]:
        """Return the quality of answers, larger is better: the score, and minus the loss, which breaks ties.

        Args:
            task: the task.
            logits: the values from `collected`, finite.
            rows: the rows.

        Raises:
            MetricError: the answers are not labels.
        """
        import torch
        from torch.nn import functional as F

        answers = label_answers(self.answers(task, logits, rows.labels, rows))
        loss = float(F.cross_entropy(torch.from_numpy(answers.logits), torch.from_numpy(answers.labels)))
        score = answers.score(task.metric)
        return score if self.metric(task.metric).higher_is_better else -score, -loss

    def unanswered(self, task: TaskDefinition, train: Examples, rows: Examples, width: int) -> Answers:
        """Return placeholder answers (all logits 0), to compute the constant floor.

        Args:
            task: the task.
            train: its training rows, for kinds that choose a constant answer from them.
            rows: the rows.
            width: the number of logits in a line.
        """
        import torch

        return self.answers(task, torch.zeros(sum(rows.counts), width, device="cpu"), rows.labels, rows)

    @abstractmethod
    def kept_answers(
        self, task: TaskDefinition, arrays: Mapping[str, npt.NDArray[Any]], rows: int | None = None
    ) -> Answers:
        """Return answers from the arrays that `Answers.tensors` returned.

        Args:
            task: the task.
            arrays: the stored arrays, by name.
            rows: the number of its test rows, if that is known.

        Raises:
            KeyError: an array is missing.
            ValueError: the arrays do not fit the task or its rows.
        """

    # -- In use ----------------------------------------------------------------------------------------------

    def names(self, task: TaskDefinition) -> tuple[str, ...]:
        """Return the names of a row's texts, as they are shown beside the answer."""
        return PAIR if len(task.text_columns) == 2 else ("text",)

    def columns_of_texts(
        self, task: TaskDefinition, where: str, header: Sequence[str], named: ColumnNames
    ) -> tuple[str, ...]:
        """Return a file's columns of texts; none where no name is recognised.

        Raises:
            DataError: a named column is missing, or several columns may be meant.
        """
        return choose_texts(where, header, named, task.form)

    def texts_of(
        self, task: TaskDefinition, record: Mapping[str, object], columns: Sequence[str]
    ) -> tuple[str | None, ...]:
        """Return the texts of a file's row in some columns; ``None`` for a cell that holds no text.

        Raises:
            UsageError: a column beside them belongs to the prompt, and cannot be read.
        """
        return tuple(self.text_of_cell(task, record.get(column)) for column in columns)

    def text_of_cell(self, task: TaskDefinition, value: object) -> str | None:
        """Return a cell of a file as a text; ``None`` if it holds no text."""
        return value if isinstance(value, str) else None

    def cell_type(self, task: TaskDefinition) -> str:
        """Return the types that a text cell of a file may have, for messages."""
        return "a text"

    def rows(self, task: TaskDefinition, texts: Sequence[Text]) -> Rows:
        """Return texts as rows, by default with label 0.

        Raises:
            UsageError: an item is no text, or does not fit the task.
        """
        return text_rows(texts, len(task.text_columns), f"Task {task.name!r}")

    def text_of_chat(self, task: TaskDefinition, chat: Chat) -> Text:
        """Return a chat as a text of the task.

        Raises:
            UsageError: the task does not answer chats, or not this chat.
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
        """Return a model's output for rows, as `replies` takes it: by default the logits of all labels.

        Args:
            task: the task.
            model: the model that answers for it.
            rows: the rows from `encode`.
            logits: runs the model on the rows, and returns the logits.
            options: the options of generated texts.
            passes: see `forgetfree.kinds.decoding.Passes`.

        Raises:
            UsageError: the options do not fit the task.
        """
        if options != AS_LEARNED:
            raise UsageError(
                f"Task {task.name!r} is answered by labels, and max_tokens and stop are for texts. Leave them out."
            )
        found: Tensor = rows.answered(logits())
        return found

    @abstractmethod
    def replies(self, task: TaskDefinition, texts: Sequence[Text], output: Any, cut: Iterable[int]) -> list[Any]:
        """Return the answer to each text as a user gets it: a dataclass with a field ``cut_tokens``.

        Args:
            task: the task.
            texts: the texts.
            output: the model's output from `output`: by default logits ``(n, n_labels)``, where a row with several labels has
                several lines, one after another.
            cut: how many tokens of each text were not read.
        """

    def network(self, task: TaskDefinition, parts: Parts) -> TaskNetwork:
        """Return the task's model as a network of transformers.

        Raises:
            GraftError: transformers has no such network, or the readout does not fit it.
        """
        raise GraftError(
            f"Task {task.name!r} is of the kind {task.kind!r}, which no network of transformers answers. Answer from the run "
            "itself: forgetfree predict."
        )

    # -- Output ----------------------------------------------------------------------------------------------

    @abstractmethod
    def fields(self, task: TaskDefinition) -> tuple[str, ...]:
        """Return the fields of an answer that a line of text, and a row of a table, show beside task and texts.

        Raises:
            UsageError: an answer does not fit into one row of a table.
        """

    def json(self, task: TaskDefinition, answer: Any, texts: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return an answer as a JSON object, with the texts that it answers, if given."""
        names = PAIR if len(texts) == 2 else ("text",)  # a router may ask a task about pairs for a single text
        return dict(zip(names, texts, strict=False)) | asdict(answer)

    def lines(self, task: TaskDefinition, texts: tuple[str, ...], answer: Any) -> list[str]:
        """Return an answer as lines of text, with the texts that it answers."""
        shown = self.json(task, answer)
        return ["\t".join([*(_in_line(shown[name]) for name in self.fields(task)), escaped(" | ".join(texts))])]

    def columns(self, task: TaskDefinition) -> tuple[str, ...]:
        """Return the columns of a table of answers: task, `fields`, and one for each probability. Errors: see `fields`."""
        return ("task", *self.fields(task), *map(probability_column, task.closed_answers or task.labels))


def _in_line(value: Any) -> str:
    """Return a field of an answer as a line of text shows it."""
    if isinstance(value, float):
        return f"{value:.3f}"
    return escaped(value if isinstance(value, str) else "|".join(value) or "-")


def probability_column(label: str) -> str:
    """Return the name of the column for the probability of a label."""
    return f"probability of {label}"


def readout_for(readout: str, tasks: Iterable[TaskDefinition]) -> str:
    """Return the requested readout; for ``auto``, the readout of the first kind of tasks that needs one of its own."""
    needed = [kind_of(task).readout for task in tasks]
    return readout if readout != "auto" else next((each for each in needed if each != "auto"), "auto")


def kind_of(task: TaskDefinition) -> Kind:
    """Return the kind of a task; see `forgetfree.registry.kind`."""
    registered: Kind = registry.kind(task.kind)
    return registered


# -- New texts, for tasks in use --------------------------------------------------------------------------


def check_texts(texts: Sequence[object], *, chats: bool = False) -> None:
    """Raise ``UsageError`` if an item is no text, or if one string is given in place of a list: each letter would be answered.

    Args:
        texts: strings, or sequences of strings for each row: a tuple, a list, a row of a NumPy array.
        chats: whether the turns of a chat count as a text, too.
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
        size: the number of texts of a row.
        reader: the name of the reader, for messages.

    Raises:
        UsageError: a text is empty or no text, or a row has more or fewer texts.
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
