"""Metrics of the learning matrix, of runs and of a custom trainer, against the hand-worked numbers in each docstring."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import Json, results_of, run_of, together, write

from forgetfree import load_results, registry
from forgetfree.errors import MetricError, RunError, UnknownNameError, UsageError
from forgetfree.results import metrics
from forgetfree.results.learning_matrix import LearningMatrix
from forgetfree.results.report.run_report import lay_out, render

# Three tasks. Task 0 peaks only after task 1, task 1 falls, and task 2 profits from task 1.
MATRIX = [
    [0.50, 0.25, 0.40],
    [0.80, 0.30, 0.35],
    [0.90, 0.70, 0.50],
    [0.60, 0.65, 0.85],
]
ONE_TASK = [[0.5], [0.9]]


def test_the_numbers_are_worked_by_hand() -> None:
    """Average: (0.60 + 0.65 + 0.85) / 3. Forgetting: max(0.80, 0.90) − 0.60 = 0.30 and 0.70 − 0.65, and 0 for the last task.

    Backward transfer compares with the row of learning: ((0.60 − 0.80) + (0.65 − 0.70)) / 2. Forward transfer compares it with
    fine-tuning, without the first task: ((0.70 − 0.75) + (0.85 − 0.82)) / 2. Zero-shot: ((0.30 − 0.25) + (0.50 − 0.40)) / 2.
    """
    assert metrics.forgetting_per_task(MATRIX) == pytest.approx([0.30, 0.05, 0.0])
    summary = metrics.summarize(np.array(MATRIX), [0.85, 0.75, 0.82])
    assert list(summary) == ["average", "forgetting", "bwt", "fwt", "zero_shot_gain"]
    assert list(summary.values()) == pytest.approx([0.70, 0.175, -0.125, -0.01, 0.075])
    assert all(type(value) is float for value in summary.values())
    assert metrics.summarize(MATRIX) == summary | {"fwt": None}


def test_forgetting_ignores_the_rows_before_learning_and_is_negative_where_a_task_got_better() -> None:
    """The values are 0.80 − 0.75, although row 0 has 0.99, and 0.70 − 0.75."""
    for first, learned, expected in ((0.99, 0.80, 0.05), (0.5, 0.70, -0.05)):
        assert metrics.forgetting_per_task([[first, 0.5], [learned, 0.5], [0.75, 0.9]]) == pytest.approx([expected, 0])


def test_one_task_neither_transfers_nor_forgets() -> None:
    """The average is 0.9, and the other metrics are 0."""
    assert metrics.forgetting_per_task(ONE_TASK) == [0.0]
    assert metrics.summarize(ONE_TASK, [0.95]) == pytest.approx(
        {"average": 0.9, "forgetting": 0.0, "bwt": 0.0, "fwt": 0.0, "zero_shot_gain": 0.0}
    )


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[0.5, 0.5], [0.5, 0.5]], r"^matrix must have shape \(T\+1, T\), .* got shape \(2, 2\)\.$"),
        ([0.5, 0.5], r"^matrix must have shape .* got shape \(2,\)\.$"),
        ([[]], r"^matrix must have shape .* got shape \(1, 0\)\.$"),
        ([[0.5], [90.0]], r"^matrix must hold fractions in \[0, 1\], not percent; got 90\.0\.$"),
        ([[0.5], [-0.1]], r"^matrix must hold fractions .* got -0\.1\.$"),
        ([[0.5], [float("nan")]], r"^matrix must hold fractions .* got nan\.$"),
        ([[0.5], [0.5, 0.6]], r"^matrix must be an array of numbers with rows of equal length; "),
        ([["high"], [0.5]], r"^matrix must be an array of numbers with rows of equal length; "),
    ],
)
def test_a_wrong_matrix_is_refused_by_every_metric(matrix: list[list[float]], message: str) -> None:
    with pytest.raises(MetricError, match=message):
        metrics.forgetting_per_task(matrix)
    with pytest.raises(MetricError, match=message):
        metrics.summarize(matrix, [0.5])


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ([0.5, 0.5], r"^reference must hold one .* shape \(3,\); got shape \(2,\)\.$"),
        ([85.0, 0.5, 0.5], r"^reference must hold fractions in \[0, 1\].* got 85\.0\.$"),
    ],
)
def test_what_does_not_belong_to_the_matrix_is_refused(reference: Any, message: str) -> None:
    with pytest.raises(MetricError, match=message):
        metrics.summarize(MATRIX, reference)


OWN = {
    "error": metrics.Metric(lambda answers: 0.0, higher_is_better=False, bounds=(0.0, None)),
    "correlation": metrics.Metric(lambda answers: 0.0, bounds=(-1.0, 1.0)),
}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the metrics of a package."""
    known = registry.metric
    monkeypatch.setattr(registry, "metric", lambda name: OWN.get(name) or known(name))


@pytest.mark.usefixtures("registered")
def test_where_lower_is_better_to_forget_is_above_zero() -> None:
    """The second task's errors are 0.3, 0.2, 0.1: it gains 0.1 before it is learned, and ends 0.3 below fine-tuning."""
    found = metrics.summarize([[4, 0.3], [1, 0.2], [3, 0.1]], [2, 0.4], ["error", "error"])
    assert found == pytest.approx(
        {
            "average": (3 + 0.1) / 2,
            "forgetting": 2,
            "bwt": -2,
            "fwt": 0.4 - 0.1,
            "zero_shot_gain": 0.3 - 0.2,
        }
    )


