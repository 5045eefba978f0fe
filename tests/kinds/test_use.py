"""New texts for each kind of task, without a model: rows, replies, and their output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from forgetfree import registry
from forgetfree.data.rows import Rows
from forgetfree.errors import UsageError
from forgetfree.kinds.kind import kind_of
from forgetfree.tasks import KIND_OF_FORM, TaskDefinition

MOOD = TaskDefinition("mood", "single", ("sad", "glad"))
PAIR = TaskDefinition("same", "pair", ("no", "yes"))
PEOPLE = TaskDefinition.of_entities("people", ["PER"])


def test_no_text_has_no_reply() -> None:
    for kind in (*KIND_OF_FORM, *registry.kinds()):
        task = TaskDefinition("one", kind, ("O", "B-X", "I-X"))
        assert kind_of(task).replies(task, [], torch.empty(0, 3), []) == []


@pytest.mark.parametrize(
    ("task", "texts", "expected"),
    [
        (MOOD, ["a film", ("a book",)], Rows(("a film", "a book"), (), (0, 0))),
        (PAIR, [("who?", "she")], Rows(("who?",), ("she",), (0,))),
        (PAIR, np.array([["who?", "she"]]), Rows(("who?",), ("she",), (0,))),
        (PEOPLE, ["Jane went", ('["New York"]',), ["a", "b c"]], None),
    ],
)
def test_texts_become_rows(task: Any, texts: Any, expected: Rows | None) -> None:
    if expected is None:
        expected = Rows(("Jane went", "New\u00a0York", "a b\u00a0c"), (), ((0, 0), (0,), (0, 0)))
    assert kind_of(task).rows(task, texts) == expected


@pytest.mark.parametrize(
    ("task", "texts", "message"),
    [
        (MOOD, [("one", "two")], "Task 'mood' reads one text, got 2"),
        (MOOD, ["one", None], "Text 2: expected a text, got None. Give one, or leave it out."),
        (PAIR, [("one", float("nan"))], "Text 1: expected a text, got nan."),
        (PEOPLE, [["a", 2]], "Text 1: expected a text, got 2."),
        (MOOD, [{"text": "a film"}], "Text 1: expected a text, got {'text': 'a film'}."),
        (PAIR, ["one"], "Task 'same' reads pairs of texts, got 1"),
        (PEOPLE, [("one", "two")], "Task 'people' labels the words of one text, got a pair of texts"),
        (PEOPLE, "Jane", r"Expected a list of texts, got the text 'Jane'\. Give \['Jane'\]\."),  # not its letters
        (PEOPLE, ["a", " "], r"Sentence 2: expected a list of words, none of them empty, got \[\]"),
    ],
)
def test_texts_that_do_not_fit_are_refused(task: Any, texts: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kind_of(task).rows(task, texts)


def test_a_label_is_shown_as_a_line_as_json_and_as_a_row_of_a_table() -> None:
    (answer,) = kind_of(MOOD).replies(MOOD, ["fine"], torch.tensor([[0.0, 0.0]]), [3])
    shown = {
        "task": "mood",
        "label": "sad",
        "probability": 0.5,
        "probabilities": {"sad": 0.5, "glad": 0.5},
        "cut_tokens": 3,
    }
    assert kind_of(MOOD).lines(MOOD, ("fine",), answer) == ["sad\t0.500\tfine"]
    assert kind_of(MOOD).json(MOOD, answer, ("fine",)) == {"text": "fine", **shown}
    assert kind_of(PAIR).json(PAIR, answer, ("a", "b")) == {"text_a": "a", "text_b": "b", **shown}
    assert kind_of(MOOD).json(MOOD, answer) == shown
    columns = ("task", "label", "probability", "probability of sad", "probability of glad")
    assert kind_of(MOOD).columns(MOOD) == columns


def test_tags_are_shown_as_lines_and_as_json_and_are_no_table() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 9.0], [9.0, 0.0, 0.0]])
    first, second = kind_of(PEOPLE).replies(PEOPLE, ["so Jane Smith", ["no"]], logits, [0, 1])
    assert (first.tags, second.tags, second.cut_tokens) == (("O", "B-PER", "I-PER"), ("O",), 1)
    assert kind_of(PEOPLE).lines(PEOPLE, ("…",), first) == ["PER\t1.000\tJane Smith\tso Jane Smith"]
    assert kind_of(PEOPLE).lines(PEOPLE, ("…",), second) == ["-\t-\t-\tno"]
    shown = kind_of(PEOPLE).json(PEOPLE, first, ("…",))
    assert list(shown) == ["task", "words", "tags", "probabilities", "cut_tokens", "entities"]
    assert [each["text"] for each in shown["entities"]] == ["Jane Smith"]
    with pytest.raises(UsageError, match="finds any number of entities in a text, which is no table"):
        kind_of(PEOPLE).columns(PEOPLE)


def test_a_cell_of_a_file_may_be_a_list_of_words_for_a_task_of_words_alone() -> None:
    assert [kind_of(each).text_of_cell(each, ["a", "b"]) for each in (MOOD, PEOPLE)] == [None, '["a", "b"]']
    assert [kind_of(each).text_of_cell(each, "a b") for each in (MOOD, PEOPLE)] == ["a b", "a b"]
    assert [kind_of(each).text_of_cell(each, ["a", 1]) for each in (MOOD, PEOPLE)] == [None, None]
