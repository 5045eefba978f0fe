"""Rows of texts in a report, and what their scores say of other rows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forgetfree.results.report.evidence_tables import text_tables

from forgetfree.results.answers import LabelAnswers, WrittenTexts, array_of
from forgetfree.results.evidence import Evidence, RowScore
from forgetfree.results.report.page import Page, render_page
from forgetfree.results.unit_folder import UnitFiles

RIGHT = [["red", "crimson"], ["<b>blue</b> | green"], ["red"], ["a\nb"]]
PROMPTS = ["Which colour?", "x" * 300, "Which?", "What?"]


def unit(*texts: str, right: Any = RIGHT, before: Any = ()) -> UnitFiles:
    return UnitFiles({}, [], {}, {"colours": WrittenTexts(texts, right, PROMPTS, before)})


def compared(**files: list[UnitFiles]) -> Any:
    runs = [SimpleNamespace(seed=seed, matrix=[[0.0], [0.5]], ece=[[None]] * 2) for seed in range(2)]
    strategies = [SimpleNamespace(label=label, runs=runs, files=units) for label, units in files.items()]
    return SimpleNamespace(tasks=("colours",), metric=("exact_match",), test_rows={"colours": 4}, strategies=strategies)


def test_rows_show_what_was_asked_what_is_right_and_what_each_strategy_wrote() -> None:
    naive = unit("blue", "|", "red", "b", before=["Once", "", "red"])
    (table,) = text_tables(compared(ours=[unit("red", "<i>", "red", "")], naive=[naive]))
    assert table.header == ("", "test row 1", "test row 2", "test row 3")
    cells = {row[0]: row[1:] for row in table.rows}
    assert cells["prompt"] == ("Which colour?", "x" * 200 + "…", "Which?")
    assert cells["right text"] == ("red", "<b>blue</b> | green", "red")
    assert list(cells) == ["prompt", "right text", "the model before training", "ours", "naive"]
    assert cells["the model before training"] == ("Once", "(empty)", "red")
    assert (cells["ours"], cells["naive"]) == (("red", "<i>", "red"), ("blue", "|", "red"))
    page = Page("Texts", (), (table,))
    html, markdown = (render_page(page, format) for format in ("html", "markdown"))
    assert "<i>" not in html
    assert "&lt;i&gt;" in html
    assert len({line.replace("\\|", "").count("|") for line in markdown.splitlines() if line.startswith("|")}) == 1


def test_texts_of_other_rows_do_not_stand_side_by_side() -> None:
    others = [unit("a", "b", "c", "d", right=[["x"]] * 4)]
    assert not list(text_tables(compared(ours=[unit("red", "a", "b", "c")], naive=others)))


def test_differences_are_those_of_the_same_rows() -> None:
    """Both strategies have the same rows right in each seed: their difference does not vary, so there is no interval."""
    texts = [unit("red", "blue green", "no", "no"), unit("red", "blue green", "no", "no")]
    score = RowScore.of_answers(texts[0].texts["colours"], "exact_match")
    assert (score.value, score.rows, score.variance) == (0.25, 4, 0.1875)
    assert score.influence == pytest.approx(np.array([0.75, -0.25, -0.25, -0.25]))
    evidence = Evidence.of(compared(ours=texts, naive=texts))
    difference = evidence.difference("ours", "naive")
    assert difference is not None
    assert difference.value == 0 and np.isnan([difference.low, difference.high]).all()
    assert evidence.average("ours").low < 0.25 < evidence.average("ours").high


def test_texts_are_kept_with_their_prompts() -> None:
    texts = WrittenTexts(["a"], [["b", "c"]], ["d"])
    again = WrittenTexts.of_array(texts.array)
    assert (again.texts, again.right, again.prompts) == (["a"], [["b", "c"]], ["d"])
    assert WrittenTexts.of_array(WrittenTexts(["a"], [["b"]]).array).prompts == []
    assert WrittenTexts.of_array(texts.array, array_of(["e"])).before == ["e"]
    with pytest.raises(ValueError, match="texts before training must be those of 1 rows"):
        WrittenTexts.of_array(texts.array, array_of(["e", "f"]))
    with pytest.raises(ValueError, match="those of the same rows"):
        WrittenTexts.of_array(WrittenTexts(["a", "b"], [["b"]]).array)


def test_the_ece_of_closed_answers_is_one_of_single_rows() -> None:
    """Both are known of them: texts, which are scored, and probabilities."""
    answers = LabelAnswers(np.eye(4, 3, dtype=np.float32), np.array([0, 1, 0, 2]))
    unit_of_both = replace(unit("red", "|", "red", "b"), answers={"colours": answers})
    comparison = compared(ours=[unit_of_both] * 2)
    for run in comparison.strategies[0].runs:
        run.ece, run.right_rows = [[None], [answers.ece]], None
    for metric, expected in (("ece", RowScore.of_answers(answers, "ece").influence), (None, [0.25, -0.75, 0.25, 0.25])):
        found = Evidence.of(comparison, metric).scores["ours"][0]["colours"].influence
        assert found is not None and found.tolist() == pytest.approx(list(expected))