# -- Scores of a custom trainer --------------------------------------------------------------------------


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
    (−0.4 + 0.1)/2. Zero-shot is not known: c was not scored before it was learned.
    """
    matrix = measured()
    assert matrix.tasks == ["a", "b", "c"]
    assert matrix.summary() == pytest.approx({"average": 0.7, "forgetting": 0.15, "bwt": -0.15, "zero_shot_gain": None})
    for task, value in (("a", 0.4), ("c", 0.3)):
        matrix.add(None, task, value)
    matrix.add("b", "c", 0.5)
    assert matrix.summary()["zero_shot_gain"] == pytest.approx(((0.6 - 0.5) + (0.5 - 0.3)) / 2)
    assert matrix.frame.loc["b", "a"] == 0.7 and matrix.frame.loc["before", "a"] == 0.4


def test_it_is_shown_as_a_run_is(tmp_path: Path) -> None:
    matrix = measured()
    matrix.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page and "trainer lost 15.0 points on average" in page and "<td>-15.0</td>" in page
    assert "LearningMatrix(accuracy)" in repr(matrix) and "0.7" in repr(matrix) and repr(LearningMatrix())


def test_what_is_missing_or_wrong_is_told() -> None:
    matrix = LearningMatrix()
    matrix.add("a", "a", 0.5)
    matrix.add("b", "b", 0.5)
    with pytest.raises(MetricError, match=r"no score of task 'a' after 'b'. Add it: matrix.add\(after='b', task='a'"):
        matrix.summary()
    with pytest.raises(UsageError, match=r"score of task 'a' after 'a' is already set: 0\.5"):
        matrix.add("a", "a", 0.6)
    for wrong in (math.nan, "0.5", None, 50.0):
        with pytest.raises(MetricError, match=r"must be a finite number in \[0, 1\], as accuracy is, got"):
            matrix.add("c", "a", wrong)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="Did you mean 'accuracy'"):
        LearningMatrix("acuracy")


# -- Missing scores before learning -----------------------------------------------------------------------

LOWER = [[None, None, None], [0.9, None, None], [0.8, 0.7, None], [0.6, 0.7, 0.5]]
WHOLE = [[0.1, 0.2, 0.3], [0.9, 0.4, 0.3], [0.8, 0.7, 0.2], [0.6, 0.7, 0.5]]


def test_metrics_of_what_is_there_do_not_change() -> None:
    lower, whole = (metrics.summarize(matrix, [0.9, 0.9, 0.9]) for matrix in (LOWER, WHOLE))
    assert lower.pop("zero_shot_gain") is None and whole.pop("zero_shot_gain") == pytest.approx(
        (0.4 - 0.2 + 0.2 - 0.3) / 2
    )
    assert lower == whole
    assert metrics.forgetting_per_task(LOWER) == metrics.forgetting_per_task(WHOLE)


CLAIM = "forget_free is True, but learning b changed the predictions for a"


def results_with(ece: Any, matrix: Any = LOWER) -> Json:
    run = run_of("grafting-continual", 0, [], metric=["accuracy"] * 3, matrix=matrix, ece=ece, broken_claims=[CLAIM])
    return results_of(run, stream="a,b,c", tasks=["a", "b", "c"], data={"test_rows": {"a": 4, "b": 4, "c": 4}})


def test_results_go_through_files_tables_and_reports(tmp_path: Path) -> None:
    for table in (together([results_with(LOWER)]), load_results(write(tmp_path / "all", results_with(LOWER)))):
        for format in ("markdown", "rich", "html", "json"):
            text = render(table, format)
            assert "nan" not in text.lower()
            assert "learning b changed the predictions for a" in text.replace("\\", "")
        matrix = table.matrix("grafting-continual")
        assert np.array_equal(np.isnan(matrix), np.triu(np.ones((4, 3), dtype=bool)))
        assert np.isnan(table.summary()["zero_shot_gain", "mean"].item())
        assert table.summary()["average", "mean"].item() == pytest.approx(0.6)
        table.plot()


def test_answers_without_probabilities_have_no_calibration(tmp_path: Path) -> None:
    """The ECE is then null, and no table shows it."""
    results = results_with([[None] * 3] * 4)
    for table in (together([results]), load_results(write(tmp_path / "all", results))):
        titles = [each.title for each in lay_out(table).tables]
        assert not any(title.startswith("Beside") for title in titles)
        assert "ECE" not in lay_out(table).tables[0].header
        for format in ("markdown", "rich", "html", "json"):
            assert "nan" not in render(table, format).lower()
        assert set(table.scores["metric"]) == {"accuracy"}
        assert np.isnan(table.summary()["ece", "mean"].item())


def test_a_task_without_shares_goes_with_tasks_that_are_answered_once_they_are_learned() -> None:
    ece = [[None, *row[1:]] for row in copy.deepcopy(LOWER)]  # the first task has no probabilities
    assert together([results_with(ece)]).matrix("grafting-continual", metric="ece").iloc[:, 0].isna().all()
    ece[2][1] = None
    with pytest.raises(RunError, match=r"ece of b are missing after a task"):
        together([results_with(ece)])
