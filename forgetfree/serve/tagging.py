"""Tagging in use: how a task that labels words is asked, what is answered, and the network that it is written as."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.nn import functional as F

from forgetfree.core.body import body_of
from forgetfree.data.rows import Rows
from forgetfree.display import brief, escaped, is_text
from forgetfree.errors import GraftError, UsageError
from forgetfree.json_file import parse_json
from forgetfree.kinds.tagging import entities_of
from forgetfree.models.architecture import reads_last
from forgetfree.serve.network import Parts, Reading, TaskNetwork, check_linear, name_labels_, tokenizer_of
from forgetfree.serve.served_task import ServedTask, Text, check_texts


@dataclass(frozen=True)
class Entity:
    """A named entity.

    Attributes:
        kind: of the task's kinds.
        text: its words.
        first, last: the numbers of its first and its last word, from 0.
        probability: the mean of those of its words' labels.
    """

    kind: str
    text: str
    first: int
    last: int
    probability: float


@dataclass(frozen=True)
class TaggedSentence:
    """A sentence with the label of each word, in BIO, and its entities.

    Words beyond the model's longest row are not read: they are ``O`` with probability 1.
    ``cut_tokens`` says how many tokens they are.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    probabilities: tuple[float, ...]
    cut_tokens: int = 0

    @property
    def entities(self) -> list[Entity]:
        """The entities, from left to right."""
        entities = []
        for kind, first, last in entities_of(self.tags):
            shares = self.probabilities[first : last + 1]
            entities.append(
                Entity(kind, " ".join(self.words[first : last + 1]), first, last, sum(shares) / len(shares))
            )
        return entities


class OneEntity(BaseModel):
    """A named entity: its kind, its words, and the numbers of the first and the last of them."""

    kind: str
    text: str
    first: int
    last: int
    probability: float


class OneSentence(BaseModel):
    """What a task that labels words says of one sentence: a tag and its probability for each word, and the entities."""

    task: str
    words: list[str]
    tags: list[str]
    probabilities: list[float]
    cut_tokens: int = Field(description="tokens of the text that are beyond the model's longest, and were not read")
    entities: list[OneEntity]


class TaggingTask(ServedTask):
    """A task that labels the words of sentences."""

    is_routed, of_words = False, True
    deed = "labels words"
    cell = "a text or a list of words"

    def written(self, value: object) -> str | None:
        """Return a text, or a list of words as JSON."""
        is_list = isinstance(value, list) and all(isinstance(word, str) for word in value)
        return json.dumps(value) if is_list else super().written(value)

    def rows(self, texts: Sequence[Text]) -> Rows:
        """Return sentences as rows; raise ``UsageError`` where one is a pair of texts, or has no words, or an empty one."""
        check_texts(texts)
        if any(isinstance(text, tuple) and len(text) > 1 for text in texts):
            raise UsageError(
                f"Task {self.task.name!r} labels the words of one text, got a pair of texts. Give a text with spaces between "
                "its words, or with a JSON list of them in it."
            )
        sentences = [_words(text) for text in texts]
        for number, words in enumerate(sentences, 1):
            if not words or not all(is_text(word) and word for word in words):
                raise UsageError(
                    f"Sentence {number}: expected a list of words, none of them empty, got {brief(words)}."
                )
        joined = tuple(" ".join(word.replace(" ", "\u00a0") for word in words) for words in sentences)
        return Rows(joined, (), tuple((0,) * len(words) for words in sentences))

    def answers(self, texts: Sequence[Text], said: Tensor, cut: Iterable[int]) -> list[TaggedSentence]:
        """Return each sentence with its tags, by logits ``(n_words, n_labels)``."""
        shares, numbers = said.softmax(1).amax(1).tolist(), said.argmax(1).tolist()
        sentences, begin = [], 0
        for words, lost in zip(map(_words, texts), cut, strict=True):
            end = begin + len(words)
            tags = tuple(self.task.labels[number] for number in numbers[begin:end])
            sentences.append(TaggedSentence(tuple(words), tags, tuple(shares[begin:end]), lost))
            begin = end
        return sentences

    def network(self, parts: Parts) -> TaskNetwork:
        """Return a token classifier."""
        return tagging_network(parts)

    def lines(self, texts: tuple[str, ...], answer: TaggedSentence) -> list[str]:
        """Return a line for each entity: kind, probability, its words, the sentence."""
        sentence = escaped(" ".join(answer.words))
        return [
            f"{escaped(entity.kind)}\t{entity.probability:.3f}\t{escaped(entity.text)}\t{sentence}"
            for entity in answer.entities
        ] or [f"-\t-\t-\t{sentence}"]

    def json(self, texts: tuple[str, ...], answer: TaggedSentence) -> dict[str, Any]:
        """Return words, tags and entities."""
        return {**asdict(answer), "entities": [asdict(each) for each in answer.entities]}

    def response(self, answer: TaggedSentence) -> OneSentence:
        """Return the answer as the server sends it."""
        return OneSentence(task=self.task.name, **self.json((), answer))

    def columns(self) -> tuple[str, ...]:
        """Raise ``UsageError``: a sentence has any number of entities."""
        raise UsageError(
            f"Task {self.task.name!r} finds any number of entities in a text, which is no table. Use --json."
        )

    def cells(self, answer: TaggedSentence) -> dict[str, Any]:
        """Return nothing, see `columns`."""
        return {}


