"""Reports on results made by hand: two strategies, two tasks, two seeds."""

from __future__ import annotations

import copy
import html.parser
import json
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import TASKS, Json, ledger_of, record_of, results_of, run_of, together, write
from reported import make_run, of_equal_rows
from safetensors.numpy import load_file

from forgetfree import registry
from forgetfree.cli import main
from forgetfree.errors import ReportError, UnknownNameError
from forgetfree.results.comparison import Comparison, merge, one_file
from forgetfree.results.learning_matrix import summarize
from forgetfree.results.report.page import FORMATS, Page, Table
from forgetfree.results.report.run_figures import _costs
from forgetfree.results.report.run_report import lay_out, lay_out_leaderboard, render
from forgetfree.results.stored import load_run_results


def page_of(*runs: Json, **more: Any) -> Page:
    return lay_out(together([results_of(*runs, **more)]))


def table_of(page: Page, title: str) -> Table:
    [table] = [table for table in page.tables if table.title.startswith(title)]
    return table


@pytest.fixture
def two_seeds() -> Comparison:
    """continual-ft ends at 0.6 / 0.7 with seed 0 and at 0.7 / 0.9 with seed 1."""
    return together([results_of(run_of("continual-ft", 0, [0.6, 0.7]), run_of("continual-ft", 1, [0.7, 0.9]))])


# ---- the tables -----------------------------------------------------------------------------------------


def test_outcome_table_is_mean_and_deviation_over_seeds(two_seeds: Comparison) -> None:
    """In %. A deviation of two values with n − 1 is their distance / √2.

    qnli 60, 70: 65.0 (10/√2 = 7.1). mrpc 70, 90: 80.0 (14.1). Average 65, 80: 72.5 (15/√2 = 10.6).
    Forgetting 80 − 60 = 20 and 10: 15.0 (7.1); BWT is its negative. ECE (10 + 30) / 2 = 20 in both.
    """
    table = table_of(lay_out(two_seeds), "After the last task")
    assert table.header == ("strategy", "qnli", "mrpc (F1)", "average", "forgetting", "BWT", "ECE")
    assert table.rows == (
        (
            "continual-ft",
            "65.0 (7.1)",
            "80.0 (14.1)",
            "72.5 (10.6)",
            "15.0 (7.1)",
            "-15.0 (7.1)",
            "20.0 (0.0)",
        ),
    )


def test_one_seed_has_no_deviation_and_zero_has_no_sign() -> None:
    """80 → 80: forgetting 0, and a BWT of −0.00001 is 0.0, not -0.0."""
    run = run_of("grafting-continual", 0, [0.8, 0.7])
    run["summary"]["bwt"] = -1e-7
    table = table_of(page_of(run), "After the last task")
    assert table.rows == (("grafting-continual", "80.0", "70.0", "75.0", "0.0", "0.0", "20.0"),)


def test_updates_stand_beside_scores_where_they_are_known() -> None:
    """300 + 100 = 400 for fine-tuning, twice that with a region; not for an older run, floors, or without those of a task."""
    runs = [run_of("fine-tune", 0, [0.8, 0.7], updates=[300, 100])]
    runs += [run_of("grafting-continual", 0, [0.8, 0.7], updates=[600, 200]), run_of("ewc", 0, [0.8, 0.7])]
    runs += [run_of("lora", 0, [0.8, 0.7], updates=[300, None])]
    table = table_of(page_of(*runs, floors={"constant": [0.5, 0.5]}), "After the last task")
    assert table.header[-1] == "updates" and [row[-1] for row in table.rows] == ["400", "800", "—", "—", "—"]
    assert "updates" in dict(table.legend)


def test_the_final_union_has_a_row_of_its_own() -> None:
    """Average (75 + 65) / 2 = 70, ECE (20 + 10) / 2 = 15; it has no history, so nothing else."""
    run = run_of("grafting-continual", 0, [0.8, 0.7], union={"accuracy": [0.75, 0.65], "ece": [0.2, 0.1]})
    table = table_of(page_of(run), "After the last task")
    assert table.rows[1] == ("grafting-continual (one final union)", "75.0", "65.0", "70.0", "—", "—", "15.0")


def test_a_constant_answer_has_the_last_row() -> None:
    """Average (62 + 80) / 2 = 71. It forgets nothing, for it learns nothing: dashes."""
    run, floors = run_of("continual-ft", 0, [0.8, 0.7]), {"constant": [0.62, 0.8]}
    table = table_of(page_of(run, floors=floors), "After the last task")
    assert table.rows[1:] == (("a constant answer", "62.0", "80.0", "71.0", "—", "—", "—"),)
    older = results_of(run_of("ewc", 0, [0.8, 0.7]))  # of a version that did not say it
    merged = lay_out(together([older, results_of(run, floors=floors)]))
    assert [row[0] for row in table_of(merged, "After the last task").rows] == [
        "ewc",
        "continual-ft",
        "a constant answer",
    ]


@pytest.mark.parametrize("constant", [None, [0.5], [0.5, 1.5], ["0.5", 0.5], 0.5])
def test_floors_that_are_none_are_refused(constant: Any, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"results.json: floors\.constant(\[\d\])? must be"):
        load_run_results(
            write(tmp_path / "run", results_of(run_of("ewc", 0, [0.8, 0.7]), floors={"constant": constant}))
        )


@pytest.mark.parametrize("constant", [None, [0.5], [0.5, float("inf")], ["0.5", 0.5], 0.5])
def test_without_a_run_floors_are_finite_numbers(constant: Any, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"results.json"):
        load_run_results(write(tmp_path / "run", results_of(floors={"constant": constant})))


@pytest.mark.parametrize(
    ("part", "more"),
    [
        (r"union\.accuracy", {"union": {"accuracy": [0.75, 5e20], "ece": [0.2, 0.1]}}),
        ("readout_again", {"readout_again": [None, -0.5]}),
    ],
)
def test_scores_beside_the_matrix_are_within_the_bounds_of_their_metrics(part: str, more: Any, tmp_path: Path) -> None:
    run = run_of("grafting-continual", 0, [0.8, 0.7], **more)
    with pytest.raises(ReportError, match=rf"runs\[0\]\.{part} must be"):
        load_run_results(write(tmp_path / "run", results_of(run)))


