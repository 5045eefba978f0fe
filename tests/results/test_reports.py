"""Reports on hand-made results: two strategies, two tasks, two seeds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from handmade import TASKS, Json, results_of, run_of, together

from forgetfree.errors import RunError, UnknownNameError
from forgetfree.results.report.page import FORMATS, Page, Table, render_page
from forgetfree.results.report.run_report import lay_out, render
from forgetfree.results.table import Results, load_results


def page_of(*runs: Json, **more: Any) -> Page:
    return lay_out(together([results_of(*runs, **more)]))


def table_of(page: Page, title: str) -> Table:
    [table] = [table for table in page.tables if table.title.startswith(title)]
    return table


@pytest.fixture
def two_seeds() -> Results:
    """continual-ft ends at 0.6 / 0.7 with seed 0 and at 0.7 / 0.9 with seed 1."""
    return together([results_of(run_of("continual-ft", 0, [0.6, 0.7]), run_of("continual-ft", 1, [0.7, 0.9]))])


# ---- the tables -----------------------------------------------------------------------------------------


def test_outcome_table_is_mean_and_deviation_over_seeds(two_seeds: Results) -> None:
    """All values are in %. The deviation of two values with n − 1 is their distance / √2.

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


def test_updates_stand_beside_scores_where_they_are_known() -> None:
    """Fine-tuning has 300 + 100 = 400, and a region twice that; older runs, floors, and runs that lack a task have none."""
    runs = [run_of("fine-tune", 0, [0.8, 0.7], updates=[300, 100])]
    runs += [run_of("grafting-continual", 0, [0.8, 0.7], updates=[600, 200]), run_of("ewc", 0, [0.8, 0.7])]
    runs += [run_of("lora", 0, [0.8, 0.7], updates=[300, None])]
    page = page_of(*runs, floors={"constant": [0.5, 0.5]})
    table = table_of(page, "After the last task")
    assert table.header[-1] == "updates" and [row[-1] for row in table.rows] == ["400", "800", "—", "—", "—"]
    assert {"updates", "forgetting", "zero-shot gain"} <= {name for name, _ in page.words} and "loss" not in dict(
        page.words
    )


def test_the_final_union_has_a_row_of_its_own() -> None:
    """The average is (75 + 65) / 2 = 70, and the ECE (20 + 10) / 2 = 15; the union has no history, so nothing else.

    One seed has no deviation; a forgetting of 0.00001 is shown as 0.0, and its negative not as -0.0.
    """
    run = run_of("grafting-continual", 0, [0.8 - 1e-7, 0.7], union_accuracy=[0.75, 0.65], union_ece=[0.2, 0.1])
    table = table_of(page_of(run), "After the last task")
    assert table.rows == (
        ("grafting-continual", "80.0", "70.0", "75.0", "0.0", "0.0", "20.0"),
        ("grafting-continual (one final union)", "75.0", "65.0", "70.0", "—", "—", "15.0"),
    )


def test_a_constant_answer_has_the_last_row() -> None:
    """The average is (62 + 80) / 2 = 71. It learns and forgets nothing, so the other cells are dashes."""
    run, floors = run_of("continual-ft", 0, [0.8, 0.7]), {"constant": [0.62, 0.8]}
    table = table_of(page_of(run, floors=floors), "After the last task")
    assert table.rows[1:] == (("a constant answer", "62.0", "80.0", "71.0", "—", "—", "—"),)
    older = results_of(run_of("ewc", 0, [0.8, 0.7]))  # from a version without floors
    merged = lay_out(together([older, results_of(run, floors=floors)]))
    assert [row[0] for row in table_of(merged, "After the last task").rows] == [
        "ewc",
        "continual-ft",
        "a constant answer",
    ]


def test_transfer_table(two_seeds: Results) -> None:
    """Zero-shot gain: just before learning, mrpc has 0.5 − 0.5 = 0. Without a reference, FWT is unknown and has no column."""
    page = lay_out(two_seeds)
    table = table_of(page, "Transfer")
    assert table.header == ("strategy", "zero-shot gain")
    assert table.rows == (("continual-ft", "0.0 (0.0)"),)
    assert "zero-shot gain" in dict(page.words) and "FWT" not in dict(page.words)


def test_a_table_in_which_nothing_is_known_is_left_out() -> None:
    """Without scores before training there is no zero-shot gain, and without a model of each task alone no FWT."""
    run = run_of("continual-ft", 0, [0.6, 0.7])
    run["matrix"] = [[None, None], [0.8, None], [0.6, 0.7]]
    page = page_of(run)
    titles = [table.title for table in page.tables]
    assert any(title.startswith("Learning matrix") for title in titles)
    assert not [title for title in titles if title.startswith("Transfer")] and "zero-shot gain" not in dict(page.words)


