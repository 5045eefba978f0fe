"""Entity F1 against hand-worked numbers, and the floor beneath it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forgetfree.kinds.tagging import TagAnswers, constant_entity_f1, entity_f1

NAMES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def answers(gold: Any, found: Any, lengths: Any) -> TagAnswers:
    return TagAnswers(np.eye(5)[found], np.array(gold), NAMES, np.array(lengths))


@pytest.mark.parametrize(
    ("gold", "found", "expected"),
    [
        ([1, 2, 0, 3], [1, 2, 0, 3], 1.0),
        ([1, 2, 0, 3], [1, 0, 0, 3], 0.5),  # of two entities each, one is right: the person's end is not
        ([1, 2, 0, 3], [0, 0, 0, 3], 2 / 3),  # 1 of 1 found, 1 of 2 there
        ([1, 2, 0, 3], [0, 0, 0, 0], 0.0),
        ([1, 2, 0, 3], [3, 4, 0, 3], 0.5),  # the right words, the wrong kind
        ([1, 2, 0, 3], [2, 2, 0, 4], 1.0),  # as CoNLL's script: an I- that continues nothing begins an entity
        ([1, 1, 0, 0], [1, 2, 0, 0], 0.0),  # two people are not one
        ([0, 0, 0, 0], [0, 0, 0, 0], 0.0),
    ],
)
def test_f1_of_entities(gold: list[int], found: list[int], expected: float) -> None:
    assert entity_f1(answers(gold, found, [4])) == pytest.approx(expected)


def test_no_entity_goes_on_in_another_sentence() -> None:
    """Of three entities, two are found: the second sentence begins with an I- that is one of its own."""
    assert entity_f1(answers([1, 2, 0, 3], [1, 0, 0, 3], [1, 3])) == pytest.approx(2 * 2 / 5)


def test_the_floor_is_the_best_single_label() -> None:
    """Compared with every label tried in turn."""
    draw = np.random.default_rng(1)
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, 4, 30)
        gold = draw.choice(5, lengths.sum(), p=[0.6, 0.15, 0.05, 0.15, 0.05])
        tried = [entity_f1(answers(gold, np.full(len(gold), label), lengths)) for label in range(5)]
        assert tried[0] == 0.0 < max(tried)
        parts = answers(gold, gold, lengths)
        assert constant_entity_f1(parts) == parts.constant_score("f1") == pytest.approx(max(tried))
        assert parts.constant_score("accuracy") == np.bincount(gold).max() / len(gold)