def test_transfer_table(two_seeds: Comparison) -> None:
    """FWT: mrpc just before learning 0.5 − 0.5 = 0. Nothing to compare with: intransigence is unknown."""
    table = table_of(lay_out(two_seeds), "Transfer")
    assert table.header == ("strategy", "FWT", "intransigence", "forgetting qnli", "forgetting mrpc")
    assert table.rows == (("continual-ft", "0.0 (0.0)", "—", "15.0 (7.1)", "0.0 (0.0)"),)


def test_a_mean_over_only_some_of_the_seeds_is_not_shown() -> None:
    runs = [run_of("continual-ft", 0, [0.6, 0.7]), run_of("continual-ft", 1, [0.6, 0.7])]
    runs[0]["summary"]["intransigence"] = 0.1
    assert table_of(page_of(*runs), "Transfer").rows[0][2] == "—"


def test_cost_table_has_every_phase_and_the_size_of_the_ledger() -> None:
    """12,000 bytes over two tasks: 6,000 a task."""
    ledger = ledger_of([100, 120], [100, 90], [[100, 30], [30, 120]])
    page = page_of(
        run_of("fine-tune", 0, [0.8, 0.7]),
        run_of("grafting-continual", 0, [0.8, 0.7], ledger=ledger, seconds={"localize": 1234.56}),
    )
    table = table_of(page, "Time per phase")
    assert table.header == (
        "strategy",
        "fine-tune (s)",
        "evaluate (s)",
        "localize (s)",
        "kept (bytes)",
        "kept per task (bytes)",
    )
    assert table.rows == (
        ("fine-tune", "1.5", "0.2", "—", "—", "—"),
        ("grafting-continual", "—", "—", "1,234.6", "12,000", "6,000"),
    )


def test_cost_table_is_left_out_where_nothing_is_known() -> None:
    titles = [table.title for table in page_of(run_of("fine-tune", 0, [0.8, 0.7], seconds={})).tables]
    assert not any(title.startswith("Time") for title in titles)


def test_calibration_table_has_error_and_agreement_per_task() -> None:
    """ECE of the last row is 0.1 and 0.3; agreement 0.8 and 0.9 is shown where a run has it."""
    page = page_of(run_of("g", 0, [0.8, 0.7], agreement=[0.8, 0.9]), run_of("h", 0, [0.8, 0.7]))
    table = table_of(page, "Calibration error")
    assert table.header == ("strategy", "ECE qnli", "ECE mrpc", "agreement qnli", "agreement mrpc")
    assert table.rows == (("g", "10.0", "30.0", "80.0", "90.0"), ("h", "10.0", "30.0", "—", "—"))
    assert table_of(page_of(run_of("h", 0, [0.8, 0.7])), "Calibration error").header[-1] == "ECE mrpc"


def test_notes_name_failed_runs() -> None:
    page = page_of(run_of("g", 0, [0.8, 0.7]), failed=[{"strategy": "h", "seed": 3, "error": "The loss became nan."}])
    assert any("h, seed 3" in note and "The loss became nan." in note for note in page.notes)


def test_ledger_table_has_sizes_and_overlap() -> None:
    """Region of mrpc 120 and 140: 130 (20/√2 = 14)."""
    runs = [
        run_of("g", seed, [0.8, 0.7], ledger=ledger_of([1000, region], [1000, 90], [[1, 0.25], [0.025, 1]]))
        for seed, region in enumerate([120, 140])
    ]
    table = table_of(page_of(*runs), "Ledger of g")
    assert table.header == ("task", "region", "owned", "overlap qnli", "overlap mrpc")
    assert table.rows == (
        ("qnli", "1,000 (0)", "1,000 (0)", "1.000 (0.000)", "0.250 (0.000)"),
        ("mrpc", "130 (14)", "90 (0)", "0.025 (0.000)", "1.000 (0.000)"),
    )


def test_an_overlap_in_shares_keeps_its_decimals() -> None:
    ledger = ledger_of([10, 10], [10, 7], [[1.0, 0.25], [0.25, 1.0]])
    table = table_of(page_of(run_of("g", 0, [0.8, 0.7], ledger=ledger)), "Ledger of g")
    assert table.rows[0] == ("qnli", "10", "10", "1.000", "0.250")


def test_learning_matrix_is_the_mean_over_seeds(two_seeds: Comparison) -> None:
    """Last row: (60 + 70) / 2 and (70 + 90) / 2."""
    table = table_of(lay_out(two_seeds), "Learning matrix of continual-ft (in %, mean over 2 seeds)")
    assert table.header == ("stage", "qnli", "mrpc (F1)")
    assert table.rows == (
        ("before training", "50.0", "50.0"),
        ("after qnli", "80.0", "50.0"),
        ("after mrpc", "65.0", "80.0"),
    )


def test_notes_name_the_set_up_and_the_seeds(two_seeds: Comparison) -> None:
    page = lay_out(two_seeds)
    assert page.title == "forgetfree: qnli-mrpc"
    assert page.notes == (
        "Set-up: model minilm, readout prompt, shots 16.",
        "Cells are mean (standard deviation, n - 1) over seeds.",
        "Every strategy: 2 seeds (0, 1).",
    )


def test_notes_name_seeds_by_strategy_where_they_differ() -> None:
    runs = [run_of("a", 0, [0.6, 0.7]), run_of("a", 3, [0.6, 0.7]), run_of("b", 0, [0.6, 0.7])]
    assert page_of(*runs).notes[-1] == "a: 2 seeds (0, 3); b: 1 seed (0)."


@pytest.mark.parametrize(("rows", "done"), [([], 0), ([[0.5, 0.5]], 0), ([[0.5, 0.5], [0.8, 0.5]], 1)])
def test_notes_name_unfinished_runs(tmp_path: Path, rows: list[list[float]], done: int) -> None:
    cut = {"strategy": "continual-ft", "seed": 4, "matrix": rows}
    folder = write(tmp_path / "a", results_of(run_of("fine-tune", 0, [0.8, 0.7]), unfinished=[cut]))
    expected = f"Unfinished and left out: continual-ft, seed 4, after {done} of 2 tasks ({folder})."
    assert lay_out(merge([load_run_results(folder)])).notes[-1] == expected


