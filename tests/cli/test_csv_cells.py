"""Cells of ``predict --csv`` that a spreadsheet would take for formulas."""

from __future__ import annotations

from typing import Any

import pytest

from forgetfree.cli.predict import TextRow, _Csv
from forgetfree.kinds.classification import Answer
from forgetfree.tasks import TaskDefinition


def test_what_a_spreadsheet_takes_for_a_formula_is_written_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    kept: dict[str, Any] = {"id": "-5", "by": "@me"}
    show = _Csv([TaskDefinition("sst2", "single", ("good", "=bad"))], 1, list(kept))
    for text in ("=1+1", "+1 to this", "- no", "\t=x", "a = b", "-0.5"):
        show(TextRow((text,), kept), Answer("sst2", "=bad", 0.75, {"good": 0.25, "=bad": 0.75}))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "id,by,text,task,label,probability,probability of good,probability of =bad"
    texts = [line.split(",")[2] for line in lines[1:]]
    assert texts == ["'=1+1", "'+1 to this", "'- no", "'\t=x", "a = b", "-0.5"]
    assert lines[1].startswith("-5,'@me,") and lines[1].endswith(",sst2,'=bad,0.75,0.25,0.75")