def test_cost_table_has_every_phase_and_what_is_kept() -> None:
    """12,000 bytes over two tasks are 6,000 per task."""
    kept = [7000, 12000]
    page = page_of(
        run_of("fine-tune", 0, [0.8, 0.7]),
        run_of("grafting-continual", 0, [0.8, 0.7], kept_bytes=kept, seconds={"localize": 1234.56}),
    )
    table = table_of(page, "Time per phase")
    assert table.header == (
        "strategy",
        "fine-tune (s)",
        "evaluate (s)",
        "localize (s)",
        "stored (bytes)",
        "stored per task (bytes)",
    )
    assert table.rows == (
        ("fine-tune", "1.5", "0.2", "—", "—", "—"),
        ("grafting-continual", "—", "—", "1,234.6", "12,000", "6,000"),
    )
    titles = [table.title for table in page_of(run_of("fine-tune", 0, [0.8, 0.7], seconds={})).tables]
    assert not any(title.startswith("Time") for title in titles)  # there is no table without known times


def test_error_and_agreement_of_each_task_stand_beside_the_scores() -> None:
    """The last row's ECE is 0.1 and 0.3; agreement, 0.8 and 0.9, is shown where a run has it."""
    page = page_of(run_of("g", 0, [0.8, 0.7], agreement=[0.8, 0.9]), run_of("h", 0, [0.8, 0.7]))
    table = table_of(page, "Other metrics after the last task (in %)")
    assert table.header == ("strategy", "ECE qnli", "ECE mrpc", "agreement qnli", "agreement mrpc")
    assert table.rows == (("g", "10.0", "30.0", "80.0", "90.0"), ("h", "10.0", "30.0", "—", "—"))


def test_learning_matrix_is_the_mean_over_seeds(two_seeds: Results) -> None:
    """The last row is (60 + 70) / 2 and (70 + 90) / 2."""
    table = table_of(lay_out(two_seeds), "Learning matrix of continual-ft (in %, mean over 2 seeds)")
    assert table.header == ("stage", "qnli", "mrpc (F1)")
    assert table.rows == (
        ("before training", "50.0", "50.0"),
        ("after qnli", "80.0", "50.0"),
        ("after mrpc", "65.0", "80.0"),
    )


def test_tints_of_learning_matrices_go_from_a_constant_answer_to_the_best_score_of_a_task() -> None:
    """a ends (0.5 − 0.3) / (0.8 − 0.3) = 40 % of the way on the first task, (0.7 − 0.5) / (0.9 − 0.5) = 50 % on the second."""
    runs = [
        run_of("a", 0, [], matrix=[[None, None], [0.8, None], [0.5, 0.7]]),
        run_of("b", 0, [], matrix=[[0.2, 0.4], [0.8, 0.4], [0.8, 0.9]]),
    ]
    a, b = (table_of(page_of(*runs, floors={"constant": [0.3, 0.5]}), f"Learning matrix of {name}") for name in "ab")
    assert [row[0] for row in a.rows] == ["after qnli", "after mrpc"]  # nothing is known before training
    assert a.tints == ((1, None), (pytest.approx(0.4), pytest.approx(0.5)))
    assert b.tints == ((0, 0), (1, 0), (1, 1))


def test_notes_name_the_set_up_and_the_seeds(two_seeds: Results) -> None:
    page = lay_out(two_seeds)
    assert page.title == "forgetfree: qnli-mrpc"
    assert page.notes == (
        "Set-up: model minilm, readout prompt, shots 16.",
        "Each cell shows the mean (standard deviation, n - 1) over seeds.",
        "Every strategy: 2 seeds (0, 1).",
    )
    runs = [run_of("a", 0, [0.6, 0.7]), run_of("a", 3, [0.6, 0.7]), run_of("b", 0, [0.6, 0.7])]
    assert page_of(*runs).notes[-1] == "a: 2 seeds (0, 3); b: 1 seed (0)."


def test_notes_name_what_is_left_out() -> None:
    cut, failed = {"strategy": "continual-ft", "seed": 4, "after": 1}, {"strategy": "h", "seed": 3, "error": "Odd."}
    one = results_of(run_of("fine-tune", 0, [0.8, 0.7]), unfinished=[cut], failed=[failed], source="runs/a")
    expected = "Unfinished and left out: continual-ft, seed 4, after 1 of 2 tasks"
    assert lay_out(together([one])).notes[-2:] == (f"{expected}.", "Failed and left out: h, seed 3: Odd.")
    other = results_of(run_of("ewc", 0, [0.8, 0.7]), source="runs/b")
    assert lay_out(together([one, other])).notes[-2] == f"{expected} (runs/a)."