def test_a_stream_of_one_task_and_results_without_runs_are_reported() -> None:
    run = run_of("fine-tune", 0, [0.8, 0.7], metric=["accuracy"], matrix=[[0.5], [0.8]], ece=[[0.2], [0.1]])
    run["summary"] = summarize(run["matrix"], run["ece"])
    page = page_of(run, tasks=["qnli"])
    table = table_of(page, "After the last task (in %)")
    assert (table.header, table.rows) == (("strategy", "qnli", "ECE"), (("fine-tune", "80.0", "10.0"),))
    assert not [
        header for each in page.tables for header in each.header if "orgetting" in header or header in ("FWT", "BWT")
    ]
    empty = together([results_of()])
    assert lay_out(empty).tables[0].rows == ()
    assert all(render(empty, name) for name in FORMATS)


# ---- reading --------------------------------------------------------------------------------------------


def test_a_directory_and_its_file_are_read_alike(tmp_path: Path) -> None:
    results = results_of(run_of("fine-tune", 0, [0.8, 0.7]), from_a_later_version="ignored")
    folder = write(tmp_path / "a", results)
    read = [load_run_results(path) for path in (folder, folder / "results.json")]
    assert [each.content for each in read] == [results, results]
    assert [each.source for each in read] == [str(folder), str(folder / "results.json")]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"nowhere does not exist\. .* `forgetfree run \.\.\. --resume`"):
        load_run_results(tmp_path / "nowhere")
    with pytest.raises(ReportError, match=r"results\.json does not exist\."):
        load_run_results(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", results_of(run_of("fine-tune", 0, [0.8, 0.7])))
    file = folder / "results.json"
    file.write_text(file.read_text(encoding="utf-8")[:200], encoding="utf-8")
    with pytest.raises(ReportError, match=r"results\.json is not valid JSON: .*line 1.*Restore it from a copy"):
        load_run_results(folder)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReportError, match=r"results\.json is not valid JSON: .*utf-8"):
        load_run_results(folder)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.json").mkdir()
    with pytest.raises(
        ReportError, match=r"results\.json cannot be read: it is a directory, expected a file\. Restore"
    ):
        load_run_results(tmp_path)


def changed(*path: str | int, to: Any) -> Callable[[Json], Any]:
    def change(results: Json) -> None:
        place: Any = results
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return change


def without(*path: str | int) -> Callable[[Json], Any]:
    def change(results: Json) -> None:
        place: Any = results
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("schema", to=2), r"schema must be 1, got 2: another version of forgetfree wrote it"),
        (without("schema"), r"schema must be 1, got None:"),
        (without("tasks"), r"json: tasks is missing\. Restore it"),
        (changed("stream", to=3), r"stream must be a string, got 3\. Restore it"),
        (
            changed("tasks", to=["a", "a"]),
            r"tasks must be a list of different task names, got \['a', 'a'\]\. Restore it",
        ),
        (
            changed("tasks", to=[]),
            r"tasks must be a list of different task names, got \[\]\. Restore it",
        ),
        (
            changed("tasks", to=[{}]),
            r"tasks\[0\] must be a string, got \{\}\. Restore it",
        ),
        (changed("runs", to={}), r"runs must be a list, got \{\}\. Restore it"),
        (changed("runs", 0, to="x"), r"runs\[0\] must be an object, got 'x'\. Restore it"),
        (
            without("runs", 0, "seed"),
            r"runs\[0\]\.seed is missing\. Restore it",
        ),
        (
            changed("runs", 0, "seed", to=True),
            r"runs\[0\]\.seed must be an integer, got True\. Restore it",
        ),
        (
            changed("runs", 0, "metric", to=["f1"]),
            r"runs\[0\]\.metric must be 2 names of metrics, got \['f1'\]",
        ),
        (
            without("runs", 0, "matrix", 2),
            r"runs\[0\]\.matrix must be a row before training and one after each task, each of 2 numbers; null",
        ),
        (changed("runs", 0, "matrix", 1, 1, to=None), r"that are not learned yet, or for none, got \[\["),
        (changed("runs", 0, "matrix", 1, 0, to=None), r"that are not learned yet, or for none, got \[\["),
        (changed("runs", 0, "matrix", 0, 1, to=50.0), r"runs\[0\]: matrix must hold scores in \[0, 1\], .*got 50\.0"),
        (changed("runs", 0, "matrix", 0, 1, to=float("nan")), r"is not valid JSON: NaN is not a finite number"),
        (changed("runs", 0, "ece", 0, to=0.5), r"runs\[0\]\.ece\[0\] must be a list, got 0\.5"),
        (
            without("runs", 0, "summary", "fwt"),
            r"runs\[0\]\.summary\.fwt is missing\.",
        ),
        (changed("runs", 0, "summary", "bwt", to="x"), r"runs\[0\]\.summary\.bwt must be a number, got 'x'"),
        (
            changed("runs", 0, "seconds", "train", to=-1),
            r"runs\[0\]\.seconds\.train must be at least 0, got -1",
        ),
        (
            changed("runs", 0, "options", to=[]),
            r"runs\[0\]\.options must be an object, got \[\]\. Restore it",
        ),
        (
            without("runs", 0, "ledger"),
            r"runs\[0\]\.ledger is missing\.",
        ),
        (
            changed("runs", 0, "ledger", "tasks", to=["a"]),
            r"ledger\.tasks must be the tasks of the stream, \['qn",
        ),
        (
            changed("runs", 0, "ledger", "bytes", to=-1),
            r"runs\[0\]\.ledger\.bytes must be at least 0, got -1",
        ),
        (
            changed("runs", 0, "ledger", "owned_size", to=[1]),
            r"ledger\.owned_size must be 2 numbers of at least 0, got \[1\]",
        ),
        (changed("runs", 0, "ledger", "overlap", to=[[1]]), r"ledger\.overlap must be 2 rows of 2 numbers"),
        (
            changed("runs", 0, "agreement", to=[0.5]),
            r"runs\[0\]\.agreement must be 2 numbers of at least 0, got \[0\.5\]",
        ),
        (
            changed("runs", 0, "summary", "bwt", to=10**400),
            r"runs\[0\]\.summary\.bwt must be a finite number, got 1000",
        ),
        (changed("runs", 0, "union", to={"ece": []}), r"runs\[0\]\.union\.accuracy is missing"),
        (
            changed("runs", 0, "union", "ece", to=[0.1]),
            r"runs\[0\]\.union\.ece must be 2 numbers in \[0, 1\], got",
        ),
        (changed("unfinished", to={}), r"unfinished must be a list, got \{\}"),
        (changed("unfinished", to=[{"strategy": "x"}]), r"unfinished\[0\]\.seed is missing"),
    ],
)
def test_a_wrong_schema_is_refused_with_file_and_key(
    tmp_path: Path, change: Callable[[Json], Any], message: str
) -> None:
    run = run_of("g", 0, [0.8, 0.7], ledger=ledger_of([9, 9], [9, 8], [[9, 1], [1, 9]]))
    run["union"] = {"accuracy": [0.8, 0.7], "ece": [0.1, 0.1]}
    results = copy.deepcopy(results_of(run))
    folder = write(tmp_path / "a", results)
    load_run_results(folder)
    change(results)
    write(folder, results)
    with pytest.raises(ReportError, match=message) as caught:
        load_run_results(folder)
    assert str(caught.value).startswith(f"{folder / 'results.json'}")


