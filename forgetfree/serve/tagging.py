"""Named entities in sentences, from a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forgetfree.data.rows import Rows
from forgetfree.display import brief, is_text
from forgetfree.errors import UsageError
from forgetfree.json_file import parse_json
from forgetfree.results.entities import entities_of

if TYPE_CHECKING:
    from forgetfree.serve.inference import Predictor


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
        found = []
        for kind, first, last in entities_of(self.tags):
            shares = self.probabilities[first : last + 1]
            found.append(Entity(kind, " ".join(self.words[first : last + 1]), first, last, sum(shares) / len(shares)))
        return found


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


def check_sentences(sentences: Sequence[Sequence[str]]) -> None:
    """Refuse sentences that cannot be labelled.

    Raises:
        UsageError: one has no words, or an empty one.
    """
    for number, words in enumerate(sentences, 1):
        if isinstance(words, str) or not words or not all(is_text(word) and word for word in words):
            raise UsageError(f"Sentence {number}: expected a list of words, none of them empty, got {brief(words)}.")


def tag_sentences(
    predictor: Predictor, task: str, sentences: Sequence[Sequence[str]], *, batch_size: int = 64
) -> list[TaggedSentence]:
    """Return the labels of the words of sentences.

    Args:
        predictor: of a run.
        task: one that labels words.
        sentences: lists of words, as `words_of` makes them of a text.
        batch_size: sentences in a forward pass.

    Raises:
        UsageError: the task labels whole texts, or a sentence has no words, or an empty one.
    """
    definition = predictor.definition(task)
    if definition.kind != "tokens":
        raise UsageError(f"Task {task!r} labels whole texts, and no words. Give one that finds entities.")
    check_sentences(sentences)
    if not sentences:
        return []
    first = tuple(" ".join(word.replace(" ", "\u00a0") for word in words) for words in sentences)
    rows = Rows(first, (), tuple((0,) * len(words) for words in sentences))
    logits, cut = predictor.read(task, rows, batch_size=batch_size)
    shares, numbers = logits.softmax(1).amax(1), logits.argmax(1)
    found, begin = [], 0
    for words, lost in zip(sentences, cut, strict=True):
        end = begin + len(words)
        tags = tuple(definition.labels[number] for number in numbers[begin:end].tolist())
        found.append(TaggedSentence(tuple(words), tags, tuple(shares[begin:end].tolist()), lost))
        begin = end
    return found
