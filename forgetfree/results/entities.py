"""Entity F1: how many named entities are found whole, with the right words and of the right kind."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy.typing as npt

#: Of an entity: its kind, and the numbers of its first word and its last.
Entity = tuple[str, int, int]


@dataclass(frozen=True, eq=False)
class Sentences:
    """How words that are labelled make up sentences.

    Attributes:
        names: of the labels, in BIO: ``O``, ``B-PER``, ``I-PER``, ….
        lengths: of the sentences in words, shape (n_sentences,); their sum is the number of words.
    """

    names: Sequence[str]
    lengths: npt.NDArray[Any]

    def tags(self, labels: npt.NDArray[Any]) -> list[list[str]]:
        """Return the names of the labels of all words, sentence by sentence."""
        ends = [0, *accumulate(self.lengths.tolist())]
        named = [self.names[label] for label in labels.tolist()]
        return [named[begin:end] for begin, end in pairwise(ends)]


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of one sentence as seqeval, and CoNLL's own script before it, find them.

    An ``I-`` that continues no entity of its kind begins one.

    >>> entities_of(["B-PER", "I-PER", "O", "I-LOC"])
    [('PER', 0, 1), ('LOC', 3, 3)]
    """
    from seqeval.metrics.sequence_labeling import get_entities

    with warnings.catch_warnings():  # it warns of names such as LABEL_0, which are no tags
        warnings.simplefilter("ignore")
        return [(str(kind), int(first), int(last)) for kind, first, last in get_entities(list(tags))]


def entity_f1(predicted: npt.NDArray[Any], labels: npt.NDArray[Any], sentences: Sentences) -> float:
    """Return the F1 of all entities of all kinds together (micro average), by seqeval.

    Args:
        predicted: numbers of the labels that words are given, shape (n_words,).
        labels: numbers of the labels that they have, same shape.
        sentences: that the words make up.

    Returns:
        A fraction in [0, 1]; 0.0 where no entity is found.
    """
    from seqeval.metrics import f1_score

    return float(f1_score(sentences.tags(labels), sentences.tags(predicted), zero_division=0))


def constant_entity_f1(labels: npt.NDArray[Any], sentences: Sentences) -> float:
    """Return the best entity F1 that one and the same label for every word can have.

    ``O`` finds nothing. ``B-X`` finds the X of one word, ``I-X`` those that are whole sentences, each among as many guesses
    as there are words, or sentences.
    """
    entities, single, whole = 0, Counter[str](), Counter[str]()
    for tags in sentences.tags(labels):
        for kind, first, last in entities_of(tags):
            entities += 1
            single[kind] += first == last
            whole[kind] += last - first + 1 == len(tags)
    right = (max(counts.values(), default=0) for counts in (single, whole))
    return max(
        2 * hits / (guesses + entities)
        for hits, guesses in zip(right, (len(labels), len(sentences.lengths)), strict=True)
    )
