"""A matrix may lack what was not evaluated before it was learned: metrics, files and reports say so and go on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import Json, results_of, run_of, together, write

from forgetfree import load_results
from forgetfree.errors import MetricError, ReportError
from forgetfree.results import learning_matrix
from forgetfree.results.report.run_report import lay_out, render

LOWER = [[None, None, None], [0.9, None, None], [0.8, 0.7, None], [0.6, 0.7, 0.5]]
WHOLE = [[0.1, 0.2, 0.3], [0.9, 0.4, 0.3], [0.8, 0.7, 0.2], [0.6, 0.7, 0.5]]


def test_metrics_of_what_is_there_do_not_change() -> None:
    lower, whole = (learning_matrix.summarize(matrix, matrix, [0.9, 0.9, 0.9]) for matrix in (LOWER, WHOLE))
    assert lower.pop("fwt") is None and whole.pop("fwt") == pytest.approx((0.4 - 0.2 + 0.2 - 0.3) / 2)
    assert lower == whole
    assert learning_matrix.forgetting_per_task(LOWER) == learning_matrix.forgetting_per_task(WHOLE)


def test_a_missing_score_of_a_learned_task_is_refused() -> None:
    for place in ((1, 0), (3, 0), (3, 2)):
        damaged = copy.deepcopy(LOWER)
        damaged[place[0]][place[1]] = None
        with pytest.raises(MetricError, match="fractions"):
            learning_matrix.average_accuracy(damaged)


CLAIM = "forget_free: claimed as True, but learning b changed the answers for a"


def results_with(ece: Any, matrix: Any = LOWER) -> Json:
    run = run_of("grafting-continual", 0, [], metric=["accuracy"] * 3, matrix=matrix, ece=ece, broken_claims=[CLAIM])
    return results_of(run, stream="a,b,c", tasks=["a", "b", "c"], data={"test_rows": {"a": 4, "b": 4, "c": 4}})


def test_results_go_through_files_tables_and_reports(tmp_path: Path) -> None:
    for table in (together([results_with(LOWER)]), load_results(write(tmp_path / "all", results_with(LOWER)))):
        for format in ("markdown", "rich", "html", "json"):
            text = render(table, format)
            assert "nan" not in text.lower()
            assert "learning b changed the answers for a" in text.replace("\\", "")
        matrix = table.matrix("grafting-continual")
        assert np.array_equal(np.isnan(matrix), np.triu(np.ones((4, 3), dtype=bool)))
        assert np.isnan(table.summary()["fwt", "mean"].item())
        assert table.summary()["average", "mean"].item() == pytest.approx(0.6)
        table.plot()


def test_answers_without_probabilities_have_no_calibration(tmp_path: Path) -> None:
    """ECE is null then, and no table shows it."""
    results = results_with([[None] * 3] * 4)
    for table in (together([results]), load_results(write(tmp_path / "all", results))):
        titles = [each.title for each in lay_out(table).tables]
        assert not any(title.startswith(("Calibration", "Agreement")) for title in titles)
        assert "ECE" not in lay_out(table).tables[0].header
        for format in ("markdown", "rich", "html", "json"):
            assert "nan" not in render(table, format).lower()
        assert set(table.scores["metric"]) == {"accuracy"}
        assert np.isnan(table.summary()["ece", "mean"].item())


@pytest.mark.parametrize("place", [(1, 0), (3, 2)])
def test_what_lacks_a_learned_score_is_refused(place: Any) -> None:
    matrix = copy.deepcopy(LOWER)
    matrix[place[0]][place[1]] = None
    with pytest.raises(ReportError, match=r"grafting-continual with seed 0: scores of [ac] are missing after a task"):
        together([results_with(LOWER, matrix)])


def test_a_task_without_shares_goes_with_tasks_that_are_answered_once_they_are_learned() -> None:
    ece = [[None, *row[1:]] for row in copy.deepcopy(LOWER)]  # the first has no probabilities
    assert np.isnan(together([results_with(ece)]).runs[0].ece[:, 0]).all()
    ece[2][1] = None
    with pytest.raises(ReportError, match=r"ece of b are missing after a task"):
        together([results_with(ece)])