def test_a_stream_of_one_task_and_results_without_runs_are_reported() -> None:
    run = run_of("fine-tune", 0, [0.8, 0.7], metric=["accuracy"], matrix=[[0.5], [0.8]], ece=[[0.2], [0.1]])
    page = page_of(run, tasks=["qnli"])
    table = table_of(page, "After the last task (in %)")
    assert (table.header, table.rows) == (("strategy", "qnli", "ECE"), (("fine-tune", "80.0", "10.0"),))
    assert not [
        header for each in page.tables for header in each.header if "orgetting" in header or header in ("FWT", "BWT")
    ]
    empty = together([results_of()])
    assert lay_out(empty).tables[0].rows == ()
    assert all(render(empty, name) for name in FORMATS) and "<svg" not in render(empty, "html")


# ---- merging --------------------------------------------------------------------------------------------


def test_the_same_run_twice_counts_once() -> None:
    """Times may differ, since no repetition reproduces them."""
    again = run_of("a", 0, [0.6, 0.7], seconds={"train": 9.0})
    merged = together([results_of(run_of("a", 0, [0.6, 0.7])), results_of(again)])
    assert [len(runs) for runs in merged.units.values()] == [1]


def test_two_outcomes_of_one_seed_are_refused() -> None:
    results = [results_of(run_of("a", 0, [0.6, last]), source=f"runs/{last}") for last in (0.7, 0.8)]
    message = r"^a with seed 0 is in runs/0\.7 and in runs/0\.8, with different outcomes\. Leave one"
    with pytest.raises(RunError, match=message):
        together(results)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"tasks": ["mrpc", "qnli"]},
            r"the list of tasks is \['qnli', 'mrpc'\] in one and \['mrpc', 'qnli'\] in the other",
        ),
        ({"scenario": "class"}, "scenario is 'task' in one and 'class' in the other"),
        (
            {"data": {"fingerprints": {"qnli": "q1", "mrpc": "p2"}, "shots": 16}},
            "SHA-256 of the rows of mrpc is 'p1' in one and 'p2' in the other",
        ),
    ],
)
def test_what_must_not_be_compared_is_refused_by_name(more: Json, message: str) -> None:
    run = run_of("a", 0, [0.6, 0.7], metric=["accuracy", "accuracy"])
    results = [results_of(run, source="x"), results_of(run, source="y"), results_of(run, **more, source="z")]
    with pytest.raises(RunError, match=rf"^x and z cannot be compared: {message}\. Report on them separat"):
        together(results)


@pytest.mark.parametrize(
    ("one", "other", "labels"),
    [
        ({"name": "small"}, {"name": "larger"}, ["a (model=small)", "a (model=larger)"]),
        (
            {"fingerprint": "0123456789"},
            {"fingerprint": "9876543210"},
            ["a (fingerprint=01234567)", "a (fingerprint=98765432)"],
        ),
        ({"graftable": 100}, {"graftable": 200}, ["a (graftable=100)", "a (graftable=200)"]),
    ],
)
def test_models_stand_side_by_side_on_the_same_rows(one: Json, other: Json, labels: list[str]) -> None:
    """Labels show the model's name or, if names are equal, the first digits of fingerprints, or the graftable entries."""
    common = {"name": "m", "fingerprint": "f", "readout": "prompt"}
    merged = together(
        [results_of(run_of("a", 0, [0.6, 0.7]), model=common | model, source=str(model)) for model in (one, other)]
    )
    assert merged.strategies == labels and merged.learned_floors == {}


def test_configurations_of_one_strategy_stand_in_rows_of_their_own() -> None:
    """Labels show only the options that differ: `steps` is the same in all."""
    runs = [
        run_of("a", 0, [0.6, 0.7], options={"sparsity": 0.01, "steps": 9}),
        run_of("b", 0, [0.6, 0.7], options={"sparsity": 0.01}),
        run_of("a", 0, [0.6, 0.8], options={"sparsity": 0.05, "steps": 9}),
        run_of("a", 1, [0.6, 0.8], options={"steps": 9, "sparsity": 0.05}),
        run_of("a", 2, [0.6, 0.8], options={"steps": 9}),
    ]
    merged = together([results_of(run) for run in runs])
    assert [(label, len(runs)) for label, runs in merged.units.items()] == [
        ("a (sparsity=0.01)", 1),
        ("a (sparsity=0.05)", 2),
        ("a (sparsity=—)", 1),
        ("b", 1),
    ]


