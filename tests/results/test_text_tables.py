"""Texts of rows in a report, and the influence of rows on their scores."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forgetfree.results.answers import TextAnswers
from forgetfree.results.evidence import RowScore
from forgetfree.results.report.page import Page, render_page
from forgetfree.results.report.run_tables import text_tables
from forgetfree.results.runs import Run, UnitFacts

RIGHT = [["red", "crimson"], ["<b>blue</b> | green"], ["red"], ["a\nb"]]
PROMPTS = ["Which colour?", "x" * 300, "Which?", "What?"]


def run_with(answers: TextAnswers) -> Run:
    return Run(UnitFacts(strategy="a", seed=0), answers={"colours": answers})


def unit(*texts: str, right: Any = RIGHT) -> Run:
    none = np.zeros(0)
    return run_with(TextAnswers(none, np.zeros(4, int), none, np.zeros(4, int), texts, right, PROMPTS))


def compared(**runs: Run) -> Any:
    return SimpleNamespace(tasks=("colours",), units={label: {0: run} for label, run in runs.items()})


def test_rows_show_what_was_asked_what_is_right_and_what_each_strategy_wrote() -> None:
    naive = unit("", "|", "red", "b")
    (table,) = text_tables(compared(ours=unit("red", "<i>", "red", ""), naive=naive))
    assert table.header == ("", "test example 1", "test example 2", "test example 3")
    cells = {row[0]: row[1:] for row in table.rows}
    assert cells["prompt"] == ("Which colour?", "x" * 200 + "…", "Which?")
    assert cells["target"] == ("red", "<b>blue</b> | green", "red")
    assert list(cells) == ["prompt", "target", "ours", "naive"]
    assert (cells["ours"], cells["naive"]) == (("red", "<i>", "red"), ("(empty)", "|", "red"))
    page = Page("Texts", (), (table,))
    html, markdown = (render_page(page, format) for format in ("html", "markdown"))
    assert "<i>" not in html
    assert "&lt;i&gt;" in html
    assert len({line.replace("\\|", "").count("|") for line in markdown.splitlines() if line.startswith("|")}) == 1


def test_texts_of_other_rows_do_not_stand_side_by_side() -> None:
    others = unit("a", "b", "c", "d", right=[["x"]] * 4)
    assert not list(text_tables(compared(ours=unit("red", "a", "b", "c"), naive=others)))


def test_texts_are_kept_with_their_prompts() -> None:
    one = unit("red", "a", "b", "c").texts["colours"]
    again = TextAnswers.of_tensors(one.tensors())
    assert (again.texts, again.right, again.prompts) == (["red", "a", "b", "c"], RIGHT, PROMPTS)
    assert TextAnswers.of_tensors(replace(one, prompts=()).tensors()).prompts == []
    with pytest.raises(ValueError, match="those of the same rows"):
        TextAnswers.of_tensors(replace(one, right=RIGHT[:2]).tensors())


def test_the_ece_of_closed_answers_is_one_of_single_rows() -> None:
    """Closed answers have texts, which are scored, and probabilities."""
    closed = {"logits": np.eye(4, 3, dtype=np.float32), "labels": np.array([0, 1, 0, 2])}
    run = run_with(replace(unit("red", "|", "red", "b").texts["colours"], **closed))
    (answers,) = run.probabilities.values()
    error, score = (RowScore.of_answers(answers, metric) for metric in ("ece", "exact_match"))
    assert error and score and error.value == answers.ece and error.rows == 4
    assert score.influence is not None and score.influence.tolist() == pytest.approx([0.25, -0.75, 0.25, 0.25])
