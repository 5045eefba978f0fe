"""Where a command writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from forgetfree import cli
from forgetfree.errors import UsageError
from forgetfree.files import locked
from forgetfree.output import LOCK, make_directory, refuse_content


def test_a_directory_is_made_and_what_it_holds_is_told(tmp_path: Path) -> None:
    make_directory(out := tmp_path / "a" / "b")
    (out / LOCK).touch()
    refuse_content(out, "Give another.")
    (out / "file").touch()
    with pytest.raises(UsageError, match=r"is not empty: it holds file\. Give another\."):
        refuse_content(out, "Give another.")
    with pytest.raises(UsageError, match="cannot be written"):
        make_directory(out / "file")


def test_beside_another_job_that_alone_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not that the directory is used, nor what else is wrong."""
    (tmp_path / "config.json").write_text("{}")
    with locked(tmp_path / LOCK):
        assert cli.main(["run", "demo", "--data", "demo", "--device", "cud", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"forgetfree: error: Another process works in {tmp_path}. Wait until it has ended, or give another --out.\n"
    )
