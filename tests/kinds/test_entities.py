"""Entity F1 and its floor, against hand-worked numbers."""

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
        ([1, 2, 0, 3], [1, 0, 0, 3], 0.5),  # 2 expected, 2 found, 1 right: the person ends too early
        ([1, 2, 0, 3], [0, 0, 0, 3], 2 / 3),  # 2 expected, 1 found, 1 right
        ([1, 2, 0, 3], [0, 0, 0, 0], 0.0),
        ([1, 2, 0, 3], [3, 4, 0, 3], 0.5),  # the right words, the wrong type
        ([1, 2, 0, 3], [2, 2, 0, 4], 1.0),  # as in CoNLL's script, an I- that continues nothing begins an entity
        ([1, 1, 0, 0], [1, 2, 0, 0], 0.0),  # one entity in place of two people
        ([0, 0, 0, 0], [0, 0, 0, 0], 0.0),
    ],
)
def test_f1_of_entities(gold: list[int], found: list[int], expected: float) -> None:
    assert entity_f1(answers(gold, found, [4])) == pytest.approx(expected)


def test_no_entity_goes_on_in_another_sentence() -> None:
    """Three entities are expected, and two are found: the I- that begins the second sentence is an entity of its own."""
    assert entity_f1(answers([1, 2, 0, 3], [1, 0, 0, 3], [1, 3])) == pytest.approx(2 * 2 / 5)


def test_the_floor_is_the_best_single_label() -> None:
    """The floor equals the best score among all labels, tried in turn."""
    draw = np.random.default_rng(1)
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, 4, 30)
        gold = draw.choice(5, lengths.sum(), p=[0.6, 0.15, 0.05, 0.15, 0.05])
        tried = [entity_f1(answers(gold, np.full(len(gold), label), lengths)) for label in range(5)]
        assert tried[0] == 0.0 < max(tried)
        parts = answers(gold, gold, lengths)
        assert constant_entity_f1(parts) == parts.constant_score("f1") == pytest.approx(max(tried))
        assert parts.constant_score("accuracy") == np.bincount(gold).max() / len(gold)
