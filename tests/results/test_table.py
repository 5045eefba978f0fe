"""The table of scores from Python: matrices, summaries and comparisons against numbers worked by hand; what it is read from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forgetfree.results.stored import load_run_results, to_csv
from handmade import TASKS, record_of, results_of, run_of, write

import forgetfree
from forgetfree.cli import main
from forgetfree.errors import ReportError, UnknownNameError, UsageError
from forgetfree.json_file import sign
from forgetfree.results.scores import Score, write_scores
from forgetfree.results.table import Results
from forgetfree.results.unit_folder import size_and_sha256

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def four_runs(tmp_path: Path) -> Path:
    """Two strategies with two seeds each; all knew 0.8 of qnli when it was learned."""
    ends = {"fine-tune": ([0.8, 0.7], [0.8, 0.9]), "ewc": ([0.6, 0.7], [0.7, 0.9])}
    runs = [run_of(name, seed, end) for name, both in ends.items() for seed, end in enumerate(both)]
    return write(tmp_path / "runs", results_of(*runs))


# -- What it tells ---------------------------------------------------------------------------------------


def test_scores_are_one_number_a_row(four_runs: Path) -> None:
    """4 runs, 3 stages, 2 tasks, a score and an ECE each."""
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
    """ewc: averages 0.65 and 0.8; it forgot 0.2 and 0.1 of qnli. It learned as much as fine-tune."""
    summary = forgetfree.load_results(four_runs).summary()
    assert list(summary.index) == ["fine-tune", "ewc"]
    columns = ["average", "forgetting", "bwt", "fwt", "intransigence", "ece"]
    assert list(summary.columns) == [(name, part) for name in columns for part in ("mean", "std")]
    means, stds = summary.loc["ewc"].xs("mean", level=1), summary.loc["ewc"].xs("std", level=1)
    assert means.tolist() == pytest.approx([0.725, 0.15, -0.15, 0.0, 0.0, 0.2])
    half = np.sqrt(0.5)  # of two values, the deviation is their distance / √2
    assert stds.tolist() == pytest.approx([0.15 * half, 0.1 * half, 0.1 * half, 0.0, 0.0, 0.0])


def test_without_fine_tuning_intransigence_is_not_a_number(tmp_path: Path) -> None:
    summary = forgetfree.load_results(write(tmp_path / "a", results_of(run_of("ewc", 0, [0.6, 0.7])))).summary()
    assert np.isnan(summary.loc["ewc", ("intransigence", "mean")])
    assert np.isnan(summary.loc["ewc", ("average", "std")])  # one seed


def test_intransigence_is_against_the_one_fine_tuning_with_the_seed(tmp_path: Path) -> None:
    """Fine-tunings that differ in options have them in their names; where a seed has two, neither is the reference.

    fine-tune learned 0.8 and 0.9, ewc 0.8 and 0.7: the mean of 0 and 0.2 is 0.1.
    """
    tuned = [
        run_of("fine-tune", seed, [0.8, 0.9]) | {"options": {"steps": steps}} for seed, steps in ((0, 10), (1, 20))
    ]
    both = [run_of("ewc", seed, [0.6, 0.7]) for seed in (0, 1)]
    results = forgetfree.load_results(
        write(tmp_path / "a", results_of(*both, tuned[0])), write(tmp_path / "b", results_of(tuned[1]))
    )
    assert results.strategies == ["ewc", "fine-tune (steps=10)", "fine-tune (steps=20)"]
    assert results.summary().loc["ewc", "intransigence"].tolist() == pytest.approx([0.1, 0.0])
    twice = write(tmp_path / "c", results_of(*(tuned[1] | {"seed": seed} for seed in (0, 1))))
    several = forgetfree.load_results(tmp_path / "a", tmp_path / "b", twice).summary()
    assert several.loc["ewc", ("intransigence", "mean")] == pytest.approx(0.1)  # seed 0 has two, seed 1 has one
    assert np.isnan(several.loc["ewc", ("intransigence", "std")])


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
    """Of three seeds, 0.20, 0.21 and 0.19: half of the interval is 4.303 · 0.01 / √3 = 0.025; of all tasks, half of it."""
    ends = {"a": (0.80, 0.82, 0.79), "b": (0.60, 0.61, 0.60)}
    runs = [run_of(name, seed, [end, 0.7]) for name, each in ends.items() for seed, end in enumerate(each)]
    results = forgetfree.load_results(write(tmp_path / "runs", results_of(*runs)))
    found = results.compare("a", "b")
    assert found.loc["qnli", ["low", "high"]].tolist() == pytest.approx([0.2 - 0.0248, 0.2 + 0.0248], abs=1e-3)
    assert found.loc["all tasks", ["low", "high"]].tolist() == pytest.approx([0.1 - 0.0124, 0.1 + 0.0124], abs=1e-3)
    assert found["verdict"].tolist() == ["higher", "undecided", "higher"]
    assert results.compare("b", "a").loc["qnli", "verdict"] == "lower"


@pytest.mark.parametrize("ends", [{"a": (0.9,), "b": (0.6,)}, {"a": (0.82, 0.72), "b": (0.80, 0.70)}])
def test_one_seed_or_equal_differences_decide_nothing(ends: dict[str, tuple[float, ...]], tmp_path: Path) -> None:
    """Neither says how much other seeds would differ, however many tasks there are; 0.82 − 0.80 is 0.72 − 0.70 but for bits."""
    runs = [run_of(name, seed, [end, end - 0.1]) for name, each in ends.items() for seed, end in enumerate(each)]
    found = forgetfree.load_results(write(tmp_path / "runs", results_of(*runs))).compare("a", "b")
    assert found["difference"].tolist() == pytest.approx([ends["a"][0] - ends["b"][0]] * 3)
    assert found[["low", "high"]].isna().all(axis=None)
    assert found["verdict"].tolist() == ["undecided"] * 3 and found["pairs"].tolist() == [len(ends["a"])] * 3


def test_a_plot_has_a_panel_for_each_task_and_a_line_for_each_strategy(four_runs: Path) -> None:
    axes = forgetfree.load_results(four_runs).plot().axes
    assert [ax.get_title() for ax in axes] == TASKS
    lines = [line.get_ydata().tolist() for line in axes[0].lines]
    assert lines == [pytest.approx([50, 80, 80]), pytest.approx([50, 80, 65])]


def test_forgetting_is_drawn_from_where_a_task_was_learned(four_runs: Path) -> None:
    """Of qnli ewc forgot 0.2 and 0.1; nothing comes after mrpc. The end is that of the summary."""
    results = forgetfree.load_results(four_runs)
    (ax,) = results.plot(metric="forgetting").axes
    assert (ax.get_title(), ax.get_ylabel()) == ("qnli", "forgetting (points)")
    assert [line.get_xdata().tolist() for line in ax.lines] == [[1, 2]] * 2
    assert [line.get_ydata().tolist() for line in ax.lines] == [pytest.approx([0, 0]), pytest.approx([0, 15])]
    assert results.summary()["forgetting", "mean"].tolist() == pytest.approx([0, 0.15])


# -- What it is read from --------------------------------------------------------------------------------


def test_the_table_is_that_of_the_report() -> None:
    """Every matrix of a directory of 0.2, as results.json has it."""
    results = forgetfree.load_results(GOLDEN / "run")
    held = json.loads((GOLDEN / "run" / "results.json").read_text())
    for run in held["runs"]:
        for name, metric in (("matrix", "score"), ("ece", "ece")):
            assert results.matrix(run["strategy"], run["seed"], metric).to_numpy().tolist() == run[name]
    summary = results.summary()
    for name in results.strategies:
        known = [run["summary"] for run in held["runs"] if run["strategy"] == name]
        for key in known[0]:
            assert summary.loc[name, (key, "mean")] == pytest.approx(np.mean([each[key] for each in known]), abs=1e-12)


@pytest.mark.parametrize("name", ["run"])
def test_one_csv_file_says_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`report --format csv` writes it; the report of it and its scores are those of the directory, to the bit."""
    monkeypatch.chdir(GOLDEN)
    (tmp_path / "timed").mkdir()
    assert main(["report", name, "--format", "csv"]) == 0
    (tmp_path / "all.csv").write_text(capsys.readouterr().out, encoding="utf-8")
    assert main(["report", str(tmp_path / "all.csv"), "--format", "markdown"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == (GOLDEN / name / "report.md").read_text().rstrip("\n")
    whole, file = (forgetfree.load_results(path).scores for path in (GOLDEN / name, tmp_path / "all.csv"))
    order = list(whole.columns)
    whole, file = (table.sort_values(order, ignore_index=True) for table in (whole, file[order]))
    assert whole.equals(file)


def test_committed_files_are_read_together() -> None:
    results = forgetfree.load_results(*sorted((ROOT / "benchmarks" / "results" / "recipe").glob("movement*.csv")))
    (slow,) = (name for name in results.strategies if "region_rate_factor=1.0" in name)
    assert len(results.strategies) == 5 and results.matrix(slow, seed=10).shape == (4, 3)


def test_units_are_read_where_nothing_was_put_together_yet(four_runs: Path, tmp_path: Path) -> None:
    """A run that was killed: each finished unit has its scores beside its unit.json, and any other is left out."""
    whole = forgetfree.load_results(four_runs).scores
    held = load_run_results(four_runs).scores()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    for seed in (0, 1):
        unit = tmp_path / "out" / "ewc" / f"seed-{seed}"
        unit.mkdir(parents=True)
        of = {"strategy": "ewc", "seed": seed}
        write_scores(unit / "scores.csv", [score for score in held if score.of == of])
        record = {"unit": of, "status": "done", "files": {"scores.csv": size_and_sha256(unit / "scores.csv")}}
        (unit / "unit.json").write_text(json.dumps(sign(record)))
    one = forgetfree.load_results(tmp_path / "out" / "ewc" / "seed-1" / "scores.csv")
    assert one.matrix("ewc", seed=1).to_numpy().tolist() == [[0.5, 0.5], [0.8, 0.5], [0.7, 0.9]]
    for change in (lambda file: file.write_text('{"status": "failed"}'), Path.unlink):
        change(tmp_path / "out" / "ewc" / "seed-1" / "unit.json")
        units = forgetfree.load_results(tmp_path / "out").scores
        assert units.equals(whole[(whole.strategy == "ewc") & (whole.seed == 0)].reset_index(drop=True))
    (unit / "scores.csv").write_text((unit / "scores.csv").read_text().replace("0.5", "0.6"))
    one = forgetfree.load_results(tmp_path / "out" / "ewc" / "seed-1" / "scores.csv")
    assert one.matrix("ewc", seed=1).to_numpy().tolist() == [[0.6, 0.6], [0.8, 0.6], [0.7, 0.9]], (
        "no unit.json says otherwise"
    )
    (tmp_path / "out" / "ewc" / "seed-0" / "scores.csv").write_bytes((unit / "scores.csv").read_bytes())
    for path in (tmp_path / "out", tmp_path / "out" / "ewc" / "seed-0" / "scores.csv"):
        with pytest.raises(ReportError, match="is not the file that its unit made"):
            forgetfree.load_results(path)


def test_a_unit_without_its_scores_is_named(tmp_path: Path) -> None:
    (tmp_path / "ewc").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "ewc" / "unit.json").write_text("{}")
    with pytest.raises(ReportError, match=r"ewc/unit\.json: status is missing, it must be a string\. Restore it"):
        forgetfree.load_results(tmp_path)
    (tmp_path / "ewc" / "unit.json").write_text('{"status": "done"}')
    with pytest.raises(ReportError, match=r"ewc/scores\.csv is not a readable table of scores"):
        forgetfree.load_results(tmp_path)


# -- What is refused -------------------------------------------------------------------------------------


def test_wrong_names_and_seeds_are_named(four_runs: Path, tmp_path: Path) -> None:
    results = forgetfree.load_results(four_runs)
    with pytest.raises(UnknownNameError, match=r"Unknown strategy in these results: 'ewcc'\. Did you mean 'ewc'\?"):
        results.matrix("ewcc")
    with pytest.raises(UnknownNameError, match="Unknown strategy in these results: 'lora'"):
        results.compare("ewc", "lora")
    with pytest.raises(
        ReportError, match=r"no whole matrix of score of ewc with seed 7: there are seeds 0, 1\. Finish"
    ):
        results.matrix("ewc", seed=7)
    runs = [run_of("a", 0, [0.8, 0.7]), run_of("b", 1, [0.8, 0.7])]
    apart = forgetfree.load_results(write(tmp_path / "apart", results_of(*runs)))
    with pytest.raises(ReportError, match=r"a and b have no seed in common\. Run both with the same seeds\."):
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


def test_nothing_is_not_drawn() -> None:
    with pytest.raises(ReportError, match=r"^There are no scores to draw\. Load results of a job"):
        Results.of_scores([]).plot()
    with pytest.raises(UnknownNameError, match="Unknown strategy in these results: 'ewc'"):
        Results.of_scores([]).matrix("ewc")


def test_one_thing_with_two_outcomes_is_refused() -> None:
    first = Score({"model": "grafted", "seed": 0}, "sst2", 1, "score", 0.5, 40)
    again = Score({"model": "grafted", "seed": 0}, "sst2", 1, "score", 0.6, 40)
    assert len(Results.of_scores([first, first]).scores) == 1
    with pytest.raises(
        ReportError, match=r"^model grafted, seed 0, task sst2, after 1, metric score was measured twice"
    ):
        Results.of_scores([first, again])


def test_a_directory_of_several_jobs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their runs need not be comparable; a job that was interrupted counts, another program's config.json does not."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(
        ReportError, match=r"holds no results of its own\. Give a directory that forgetfree run or graft"
    ):
        forgetfree.load_results(tmp_path)
    for name in ("c", "d"):
        write(tmp_path / name, results_of(run_of("ewc", 0, [0.8, 0.7])))
    (tmp_path / "group" / "a" / "ewc").mkdir(parents=True)
    (tmp_path / "group" / "a" / "config.json").write_text("{}")
    (tmp_path / "group" / "a" / "ewc" / "unit.json").write_text('{"status": "done"}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ReportError, match=r"^\. holds .* own, but directories below it do: c, d, group/a\. Give them one by one"
    ):
        forgetfree.load_results("")
    write(tmp_path / "b", results_of(run_of("ewc", 0, [0.8, 0.7])))
    with pytest.raises(ReportError, match=r"directories below it do: b, c, d, …\. Give"):
        forgetfree.load_results("c", ".")