def test_content_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ReportError,
        match=r"results\.json: the content must be an object, got \[1\]\. Restore it",
    ):
        load_run_results(write(tmp_path / "a", [1]))


# ---- merging --------------------------------------------------------------------------------------------


def test_seeds_of_several_directories_come_together_in_order() -> None:
    merged = together(
        [
            results_of(run_of("b", 1, [0.6, 0.7]), source="one"),
            results_of(run_of("a", 0, [0.6, 0.7]), run_of("b", 0, [0.6, 0.7]), source="two"),
        ]
    )
    assert merged.sources == ("one", "two")
    assert [(entry.label, [run.seed for run in entry.runs]) for entry in merged.strategies] == [
        ("b", [0, 1]),
        ("a", [0]),
    ]


def test_the_same_run_twice_counts_once() -> None:
    """Time aside, which no repetition reproduces."""
    again = run_of("a", 0, [0.6, 0.7], seconds={"train": 9.0})
    merged = together([results_of(run_of("a", 0, [0.6, 0.7])), results_of(again)])
    assert [len(entry.runs) for entry in merged.strategies] == [1]


def test_two_outcomes_of_one_seed_are_refused() -> None:
    results = [results_of(run_of("a", 0, [0.6, last]), source=f"runs/{last}") for last in (0.7, 0.8)]
    message = r"^a with seed 0 is in runs/0\.7 and in runs/0\.8, with different outcomes\. Leave one"
    with pytest.raises(ReportError, match=message):
        together(results)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"tasks": ["mrpc", "qnli"]},
            r"tasks: qnli, mrpc in one and mrpc, qnli in the other",
        ),
        (
            {"model": {"name": "minilm", "fingerprint": "m2"}},
            r"the weights of their models, minilm and minilm, are not the same",
        ),
        ({"readout": "linear"}, r"readout is 'prompt' in one and 'linear' in the other"),
        (
            {"data": {"fingerprints": {"qnli": "q1", "mrpc": "p2"}, "shots": 16}},
            r"the rows of mrpc are not the same",
        ),
    ],
)
def test_what_must_not_be_compared_is_refused_by_name(more: Json, message: str) -> None:
    run = run_of("a", 0, [0.6, 0.7])
    results = [results_of(run, source="x"), results_of(run, source="y"), results_of(run, **more, source="z")]
    with pytest.raises(
        ReportError, match=rf"^x and z cannot be compared task by task: {message}\. Report on them separat"
    ):
        together(results)


def test_different_metrics_are_refused() -> None:
    other = run_of("b", 0, [0.6, 0.7], metric=["accuracy", "accuracy"])
    with pytest.raises(ReportError, match=r"^x and y cannot be compared task by task: metrics are accuracy, f1 in one"):
        together([results_of(run_of("a", 0, [0.6, 0.7]), source="x"), results_of(other, source="y")])


