"""The metrics by hand, and a stream of the kind that keeps the contract of forgetfree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from my_kind import stars_off, weighted_kappa

from forgetfree.results.answers import LabelAnswers
from forgetfree.testing import check_stream


def test_the_metrics_by_hand() -> None:
    """Stars 0, 1, 2 and answers 0, 2, 2: one is off by one."""
    answers = LabelAnswers(np.eye(3)[[0, 2, 2]], np.array([0, 1, 2]))
    assert stars_off(answers) == pytest.approx(1 / 3)
    assert weighted_kappa(answers) == pytest.approx(0.8)


def test_a_stream_of_ratings(tmp_path: Path) -> None:
    rows = [
        {"text": f"{word} film {i}", "stars": s} for i in range(12) for s, word in enumerate(("bad", "fair", "good"), 1)
    ]
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "films" / "source.json").write_text('{"kind": "rating", "metric": "stars-off"}')
    check_stream("films", data=str(tmp_path))
