"""docs/gallery.html in a real browser: it sorts, filters, compares two strategies, and shows a dropped file beside ours."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_site import CHROMIUM, ROOT

from forgetfree import load_results, registry

pytestmark = [pytest.mark.slow, pytest.mark.sampled(share=0.15)]
RESULTS = ROOT / "benchmarks" / "results"
MAIN = RESULTS / "main-job.csv"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Open a gallery of the main job and of standard-1 in a browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install '.[dev]'")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    making = runpy.run_path(str(ROOT / "docs" / "gallery.py"))
    place = tmp_path_factory.mktemp("gallery") / "gallery.html"
    place.write_text(making["page"]([MAIN, RESULTS / "standard-1.csv"]), encoding="utf-8")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: request.url.startswith("file:") or wrong.append(request.url))
        page.goto(place.as_uri())
        yield page
        browser.close()
    assert wrong == []


def names(page: Any) -> list[str]:
    return [name.partition("\n")[0] for name in page.locator("tbody th[scope=row]").all_inner_texts()]


def averages(page: Any, which: str) -> dict[str, str]:
    lines = page.locator(which).filter(has=page.locator("svg")).all()
    return {
        line.locator("th").inner_text().partition("\n")[0]: line.locator("td:nth-child(4)").inner_text()
        for line in lines
    }


def choose(page: Any, words: str) -> None:
    option = next(text for text in page.locator("#stream option").all_inner_texts() if words in text)
    page.select_option("#stream", label=option)


def test_a_pair_has_the_difference_and_interval_that_python_gives(page: Any) -> None:
    choose(page, "1024 rows")
    for name in ("grafting-continual", "continual-ft"):
        page.check(f"[aria-label='compare {name}']")
    shown = {line.split("\t")[1]: line.split("\t")[2:] for line in page.locator("#difference tr").all_inner_texts()}
    compared = load_results(MAIN).compare("grafting-continual", "continual-ft")
    for task in ("qnli", "ag_news", "sst2", "average"):
        row = compared.loc["all tasks" if task == "average" else task]
        difference, half = (float(part.replace("−", "-")) for part in shown[task][0].split(" ± "))
        assert difference == pytest.approx(100 * row["difference"], abs=0.006)
        assert half == pytest.approx(100 * (row["high"] - row["low"]) / 2, abs=0.006)
        assert shown[task][1] == row["verdict"]


def test_a_file_of_a_reader_stands_beside_ours(page: Any) -> None:
    choose(page, "1024 rows")
    page.locator("thead [data-key=kept] button").click()  # sort by this column
    before = len(names(page))
    page.set_input_files("#file", MAIN)
    page.locator("tr.yours").first.wait_for()
    yours = page.locator("tr.yours th[scope=row]").all_inner_texts()
    assert len(yours) == 3 and len(names(page)) == before + 3
    assert all("yours: main-job.csv" in name for name in yours)
    assert averages(page, "tr.yours") == averages(page, "tbody tr:not(.yours)")


def test_what_is_no_run_is_refused_and_names_are_text(page: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "table.csv"
    wrong.write_text("a,b\n1,2\n", encoding="utf-8")
    page.set_input_files("#file", wrong)
    page.locator("#told").filter(has_text="table.csv").wait_for()
    assert page.locator("#told").inner_text() == (
        "table.csv is not shown: it is not the csv file of a run; write one with forgetfree report RUN --format csv."
    )
    hostile = MAIN.read_text(encoding="utf-8").replace("continual-ft", "<img src=x onerror=alert(1)>")
    page.evaluate(
        """(text) => {
            const data = new DataTransfer();
            data.items.add(new File([text], "hostile.csv"));
            document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
        }""",
        hostile,
    )
    page.locator("tr.yours").filter(has_text="hostile.csv").first.wait_for()
    assert "<img src=x onerror=alert(1)>" in names(page)


def test_the_strategies_that_need_something_are_registered() -> None:
    needs = runpy.run_path(str(ROOT / "docs" / "gallery.py"))["NEEDS"]
    assert {name for names in needs.values() for name in names} <= set(registry.strategies())
    assert re.findall(r"https?://", (ROOT / "docs" / "gallery.html").read_text(encoding="utf-8")) == []
