"""Shell completion, and the layout of help pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from forgetfree import cli


def test_the_completion_is_installed_for_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    script = tmp_path / "script"
    assert cli.main(["--install-completion", "--shell", "bash", "--output", str(script)]) == 0
    text = script.read_text()
    assert all(flag in text for flag in ("--learning-rate", "--install-completion", "graft"))


@pytest.mark.parametrize("command", ["run", "graft", "report", "list", "predict", "apply", "ledger"])
def test_help_shows_usage_and_an_example(capsys: pytest.CaptureFixture, command: str) -> None:
    assert cli.main([command, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"Usage: forgetfree {command} ")
    assert f"Example: forgetfree {command} " in page


def test_flags_of_jobs_are_grouped_and_alike(capsys: pytest.CaptureFixture) -> None:
    pages = []
    for command in ("run", "graft"):
        assert cli.main([command, "--help"]) == 0
        pages.append(capsys.readouterr().out)
    alike = ("learning-rate", "batch-size", "precision", "test-limit", "threads", "cache", "jobs", "resume", "config")
    for page in pages:
        groups = [line.split("─")[1].strip() for line in page.splitlines() if line.startswith("╭")]
        assert groups == ["Arguments", "What to learn", "How to learn", "How to run", "Help"]
        assert all(f"--{flag} " in page for flag in alike)
