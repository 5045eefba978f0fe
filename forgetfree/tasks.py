"""What a task is, before any data is read: kind of text, labels, prompt, metric, where the hub has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["single", "pair"]
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class HubSource:
    """Where the Hugging Face hub holds a task.

    Attributes:
        path: repository, e.g. ``nyu-mll/glue``.
        name: its configuration, e.g. ``qnli``.
        columns: the hub's text columns, in order: one for a single text, two for a pair.
        label: the hub's label column.
        splits: our split to the hub's. A missing ``validation`` is held out from ``train``.
        labels: the hub's label value to our label index, where they differ.
    """

    path: str
    name: str | None = None
    columns: tuple[str, ...] = ("text",)
    label: str = "label"
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    labels: Mapping[int, int] | None = None


@dataclass(frozen=True)
class TaskDefinition:
    """One classification task over a text or a pair of texts.

    Attributes:
        name: the task's name, on the command line and in a data directory.
        kind: ``single`` text or ``pair`` of texts.
        labels: label names; their positions are the integer labels.
        template: the prompt for masked LMs, with ``{text}`` or ``{text_a}``/``{text_b}`` and one ``{mask}``.
            ``{text_a:bare}`` drops a final punctuation mark, ``{text_b:lower}`` lower-cases the first letter.
        label_words: one word a label, read at the mask (or, for causal LMs, after the last token).
        causal_template: the prompt for causal LMs: it ends where the label word would follow.
        metric: the score of the paper: ``accuracy``, or ``f1`` of label 1.
        hub: where the hub holds it, if it does.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    template: str = ""
    label_words: tuple[str, ...] = ()
    causal_template: str = ""
    metric: Literal["accuracy", "f1"] = "accuracy"
    hub: HubSource | None = None

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The text columns of the task's data files."""
        return ("text",) if self.kind == "single" else ("text_a", "text_b")


#: Prompts for tasks that bring none, the commonest of LM-BFF's (Gao et al., 2021, table 1) for either kind.
DEFAULT_TEMPLATE: dict[Kind, str] = {
    "single": "{text} It was {mask}.",
    "pair": "{text_a:bare}? {mask}, {text_b:lower}",
}
DEFAULT_CAUSAL_TEMPLATE: dict[Kind, str] = {
    "single": "{text} It was",
    "pair": "{text_a} {text_b} Answer:",
}
