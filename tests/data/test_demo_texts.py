"""The demo tasks that are answered by texts: the same rows everywhere, short, and out of reach of what was seen in training."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from difflib import SequenceMatcher

import pytest

from forgetfree.data.demo import TEXTS, load
from forgetfree.data.streams import STREAMS
from forgetfree.data.streams import TASKS as DEFINITIONS
from forgetfree.results.text_metrics import ROWS

ROWS_SHA256 = {
    "when_is_it": "f66c791d6a60cd14068c0f8ba4e0b16189dc104e4685be1b51612cc317fb782a",
    "who_and_where": "2ca2f7067226656f52f6d37df31ecafa41303ad96e7dad92c034b9be1f328526",
    "in_one_line": "3c28d1fc70e51df37826e77f6977ac9cb8dac5d5a983d2a86b5a087949b7f9af",
}
SIZES = {"train": 240, "validation": 48, "test": 48}


def test_these_are_the_tasks() -> None:
    assert STREAMS["generation-demo"] == TEXTS
    assert all(DEFINITIONS[task].max_new_tokens <= 16 for task in TEXTS)


@pytest.mark.parametrize("task", TEXTS)
def test_rows_are_pinned(task: str) -> None:
    rows = json.dumps(load(task), ensure_ascii=True)
    assert hashlib.sha256(rows.encode()).hexdigest() == ROWS_SHA256[task]


@pytest.mark.parametrize("task", TEXTS)
def test_rows_are_prompts_and_right_texts_and_none_occurs_twice(task: str) -> None:
    splits = load(task)
    assert {split: len(rows) for split, rows in splits.items()} == SIZES
    prompts = Counter(prompt for rows in splits.values() for prompt, _, _ in rows)
    assert max(prompts.values()) == 1
    for prompt, second, right in (row for rows in splits.values() for row in rows):
        assert second is None and isinstance(right, tuple) and len(right) == 1
        for text in (prompt, right[0]):
            assert isinstance(text, str) and text == text.strip() and "\n" not in text and "{" not in text


# -- Floors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "ceiling"), [("when_is_it", 0.03), ("who_and_where", 0.1), ("in_one_line", 0.4)])
def test_one_answer_to_all_rows_stays_weak(task: str, ceiling: float) -> None:
    right = [row[2] for row in load(task)["test"]]
    scores = [ROWS[DEFINITIONS[task].metric]([target] * len(right), right).mean() for (target,) in set(right)]
    assert max(scores) <= ceiling


@pytest.mark.parametrize(("task", "ceiling"), [("when_is_it", 0.0), ("who_and_where", 0.0), ("in_one_line", 0.5)])
def test_the_answer_of_the_most_similar_training_row_stays_weak(task: str, ceiling: float) -> None:
    splits = load(task)

    def nearest(prompt: str) -> str:
        words = prompt.split()
        best = max(splits["train"], key=lambda row: SequenceMatcher(None, row[0].split(), words).ratio())
        return best[2][0]

    test = splits["test"]
    assert ROWS[DEFINITIONS[task].metric]([nearest(row[0]) for row in test], [row[2] for row in test]).mean() <= ceiling
