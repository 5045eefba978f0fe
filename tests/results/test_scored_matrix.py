"""What a trainer measured, put together, against numbers worked by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from forgetfree.errors import MetricError, UnknownNameError, UsageError
from forgetfree.results.learning_matrix import LearningMatrix


def measured() -> LearningMatrix:
    matrix = LearningMatrix()
    for after, task, value in (
        (None, "b", 0.5),
        ("a", "a", 0.9),
        ("a", "b", 0.6),
        ("b", "a", 0.7),
        ("b", "b", 0.8),
        ("c", "a", 0.5),
        ("c", "b", 0.9),
        ("c", "c", 0.7),
    ):
        matrix.add(after=after, task=task, value=value)
    return matrix


def test_the_numbers() -> None:
    """Average (0.5 + 0.9 + 0.7)/3. Forgetting: a fell from 0.9 to 0.5, b from 0.8 to 0.9: (0.4 − 0.1)/2. Backward transfer:
    (−0.4 + 0.1)/2. Forward transfer is not known: c was not scored before it was learned.
    """
    matrix = measured()
    assert matrix.tasks == ["a", "b", "c"]
    assert matrix.summary() == pytest.approx({"average": 0.7, "forgetting": 0.15, "bwt": -0.15, "fwt": None})
    for task, value in (("a", 0.4), ("c", 0.3)):
        matrix.add(None, task, value)
    matrix.add("b", "c", 0.5)
    assert matrix.summary()["fwt"] == pytest.approx(((0.6 - 0.5) + (0.5 - 0.3)) / 2)
    assert matrix.frame.loc["b", "a"] == 0.7 and matrix.frame.loc["before", "a"] == 0.4


def test_it_is_shown_as_a_run_is(tmp_path: Path) -> None:
    matrix = measured()
    matrix.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page and "trainer lost 15.0 points on average" in page and "<td>-15.0</td>" in page
    assert "70.0" in repr(matrix) and "—" in repr(matrix) and "<table>" in matrix._repr_html_()
    assert repr(LearningMatrix()) == "LearningMatrix(accuracy; no scores)"


def test_what_is_missing_or_wrong_is_told() -> None:
    matrix = LearningMatrix()
    matrix.add("a", "a", 0.5)
    matrix.add("b", "b", 0.5)
    with pytest.raises(MetricError, match=r"no score of task 'a' after 'b'. Add it: matrix.add\(after='b', task='a'"):
        matrix.summary()
    with pytest.raises(UsageError, match=r"score of task 'a' after 'a' already: 0\.5"):
        matrix.add("a", "a", 0.6)
    for wrong in (math.nan, "0.5", None):
        with pytest.raises(MetricError, match="must be a finite number"):
            matrix.add("c", "a", wrong)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="Did you mean 'accuracy'"):
        LearningMatrix("acuracy")
