"""The table of scores from Python: matrices, summaries and comparisons against hand-worked numbers, and its sources."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from handmade import TASKS, record_of, results_of, run_of, together, write
from reported import edit, edit_about, make_run

import forgetfree
from forgetfree import json_file
from forgetfree.cli import main
from forgetfree.errors import RunError, UnknownNameError, UsageError
from forgetfree.results import runs
from forgetfree.results.report.run_report import to_csv, write_report
from forgetfree.results.run_folder import Score, write_scores
from forgetfree.results.runs import RunReader, read_run
from forgetfree.results.table import Results

ROOT = Path(__file__).parents[2]


@pytest.fixture
def four_runs(tmp_path: Path) -> Path:
    """Two strategies with two seeds each; all scored 0.8 on qnli right after learning it."""
    ends = {"fine-tune": ([0.8, 0.7], [0.8, 0.9]), "ewc": ([0.6, 0.7], [0.7, 0.9])}
    runs = [run_of(name, seed, end) for name, both in ends.items() for seed, end in enumerate(both)]
    return write(tmp_path / "runs", results_of(*runs))


# -- Results ---------------------------------------------------------------------------------------------


def test_scores_are_one_number_a_row(four_runs: Path) -> None:
    """Each of 4 runs, 3 stages and 2 tasks has a score and an ECE."""
    scores = forgetfree.load_results(four_runs).scores
    assert list(scores.columns) == ["strategy", "seed", "task", "after", "metric", "value", "rows"]
    assert len(scores) == 4 * 3 * 2 * 2
    last = scores[(scores.strategy == "ewc") & (scores.seed == 1) & (scores.after == 2) & (scores.metric == "f1")]
    assert last.to_dict("records") == [
        {"strategy": "ewc", "seed": 1, "task": "mrpc", "after": 2, "metric": "f1", "value": 0.9, "rows": 0}
    ]


def test_a_matrix_has_a_row_before_training_and_one_after_each_task(four_runs: Path) -> None:
    results = forgetfree.load_results(four_runs)
    matrix = results.matrix("ewc", seed=1)
    assert matrix.to_numpy().tolist() == [[0.5, 0.5], [0.8, 0.5], [0.7, 0.9]]
    assert (matrix.index.name, list(matrix.index)) == ("after", ["before training", *TASKS])
    assert (matrix.columns.name, list(matrix.columns)) == ("task", TASKS)
    assert matrix.loc["mrpc", "qnli"] == 0.7
    assert results.matrix("ewc", metric="ece").to_numpy().tolist() == [[0.2, 0.2], [0.2, 0.2], [0.1, 0.3]]
    assert (results.tasks, results.strategies) == (TASKS, ["fine-tune", "ewc"])


def test_a_summary_is_mean_and_deviation_over_seeds(four_runs: Path) -> None:
    """ewc has averages 0.65 and 0.8, forgets 0.2 and 0.1 on qnli, and learns as much as fine-tune."""
    summary = forgetfree.load_results(four_runs).summary()
    assert list(summary.index) == ["fine-tune", "ewc"]
    columns = ["average", "forgetting", "bwt", "fwt", "zero_shot_gain", "ece"]
    assert list(summary.columns) == [(name, part) for name in columns for part in ("mean", "std")]
    means, stds = summary.loc["ewc"].xs("mean", level=1), summary.loc["ewc"].xs("std", level=1)
    assert means.tolist() == pytest.approx([0.725, 0.15, -0.15, 0.0, 0.0, 0.2])
    half = np.sqrt(0.5)  # the deviation of two values is their distance / √2
    assert stds.tolist() == pytest.approx([0.15 * half, 0.1 * half, 0.1 * half, 0.0, 0.0, 0.0])


def test_a_comparison_is_paired_with_its_interval(four_runs: Path) -> None:
    """qnli: −0.2 and −0.1, mean −0.15, s = 0.1/√2, and t(0.975, 1) = 12.706: half of the interval is 12.706 · 0.05 = 0.635.

    All tasks: per seed −0.1 and −0.05, mean −0.075, s = 0.05/√2: half of the interval is 12.706 · 0.025 = 0.318.
    """
    found = forgetfree.load_results(four_runs).compare("ewc", "fine-tune")
    assert list(found.index) == ["qnli", "mrpc", "all tasks"]
    assert found.loc["qnli", ["a", "b", "difference", "pairs"]].tolist() == pytest.approx([0.65, 0.8, -0.15, 2])
    assert found.loc["qnli", ["low", "high"]].tolist() == pytest.approx([-0.15 - 0.6353, -0.15 + 0.6353], abs=1e-4)
    assert found.loc["all tasks", ["low", "high"]].tolist() == pytest.approx(
        [-0.075 - 0.3177, -0.075 + 0.3177], abs=1e-4
    )
    assert found["pairs"].tolist() == [2, 2, 2]
    assert found["verdict"].tolist() == ["undecided"] * 3


def test_a_difference_is_decided_where_its_interval_leaves_zero_out(tmp_path: Path) -> None:
    """Three seeds differ by 0.20, 0.21 and 0.19: half the interval is 4.303 · 0.01 / √3 = 0.025; for all tasks, half of it."""
    ends = {"a": (0.80, 0.82, 0.79), "b": (0.60, 0.61, 0.60)}
    runs = [run_of(name, seed, [end, 0.7]) for name, each in ends.items() for seed, end in enumerate(each)]
    results = forgetfree.load_results(write(tmp_path / "runs", results_of(*runs)))
    found = results.compare("a", "b")
    assert found.loc["qnli", ["low", "high"]].tolist() == pytest.approx([0.2 - 0.0248, 0.2 + 0.0248], abs=1e-3)
    assert found.loc["all tasks", ["low", "high"]].tolist() == pytest.approx([0.1 - 0.0124, 0.1 + 0.0124], abs=1e-3)
    assert found["verdict"].tolist() == ["higher", "undecided", "higher"]
    assert results.compare("b", "a").loc["qnli", "verdict"] == "lower"


def test_a_plot_has_a_panel_for_each_task_and_a_line_for_each_strategy(four_runs: Path) -> None:
    axes = forgetfree.load_results(four_runs).plot().axes
    assert [ax.get_title() for ax in axes] == TASKS
    lines = [list(line.get_ydata()) for line in axes[0].lines]
    assert lines[:2] == [pytest.approx([50, 80, 80]), pytest.approx([50, 80, 65])]


# -- Refusals --------------------------------------------------------------------------------------------


def test_wrong_names_and_seeds_are_named(four_runs: Path, tmp_path: Path) -> None:
    results = forgetfree.load_results(four_runs)
    with pytest.raises(UnknownNameError, match=r"Unknown strategy in these results: 'ewcc'\. Did you mean 'ewc'\?"):
        results.matrix("ewcc")
    with pytest.raises(UnknownNameError, match="Unknown strategy in these results: 'lora'"):
        results.compare("ewc", "lora")
    with pytest.raises(RunError, match=r"ewc has no seed 7; its seeds are 0, 1\."):
        results.matrix("ewc", seed=7)
    runs = [run_of("a", 0, [0.8, 0.7]), run_of("b", 1, [0.8, 0.7])]
    apart = forgetfree.load_results(write(tmp_path / "apart", results_of(*runs)))
    with pytest.raises(RunError, match=r"a and b have no seed in common\. Run both with the same seeds\."):
        apart.compare("a", "b")
    with pytest.raises(UsageError, match="needs at least one path"):
        forgetfree.load_results()


def test_a_metric_that_was_not_measured_is_named(four_runs: Path) -> None:
    results = forgetfree.load_results(four_runs)
    for read in (
        lambda: results.matrix("ewc", metric="acuracy"),
        lambda: results.compare("ewc", "fine-tune", "acuracy"),
        lambda: results.plot("acuracy"),
    ):
        with pytest.raises(UnknownNameError, match=r"^Unknown metric 'acuracy'\. .*Known: accuracy, ece, f1, score\.$"):
            read()
    with pytest.raises(RunError, match=r"^There are no scores to draw\. Load results of a run"):
        Results([record_of(results_of())]).plot()


def test_what_is_no_directory_of_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"contains no results: it has no config\.json\. Give the directory that"):
        forgetfree.load_results(tmp_path)
    for name in ("nowhere", "nowhere.csv"):
        with pytest.raises(RunError, match=rf"{name} does not exist"):
            forgetfree.load_results(tmp_path / name)


def test_a_damaged_directory_is_named(tmp_path: Path) -> None:
    out = make_run(tmp_path / "run", ["a", "b"], {"ewc": 0.1, "lora": 0.0}, seeds=(0,))
    folder = out / "ewc" / "seed-0"
    kept = {name: (folder / name).read_bytes() for name in ("scores.csv", "predictions.safetensors")}
    for name, content in kept.items():
        (folder / name).write_bytes(content[:-9])
        with pytest.raises(RunError, match=rf"{name} is not the file that its unit wrote"):
            forgetfree.load_results(out)
        (folder / name).write_bytes(content)
    outcome = json.loads((folder / "outcome.json").read_text())
    (folder / "outcome.json").write_text(json.dumps(outcome | {"status": "failed"}))
    with pytest.raises(RunError, match=r"outcome\.json is not the file that its unit wrote"):
        forgetfree.load_results(out)
    assert [run.strategy for run in RunReader(out, running=True).read().runs] == [
        "lora"
    ]  # a run that goes on skips the damaged unit
    edit(out, "lora", kept_bytes=[1])
    (folder / "unit.json").unlink()
    with pytest.raises(RunError, match=r"lora with seed 0: kept_bytes must be 2 numbers, got \[1\]"):
        forgetfree.load_results(out)
    edit(out, "lora", kept_bytes=[1, "2"])
    with pytest.raises(RunError, match=r"kept_bytes\[1\] must be an integer"):
        forgetfree.load_results(out)
    edit_about(out, tasks=[])
    with pytest.raises(RunError, match=r"tasks must be"):
        forgetfree.load_results(out)


def test_a_run_that_was_cut_short_has_what_has_ended(tmp_path: Path) -> None:
    """Its report can be written again at any time, from the records of the units."""
    out = make_run(tmp_path / "run", ["a", "b"], {"ewc": 0.1, "lora": 0.0}, seeds=(0,))
    whole = forgetfree.load_results(out).scores
    (out / "ewc" / "seed-0" / "unit.json").unlink()
    results = forgetfree.load_results(out)
    assert results.scores.equals(whole[whole.strategy == "lora"].reset_index(drop=True))
    write_report(out, results, ended=True)
    content = json.loads((out / "results.json").read_text())
    assert content["unfinished"] == [{"strategy": "ewc", "seed": 0, "after": 2}]
    assert "Unfinished and left out: ewc, seed 0" in (out / "report.md").read_text() < (out / "report.html").read_text()


def test_each_unit_is_read_once_while_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If n units end one after another, n records, n outcomes and n tables are read, and not n²."""
    out = make_run(tmp_path / "run", ["a", "b"], {"ewc": 0.1, "lora": 0.0}, seeds=(0, 1, 2))
    records = {path: path.read_bytes() for path in sorted(out.rglob("unit.json"))}
    for path in [*records, *out.rglob("history.jsonl")]:  # no unit has begun
        path.unlink()
    read, read_bounded, read_scores = Counter[str](), json_file.read_bounded, runs.read_scores
    monkeypatch.setattr(json_file, "read_bounded", lambda path: (read.update([path.name]), read_bounded(path))[1])
    monkeypatch.setattr(runs, "read_scores", lambda path: (read.update([path.name]), read_scores(path))[1])
    reader = RunReader(out, running=True)
    for count, (path, record) in enumerate(records.items(), 1):
        path.write_bytes(record)
        found = reader.read()
        assert len(found.runs) == count
    assert read == {"config.json": 1, "unit.json": 6, "outcome.json": 6, "scores.csv": 6}
    assert found.scores.equals(read_run(out).scores)


