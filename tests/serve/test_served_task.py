"""A task of each kind in use: its rows, its answers, and how they are shown, without a model."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from forgetfree import registry
from forgetfree.data.rows import Rows
from forgetfree.errors import UsageError
from forgetfree.serve.classification import LabelTask
from forgetfree.serve.served_task import served
from forgetfree.serve.tagging import TaggingTask
from forgetfree.tasks import KIND_OF_FORM, TaskDefinition

MOOD = served(TaskDefinition("mood", "single", ("sad", "glad")))
PAIR = served(TaskDefinition("same", "pair", ("no", "yes")))
PEOPLE = served(TaskDefinition.of_entities("people", ["PER"]))


def test_a_kind_of_tasks_is_used_by_one_class() -> None:
    assert [type(each) for each in (MOOD, PAIR, PEOPLE)] == [LabelTask, LabelTask, TaggingTask]
    for kind in (*KIND_OF_FORM, *registry.kinds()):
        assert served(TaskDefinition("one", kind, ("O", "B-X", "I-X"))).answers([], torch.empty(0, 3), []) == []


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
    assert task.rows(texts) == expected


@pytest.mark.parametrize(
    ("task", "texts", "message"),
    [
        (MOOD, [("one", "two")], "Task 'mood' reads one text, got 2"),
        (MOOD, ["one", None], "Text 2: expected a text, got None. Give one, or leave it out."),
        (PAIR, [("one", float("nan"))], "Text 1: expected a text, got nan."),
        (PEOPLE, [["a", 2]], "Text 1: expected a text, got 2."),
        (MOOD, [()], r"Text 1: expected a text, got \(\)."),
        (MOOD, [{"text": "a film"}], "Text 1: expected a text, got {'text': 'a film'}."),
        (PAIR, [("one", ["x"])], r"Text 1: expected a text, got \['x'\]."),
        (PAIR, ["one"], "Task 'same' reads pairs of texts, got 1"),
        (PEOPLE, [("one", "two")], "Task 'people' labels the words of one text, got a pair of texts"),
        (PEOPLE, ["a", " "], r"Sentence 2: expected a list of words, none of them empty, got \[\]"),
    ],
)
def test_texts_that_do_not_fit_are_refused(task: Any, texts: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        task.rows(texts)


def test_a_label_is_shown_as_a_line_as_json_and_as_a_row_of_a_table() -> None:
    (answer,) = MOOD.answers(["fine"], torch.tensor([[0.0, 0.0]]), [3])
    shown = {
        "task": "mood",
        "label": "sad",
        "probability": 0.5,
        "probabilities": {"sad": 0.5, "glad": 0.5},
        "cut_tokens": 3,
    }
    assert MOOD.lines(("fine",), answer) == ["sad\t0.500\tfine"]
    assert MOOD.json(("fine",), answer) == {"text": "fine", **shown}
    assert PAIR.json(("a", "b"), answer) == {"text_a": "a", "text_b": "b", **shown}
    assert MOOD.response(answer).model_dump() == shown
    cells = MOOD.cells(answer)
    assert [cells[column] for column in MOOD.columns()] == ["mood", "sad", 0.5, 0.5, 0.5]


def test_tags_are_shown_as_lines_and_as_json_and_are_no_table() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 9.0], [9.0, 0.0, 0.0]])
    first, second = PEOPLE.answers(["so Jane Smith", ["no"]], logits, [0, 1])
    assert (first.tags, second.tags, second.cut_tokens) == (("O", "B-PER", "I-PER"), ("O",), 1)
    assert PEOPLE.lines(("…",), first) == ["PER\t1.000\tJane Smith\tso Jane Smith"]
    assert PEOPLE.lines(("…",), second) == ["-\t-\t-\tno"]
    shown = PEOPLE.json(("…",), first)
    assert list(shown) == ["words", "tags", "probabilities", "cut_tokens", "entities"]
    assert json.loads(PEOPLE.response(first).model_dump_json()) == {"task": "people", **json.loads(json.dumps(shown))}
    with pytest.raises(UsageError, match="finds any number of entities in a text, which is no table"):
        PEOPLE.columns()


def test_a_cell_of_a_file_may_be_a_list_of_words_for_a_task_of_words_alone() -> None:
    assert [each.written(["a", "b"]) for each in (MOOD, PEOPLE)] == [None, '["a", "b"]']
    assert [each.written("a b") for each in (MOOD, PEOPLE)] == ["a b", "a b"]
    assert [each.written(["a", 1]) for each in (MOOD, PEOPLE)] == [None, None]


@pytest.mark.parametrize("task", [MOOD, PAIR, PEOPLE])
def test_a_text_in_place_of_a_list_is_refused(task: Any) -> None:
    """Else each of its letters would be answered."""
    with pytest.raises(UsageError, match=r"Expected a list of texts, got the text 'Jane'\. Give \['Jane'\]\."):
        task.rows("Jane")
