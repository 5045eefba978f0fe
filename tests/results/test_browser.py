"""The page of a run in a real browser: Chromium, as Debian packages it, driven by Playwright."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reported import make_run

from forgetfree.cli import main

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS, SCHEMES = (360, 800, 1200), ("light", "dark")

#: A script that counts the texts, and lists those with too little contrast (WCAG 2, AA), as [text, ratio].
CONTRAST = """() => {
  // A mixed colour is written as color(srgb 0.5 0.5 0.5), others as rgb(127, 127, 127).
  const channels = (colour) => colour.match(/[\\d.]+/g).map((each) => each * (colour.startsWith("color(") ? 255 : 1));
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = channels(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  let seen = 0;
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {
    const element = words.currentNode.parentElement;
    if (!words.currentNode.textContent.trim() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const colour = channels(element.closest("svg") ? style.fill : style.color);
    seen += 1;
    const pair = [light(colour), light(behind(element))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) low.push([words.currentNode.textContent.trim(), ratio]);
  }
  return [seen, low];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install '.[dev]'")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return reports written by the command: of a small run with a failed unit, and of a run with fifty tasks."""
    made = {}
    short = ("qnli", "ag_news", "a task whose name is rather long")
    failed = [{"strategy": "ewc", "seed": 2, "error": "The loss became nan."}]
    for name, tasks, more in (("small", short, failed), ("fifty", [f"task{i}" for i in range(50)], [])):
        loss = {"continual-ft": 0.1, "grafting-continual": 0.0, "ewc": 0.03}
        run = make_run(tmp_path_factory.mktemp(name) / "run", tasks, loss, failed=more)
        made[name] = run.parent / "report.html"
        with pytest.MonkeyPatch.context() as patch, made[name].open("w", encoding="utf-8") as file:
            patch.setattr("sys.stdout", file)
            assert main(["report", str(run), "--format", "html"]) == 0
    return made


def opened(browser: Any, path: Path, width: int, scheme: str) -> Any:
    """Return the opened page, with its console messages and its HTTP requests in ``said``."""
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
    page.goto(path.as_uri())
    page.said = said
    return page


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["small", "fifty"])
def test_it_is_legible_at_every_width_in_both_schemes(
    browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    page = opened(browser, pages[name], width, scheme)
    page.screenshot(path=pages[name].with_name(f"{width}-{scheme}.png"), full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width == 1200:  # the figure and the tables are visible as a whole
        cut = "[...document.querySelectorAll('.wide')].filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.ariaLabel)"
        assert page.evaluate(cut) == []
    seen, low = page.evaluate(CONTRAST)
    assert seen > 200 and low == []
    bright = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (bright == "rgb(255, 255, 255)") == (scheme == "light")
    assert page.said == []
    page.close()


def test_everything_has_a_name(browser: Any, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["small"], 800, "light")
    assert page.locator("svg").count() == 1
    for without in (
        "[...document.querySelectorAll('svg')].filter((s) => s.role !== 'img' || !s.ariaLabel)",
        "[...document.querySelectorAll('table')].filter((t) => !t.caption?.textContent.trim())",
        "[...document.querySelectorAll('th')].filter((t) => !t.scope)",
    ):
        assert page.evaluate(f"{without}.length") == 0
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    assert page.locator("li.warning").inner_text().startswith("Failed and left out: ewc, seed 2")
    page.close()


def test_a_click_sorts_a_table_by_numbers(browser: Any, pages: dict[str, Path]) -> None:
    """Bytes sort as numbers, 27,000 before 40,000,000; a dash is last in both directions."""
    page = opened(browser, pages["small"], 1200, "light")

    def after_a_click(table: str, column: str) -> tuple[str, list[str]]:
        # The whole title must match: two titles have the words "after the last task".
        found = page.get_by_role("table", name=table, exact=True)
        found.get_by_role("button", name=column).click()
        [way] = found.locator("[aria-sort]").evaluate_all("them => them.map((each) => each.ariaSort)")
        return way, found.locator("tbody th").all_inner_texts()

    cost, outcome, chance = "Time per phase and stored bytes", "After the last task (in %)", "a constant answer"
    way, rows = after_a_click(cost, "stored (bytes)")
    assert (way, rows[0]) == ("ascending", "grafting-continual")
    way, rows = after_a_click(cost, "stored (bytes)")
    assert (way, rows[-1]) == ("descending", "grafting-continual")
    rows = ["grafting-continual", "ewc", "continual-ft"]
    assert after_a_click(outcome, "forgetting") == ("ascending", [*rows, chance])
    assert after_a_click(outcome, "forgetting") == ("descending", [*reversed(rows), chance])
    page.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scores_of_a_learning_matrix_are_tinted(browser: Any, pages: dict[str, Path], scheme: str) -> None:
    """The lower a score is, the weaker is the tint of its cell, in the dark scheme, too."""
    page = opened(browser, pages["small"], 1200, scheme)
    column = page.get_by_role("table", name="Learning matrix of continual-ft (in %, mean over 2 seeds)").locator(
        "td:nth-child(2)"
    )
    shown = column.evaluate_all(
        "them => them.map((each) => [each.textContent, getComputedStyle(each).backgroundColor])"
    )
    blue = [float(re.findall(r"[\d.]+", colour)[2]) - float(re.findall(r"[\d.]+", colour)[0]) for _, colour in shown]
    scores = [float(score) for score, _ in shown]
    assert scores[1] > scores[2] > scores[3] and blue[1] > blue[2] > blue[3] > blue[0] + 0.01
    page.close()


def test_it_prints(browser: Any, pages: dict[str, Path]) -> None:
    """The page is printed on white in any colour scheme, with enough contrast."""
    page = opened(browser, pages["small"], 800, "dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate(CONTRAST)[1] == []
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()
