"""The page of a run, without a browser: its sentence, its figures and its tables, also where results are missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from handmade import results_of, run_of, together
from reported import make_run

from forgetfree.results.report.figures import COLOURS
from forgetfree.results.report.run_report import lay_out, render
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
    """Right after learning, both have 80 on the first task, and 70 and 80 on the second; the floors are 80 and 75."""
    runs = [run_of("continual-ft", 0, [0.8, 0.7]), run_of("grafting-continual", 0, [0.8, 0.8])]
    text = headline(compared(*runs, floors={"constant": [0.8, 0.75]}))
    assert text.startswith(
        "Naive fine-tuning (continual-ft) did not score above a constant answer on any task, grafting-continual lost 0.0 points"
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
    outcome = lay_out(results).tables[0]
    assert outcome.header == ("task", "continual-ft", "grafting-continual", "a constant answer")
    assert [row[0] for row in outcome.rows] == [*results.tasks, "average", "forgetting", "BWT", "ECE"]


# ---- the page -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    failed = [{"strategy": "ewc", "seed": 1, "error": "The loss became nan."}]
    return make_run(out, ["qnli", "<b>&"], {"continual-ft": 0.1, "grafting-continual": 0.0}, failed=failed)


def test_the_page_has_its_figure_and_needs_nothing_else(whole: Path) -> None:
    """The same results give the same page."""
    text, again = (render(load_results(whole), "html") for _ in range(2))
    assert text == again and text.count("<svg") == 1
    assert len(text) < 1_000_000
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:image/png)""", text)
    assert text.startswith("<!doctype html>") and "<b>" not in text and "&lt;b&gt;&amp;" in text
    for tag in ("table", "tr", "td", "th", "figure", "svg"):
        assert len(re.findall(rf"<{tag}[ >]", text)) == text.count(f"</{tag}>"), tag
    assert "default-src 'none'" in text and not re.findall(r"<link|url\(http|@import", text)
    assert '<li class="warning">Failed and left out: ewc, seed 1' in text
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.S))
    assert "var(--blue)" in drawn and not {light for light, _ in COLOURS.values() if light in drawn}
