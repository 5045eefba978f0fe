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
from reported import make_run

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


def test_the_sentence_says_what_each_lost_and_how_sure_that_is() -> None:
    """Naive losses of 20 and 10: 15 ± t(0.975, 1) · 7.07 / √2 = 15 ± 12.706 · 5 = −48.5 to 78.5: two seeds decide nothing."""
    runs = [run_of("continual-ft", seed, [last, 0.7]) for seed, last in enumerate((0.6, 0.7))]
    assert headline(compared(runs[0], run_of("grafting-continual", 0, [0.8, 0.7]))) == (
        "Naive fine-tuning (continual-ft) lost 20.0 points on average (one seed), grafting-continual lost 0.0 points on "
        "average (one seed). At the end grafting-continual scores 75.0 % on average, continual-ft 65.0 %: undecided (one seed)."
    )
    text = headline(compared(*runs, *(run_of("grafting-continual", seed, [0.8, 0.7]) for seed in (0, 1))))
    assert "lost 15.0 points on average (95 % interval of the loss -48.5 to 78.5, 2 seeds), grafting-continual" in text
    assert "grafting-continual lost 0.0 points on average (the same with each of 2 seeds)." in text
    assert text.endswith(": undecided (95 % interval of the difference -24.3 to 39.3, 2 seeds).")


def test_the_sentence_says_where_nothing_was_learned() -> None:
    """Right after learning both have 80 on the first task, and 70 and 80 on the second."""
    runs = [run_of("continual-ft", 0, [0.8, 0.7]), run_of("grafting-continual", 0, [0.8, 0.8])]
    text = headline(compared(*runs, floors={"constant": [0.8, 0.75]}))
    assert text.startswith(
        "Naive fine-tuning (continual-ft) learned no task above a constant answer, grafting-continual lost 0.0 points"
    )


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([], "No strategy has finished, so there is nothing to compare."),
        ([("fine-tune", [0.8, 0.7])], "fine-tune lost 0.0 points on average (one seed)."),
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


# ---- the page -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    failed = [{"strategy": "ewc", "seed": 1, "error": "The loss became nan."}]
    return make_run(out, ["qnli", "<b>&"], {"continual-ft": 0.1, "grafting-continual": 0.0}, failed=failed)


def sections(text: str) -> list[str]:
    return re.findall(r'<section id="([a-z]+)">', text)


EVERY = ["matrix", "curves", "reliability", "tables"]


@pytest.mark.sampled(share=0.4)
def test_the_page_has_every_figure_and_needs_nothing_else(whole: Path) -> None:
    """And the same results make the same page."""
    text, again = (render(load_results(whole), "html") for _ in range(2))
    assert text == again
    assert sections(text) == EVERY
    assert len(text) < 1_000_000
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:image/png)""", text)
    assert "<b>" not in text and "&lt;b&gt;&amp;" in text
    assert '<li class="warning">Failed and left out: ewc, seed 1' in text
    assert "120 test rows a task" in text and "mean over 2 seeds" in text
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.S))
    assert "var(--blue)" in drawn and not {light for light, _ in COLOURS.values() if light in drawn}


def test_what_a_directory_lacks_is_left_out(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for path in run.rglob("predictions.safetensors"):
        path.unlink()
    text = render(load_results(run), "html")
    assert sections(text) == [name for name in EVERY if name != "reliability"]


def test_results_without_runs_have_a_page(tmp_path: Path) -> None:
    failed = [{"strategy": "ewc", "seed": 1, "error": "The loss became nan."}]
    text = render(load_results(write(tmp_path / "run", results_of(failed=failed))), "html")
    assert "No strategy has finished" in text and "The loss became nan." in text
    assert sections(text) == ["tables"]


def test_results_in_one_file_have_a_page() -> None:
    source = Path(__file__).parents[2] / "benchmarks" / "results" / "long.csv"
    found, kept = read_run(source), ("continual-ft", "grafting-continual")
    text = render(Results([replace(found, runs=tuple(run for run in found.runs if run.strategy in kept))]), "html")
    assert sections(text) == [name for name in EVERY if name != "reliability"]
    assert "grafting-continual lost 0.0 points on average" in text.lower()


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
