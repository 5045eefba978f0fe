"""The site builds in strict mode, documents all public names, loads nothing from elsewhere, and fits a phone."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import forgetfree

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.sampled(share=0.15)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as ``make docs`` does, in a temporary folder."""
    pytest.importorskip("material", reason="MkDocs is not installed: pip install '.[dev]'")
    place = tmp_path_factory.mktemp("site")
    # The pages get their own folder: another worker may build the site, too.
    pages = tmp_path_factory.mktemp("pages") / "pages"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1", "FORGETFREE_PAGES": str(pages)}
    for command in (("docs/pages.py",), ("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place))):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_all_that_is_public_has_its_place(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    drawing = runpy.run_path(str(ROOT / "docs" / "pages.py"))
    text = "".join(page.read_text(encoding="utf-8") for page in site.glob("api/*.html"))
    places = set(re.findall(r'id="(forgetfree\.[\w.]+)"', text))
    for _, modules in drawing["API"].values():
        for module in modules:
            for name in drawing["public"](module):
                home = getattr(getattr(importlib.import_module(module), name), "__module__", module)
                assert places & {f"{home}.{name}", f"{module}.{name}"}, f"{module}.{name} is not in the reference"
    assert drawing["public"]("forgetfree") == forgetfree.__all__[1:]


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert re.findall(r'<[^>]*\ssrc="?(?:https?:)?//[^>]*>|<link\s[^>]*href="?(?:https?:)?//[^>]*>', text) == [], (
            page.name
        )


def test_pages_fit_a_phone_and_search_works_from_disk(site: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install '.[dev]'")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        for file in sorted(site.rglob("*.html")):
            page.goto(file.as_uri())
            if page.evaluate("document.documentElement.scrollWidth") > 360:
                wrong.append(f"{file.relative_to(site)} is wider than a phone")
        page.set_viewport_size({"width": 1300, "height": 800})
        page.goto((site / "index.html").as_uri())
        page.locator("input.md-search__input").click()
        page.keyboard.type("localize")
        page.locator(".md-search-result__item").first.wait_for(timeout=10_000)
        browser.close()
    assert wrong == []
