"""The metrics by hand, and rows of the kind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from my_kind import stars_off, weighted_kappa

from forgetfree.data.sources import load_task
from forgetfree.results.answers import LabelAnswers


def test_the_metrics_by_hand() -> None:
    """Stars 0, 1, 2 and answers 0, 2, 2: one is off by one."""
    answers = LabelAnswers(np.eye(3)[[0, 2, 2]], np.array([0, 1, 2]))
    assert stars_off(answers) == pytest.approx(1 / 3)
    assert weighted_kappa(answers) == pytest.approx(0.8)


def test_ratings_are_read(tmp_path: Path) -> None:
    rows = [{"text": f"a {word} film", "stars": stars} for stars, word in ((2, "fair"), (1, "bad"), (3, "good"))]
    (tmp_path / "films").mkdir()
    for split in ("train", "test"):
        (tmp_path / "films" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, 2 * rows)))
    (tmp_path / "films" / "source.json").write_text('{"kind": "rating", "metric": "stars-off"}')
    films = load_task("films", str(tmp_path))
    assert (films.task.kind, films.task.metric, films.task.labels) == ("rating", "stars-off", ("1", "2", "3"))
    assert films.test.labels == (1, 0, 2, 1, 0, 2)
