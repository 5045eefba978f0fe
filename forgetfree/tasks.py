"""The definition of a task, independent of its data: form of its rows, labels or texts, prompt, metric, place on the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from forgetfree.display import brief
from forgetfree.json_file import checked

#: The kind of a task, see `forgetfree.registry.kind`, by the form of its rows: a text, two texts, the words of a sentence, a
#: prompt with the text that answers it, or a chat. In a definition, ``kind`` is the form for our own kinds, and the kind's
#: name for others.
KIND_OF_FORM = {
    "single": "classification",
    "pair": "classification",
    "tokens": "tagging",
    "generation": "generation",
    "messages": "generation",
}
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class HubSource:
    """The place of a task on the Hugging Face hub.

    Attributes:
        path: repository, e.g. ``nyu-mll/glue``; or a folder of data files, such as an installed package ships.
        name: its configuration, e.g. ``qnli``.
        columns: the hub's text columns, in order: one for a single text, two for a pair. For a text made from several
            columns, a template such as ``{title}. {content}``.
        label: the hub's label column.
        splits: from our splits to the hub's. A missing ``validation`` is split off from ``train``.
        labels: from the hub's label values to our label indices, where they differ.
    """

    path: str
    name: str | None = None
    columns: tuple[str, ...] = ("text",)
    label: str = "label"
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    labels: Mapping[int, int] | None = None


#: The information at inference (van de Ven & Tolias, 2019): the task; or, without the task, one label among those of all tasks
#: is predicted (``class``), or a label that all tasks share (``domain``).
Scenario = Literal["task", "class", "domain"]

#: The rows that models are scored on: test rows; or validation rows in their place, to choose options.
EvaluatedOn = Literal["test", "validation"]

#: The metrics for predictions among the labels of all tasks, ``class``.
OF_ALL_LABELS = ("accuracy", "macro_f1")

#: The maximum length of a text to write, in tokens.
MOST_NEW_TOKENS = 8192

#: Default maximum length of a row in tokens (LM-BFF's default); the longest text is cut first.
MAX_LENGTH = 128


@dataclass(frozen=True)
class TaskDefinition:
    """A task over a text, a pair of texts, or each word of a sentence; or a task with text answers.

    Attributes:
        name: the task's name, on the command line and in a data directory.
        kind: ``single`` text, ``pair`` of texts, or ``tokens``: the words of a sentence; ``generation`` of a text that answers
            a prompt, or ``messages`` of a chat; or the name of a registered kind.
        labels: label names; their positions are the integer labels. For ``tokens``, ``O`` and then ``B-X`` and ``I-X`` for
            each kind X of entity: see `of_entities`. Empty where texts are the answers.
        template: the prompt for masked LMs, with ``{text}`` or ``{text_a}``/``{text_b}`` and one ``{mask}``.
            ``{text_a:bare}`` drops a final punctuation mark, ``{text_b:lower}`` lower-cases the first letter. Where texts are
            the answers, the text before an answer, with ``{prompt}``; empty: the tokenizer's chat template, if it has one.
        label_words: one word per label, predicted at the mask (or, for causal LMs, after the last token).
        causal_template: the prompt for causal LMs: it ends where the label word would follow.
        metric: ``accuracy``, ``macro_f1``, or ``f1`` of label 1; for ``tokens``, ``f1`` of entities; or another registered
            name.
        hub: the task's place on the hub, if it has one.
        instruction: where texts are the answers, an instruction for all rows.
        max_new_tokens: the maximum length of a written text, in tokens.
        stop: texts before which an answer ends.
        closed_answers: the possible answers, of which the likeliest is given; empty if any text is possible.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    template: str = ""
    label_words: tuple[str, ...] = ()
    causal_template: str = ""
    metric: str = "accuracy"
    hub: HubSource | None = None
    instruction: str = ""
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    closed_answers: tuple[str, ...] = ()

    __pydantic_config__ = {"extra": "forbid", "revalidate_instances": "always"}  # noqa: RUF012  # pydantic's name

    @classmethod
    def of_entities(
        cls, name: str, entities: Sequence[str], kind: str = "tokens", metric: str = "f1"
    ) -> TaskDefinition:
        """Return the definition of a task of finding entities of these kinds in sentences.

        >>> TaskDefinition.of_entities("people", ["PER"]).labels
        ('O', 'B-PER', 'I-PER')
        """
        labels = ("O", *(f"{place}-{entity}" for entity in entities for place in "BI"))
        return cls(name, kind, labels, metric=metric)

    @classmethod
    def of_fields(cls, fields: Any) -> TaskDefinition:
        """Return the definition with these `fields`, as loaded from JSON.

        Raises:
            ValueError: a field is unknown, missing or not valid; the message names each.
        """
        task = checked(cls, fields)
        if len({*task.labels}) < len(task.labels):
            raise ValueError(f"labels must be all different, got {brief(task.labels, 200)}")
        return replace(task, hub=None)

    @property
    def fields(self) -> dict[str, Any]:
        """All fields except ``hub``, which is the place of the rows and not part of their meaning."""
        return {name: value for name, value in asdict(self).items() if name != "hub"}

    @property
    def form(self) -> str:
        """The form of a row, such as ``single`` or ``pair``: from the kind, or else from labels and prompts."""
        if self.kind in KIND_OF_FORM:
            return self.kind
        if self.entities:
            return "tokens"
        return "pair" if "text_b" in (*slots(self.template), *slots(self.causal_template)) else "single"

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The names of the text columns in the task's data files."""
        columns = {
            "pair": ("text_a", "text_b"),
            "tokens": ("tokens",),
            "generation": ("prompt",),
            "messages": ("messages",),
        }
        return columns.get(self.form, ("text",))

    @property
    def entities(self) -> tuple[str, ...]:
        """The kinds of entities of a task that labels words, see `of_entities`; empty for any other task."""
        kinds = tuple(label[2:] for label in self.labels[1::2])
        if self.kind == "tokens":
            return kinds
        if self.kind in KIND_OF_FORM or self.labels != TaskDefinition.of_entities(self.name, kinds).labels:
            return ()
        return kinds


def slots(template: str) -> list[str]:
    """Return the slots of a prompt in order, without their styles.

    >>> slots("{text_a:bare}? {mask}, {text_b:lower}")
    ['text_a', 'mask', 'text_b']
    """
    return re.findall(r"\{(.*?)(?::bare|:lower)?\}", template)


#: Prompts for tasks without their own, the commonest of LM-BFF's (Gao et al., 2021, table 1) for each kind.
DEFAULT_TEMPLATE: dict[str, str] = {
    "single": "{text} It was {mask}.",
    "pair": "{text_a:bare}? {mask}, {text_b:lower}",
    "tokens": "",
}
DEFAULT_CAUSAL_TEMPLATE: dict[str, str] = {
    "single": "{text} It was",
    "pair": "{text_a} {text_b} Answer:",
    "tokens": "",
}