def words_of(text: str) -> list[str]:
    """Return the words of a sentence: those between spaces, or those of a JSON list.

    >>> words_of("Jane works here"), words_of('["New York", "is", "far"]')
    (['Jane', 'works', 'here'], ['New York', 'is', 'far'])
    """
    if text.lstrip().startswith("["):
        try:
            words = parse_json(text)
        except ValueError:
            words = None
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            return words
    return text.split()


def _words(text: Text) -> list[str]:
    """Return the words of a text, of a tuple of one, or of a list of words."""
    return text if isinstance(text, list) else words_of(text if isinstance(text, str) else text[0])


# -- As a network of transformers ------------------------------------------------------------------------


def tagging_network(parts: Parts) -> TaskNetwork:
    """Return the token classifier of a task that labels words.

    Raises:
        GraftError: transformers has none for this architecture, or one that computes something else.
    """
    loaded, task = parts.loaded, parts.origin.task
    encoder = loaded.encoder(task)
    ids = encoder(Rows(("What was it ?",), (), ((0,) * 4,)))
    inputs = cast(Any, loaded.model).inputs(torch.tensor(ids, device="cpu"))
    name_labels_(parts.config, task.labels, parts.origin.classes)
    check_linear(parts.readout, len(task.labels), loaded.model.hidden_size)
    network = _token_classifier(parts.config, parts.body, parts.readout, inputs)
    reading = Reading(
        "AutoModelForTokenClassification", encoder, position=-1 if reads_last(parts.config) else 0, usual=True
    )
    return TaskNetwork(network, tokenizer_of(loaded, list(inputs)), reading)


def _token_classifier(
    config: Any, body: Mapping[str, Tensor], readout: Mapping[str, Tensor], row: Mapping[str, Tensor]
) -> Any:
    """Return the architecture's token classifier, which computes W h + b at each token, with ``readout`` as its head.

    Args:
        config: the model's configuration, with the task's labels.
        body: the body's tensors; there may be more.
        readout: ``weight`` ``(n, H)`` and ``bias`` ``(n,)``.
        row: what the model is called with, ``(1, L)``, to compare by.

    Raises:
        GraftError: transformers has none for this architecture, or one that computes something else.
    """
    import transformers

    try:
        loader: Any = transformers.AutoModelForTokenClassification
        network = loader.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    except ValueError as error:
        raise _refusal(config, "there is none") from error
    inside = {*body_of(network).modules()}
    heads = [module for module in network.modules() if isinstance(module, nn.Linear) and module not in inside]
    lacking = body_of(network).load_state_dict(dict(body), strict=False).missing_keys
    if lacking or len(heads) != 1 or heads[0].bias is None or heads[0].weight.shape != readout["weight"].shape:
        raise _refusal(config, f"{type(network).__name__} has another head")
    heads[0].load_state_dict(dict(readout))
    with torch.no_grad():
        expected = F.linear(body_of(network)(**row).last_hidden_state, readout["weight"], readout["bias"])
        if not torch.equal(network(**row).logits, expected):
            raise _refusal(config, f"{type(network).__name__} computes other logits")
    return network


def _refusal(config: Any, why: str) -> GraftError:
    return GraftError(
        f"A graft that labels words is written as a token classifier with one linear layer, and for a model of type "
        f"{config.model_type!r} {why}. Answer from the run itself: forgetfree predict."
    )
