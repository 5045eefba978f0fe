"""What a task is, before any data is read: form of its rows, labels or texts, prompt, metric, where the hub has it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Where the Hugging Face hub holds a task.

    Attributes:
        path: repository, e.g. ``nyu-mll/glue``; or a folder of data files, such as an installed package ships.
        name: its configuration, e.g. ``qnli``.
        columns: the hub's text columns, in order: one for a single text, two for a pair. Where a text is made of
            several columns, a template such as ``{title}. {content}``.
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


#: What is known at inference (van de Ven & Tolias, 2019): the task; or neither the task nor which of all tasks'
#: labels are meant (``class``), or not the task but the labels, which all tasks share (``domain``).
Scenario = Literal["task", "class", "domain"]

#: Which rows models are scored on: those of the test set; or validation rows in their place, to choose options by.
EvaluatedOn = Literal["test", "validation"]

#: The metrics of tasks whose labels are told apart from those of all others, ``class``.
OF_ALL_LABELS = ("accuracy", "macro_f1")

#: The longest text that may be asked for, in tokens.
MOST_NEW_TOKENS = 8192
#: The most beams, and the temperatures that tokens are drawn at.
_MOST_BEAMS, _LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 64, 1e-6, 100
#: The fields of a definition that are about answers that are texts.
_OF_TEXTS = ("instruction", "max_new_tokens", "stop")

#: Longest row in tokens where nothing else is said (LM-BFF's default); the longest text is cut first.
MAX_LENGTH = 128
#: The same where texts are the answers: instructions and what is to be summarised are long.
_MAX_LENGTH_OF_TEXTS = 1024


@dataclass(frozen=True)
class Decoding:
    """How texts are written. By default greedily: the likeliest token, always.

    Attributes:
        num_beams: how many texts are kept side by side in the search for the likeliest; 1: no search.
        temperature: that at which each token is drawn; 0: none is drawn.
        top_p: tokens are drawn among the likeliest, which make up this probability.
        seed: of what is drawn; each prompt has its own.
    """

    num_beams: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  # pydantic's name

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one."""
        return self.num_beams == 1 and not self.temperature

    def otherwise(self, **options: Any) -> Decoding:
        """Return what is asked for in place of this; ``None`` is as it is here. Beams and a temperature replace each other."""
        changes = {name: value for name, value in options.items() if value is not None}
        base = self
        if changes.keys() & {"num_beams", "temperature"}:
            base = replace(self, num_beams=1) if changes.get("temperature") else GREEDY
        return replace(base, **changes)

    def faults(self, named: Callable[[str], str] = str) -> list[str]:
        """Return a phrase for each fault.

        Args:
            named: makes what the caller calls a field of its name.
        """
        beams, temperature, top_p, seed = map(named, ("num_beams", "temperature", "top_p", "seed"))
        faults = []
        if not 1 <= self.num_beams <= _MOST_BEAMS:
            faults.append(f"{beams} must be from 1 to {_MOST_BEAMS}, got {self.num_beams}")
        if self.temperature != 0 and not _LOWEST_TEMPERATURE <= self.temperature <= _HIGHEST_TEMPERATURE:
            faults.append(
                f"{temperature} must be 0, or from {_LOWEST_TEMPERATURE} to {_HIGHEST_TEMPERATURE}, got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            faults.append(f"{top_p} must be above 0, and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            faults.append(f"{seed} must be from 0 to 2^63 - 1, got {self.seed}")
        if self.num_beams > 1 and self.temperature:
            faults.append(
                f"{beams} must be 1 where {temperature} draws texts, got {beams} {self.num_beams} and {temperature} "
                f"{self.temperature}: leave one of them out"
            )
        if self.top_p < 1 and not self.temperature:
            faults.append(
                f"{top_p} must be 1 where texts are not drawn, got {self.top_p}: give {temperature}, too, or leave it out"
            )
        return faults


GREEDY = Decoding()


def seeded(task: TaskDefinition, seed: int, sampling_seed: int | None) -> TaskDefinition:
    """Return a task whose texts are drawn by a run's own seed, unless the run was given another for them.

    Args:
        task: as config.json has it, the same for all seeds of a run.
        seed: of the run.
        sampling_seed: what was given.
    """
    drawn = task.decoding.temperature and sampling_seed is None
    return replace(task, decoding=replace(task.decoding, seed=seed)) if drawn else task


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
        decoding: how a text is written.
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
    decoding: Decoding = GREEDY
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
        if faults := task.label_faults():
            raise ValueError("; ".join(faults))
        return replace(task, hub=None)

    @property
    def fields(self) -> dict[str, Any]:
        """All fields without ``hub``, which says where rows are and not what they mean.

        Those of answers that are texts stand there for such tasks alone; ``decoding`` where it is not greedy, and
        ``closed_answers`` where there are some.
        """
        unsaid = [*(() if self.writes else _OF_TEXTS), *(["decoding"] if self.decoding == GREEDY else [])]
        unsaid += [] if self.closed_answers else ["closed_answers"]
        return {name: value for name, value in (asdict(self) | {"hub": None}).items() if name not in unsaid}

    @property
    def writes(self) -> bool:
        """Whether the answers are texts, which a language model writes."""
        return self.kind in ("generation", "messages")

    @property
    def writes_freely(self) -> bool:
        """Whether any text may answer."""
        return self.writes and not self.closed_answers

    def reading(self, readout: str) -> dict[str, Any]:
        """Return the fields that decide how a model with this readout answers, by name.

        They are kind and labels; for a readout by label words also these words and the prompt; for texts how they are asked for
        and when they end.
        """
        names = ["kind", "labels"]
        if self.writes:
            names = ["kind", "template", *_OF_TEXTS, "decoding", "closed_answers"]
        elif readout in ("prompt", "causal", "generate"):
            names += ["label_words", "template" if readout == "prompt" else "causal_template"]
        fields = asdict(self)
        return {name: fields[name] for name in names}

    @property
    def form(self) -> str:
        """What a row is, ``single``, ``pair`` or such: the kind says it, or else labels and prompts do."""
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

    def faults(self) -> list[str]:
        """Return a phrase for each fault of the definition; none if it can be used with every readout."""
        try:
            checked(TaskDefinition, self)
        except ValueError as error:
            return [str(error)]
        if self.writes:
            return self.template_faults()
        if self.kind not in ("single", "pair"):
            return self.label_faults()
        return [*self.label_faults(), *self.prompt_faults("prompt"), *self.prompt_faults("causal", words=False)]

    def prompt_faults(self, readout: str, *, words: bool = True) -> list[str]:
        """Return a phrase for each thing that a readout by label words lacks.

        Args:
            readout: ``prompt`` or ``causal``.
            words: whether to check the label words, too.
        """
        faults = []
        if self.form == "tokens":
            return ["its words are labelled one by one, and label words stand for whole texts"]
        if words and len(set(self.label_words)) != len(self.labels):
            faults.append(f"label_words must be as many as labels, all different, got {brief(self.label_words, 200)}")
        name, expected = "causal_template", [*self.text_columns]
        if readout == "prompt":
            name, expected = "template", [*expected, "mask"]
        prompt = getattr(self, name)
        if not isinstance(prompt, str) or sorted(slots(prompt)) != sorted(expected):
            each = ", ".join(f"{{{slot}}}" for slot in expected)
            faults.append(f"{name} must hold each of {each} once and no other slot, got {prompt!r}")
        return faults

    def template_faults(self) -> list[str]:
        """Return a phrase for each fault of what stands before an answer that is a text."""
        faults = []
        if self.labels:
            faults.append(f"labels must be none where answers are texts, got {brief(self.labels, 200)}")
        if self.template and self.template.count("{prompt}") != 1:
            faults.append(f"template must hold {{prompt}} once, got {brief(self.template, 200)}")
        if self.instruction and self.template and "{instruction}" not in self.template:
            faults.append(f"template must hold {{instruction}}, since there is one, got {brief(self.template, 200)}")
        if not 1 <= self.max_new_tokens <= MOST_NEW_TOKENS:
            faults.append(f"max_new_tokens must be from 1 to {MOST_NEW_TOKENS:,}, got {self.max_new_tokens}")
        if self.template and self.kind == "messages":
            faults.append("template must be left out for chats, which the tokenizer's chat template puts together")
        if not all(self.stop):
            faults.append(f"stop must hold no empty text, got {brief(self.stop, 200)}")
        closed = self.closed_answers
        if closed and (
            len({*closed}) < max(2, len(closed)) or not all(text and text == text.strip() for text in closed)
        ):
            faults.append(
                "closed_answers must be at least two texts, all different, without white space around them, got "
                f"{brief(closed, 200)}"
            )
        return [*faults, *self.decoding.faults()]

    def label_faults(self) -> list[str]:
        """Return a phrase for each fault of the labels, of the metric and of the hub's columns."""
        if self.writes:
            return self.template_faults()
        faults = []
        if len(set(self.labels)) != len(self.labels) or len(self.labels) < 2:
            faults.append(f"labels must be at least two names, all different, got {brief(self.labels, 200)}")
        if self.kind == "tokens":
            if self.labels != TaskDefinition.of_entities(self.name, self.entities).labels:
                faults.append(
                    f"labels must be O, and B-X and I-X for each kind X of entity, got {brief(self.labels, 200)}"
                )
            if self.metric != "f1":
                faults.append(f"metric must be 'f1', that of entities, for kind 'tokens', got {self.metric!r}")
        elif self.metric == "f1" and self.kind in KIND_OF_FORM and len(self.labels) != 2:
            faults.append(
                f"metric must be 'accuracy' or 'macro_f1' for {len(self.labels)} labels: 'f1' is that of label 1 of two"
            )
        if self.hub and len(self.hub.columns) != len(self.text_columns):
            faults.append(
                f"hub.columns must be one for each text, {len(self.text_columns)}, got {brief(self.hub.columns, 200)}"
            )
        return faults


def usual_max_length(tasks: Iterable[TaskDefinition]) -> int:
    """Return the longest row of a model that learns these tasks, in tokens, where nothing else is said."""
    return _MAX_LENGTH_OF_TEXTS if any(task.writes for task in tasks) else MAX_LENGTH


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