def test_forward_transfer_is_that_against_fine_tuned_models_of_another_directory() -> None:
    """They score 0.7 on the second task right after learning, and g scores 0.6: −0.1. Nothing transfers to the first task.

    Models with other seeds, options or shots are no reference.
    """
    own = {"learning_rate": 0.1, "composition": "alone"}
    tuned = results_of(run_of("fine-tune", 0, [0.8, 0.7], options={"learning_rate": 0.1}), source="a")

    def found(run: Json, **more: Any) -> float | None:
        merged = together([tuned, results_of(run, source="b", **more)])
        (label,) = [each for each in merged.strategies if each.startswith("g")]
        return merged.summary_of(label, run["seed"])["fwt"]

    assert found(run_of("g", 0, [0.5, 0.6], options=own)) == pytest.approx(-0.1)
    assert found(run_of("g", 1, [0.5, 0.6], options=own)) is None
    assert found(run_of("g", 0, [0.5, 0.6], options=own | {"learning_rate": 0.2})) is None
    other = {"fingerprints": {"qnli": "q1", "mrpc": "p1"}, "shots": 64}
    assert found(run_of("g", 0, [0.5, 0.6], options=own), data=other) is None


def test_runs_that_differ_in_shots_or_steps_stand_side_by_side_and_say_it() -> None:
    """The label of each row shows the settings that differ between directories; common settings are above the table."""

    def directory(shots: int, steps: int, *names: str, **options: float) -> Json:
        data = {"fingerprints": {"qnli": "q1", "mrpc": "p1"}, "shots": shots, "steps": steps}
        runs = [run_of(name, 0, [0.6, 0.7 + shots / 1000], options={"steps": steps, **options}) for name in names]
        return results_of(*runs, data=data, source=f"{shots}-{steps}", set={"learning_rate": "0.1"})

    few, many, long = directory(16, 9, "a", "b"), directory(64, 9, "a", "c"), directory(64, 30, "a", l1=0.5)
    merged = together([few, many])
    labels = ["a (shots=16)", "a (shots=64)", "b (shots=16)", "c (shots=64)"]
    assert merged.strategies == labels
    assert merged.settings == {"model": "minilm", "readout": "prompt", "steps": 9, "learning_rate": "0.1"}
    assert [label for label in together([few, many, long]).strategies if label.startswith("a")] == [
        "a (shots=16, steps=9, l1=—)",
        "a (shots=64, steps=9, l1=—)",
        "a (shots=64, steps=30, l1=0.5)",
    ]
    assert together([many]).strategies == ["a", "c"]
    with pytest.raises(
        RunError, match=r"^One CSV file holds one set-up and one configuration of a strategy, got a \(shots=16\)"
    ):
        render(together([few, many]), "csv")


def test_the_set_up_is_told_as_it_was_typed() -> None:
    """An option that is None is left out."""
    typed = {"learning_rate": "0.001", "dropout": False, "mask_batch_size": "512"}
    page = page_of(run_of("a", 0, [0.6, 0.7]), set=typed)
    assert page.notes[0] == (
        "Set-up: model minilm, readout prompt, shots 16, learning rate 0.001, dropout false, mask batch size 512."
    )
    runs = [run_of("a", 0, [0.6, 0.7], options={"region_steps": steps, "dropout": not steps}) for steps in (None, 4)]
    merged = together([results_of(runs[0], source="x"), results_of(runs[1], source="y")])
    assert merged.strategies == ["a (dropout=true)", "a (dropout=false, region_steps=4)"]


def test_one_file_of_several_directories_has_the_floors_of_all_their_seeds(tmp_path: Path) -> None:
    def directory(seed: int, floor: float) -> Json:
        floors = {"constant": [0.5, 0.4], "bag_of_words": {str(seed): [floor, 0.6]}}
        return results_of(run_of("a", seed, [0.6, 0.7]), floors=floors, source=f"seed-{seed}")

    both = [directory(0, 0.5), directory(1, 0.6)]
    (tmp_path / "both.csv").write_text(render(together(both), "csv"))
    for merged in (together(both), load_results(tmp_path / "both.csv")):
        assert merged.learned_floors["a bag of words"] == pytest.approx((0.55, 0.6))


# ---- formats --------------------------------------------------------------------------------------------

HOSTILE = r"a & <b>|[red]_\{x}"