def test_what_cannot_be_compared_by_task_is_a_leaderboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table for each set of test rows: in it the best average first, with floor, forgetting, bytes and seconds.

    a: (60 + 70) / 2 = 65, floor (62 + 50) / 2 = 56, forgot 80 - 60 = 20; another model's a: 75 and nothing.
    """
    floors, more = {"constant": [0.62, 0.5]}, {"fingerprints": {"qnli": "q1", "mrpc": "p1"}, "shots": 16}
    here = results_of(run_of("a", 0, [0.6, 0.7], kept_bytes=[10, 2000]), floors=floors, data=more)
    other = results_of(run_of("a", 0, [0.8, 0.7]), model={"name": "larger", "fingerprint": "m2"}, data=more)
    rows = {"fingerprints": {"qnli": "q2", "mrpc": "p2"}, "test_rows": {"qnli": 40, "mrpc": 60}}
    elsewhere = results_of(run_of("b", 0, [0.8, 0.9]), run_of("b", 1, [0.8, 0.7]), data=rows)
    places = [str(write(tmp_path / name, held)) for name, held in (("x", here), ("y", other), ("z", elsewhere))]
    page = lay_out_leaderboard([load_run_results(place) for place in places])
    assert [table.title.partition(" (")[0] for table in page.tables] == [
        "qnli, mrpc",
        "qnli: 40 test rows, mrpc: 60 test rows",
    ]
    assert page.tables[0].rows == (
        ("a", places[1], "larger", "1", "75.0", "—", "0.0", "—", "1.8"),
        ("a", places[0], "minilm", "1", "65.0", "56.0", "20.0", "2 kB", "1.8"),
    )
    assert page.tables[1].rows[0][3:5] == ("2", "80.0 (7.1)")
    assert page.notes[0].endswith("they differ in: model, data.")
    assert main(["report", *places]) == 0
    assert "75.0" in capsys.readouterr().out
    assert main(["report", *places, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["comparisons"]) == 3
    assert main(["report", *places, "--format", "csv"]) == 1
    told = capsys.readouterr().err
    assert "cannot be compared task by task: the weights" in told and "a leaderboard (not as csv)" in told


def test_scores_by_a_metric_of_a_package_that_is_not_installed_are_told(tmp_path: Path) -> None:
    text = one_file([record_of(results_of(run_of("a", 0, [0.6, 0.7])))])
    (tmp_path / "a.csv").write_text(text.replace(",accuracy,", ",theirs,"))
    with pytest.raises(
        ReportError, match=r"a\.csv: Unknown metric 'theirs'\..* An installed package may add metrics\."
    ):
        load_run_results(tmp_path / "a.csv")


def test_nothing_to_merge_is_refused() -> None:
    with pytest.raises(ReportError, match=r"^There are no results to report on\. Give at least one"):
        merge([])


def test_configurations_of_one_strategy_stand_in_rows_of_their_own() -> None:
    """Named by what differs only: `steps` is the same in all."""
    merged = together(
        [
            results_of(
                run_of("a", 0, [0.6, 0.7], options={"sparsity": 0.01, "steps": 9}),
                run_of("b", 0, [0.6, 0.7], options={"sparsity": 0.01}),
                run_of("a", 0, [0.6, 0.8], options={"sparsity": 0.05, "steps": 9}),
                run_of("a", 1, [0.6, 0.8], options={"steps": 9, "sparsity": 0.05}),
                run_of("a", 2, [0.6, 0.8], options={"steps": 9}),
            )
        ]
    )
    assert [(entry.label, len(entry.runs)) for entry in merged.strategies] == [
        ("a (sparsity=0.01)", 1),
        ("a (sparsity=0.05)", 2),
        ("a (sparsity=—)", 1),
        ("b", 1),
    ]


@pytest.mark.parametrize("rows", [9, {"qnli": "9"}, {"qnli": -1}])
def test_numbers_of_test_rows_that_are_none_are_refused(rows: Any, tmp_path: Path) -> None:
    data = {"fingerprints": {}, "shots": 16, "test_rows": rows}
    folder = write(tmp_path / "run", results_of(run_of("a", 0, [0.6, 0.7]), data=data))
    with pytest.raises(ReportError, match=r"data\.test_rows must be a number of rows for each task, got"):
        load_run_results(folder)


def test_a_label_names_no_option_that_has_no_effect() -> None:
    """Beside the most moved entries no mask is searched for; but rows that nothing else tells apart name all that differs."""
    searched = {
        "region_from": "mask",
        "mask_steps": 4,
        "base": "movement",
        "fisher_rows": 9,
        "region_start": "pre-trained",
    }
    moved = searched | {"region_from": "movement", "mask_steps": 1, "base": "empty", "fisher_rows": 7}
    scaled = moved | {"region_start": "scaled", "mask_steps": 2, "largest_scale": 8.0}

    def labels(*variants: Json) -> list[str]:
        return [entry.label for entry in together([results_of(*map(run, range(len(variants)), variants))]).strategies]

    def run(seed: int, options: Json) -> Json:
        return run_of("a", seed, [0.6, 0.7], options=options)

    assert labels(searched, moved, scaled) == [
        "a (base=movement, mask_steps=4, region_from=mask, region_start=pre-trained)",
        "a (region_from=movement, region_start=pre-trained)",
        "a (region_from=movement, region_start=scaled, largest_scale=8.0)",
    ]
    assert labels(moved, moved | {"mask_steps": 3}) == ["a (mask_steps=1)", "a (mask_steps=3)"]


def test_intransigence_is_that_against_fine_tuned_models_of_another_directory() -> None:
    """They know 0.8 and 0.7 once learned, the others 0.8 and 0.6: (0 + 0.1) / 2.

    Those with other seeds, options or shots are no reference.
    """
    own = {"learning_rate": 0.1, "composition": "alone"}
    tuned = results_of(run_of("fine-tune", 0, [0.8, 0.7], options={"learning_rate": 0.1}), source="a")

    def found(run: Json, **more: Any) -> float | None:
        merged = together([tuned, results_of(run, source="b", **more)])
        (entry,) = [each for each in merged.strategies if each.label.startswith("g")]
        return entry.runs[0].summary.intransigence

    assert found(run_of("g", 0, [0.5, 0.6], options=own)) == pytest.approx(0.05)
    assert found(run_of("g", 1, [0.5, 0.6], options=own)) is None
    assert found(run_of("g", 0, [0.5, 0.6], options=own | {"learning_rate": 0.2})) is None
    other = {"fingerprints": {"qnli": "q1", "mrpc": "p1"}, "shots": 64}
    assert found(run_of("g", 0, [0.5, 0.6], options=own), data=other) is None
    known = run_of("g", 0, [0.5, 0.6], options=own)
    known["summary"]["intransigence"] = 0.25
    assert found(known) == 0.25


def test_agreement_is_that_with_answers_of_another_directory(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", ["a", "b"], {"fine-tune": 0.0, "g": 0.1}, seeds=(0,))
    of_equal_rows(whole)
    results = json.loads((whole / "results.json").read_text())
    for name, folder in (("fine-tune", "first"), ("g", "second")):
        (tmp_path / folder).mkdir()
        (whole / name).rename(tmp_path / folder / name)
        of_one = results | {"runs": [run for run in results["runs"] if run["strategy"] == name]}
        (tmp_path / folder / "results.json").write_text(json.dumps(of_one))
    held = [load_file(next((tmp_path / folder).glob("*/seed-0/*.safetensors"))) for folder in ("first", "second")]
    same = [100 * np.mean(np.equal(*(each[f"{task}/logits"].argmax(1) for each in held))) for task in ("a", "b")]
    comparison = merge([load_run_results(tmp_path / each) for each in ("first", "second")])
    rows = table_of(lay_out(comparison), "Calibration error").rows
    assert [row[-2:] for row in rows] == [("—", "—"), tuple(f"{each:.1f}" for each in same)]
    (run,) = json.loads(render(comparison, "json"))["strategies"][1]["runs"]
    assert np.multiply(run["agreement"], 100) == pytest.approx(same)


def test_seconds_of_models_that_others_made_stand_beside_ones_own() -> None:
    """Or it is said that they are not counted: of a cache that does not tell them, and of older results without them."""
    seconds = {"fine_tune": 0.0, "train": 30.0}
    made = run_of("fine-tune", 0, [0.8, 0.7], seconds={"fine_tune": 240.0, "train": 0.0})
    taken = run_of("grafting-continual", 0, [0.8, 0.7], seconds=seconds | {"fine_tune_elsewhere": 240.0})
    page = page_of(made, taken)
    table = table_of(page, "Time per phase")
    assert table.header == ("strategy", "fine-tune (s)", "train (s)", "fine-tune-elsewhere (s)")
    assert [row[1:] for row in table.rows] == [("240.0", "0.0", "—"), ("0.0", "30.0", "240.0")]
    assert record_of(results_of(taken)).runs[0].all_seconds == 270
    unknown = run_of("grafting-continual", 0, [0.8, 0.7], seconds=seconds | {"fine_tune_elsewhere": None})
    older = run_of("grafting-continual", 0, [0.8, 0.7], seconds=seconds)

    def told(*runs: Json) -> bool:
        note = "Seconds of grafting-continual do not count fine-tuning: its fine-tuned models came from a cache"
        return any(each.startswith(note) for each in page_of(*runs).notes)

    assert record_of(results_of(unknown)).runs[0].all_seconds is None
    again = run_of("grafting-continual", 1, [0.8, 0.7], seconds=seconds)
    _, time, *_ = _costs(together([results_of(made, unknown, again)])).pictures
    assert "Score against time: fine-tune 75.0 % at 240" in time.svg
    assert "grafting-continual" not in time.svg  # a mean over some of its seeds is none
    assert told(unknown) and told(made, unknown) and told(older)
    assert not told(made, taken) and not told(made, older)
    assert not told(run_of("grafting-continual", 0, [0.8, 0.7], seconds=seconds, options={"region_from": "snip"}))
    assert table_of(page_of(unknown), "Time per phase").rows[0][-1] == "—"


def test_the_picks_that_need_a_fine_tuned_model_are_those_that_say_so() -> None:
    from forgetfree.results.configurations import NEED_FINE_TUNED
    from forgetfree.training.localization import LocalizationOptions

    declared = typing.get_args(typing.get_type_hints(LocalizationOptions)["region_from"])
    kinds = [kind for each in declared for kind in typing.get_args(each)]
    assert {kind for kind in kinds if LocalizationOptions(region_from=kind).needs_fine_tuned} == {*NEED_FINE_TUNED}


def test_runs_that_differ_in_shots_or_steps_stand_side_by_side_and_say_it() -> None:
    """Every row says what differs between directories; what they share stands above."""

    def directory(shots: int, steps: int, *names: str, **options: float) -> Json:
        data = {"fingerprints": {"qnli": "q1", "mrpc": "p1"}, "shots": shots, "steps": steps}
        runs = [run_of(name, 0, [0.6, 0.7 + shots / 1000], options={"steps": steps, **options}) for name in names]
        return results_of(*runs, data=data, source=f"{shots}-{steps}", set={"learning_rate": "0.1"})

    few, many, long = directory(16, 9, "a", "b"), directory(64, 9, "a", "c"), directory(64, 30, "a", l1=0.5)
    merged = together([few, many])
    labels = ["a (shots=16)", "a (shots=64)", "b (shots=16)", "c (shots=64)"]
    assert [entry.label for entry in merged.strategies] == labels
    assert merged.settings == {"model": "minilm", "readout": "prompt", "steps": 9, "learning_rate": "0.1"}
    assert [entry.label for entry in together([few, many, long]).strategies if entry.label.startswith("a")] == [
        "a (shots=16, steps=9, l1=—)",
        "a (shots=64, steps=9, l1=—)",
        "a (shots=64, steps=30, l1=0.5)",
    ]
    assert [entry.label for entry in together([many]).strategies] == ["a", "c"]
    with pytest.raises(ReportError, match=r"^One CSV file holds one set-up and one configuration"):
        one_file([record_of(directory(16, 9, "b")), record_of(directory(64, 9, "c"))])


def test_the_set_up_is_told_as_it_was_typed() -> None:
    """An option that is set to nothing goes without saying."""
    typed = {"learning_rate": "0.001", "dropout": False, "mask_batch_size": "512"}
    page = page_of(run_of("a", 0, [0.6, 0.7]), set=typed)
    assert page.notes[:2] == (
        "Set-up: model minilm, readout prompt, shots 16, learning rate 0.001.",
        "Also set: dropout=false mask_batch_size=512.",
    )
    narrow = page_of(run_of("a", 0, [0.6, 0.7]), set={"precision": "fp32", "dtype": "bfloat16"})
    assert narrow.notes[0].endswith(", shots 16, precision that of the weights (bfloat16).")
    runs = [run_of("a", 0, [0.6, 0.7], options={"region_steps": steps, "dropout": not steps}) for steps in (None, 4)]
    merged = together([results_of(runs[0], source="x"), results_of(runs[1], source="y")])
    assert [entry.label for entry in merged.strategies] == ["a (dropout=true)", "a (dropout=false, region_steps=4)"]


def test_one_file_of_several_directories_has_the_floors_of_all_their_seeds(tmp_path: Path) -> None:
    def directory(seed: int, floor: float) -> Json:
        floors = {"constant": [0.5, 0.4], "bag_of_words": {str(seed): [floor, 0.6]}}
        return results_of(run_of("a", seed, [0.6, 0.7]), floors=floors, source=f"seed-{seed}")

    both = [directory(0, 0.5), directory(1, 0.6)]
    (tmp_path / "both.csv").write_text(one_file([record_of(each) for each in both]))
    for merged in (together(both), merge([load_run_results(tmp_path / "both.csv")])):
        assert merged.learned_floors["a bag of words"] == pytest.approx((0.55, 0.6))


# ---- formats --------------------------------------------------------------------------------------------

HOSTILE = r"a & <b>|[red]_\{x}"


@pytest.fixture
def hostile() -> Comparison:
    """A strategy whose name means something in every format; BWT is −20.0 and intransigence unknown."""
    return together([results_of(run_of(HOSTILE, 0, [0.6, 0.7]))])


def test_an_unknown_format_is_refused(two_seeds: Comparison) -> None:
    with pytest.raises(UnknownNameError, match=r"^Unknown report format 'markdwn'\. Did you mean 'markdown'\?"):
        render(two_seeds, "markdwn")


@pytest.mark.sampled("json")
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_holds_every_title_note_and_number(
    two_seeds: Comparison, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = render(two_seeds, format)
    assert text.endswith("\n") and not text.endswith("\n\n")
    plain = re.sub(r"\\(?=[%()_-])", "", text)
    for wanted in (
        "After the last task (in %",
        "Transfer",
        "65.0 (7.1)",
        "15.0 (7.1)",
        "2 seeds (0, 1)",
        "1.5 (0.0)",
    ):
        assert wanted in plain, wanted


def test_rich_shows_names_as_they_are(hostile: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = render(hostile, "rich")
    assert f"Learning matrix of {HOSTILE}" in text
    assert "\x1b" not in text
    [row] = [line for line in text.splitlines() if "-20.0" in line]
    assert row.split() == [*HOSTILE.split(), "60.0", "70.0", "65.0", "20.0", "-20.0", "20.0"]


def test_rich_breaks_cells_to_fit_the_terminal(two_seeds: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the first table becomes two lines; only under the wide word "forgetting" one is enough."""
    monkeypatch.setenv("COLUMNS", "72")
    lines = render(two_seeds, "rich").splitlines()
    assert max(map(len, lines)) <= 72
    [number] = [n for n, line in enumerate(lines) if line.split()[:2] == ["continual-ft", "65.0"]]
    assert lines[number].split()[1:] == ["65.0", "80.0", "72.5", "15.0", "(7.1)", "-15.0", "20.0"]
    assert lines[number + 1].split() == ["(7.1)", "(14.1)", "(10.6)", "(7.1)", "(0.0)"]


