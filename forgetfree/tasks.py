"""The definition of a task, before any data is read: form of its rows, labels or texts, prompt, metric, place on the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from forgetfree.display import brief
from forgetfree.json_file import checked

#: The kind of a task, as `forgetfree.registry.kind` knows it, by the form of its rows: a text, two, the words of a sentence, a
#: prompt with the text that answers it, or a chat. The definition of a task of ours names the form; that of a task of another
#: kind names the kind.
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
        columns: the hub's text columns, in order: one for a single text, two for a pair. Where a text is made of
            several columns, a template such as ``{title}. {content}``.
        label: the hub's label column.
        splits: our split to the hub's. A missing ``validation`` is split off from ``train``.
        labels: the hub's label value to our label index, where they differ.
    """

    path: str
    name: str | None = None
    columns: tuple[str, ...] = ("text",)
    label: str = "label"
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    labels: Mapping[int, int] | None = None


#: What is known at inference (van de Ven & Tolias, 2019): the task; or neither the task nor which of all tasks'
#: labels are meant (``class``), or not the task but the labels, which all tasks share (``domain``).
Scenario = Literal["task", "class", "domain"]

#: Which rows models are scored on: those of the test set; or validation rows in their place, to choose options by.
EvaluatedOn = Literal["test", "validation"]

#: The metrics of tasks whose labels are told apart from those of all others, ``class``.
OF_ALL_LABELS = ("accuracy", "macro_f1")

#: The longest text that may be asked for, in tokens.
MOST_NEW_TOKENS = 8192

#: Longest row in tokens where nothing else is said (LM-BFF's default); the longest text is cut first.
MAX_LENGTH = 128


@dataclass(frozen=True)
class TaskDefinition:
    """A task over a text, a pair of texts, or each word of a sentence; or one that is answered by a text.

    Attributes:
        name: the task's name, on the command line and in a data directory.
        kind: ``single`` text, ``pair`` of texts, or ``tokens``: the words of a sentence; ``generation`` of a text that answers
            a prompt, or ``messages`` of a chat; or the name of a registered kind.
        labels: label names; their positions are the integer labels. For ``tokens``, ``O`` and then ``B-X`` and ``I-X`` for
            each kind X of entity: see `of_entities`. None where texts are the answers.
        template: the prompt for masked LMs, with ``{text}`` or ``{text_a}``/``{text_b}`` and one ``{mask}``.
            ``{text_a:bare}`` drops a final punctuation mark, ``{text_b:lower}`` lower-cases the first letter. Where texts are
            the answers, what stands before an answer, with ``{prompt}``; empty: the tokenizer's chat template, if it has one.
        label_words: one word a label, read at the mask (or, for causal LMs, after the last token).
        causal_template: the prompt for causal LMs: it ends where the label word would follow.
        metric: ``accuracy``, ``macro_f1``, or ``f1`` of label 1; for ``tokens``, ``f1`` of entities; or the name of another
            that is registered.
        hub: where the hub holds it, if it does.
        instruction: what to do, the same for all rows, where texts are the answers.
        max_new_tokens: the longest text that is written, in tokens.
        stop: texts before which an answer ends.
        closed_answers: the texts that may answer, of which the likeliest does; none where any text may.
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
        """Return the definition of a task that finds entities of these kinds in sentences.

        >>> TaskDefinition.of_entities("people", ["PER"]).labels
        ('O', 'B-PER', 'I-PER')
        """
        labels = ("O", *(f"{place}-{entity}" for entity in entities for place in "BI"))
        return cls(name, kind, labels, metric=metric)

    @classmethod
    def of_fields(cls, fields: Any) -> TaskDefinition:
        """Return the definition with these `fields`, as they come back from JSON.

        Raises:
            ValueError: a field is not known, is missing or does not fit; the message names each.
        """
        task = checked(cls, fields)
        if len({*task.labels}) < len(task.labels):
            raise ValueError(f"labels must be all different, got {brief(task.labels, 200)}")
        return replace(task, hub=None)

    @property
    def fields(self) -> dict[str, Any]:
        """All fields without ``hub``, which says where rows are and not what they mean."""
        return {name: value for name, value in asdict(self).items() if name != "hub"}

    @property
    def form(self) -> str:
        """The form of a row, ``single``, ``pair`` or such: the kind says it, or else labels and prompts do."""
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
        """The kinds of entities that a task finds whose labels are those of words: see `of_entities`."""
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


#: Prompts for tasks that bring none, the commonest of LM-BFF's (Gao et al., 2021, table 1) for either kind.
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
