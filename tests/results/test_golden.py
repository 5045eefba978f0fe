"""Reports of directories without unit.json: they stay the same, byte by byte.

``golden/`` holds what ``run`` wrote on the demo data, and the reports that were made of it then.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forgetfree.cli import main

GOLDEN = Path(__file__).parent / "golden"
REPORTS = sorted(path.relative_to(GOLDEN) for path in GOLDEN.glob("*/report.*"))
FORMATS = {".md": "markdown", ".html": "html", ".latex": "latex", ".json": "json"}


@pytest.mark.sampled("run/report.md")
@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_an_older_directory_is_reported_as_it_was(
    report: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(GOLDEN)  # reports name the directories that they were given
    assert main(["report", report.parts[0], "--format", FORMATS[report.suffix]]) == 0
    printed = re.sub(
        r"<svg.*?</svg>", "<svg></svg>", capsys.readouterr().out, flags=re.S
    )  # matplotlib's, as its version draws
    assert printed.rstrip("\n") == (GOLDEN / report).read_text(encoding="utf-8").rstrip("\n")


def test_there_is_one() -> None:
    assert {report.parts[0] for report in REPORTS} == {"run"}