def test_rich_never_drops_a_column(two_seeds: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    words = render(two_seeds, "rich").split()
    for table in lay_out(two_seeds).tables:
        for cell in (*table.header, *(cell for row in table.rows for cell in row)):
            assert all(word in words for word in cell.split()), cell


def test_markdown_tables_are_proper(hostile: Comparison) -> None:
    text = render(hostile, "markdown")
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(blocks) == 5
    for block in blocks:
        # A pipe that is not escaped separates cells: every line must have as many.
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block}) == 1
        assert re.fullmatch(r"\| ---( \| ---:)+ \|", block[1])
    assert r"| a \& \<b\>\|\[red\]\_\\{x} | 60.0 | 70.0 | 65.0 | 20.0 | -20.0 | 20.0 |" in blocks[0]
    assert "| 0.0 | — | 20.0 | 0.0 |" in blocks[1][2]
    assert "- Every strategy: 1 seed (0)." in text


def test_json_holds_the_tables_and_the_runs(two_seeds: Comparison) -> None:
    content = json.loads(render(two_seeds, "json"))
    assert content["tasks"] == TASKS
    assert content["strategies"][0]["runs"][1]["matrix"][-1] == [0.7, 0.9]
    assert content["report"]["tables"][0]["rows"][0][:2] == ["continual-ft", "65.0 (7.1)"]


