"""The page of a run without a browser: its sentence, its figures, its tables, and what is said where something is missing."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import results_of, run_of, together, write
from matplotlib import colormaps
from reported import edit, make_run

from forgetfree.results.config_file import repeating_command
from forgetfree.results.evidence import interval
from forgetfree.results.report.figures import COLOURS, SHADES, _on
from forgetfree.results.report.page import Page, Table, notebook_html, render_page, transposed, with_best
from forgetfree.results.report.run_report import lay_out, render
from forgetfree.results.runs import read_run
from forgetfree.results.table import Results, load_results


def headline(results: Results) -> str:
    return lay_out(results).headline


def compared(*runs: Any, **more: Any) -> Results:
    return together([results_of(*runs, **more)])


# ---- the sentence -----------------------------------------------------------------------------------------


def test_the_sentence_says_what_each_lost_and_at_what_price() -> None:
    """Naive: 80 − 60 = 20 points with one seed. Grafting loses nothing and keeps 12,000 bytes for two tasks: 6 kB each."""
    naive = run_of("continual-ft", 0, [0.6, 0.7])
    ours = run_of("grafting-continual", 0, [0.8, 0.7], kept_bytes=[7_000, 12_000])
    text = headline(compared(naive, ours, floors={"constant": [0.5, 0.6]}))
    assert text == (
        "Naive fine-tuning (continual-ft) lost 20.0 points on average (one seed), grafting-continual lost 0.0 points on "
        "average, at 6 kB a task. At the end grafting-continual scores 75.0 % on average, continual-ft 65.0 %: undecided "
        "(one seed)."
    )


def test_the_sentence_has_the_interval_over_seeds() -> None:
    """Losses of 20 and 10: 15 ± t(0.975, 1) · 7.07 / √2 = 15 ± 12.706 · 5 = −48.5 to 78.5. Nothing is decided by two seeds."""
    runs = [run_of("continual-ft", seed, [last, 0.7]) for seed, last in enumerate((0.6, 0.7))]
    text = headline(compared(*runs, *(run_of("grafting-continual", seed, [0.8, 0.7]) for seed in (0, 1))))
    lost = "lost 15.0 points on average (95 % interval of the loss -48.5 to 78.5 points over 2 seeds)"
    assert lost in text
    assert "grafting-continual lost 0.0 points on average, with every seed." in text  # and no price, which is not known
    assert ": undecided (95 % interval of the difference -24.3 to 39.3 points over 2 seeds)." in text
    loss = interval([0.2, 0.1])
    assert (loss.value, loss.low, loss.high) == pytest.approx((0.15, -0.4853, 0.7853), abs=1e-4)


def test_the_sentence_says_where_nothing_was_learned() -> None:
    """Right after learning both have 80 on the first task, and 70 and 80 on the second."""
    runs = [run_of("continual-ft", 0, [0.8, 0.7]), run_of("grafting-continual", 0, [0.8, 0.8])]
    text = headline(compared(*runs, floors={"constant": [0.8, 0.75]}))
    assert text.startswith(
        "Naive fine-tuning (continual-ft) learned no task above a constant answer, grafting-continual lost 0.0 points"
    )
    text = headline(compared(*runs, floors={"constant": [0.8, 0.8]}))
    assert text.startswith(
        "No strategy learned a task above a constant answer, so nothing could be forgotten. At the end"
    )
    assert "lost" not in text


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([], "No strategy has finished, so there is nothing to compare."),
        ([("fine-tune", [0.8, 0.7])], "fine-tune lost 0.0 points on average."),
        ([("fine-tune", [0.8, 0.9]), ("mine", [0.7, 0.7])], "mine lost 10.0 points on average (one seed)."),
        ([("continual-ft", [0.9, 0.7])], "Naive fine-tuning (continual-ft) gained 10.0 points on average (one seed)."),
    ],
)
def test_the_sentence_says_only_what_was_run(runs: list[tuple[str, list[float]]], expected: str) -> None:
    assert headline(compared(*(run_of(name, 0, last) for name, last in runs))) == expected


# ---- the best of a column -----------------------------------------------------------------------------------


def test_the_best_are_marked_by_their_column_s_sense_and_ties_as_shown() -> None:
    table = Table(
        "t",
        ("strategy", "score", "forgetting", "seconds", "same", "bytes"),
        (
            ("a", "60.0 (1.0)", "-1.0", "3", "1.0", "1,000"),
            ("b", "60.0 (9.9)", "0.0", "2", "1.0", "999"),
            ("c", "9.5", "2.0", "—", "1.0", "—"),
        ),
    )
    best = with_best(table, [1, -1, 0, 1, -1]).best
    assert set(best) == {(0, 1), (1, 1), (0, 2), (1, 5)}
    turned = transposed(with_best(table, [1, -1, 0, 1, -1]), "what")
    assert turned.header == ("what", "a", "b", "c") and turned.rows[1] == ("forgetting", "-1.0", "0.0", "2.0")
    assert {(turned.rows[row][0], turned.header[column]) for row, column in turned.best} == {
        *(("score", "a"), ("score", "b"), ("forgetting", "a"), ("bytes", "b")),
    }


def test_the_best_are_bold_in_every_format_that_has_bold() -> None:
    page = lay_out(compared(run_of("a", 0, [0.6, 0.7]), run_of("b", 0, [0.8, 0.7])))
    assert "| b | **80.0** | 70.0 | **75.0** | **0.0** | **0.0** | 20.0 |" in render_page(page, "markdown")
    assert "<td><strong>80.0</strong></td><td>70.0</td><td><strong>75.0</strong></td>" in notebook_html(page)
    assert "*" not in render_page(page, "rich")


def test_every_column_has_a_legend() -> None:
    page = lay_out(compared(run_of("a", 0, [0.6, 0.7], agreement=[0.5, 0.5]), floors={"constant": [0.5, 0.5]}))
    text = render_page(page, "markdown")
    for name in (
        "a task",
        "average",
        "forgetting",
        "BWT",
        "ECE",
        "a constant answer",
        "FWT",
        "intransigence",
        "agreement",
    ):
        assert f"\n- {name}: " in text, name
    assert "- a task: the score" in text and "of label 1, or of entities where a task labels words" in text


# ---- fifty tasks --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fifty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fifty") / "run"
    return make_run(out, [f"task{i}" for i in range(50)], {"continual-ft": 0.1, "grafting-continual": 0.0})


def test_fifty_tasks_fit_a_terminal(fifty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    results = load_results(fifty)
    text = render(results, "rich")
    assert max(map(len, text.splitlines())) <= 80
    for table in lay_out(results).tables[:3]:
        assert len(table.header) <= 4 and len(table.rows) >= 50
    outcome = lay_out(results).tables[0]
    assert outcome.header == ("task", "continual-ft", "grafting-continual", "a constant answer")
    assert [row[0] for row in outcome.rows] == [*results.tasks, "average", "forgetting", "BWT", "ECE"]


def test_ten_tasks_are_columns_still(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"task{i}" for i in range(10)], {"continual-ft": 0.1}, seeds=[0])
    assert lay_out(load_results(run)).tables[0].header[1:3] == ("task0", "task1")


# ---- the page -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    failed = [{"strategy": "ewc", "seed": 1, "error": "The loss became nan."}]
    return make_run(out, ["qnli", "<b>&"], {"continual-ft": 0.1, "grafting-continual": 0.0}, failed=failed)


def sections(text: str) -> list[str]:
    return re.findall(r'<section id="([a-z]+)">', text)


EVERY = ["matrix", "curves", "forgetting", "cost", "reliability", "ownership", "losses", "tables"]


@pytest.mark.sampled(share=0.4)
def test_the_page_has_every_figure_and_needs_nothing_else(whole: Path) -> None:
    """And the same results make the same page."""
    text, again = (render(load_results(whole), "html") for _ in range(2))
    assert text == again
    assert sections(text) == EVERY  # the matrices of few strategies first
    assert len(text) < 1_000_000
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:image/png)""", text)
    assert "<b>" not in text and "&lt;b&gt;&amp;" in text
    assert '<li class="warning">Failed and left out: ewc, seed 1' in text
    assert "120 test rows a task" in text and "mean over 2 seeds" in text
    assert "forgetfree run &#39;qnli,&lt;b&gt;&amp;&#39; --strategy continual-ft" in text
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.S))
    assert drawn.count(">a constant answer</text>") == 2  # below the matrix of each strategy
    assert "var(--blue)" in drawn and not {light for light, _ in COLOURS.values() if light in drawn}


