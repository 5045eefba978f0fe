"""Scores per label and confusion tables: worked by hand, and from runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reported import make_run

import forgetfree
from forgetfree.data.sources import load_tasks
from forgetfree.errors import RunError, UnknownNameError
from forgetfree.results.answers import LabelAnswers, confusion, label_scores


def test_scores_of_labels_are_worked_by_hand() -> None:
    """Labels a, b, c are numbered from 1, after label 0 of an earlier task; one row is answered with label 0."""
    answers = LabelAnswers(np.eye(4)[[1, 1, 2, 0, 2, 1]], np.array([1, 1, 1, 1, 2, 2]))
    names = {1: "a", 2: "b", 3: "c"}
    scores, counts = label_scores(answers, names), confusion(answers, names)
    assert list(scores.index) == ["a", "b", "c", "macro average"]
    assert counts.to_numpy().tolist() == [[2, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert list(counts.columns) == ["a", "b", "c", "another task's"] and scores["rows"].tolist() == [4, 2, 0, 6]
    # The last value is the mean over a and b; no row has label c.
    assert scores["precision"].tolist() == pytest.approx([2 / 3, 1 / 2, 0, 7 / 12])
    assert scores["recall"].tolist() == pytest.approx([1 / 2, 1 / 2, 0, 1 / 2])
    assert scores["f1"].tolist() == pytest.approx([4 / 7, 1 / 2, 0, (4 / 7 + 1 / 2) / 2])


def test_what_has_no_answers_is_refused(tmp_path: Path) -> None:
    out = make_run(tmp_path / "run", ["a", "b"], {"fine-tune": 0.0})
    results = forgetfree.load_results(out)
    with pytest.raises(UnknownNameError, match="task in these results"):
        results.label_scores("fine-tune", "c")
    with pytest.raises(UnknownNameError, match="strategy in these results"):
        results.confusion("lora", "a")
    with pytest.raises(RunError, match="has no seed 7; its seeds are 0, 1"):
        results.confusion("fine-tune", "a", 7)
    (out / "fine-tune" / "seed-0" / "predictions.safetensors").unlink()
    with pytest.raises(RunError, match=r"These scores come without predictions\. Load the directory of a run\."):
        forgetfree.load_results(out).label_scores("fine-tune", "a")


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_labels_have_the_names_of_their_task_also_where_it_is_withheld(
    scenario: str, data_directory: Path, model_directory: Any
) -> None:
    """The run is kept in memory; its metric is the macro average."""
    results = forgetfree.run(
        "sst2,ag_news",
        data=str(data_directory),
        metric=["ag_news=macro_f1", "sst2=macro_f1"],
        model=str(model_directory("bert")),
        strategies=("continual-ft",),
        readout="linear",
        steps=4,
        learning_rate=0.1,
        floors="constant",
        scenario=scenario,
        progress=False,
    )
    tasks = {rows.task.name: rows for rows in load_tasks("sst2,ag_news", str(data_directory))}
    for name, rows in tasks.items():
        table, taken = results.label_scores("continual-ft", name), results.confusion("continual-ft", name)
        assert list(table.index) == [*rows.task.labels, "macro average"]
        assert table["rows"].tolist() == [*np.bincount(rows.test.labels), len(rows.test)]
        assert taken.sum(axis=1).tolist() == np.bincount(rows.test.labels).tolist()
        score = results.matrix("continual-ft", metric="macro_f1").iloc[-1][name]
        assert table.loc["macro average", "f1"] == pytest.approx(score)
    elsewhere = [results.confusion("continual-ft", name).columns[-1] == "another task's" for name in tasks]
    assert any(elsewhere) == (scenario == "class")