class Cells(html.parser.HTMLParser):
    """Collects the text of every cell and every tag met."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def test_html_is_balanced_escaped_and_needs_no_other_file(hostile: Comparison) -> None:
    text = render(hostile, "html")
    page = Cells()
    page.feed(text)
    assert page.open == []
    assert HOSTILE in page.cells and "—" in page.cells and "-20.0" in page.cells
    assert "b" not in page.tags
    assert '<th scope="row">a &amp; &lt;b&gt;|[red]_\\{x}</th>' in text
    assert "src=" not in text and "<link" not in text and "url(http" not in text and "@import" not in text
    assert {
        href for href in re.findall(r'href="([^"]*)"', text) if not href.startswith(("#", "data:image/png;"))
    } == set()
    assert "default-src 'none'" in text  # and the browser holds it to that
    assert text.startswith("<!doctype html>")


def test_latex_is_escaped_and_uses_booktabs(hostile: Comparison) -> None:
    text = render(hostile, "latex")
    name = r"a \& \textless{}b\textgreater{}\textbar{}{[}red{]}\_\textbackslash{}\{x\}"
    assert rf"{name} & 60.0 & 70.0 & 65.0 & 20.0 & $-$20.0 & 20.0 \\" in text
    assert rf"{name} & 0.0 & --- & 20.0 & 0.0 \\" in text
    assert r"\caption{After the last task (in \%; forgetting" in text
    for opening, number in (
        (r"\begin{tabular}{lrrrrrr}", 1),
        (r"\toprule", 5),
        (r"\midrule", 5),
        (r"\bottomrule", 5),
    ):
        assert text.count(opening) == number
    assert text.count(r"\begin{") == text.count(r"\end{")
    assert r"\item Every strategy: 1 seed (0)." in text


# ---- growth with the number of tasks ----------------------------------------------------------------------


def long_results() -> Json:
    """Six tasks: the first falls from 0.9 by 0.1 with each task, any other is 0.6 once learned."""
    tasks = [f"t{i}" for i in range(6)]
    matrix = [[0.5] * 6]
    for step in range(6):
        matrix.append([round(0.9 - 0.1 * step, 1), *([0.6] * step), *([0.5] * (5 - step))])
    ece = [[0.1] * 6] * 7
    ledger = {
        "tasks": tasks,
        "region_size": [10] * 6,
        "owned_size": [10, 8, 5, 5, 5, 0],
        "bytes": 600,
        "overlap": [[0.0] * 6] * 6,
    }
    run = run_of("grafting-continual", 0, [0.0, 0.0]) | {
        "metric": ["accuracy"] * 6,
        "matrix": matrix,
        "ece": ece,
        "summary": summarize(matrix, ece),
        "ledger": ledger,
        "kept_bytes": [100, 200, 300, 400, 500, 600],
    }
    return results_of(run) | {"tasks": tasks, "data": {}}


def test_a_long_stream_shows_how_things_grow(tmp_path: Path) -> None:
    """After the second task: the first at 80 %, mean of 80 and 60; it owns 8 of the 10 entries of its region."""
    folder = write(tmp_path, long_results())
    timings = folder / "grafting-continual" / "seed-0" / "seconds-per-task.json"
    timings.parent.mkdir(parents=True)
    timings.write_text("[1, 2, 3, 4, 5, 6]")
    table = table_of(lay_out(merge([load_run_results(folder)])), "Growth of grafting-continual")
    assert table.rows[1] == ("t1", "2.0", "200", "80.0", "80.0", "70.0")
    assert table.rows[5] == ("t5", "6.0", "600", "0.0", "40.0", "56.7")


@pytest.mark.parametrize("content", [None, "[1, 2]", "{", "[1, 2, 3, 4, 5, null]"])
def test_without_sound_timings_there_is_no_growth_table(tmp_path: Path, content: str | None) -> None:
    folder = write(tmp_path, long_results())
    if content is not None:
        timings = folder / "grafting-continual" / "seed-0" / "seconds-per-task.json"
        timings.parent.mkdir(parents=True)
        timings.write_text(content)
    page = lay_out(merge([load_run_results(folder)]))
    assert not [table for table in page.tables if table.title.startswith("Growth")]


def test_scenarios_are_not_compared() -> None:
    runs = [run_of("continual-ft", 0, [0.6, 0.7])]
    with pytest.raises(ReportError, match="scenario: task in one and class in the other"):
        together([results_of(*runs), results_of(*runs, scenario="class")])


@pytest.mark.parametrize("key", ["average", "forgetting", "bwt", "fwt", "ece", "intransigence"])
def test_a_summary_that_does_not_follow_from_the_matrix_is_refused(tmp_path: Path, key: str) -> None:
    results = copy.deepcopy(results_of(run_of("fine-tune", 0, [0.8, 0.7])))
    run = results["runs"][0]
    run["summary"]["intransigence"] = 0.0
    folder = write(tmp_path / "a", results)
    load_run_results(folder)
    run["summary"][key] = 6172839450617283.0
    write(folder, results)
    with pytest.raises(
        ReportError, match=rf"runs\[0\]\.summary\.{key} must be .*, which follows from the matrices, got 6"
    ):
        load_run_results(folder)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("learning_rate", -1.0, "greater than 0"),
        ("momentum", 1.5, "at most 1"),
        ("batch_size", 0, "at least 1"),
        ("steps", -3, "at least 1"),
        ("weight_decay", -0.1, "at least 0"),
        ("lora.rank", 0, "at least 1"),
        ("lora.rank", 65537, "at most 65536"),
        ("lora.lora_dropout", 1.5, "at most 1"),
        ("grafting-continual.sparsity", 0.0, "greater than 0"),
        ("grafting-continual.mask_steps", -1, "at least 0"),
        ("mas.alpha", 2.0, "at most 1"),
    ],
)
def test_an_option_out_of_its_bounds_is_refused(tmp_path: Path, option: str, value: float, expected: str) -> None:
    strategy, _, option = option.rpartition(".")
    results = copy.deepcopy(results_of(run_of(strategy or "ewc", 0, [0.8, 0.7])))
    results["runs"][0]["options"] = {option: value, "my_own": -1}
    folder = write(tmp_path / "a", results)
    with pytest.raises(ReportError, match=rf"runs\[0\]\.options\.{option} must be {expected}, got {value}"):
        load_run_results(folder)


def test_options_of_plug_ins_have_bounds_of_their_own(tmp_path: Path) -> None:
    results = copy.deepcopy(results_of(run_of("my-lora", 0, [0.8, 0.7])))
    results["runs"][0]["options"] = {"rank": 0, "alpha": -1.0}
    assert load_run_results(write(tmp_path / "a", results)).runs[0].options["rank"] == 0


def test_the_bounds_of_options_are_those_that_strategies_declare() -> None:
    from annotated_types import Ge, Gt, Le

    from forgetfree.results.run_results import MASOptions, OwnOptions, RunOptions
    from forgetfree.training.training_options import TrainingOptions

    names = {Gt: "gt", Ge: "ge", Le: "le"}

    def bounds_in(model: Any) -> dict[str, Any]:
        found = {}
        for name, field in model.model_fields.items():
            (kind,) = [each for each in typing.get_args(field.annotation) if each is not type(None)]
            bounds = typing.get_args(kind)[1]
            found[name] = (
                typing.get_args(kind)[0],
                {names[type(bound)]: getattr(bound, names[type(bound)]) for bound in bounds.metadata},
            )
        return found

    def declared(options: Any) -> dict[str, Any]:
        hints, found = typing.get_type_hints(options), {}
        for name, field in options.__dataclass_fields__.items():
            if bounds := {key: value for key, value in field.metadata.items() if key in names.values()}:
                found[name] = (int if int in (hints[name], *typing.get_args(hints[name])) else float, bounds)
        return found

    assert declared(TrainingOptions) == bounds_in(RunOptions)
    of_all, known = {}, bounds_in(OwnOptions)
    for strategy in registry.STRATEGIES:
        options = declared(registry.strategy(strategy).Options)
        own = {name: options[name] for name in options.keys() - bounds_in(RunOptions).keys()}
        expected = bounds_in(MASOptions) if strategy == "mas" else known
        assert own == {name: expected.get(name) for name in own}, strategy
        of_all |= own
    assert of_all.keys() == known.keys()
