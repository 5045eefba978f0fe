"""A matrix may lack what was not evaluated before it was learned: metrics, files and reports say so and go on."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forgetfree.results.comparison import merge
from forgetfree.results.run_results import RunResults
from forgetfree.results.stored import load_run_results, of_csv, run_of_scores, to_csv

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


@pytest.fixture
def results() -> dict[str, Any]:
    run = {
        **{"strategy": "grafting-continual", "seed": 0, "metric": ["accuracy"] * 3, "matrix": LOWER, "ece": LOWER},
        **{
            "summary": learning_matrix.summarize(LOWER, LOWER),
            "seconds": {"train": 1.0},
            "options": {},
            "ledger": None,
        },
        **{
            "kept_bytes": None,
            "broken_claims": ["forget_free: claimed as True, but learning b changed the answers for a"],
        },
    }
    return {
        **{"schema": 1, "stream": "a,b,c", "tasks": ["a", "b", "c"], "model": {"name": "m"}, "runs": [run]},
        **{"data": {"test_rows": {"a": 4, "b": 4, "c": 4}}, "unfinished": [], "failed": []},
    }


def test_results_go_through_files_tables_and_reports(results: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results))
    held = load_run_results(tmp_path)
    for format in ("markdown", "rich", "html", "latex"):
        text = render(merge([held]), format)
        assert "nan" not in text.lower()
        assert "learning b changed the answers for a" in text.replace("\\", "")
    text = to_csv(RunResults.of(results))
    assert of_csv(text)["runs"] == results["runs"]
    (tmp_path / "all.csv").write_text(text)
    for path in (tmp_path, tmp_path / "all.csv"):
        table = load_results(path)
        matrix = table.matrix("grafting-continual")
        assert np.array_equal(np.isnan(matrix), np.triu(np.ones((4, 3), dtype=bool)))
        assert np.isnan(table.summary()["fwt", "mean"].item())
        assert table.summary()["average", "mean"].item() == pytest.approx(0.6)
        table.plot()


def test_answers_without_probabilities_have_no_calibration(results: dict[str, Any], tmp_path: Path) -> None:
    """ECE is null then, and no table shows it."""
    (run,) = results["runs"]
    run |= {"ece": [[None] * 3] * 4, "summary": learning_matrix.summarize(LOWER, None)}
    (tmp_path / "results.json").write_text(json.dumps(results))
    comparison = merge([load_run_results(tmp_path)])
    titles = [table.title for table in lay_out(comparison).tables]
    assert not any(title.startswith(("Calibration", "Agreement")) for title in titles)
    assert "ECE" not in lay_out(comparison).tables[0].header
    for format in ("markdown", "rich", "html", "latex", "json"):
        assert "nan" not in render(comparison, format).lower()
    text = to_csv(RunResults.of(results))
    assert of_csv(text)["runs"] == results["runs"]
    (tmp_path / "all.csv").write_text(text)
    for path in (tmp_path, tmp_path / "all.csv"):
        table = load_results(path)
        assert set(table.scores["metric"]) == {"accuracy"}
        assert np.isnan(table.summary()["ece", "mean"].item())


def test_scores_are_put_back_into_their_places(results: dict[str, Any]) -> None:
    scores = RunResults.of(results).scores()
    assert len(scores) == 2 * 6
    found = run_of_scores(scores, ["a", "b", "c"])
    assert found["matrix"] == LOWER and found["ece"] == LOWER
    with pytest.raises(KeyError):
        run_of_scores([score for score in scores if (score.task, score.after) != ("a", 2)], ["a", "b", "c"])


@pytest.mark.parametrize("place", [(1, 0), (3, 2)])
def test_a_file_that_lacks_a_learned_score_is_refused(results: dict[str, Any], tmp_path: Path, place: Any) -> None:
    results["runs"][0]["matrix"] = copy.deepcopy(LOWER)
    results["runs"][0]["matrix"][place[0]][place[1]] = None
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(ReportError, match=r"matrix must be a row before training"):
        load_run_results(tmp_path)


def test_a_task_without_shares_goes_with_tasks_that_are_answered_once_they_are_learned(
    results: dict[str, Any], tmp_path: Path
) -> None:
    run = results["runs"][0]
    run["ece"] = [[None, *row[1:]] for row in copy.deepcopy(LOWER)]  # the first has no probabilities
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert load_run_results(tmp_path).runs[0].ece == run["ece"]
    run["ece"][2][1] = None
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(ReportError, match=r"ece must be a row before training"):
        load_run_results(tmp_path)
