"""The table of scores: what is written comes back to the bit, and wide rows and scores say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from forgetfree.errors import ReportError
from forgetfree.results.scores import Score, read_scores, rows_of_scores, scores_of_rows, write_scores

SCORES = [
    Score({"strategy": "ewc", "seed": 0, "sparsity": None, "layer": "1"}, "qnli", 0, "accuracy", 1 / 3, 40),
    Score({"strategy": "ewc", "seed": 1, "sparsity": 0.1, "layer": "head"}, "mr, pc", 2, "f1", 1e-17, 0),
]


def test_a_table_comes_back_to_the_bit(tmp_path: Path) -> None:
    """And in the type that its column has: a layer named 1 stays a text."""
    write_scores(tmp_path / "scores.csv", SCORES)
    assert read_scores(tmp_path / "scores.csv") == SCORES
    first, second = (tmp_path / "scores.csv").read_text().splitlines()[:2]
    assert first == "strategy,seed,sparsity,layer,task,after,metric,value,rows"
    assert second == "ewc,0,,1,qnli,0,accuracy,0.3333333333333333,40"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strategy,task\n", "its last columns must be task, after, metric, value, rows, got strategy, task"),
        ("", "got none"),
        ("task,after,metric,value,rows\nqnli,0,accuracy,high,40\n", "could not convert string to float: 'high'"),
        ("task,after,metric,value,rows\nqnli,0,accuracy,nan,40\n", "row 1 must hold finite numbers"),
        ("task,after,metric,value,rows\nqnli,0,accuracy,0.5,40,7\n", "row 1 must have 5 cells, got more"),
        ("task,after,metric,value,rows\nqnli,0,f1,81.25,40\n", r"row 1: f1 must be in \[0, 1\], got 81\.25"),
        ("task,after,metric,value,rows\nqnli,0,ece,-0.1,40\n", r"row 1: ece must be in \[0, 1\], got -0\.1"),
        ("task,after,metric,value,rows\nqnli,0\n", "not a readable table of scores"),
    ],
)
def test_another_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text(text)
    with pytest.raises(ReportError, match=message):
        read_scores(tmp_path / "scores.csv")
    with pytest.raises(ReportError, match=r"nowhere\.csv is not a readable table of scores .*Restore it"):
        read_scores(tmp_path / "nowhere.csv")


def test_rows_with_several_numbers_become_scores_and_come_back() -> None:
    rows = [
        {"task": "sst2", "seed": 0, "model": name, "test_rows": 40, "score": 0.5, "counts": [1.0, 2.0, 3.0], "ece": ece}
        for name, ece in (("fine-tuned", 0.25), ("grafted", 0.125))
    ]
    scores = scores_of_rows(rows, ("score", "ece", "counts"))
    assert [(score.metric, score.value) for score in scores[:5]] == [
        *(("score", 0.5), ("counts[0]", 1.0), ("counts[1]", 2.0), ("counts[2]", 3.0), ("ece", 0.25)),
    ]
    assert scores[-1] == Score({"seed": 0, "model": "grafted"}, "sst2", 1, "ece", 0.125, 40)
    assert rows_of_scores(scores) == rows