@pytest.fixture
def hostile() -> Results:
    """A strategy whose name has special characters of every format; BWT is −20.0, and unknown for a constant answer."""
    return together([results_of(run_of(HOSTILE, 0, [0.6, 0.7]), floors={"constant": [0.5, 0.5]})])


def test_an_unknown_format_is_refused(two_seeds: Results) -> None:
    with pytest.raises(UnknownNameError, match=r"^Unknown report format 'markdwn'\. Did you mean 'markdown'\?"):
        render(two_seeds, "markdwn")


@pytest.mark.parametrize("format", ["rich", "markdown", "html", "latex"])
def test_every_format_holds_every_title_note_and_number(
    two_seeds: Results, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = render(two_seeds, format)
    assert text.endswith("\n") and not text.endswith("\n\n")
    plain = re.sub(r"\\(?=[%()_-])", "", text).replace("\xa0", " ")
    for wanted in (
        "After the last task (in %",
        "Transfer",
        "65.0 (7.1)",
        "15.0 (7.1)",
        "2 seeds (0, 1)",
        "1.5 (0.0)",
    ):
        assert wanted in plain, wanted


def test_rich_shows_names_as_they_are(hostile: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = render(hostile, "rich")
    assert f"Learning matrix of {HOSTILE}" in text
    assert "\x1b" not in text
    [row] = [line for line in text.splitlines() if "-20.0" in line]
    assert row.split() == [*HOSTILE.split(), "60.0", "70.0", "65.0", "20.0", "-20.0", "20.0"]


def test_rich_breaks_cells_to_fit_the_terminal(two_seeds: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the first table takes two lines; only the wide column "forgetting" needs one."""
    monkeypatch.setenv("COLUMNS", "72")
    lines = render(two_seeds, "rich").splitlines()
    assert max(map(len, lines)) <= 72
    [number] = [n for n, line in enumerate(lines) if line.split()[:2] == ["continual-ft", "65.0"]]
    assert lines[number].split()[1:] == ["65.0", "80.0", "72.5", "15.0", "(7.1)", "-15.0", "20.0"]
    assert lines[number + 1].split() == ["(7.1)", "(14.1)", "(10.6)", "(7.1)", "(0.0)"]


def test_markdown_tables_are_proper(hostile: Results) -> None:
    text = render(hostile, "markdown")
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(blocks) == 5
    for block in blocks:
        # An unescaped pipe separates cells: every line must have the same number.
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block}) == 1
        assert re.fullmatch(r"\| ---( \| ---:)+ \|", block[1])
    assert r"| a \& \<b\>\|\[red\]\_\\{x} | 60.0 | 70.0 | 65.0 | 20.0 | -20.0 | 20.0 |" in blocks[0]
    assert "| a constant answer | 50.0 | 50.0 | 50.0 | — | — | — |" in blocks[0]
    assert "- Every strategy: 1 seed (0)." in text


def test_latex_tables_are_proper(hostile: Results) -> None:
    text = render(hostile, "latex")
    tables = re.findall(r"\\toprule\n(.*?)\n\\bottomrule", text, flags=re.S)
    assert len(tables) == 5 == text.count(r"\caption{") and r"\caption{After the last task (in \%)}" in text
    for table in tables:
        # An unescaped ampersand separates cells: every line must have the same number.
        lines = [line for line in table.splitlines() if line != r"\midrule"]
        assert len({len(re.findall(r"(?<!\\)&", line)) for line in lines}) == 1
    name = r"a \& \textless{}b\textgreater{}\textbar{}[red]\_\textbackslash{}\{x\}"
    assert name + r" & 60.0 & 70.0 & 65.0 & 20.0 & $-$20.0 & 20.0 \\" in tables[0].splitlines()
    assert "% Every strategy: 1 seed (0)." in text.splitlines()


def test_a_table_wider_than_a_page_is_scaled_in_latex() -> None:
    titles = [Table("narrow", tuple("abcdefgh"), ()), Table("wide", tuple("abcdefghi"), ())]
    narrow, wide = render_page(Page("page", (), tuple(titles)), "latex").split(r"\caption{wide}")
    assert "resizebox" not in narrow
    assert "\\resizebox{\\linewidth}{!}{%\n\\begin{tabular}{lrrrrrrrr}" in wide and "\\end{tabular}}" in wide


def test_json_holds_the_runs(two_seeds: Results) -> None:
    content = json.loads(render(two_seeds, "json"))
    assert content["tasks"] == TASKS
    assert content["runs"][1]["matrix"][-1] == [0.7, 0.9]