def test_one_csv_file_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its table equals the frame to the bit, and it is written again without a change."""
    out = make_run(tmp_path / "run", ["a", "b"], {"fine-tune": 0.0, "ewc": 0.1})
    assert main(["report", str(out), "--format", "csv"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "all.csv").write_text(text, encoding="utf-8")
    whole, file = (forgetfree.load_results(path).scores for path in (out, tmp_path / "all.csv"))
    assert whole.equals(file) and "agreement" in set(file["metric"])
    assert pd.read_csv(tmp_path / "all.csv", comment="#").equals(whole)
    assert main(["report", str(tmp_path / "all.csv"), "--format", "csv"]) == 0
    assert capsys.readouterr().out == text


def test_scores_alone_are_read_and_compared(tmp_path: Path) -> None:
    for name, rows in (("a", 40), ("b", 40), ("c", 400)):
        (tmp_path / name).mkdir()
        scores = [Score(name, 0, "sst2", after, "accuracy", 0.5, rows) for after in (0, 1)]
        write_scores(tmp_path / name / "scores.csv", scores)
    first, second, third = (tmp_path / name / "scores.csv" for name in "abc")
    assert forgetfree.load_results(first, second).strategies == ["a", "b"]
    with pytest.raises(RunError, match="test rows of sst2 is 40 in one and 400 in the other"):
        forgetfree.load_results(first, third)


def test_agreement_is_that_with_answers_of_another_directory(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", ["a", "b"], {"fine-tune": 0.0, "g": 0.1}, seeds=(0,))
    config = json.loads((whole / "config.json").read_text())
    for name in ("fine-tune", "g"):
        (tmp_path / f"of-{name}").mkdir()
        (whole / name).rename(tmp_path / f"of-{name}" / name)
        units = {place: key for place, key in config["units"].items() if key["strategy"] == name}
        (tmp_path / f"of-{name}" / "config.json").write_text(json.dumps(config | {"units": units}))
    results = forgetfree.load_results(tmp_path / "of-fine-tune", tmp_path / "of-g")
    tuned, other = (run.probabilities for run in results.runs)
    same = [np.mean(tuned[task].logits.argmax(1) == other[task].logits.argmax(1)) for task in ("a", "b")]
    assert results.matrix("g", metric="agreement").iloc[-1].tolist() == same
    assert np.isnan(results.matrix("g", metric="agreement").iloc[:-1]).all(axis=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace(",0.8,", ",8.0,"), r"accuracy of qnli must be in \[0, 1\], got \[0\.5, 8\.0"),
        (lambda text: "\n".join(text.splitlines()[:-1]), r"ewc with seed 0: ece of mrpc are missing after a task"),
        (lambda text: text + text.splitlines()[-1] + "\n", "a score is given twice"),
        (lambda text: text.replace("# {", "# ["), "Expecting"),
        (
            lambda text: text.replace(",mrpc,", ",other,"),
            "a score names a task, or a number of tasks, that the stream does not have",
        ),
        (lambda text: text.replace('"seed": 0', '"seed": "x"'), "seed must be an integer"),
        (lambda text: text.replace('"accuracy"', '"theirs"'), "Unknown metric 'theirs'|scores of qnli"),
    ],
)
def test_a_damaged_csv_file_is_refused_in_one_paragraph(change: Any, message: str, tmp_path: Path) -> None:
    run = run_of("ewc", 0, [0.6, 0.7]) | {"metric": ["accuracy", "accuracy"]}
    text = to_csv(together([results_of(run)]))
    file = tmp_path / "all.csv"
    file.write_text(text)
    forgetfree.load_results(file)
    file.write_text(change(text))
    with pytest.raises(RunError, match=message) as caught:
        forgetfree.load_results(file)
    said = str(caught.value)
    assert said.startswith(str(file)) and said.count(str(file)) == 1
    assert not any(each in said for each in ("\n", "np.", "--resume"))  # there is no run to resume
