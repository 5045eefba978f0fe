"""Floors, which a run measures beside its scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forgetfree
from forgetfree import cli
from forgetfree.continual.stream import load_stream
from forgetfree.data.sources import load_tasks
from forgetfree.errors import TrainingError
from forgetfree.strategies.continual_ft import ContinualFT
from forgetfree.training import floors
from forgetfree.training.encoded_task import sampled
from forgetfree.training.floors import linear_probes, overlap, word_answers

ALL = ("--set", "floors=probe")
TASKS = "sst2,ag_news"


def results_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def command(data_directory: Path, model_directory: Any) -> list[str]:
    fixed = {
        "--data": data_directory,
        "--model": model_directory("bert"),
        "--shots": 4,
        "--steps": 10,
        "--learning-rate": 0.3,
    }
    words = [str(word) for pair in fixed.items() for word in pair]
    return ["run", TASKS, *words, "--strategy", "continual-ft", "--strategy", "fine-tune"]


@pytest.fixture(scope="module")
def finished(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("beside") / "out"
    assert cli.main([*command, *ALL, "--seed", "0", "--seed", "5", "--out", str(out)]) == 0
    return out


def test_floors_are_those_of_each_seeds_sample(finished: Path, data_directory: Path, model_directory: Any) -> None:
    found = results_of(finished)["floors"]
    assert set(found) == {"constant", "bag_of_words", "linear_probe", "mean_probe"}
    for seed in (0, 5):
        for number, rows in enumerate(load_tasks(TASKS, str(data_directory))):
            train = sampled(rows, 4, seed)
            (predicted,) = word_answers([train], np.array(train.labels), [rows.test])
            share = (predicted == np.array(rows.test.labels)).mean()
            assert found["bag_of_words"][str(seed)][number] == share
        how: dict[str, Any] = {"data": str(data_directory), "model": str(model_directory("bert"))}
        stream = load_stream(TASKS, shots=4, seed=seed, **how)
        assert (
            found["linear_probe"][str(seed)]
            == linear_probes(stream.tasks, stream.model, precision="auto")["linear_probe"]
        )
        at_mean = load_stream(TASKS, shots=4, seed=seed, readout="mean", **how)
        assert (
            found["mean_probe"][str(seed)]
            == linear_probes(at_mean.tasks, at_mean.model, precision="auto")["linear_probe"]
        )


def test_a_report_its_csv_file_and_its_results_have_one_interval(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All three know which rows were right, so the interval is that of differences between single answers."""
    assert cli.main(["report", str(finished), "--format", "csv"]) == 0
    file = tmp_path / "run.csv"
    file.write_text(capsys.readouterr().out)
    tables = []
    for source in (finished, file):
        results = forgetfree.load_results(source)
        assert any(run.answers for run in results.runs) == (source == finished)
        tables.append(results.evidence().difference("continual-ft", "fine-tune"))
    of_run, of_file = tables
    assert of_run is not None and of_file is not None and not np.isnan(of_run.low)
    assert (of_file.low, of_file.high) == pytest.approx((of_run.low, of_run.high), rel=1e-9)
    for source in (finished, file):
        compared = forgetfree.load_results(source).compare("continual-ft", "fine-tune").loc["all tasks"]
        assert compared[["low", "high"]].tolist() == pytest.approx([of_run.low, of_run.high], rel=1e-9)


def test_floors_stay_where_the_strategy_that_measured_them_fails(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ContinualFT, *_: Any) -> None:
        raise TrainingError("The loss is not finite.")

    monkeypatch.setattr(ContinualFT, "train", fail)
    assert cli.main([*command, "--seed", "0", "--out", str(tmp_path / "out")]) != 0
    results = results_of(tmp_path / "out")
    assert [run["strategy"] for run in results["failed"]] == ["continual-ft"]
    assert all(0 < score < 1 for score in results["floors"]["bag_of_words"]["0"])


def test_floors_wait_until_the_first_strategy_has_learned(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users then see losses at once, and floors on the page."""
    learned, measured = list[str](), floors.bag_of_words

    def bag_of_words(*arguments: Any, **more: Any) -> Any:
        learned.append((tmp_path / "out" / "continual-ft" / "seed-0" / "history.jsonl").read_text())
        return measured(*arguments, **more)

    monkeypatch.setattr(floors, "bag_of_words", bag_of_words)
    assert cli.main([*command, "--seed", "0", "--out", str(tmp_path / "out")]) == 0
    (history,) = learned
    assert {json.loads(line)["task"] for line in history.splitlines()} == set(TASKS.split(","))


def test_the_overlap_of_a_pair_is_worked_by_hand() -> None:
    """a (weight 1) is shared; b (2) and c (2) are not; d is in no training row and gets the largest weight, 2."""
    (row,) = overlap(["a b"], ["A, c d"], {"a": 1.0, "b": 2.0, "c": 2.0})
    cosine = 1 / np.sqrt((1 + 4) * (1 + 4 + 4))
    expected = [cosine, 1 / 3, 1 / 5, np.log(1 + 1), np.log(1 + 2), np.log(1 + 4), np.log(1 + 2), np.log(1 + 3)]
    assert row == pytest.approx(expected)
    assert np.isfinite(overlap(["", "a"], ["", ""], {})).all()
