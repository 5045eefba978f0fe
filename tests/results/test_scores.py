"""The table of scores: written scores are read back to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from forgetfree.errors import RunError
from forgetfree.results.run_folder import COLUMNS, Score, read_scores, write_scores

HEADER = ",".join(COLUMNS)


def test_a_table_comes_back_to_the_bit(tmp_path: Path) -> None:
    scores = [Score("ewc", 0, "qnli", 0, "accuracy", 1 / 3, 40), Score("1", 1, "mr, pc", 2, "f1", 1e-17, 0)]
    write_scores(tmp_path / "scores.csv", scores)
    assert read_scores(tmp_path / "scores.csv") == scores
    first, second = (tmp_path / "scores.csv").read_text().splitlines()[:2]
    assert first == "strategy,seed,task,after,metric,value,rows"
    assert second == "ewc,0,qnli,0,accuracy,0.3333333333333333,40"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "strategy,task\n",
            "its columns must be strategy, seed, task, after, metric, value, rows, got 'strategy, task'",
        ),
        (f"{HEADER}\newc,0,qnli,0,accuracy,high,40\n", "could not convert string to float: 'high'"),
        (f"{HEADER}\newc,0,qnli,0,accuracy,nan,40\n", "expected finite numbers, .* got Score"),
        (f"{HEADER}\newc,0,qnli,-1,accuracy,0.5,40\n", "after and rows of at least 0, got Score"),
        (f"{HEADER}\newc,0,qnli,0,accuracy,0.5,40,7\n", "too many values"),
    ],
)
def test_another_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text(text)
    with pytest.raises(RunError, match=message):
        read_scores(tmp_path / "scores.csv")
    with pytest.raises(RunError, match=r"nowhere\.csv is not a readable table of scores .*Restore it"):
        read_scores(tmp_path / "nowhere.csv")