def test_runs_on_different_numbers_of_test_rows_are_refused() -> None:
    """0 rows are unknown."""
    few, many, unknown = (
        Score({"strategy": name, "seed": 0}, "sst2", 0, "accuracy", 0.5, rows)
        for name, rows in (("a", 40), ("b", 400), ("c", 0))
    )
    assert len(Results.of_scores([few, unknown]).scores) == 2
    with pytest.raises(
        ReportError, match=r"^accuracy of sst2 was measured on 40 and on 400 test rows: .* one by one\.$"
    ):
        Results.of_scores([few, unknown, many])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("0.8,", "8.0,"), r"runs\[0\]: matrix must hold scores in \[0, 1\], .*got 8\.0"),
        (lambda text: text.replace('"schema": 1', '"schema": 2'), "schema must be 1, got 2: another version"),
        (lambda text: "\n".join(text.splitlines()[:-1]), r"a row or a setting lacks \('accuracy', 2, 'mrpc'\)"),
        (lambda text: text.replace("# {", "# ["), "Expecting"),
        (lambda text: text.replace("task,", "tusk,"), "a row or a setting lacks 'task'"),
        (lambda text: "#" + text, "must begin with a line"),
    ],
)
def test_a_damaged_csv_file_is_refused_in_one_paragraph(change: Any, message: str, tmp_path: Path) -> None:
    run = run_of("ewc", 0, [0.6, 0.7]) | {"metric": ["accuracy", "accuracy"]}
    text = to_csv(record_of(results_of(run)))
    file = tmp_path / "all.csv"
    file.write_text(text)
    forgetfree.load_results(file)
    file.write_text(change(text))
    with pytest.raises(ReportError, match=message) as caught:
        forgetfree.load_results(file)
    assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path / "nowhere.csv"):
        with pytest.raises(ReportError, match=r"nowhere(\.csv)? (does not exist|cannot be read)"):
            forgetfree.load_results(path)


@pytest.mark.parametrize("name", ["run"])
def test_results_that_have_changed_since_they_were_written_are_refused(name: str, tmp_path: Path, capsys: Any) -> None:
    held = json.loads((GOLDEN / name / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps(sign(held)))
    assert main(["report", str(tmp_path)]) == 0
    changed = sign(held) | {"stream": "another"}
    (tmp_path / "results.json").write_text(json.dumps(changed))
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 1
    assert "checksum must be that of the content, which has changed" in capsys.readouterr().err
    with pytest.raises(ReportError, match="has changed since forgetfree wrote it"):
        forgetfree.load_results(tmp_path)