@pytest.mark.sampled(share=0.4)
def test_owners_that_overlap_are_not_added_up(tmp_path: Path) -> None:
    """Where tasks stand alone, three that own 32, 32 and 1 of 32 entries own all of them, and not 2e+02 %."""
    out = make_run(tmp_path / "run", ["a", "b", "c"], {"grafting-continual": 0.0})
    together = render(load_results(out), "html")
    assert "owned by any task" in together
    ledger = load_results(out).runs[0].facts.ledger
    assert ledger and ledger.places
    places = [place.model_dump() for place in ledger.places]
    places[0] |= {"entries": 32, "owned": [32, 32, 1]}
    edit(out, ledger=ledger.model_dump() | {"composition": "alone", "places": places})
    alone = render(load_results(out), "html")
    assert "one task owns at most, from 0 to 100 %." in alone and "owned by the largest owner" in alone
    assert "e+0" not in re.sub(r"<svg.*?</svg>", "", alone, flags=re.S)


def test_what_a_directory_lacks_is_left_out(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for path in [*run.rglob("predictions.safetensors"), *run.rglob("history.jsonl")]:
        path.unlink()
    text = render(load_results(run), "html")
    assert sections(text) == [name for name in EVERY if name not in ("reliability", "losses")]


def test_results_without_runs_have_a_page(tmp_path: Path) -> None:
    failed = [{"strategy": "ewc", "seed": 1, "error": "The loss became nan."}]
    text = render(load_results(write(tmp_path / "run", results_of(failed=failed))), "html")
    assert "No strategy has finished" in text and "The loss became nan." in text
    assert sections(text) == ["tables"]


@pytest.mark.sampled("long")
@pytest.mark.parametrize("name", ["main-job", "long"])
def test_results_in_one_file_have_a_page(name: str) -> None:
    source = Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.csv"
    found, kept = read_run(source), ("continual-ft", "grafting-continual")
    text = render(Results([replace(found, runs=tuple(run for run in found.runs if run.strategy in kept))]), "html")
    assert {"forgetting", "cost", "matrix", "curves", "ownership", "tables"} == set(sections(text))
    assert "grafting-continual lost 0.0 points on average" in text.lower()


def test_the_command_is_the_one_that_was_given(tmp_path: Path) -> None:
    asked = {
        **{"stream": "a,b", "strategy": ["ewc"], "data": "my data", "model": "minilm", "seed": [0, 1], "shots": None},
        "set": {"precision": "bf16", "dropout": False},
    }
    assert repeating_command(asked, tmp_path) == (
        "forgetfree run a,b --strategy ewc --data 'my data' --model minilm --seed 0 --seed 1 --set precision=bf16 "
        "--set dropout=false --out runs/again"
    )


def test_digits_can_be_read_on_every_shade() -> None:
    """WCAG 2, AA: a contrast of 4.5."""

    def light(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
        return float(np.dot((0.2126, 0.7152, 0.0722), linear))

    for shade in (colormaps[SHADES](float(x)) for x in np.linspace(0, 1, 256)):
        ink = tuple(int(_on(shade)[i : i + 2], 16) / 255 for i in (1, 3, 5))
        low, high = sorted((light(ink), light(shade)))
        assert (high + 0.05) / (low + 0.05) >= 4.5


def test_the_tables_alone_are_html_of_their_own() -> None:
    page = Page("t", (), (Table("a <b>", ("x", "y"), (("1", "2"),)),))
    assert notebook_html(page).count("<table>") == 1 and "a &lt;b&gt;" in notebook_html(page)
    assert "<style" not in notebook_html(page) and "<script" not in notebook_html(page)
