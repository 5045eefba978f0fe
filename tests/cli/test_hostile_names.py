"""Names, labels and texts with control or markup characters: everything works, and output shows them escaped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from forgetfree import cli
from forgetfree.jobs.progress import ShownProgress

#: Escapes for a terminal's title, red, and right-to-left; and markup of rich, markdown, HTML, LaTeX and matplotlib.
HOSTILE = "日本\x1b]0;t\x07\x1b[31m\u202e\x9b [bold] `a` |b| $y^{ <i> \\input{x} {text}"
LABELS = ["né\x1b[2Jgative\n[/red]", "\u2066positive 👍🏽"]
LONG = "é" * 120


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, data_directory: Path) -> Path:
    """Return sst2 under hostile names, with hostile labels and texts."""
    data = tmp_path_factory.mktemp("hostile")
    for name in (HOSTILE, LONG):
        folder = Path(shutil.copytree(data_directory / "sst2", data / name))
        (folder / "source.json").write_text(json.dumps({"label_names": LABELS}))
        rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
        rows[0]["text"] += " \x1b[31m\u202e\n\x00 日本"
        (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data


def shown(capsys: pytest.CaptureFixture) -> str:
    """Return the printed output, after a check that it is harmless."""
    printed = capsys.readouterr()
    for line in (printed.out + printed.err).split("\n"):
        assert line.replace("\t", "").isprintable(), ascii(line)
    return printed.out + printed.err


@pytest.mark.sampled(share=0.15)
@pytest.mark.figures
def test_a_whole_run_shows_hostile_names_escaped(
    data: Path, model_directory, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    quick = ["--data", str(data), "--model", str(model_directory("bert")), "--shots", "4", "--steps", "1"]
    out, graft = tmp_path / "out", tmp_path / "graft"
    capsys.readouterr()  # progress bars of making the model
    assert cli.main(["run", HOSTILE, *quick, "--sparsity", "0.01", "--out", str(out)]) == 0
    name = r"日本\u001b]0;t\u0007\u001b[31m\u202e\u009b [bold] `a` |b| $y^{ <i> \input{x} {text}"
    assert f"Running {name} into" in (said := shown(capsys))
    assert f"forgetfree: {name}\n" in said
    for format in ("rich", "markdown", "html", "latex", "json"):
        assert cli.main(["report", str(out), "--format", format]) == 0
        assert "日本" in shown(capsys)
    ledger = str(out / "grafting-continual" / "seed-0" / "ledger.safetensors")
    assert cli.main(["ledger", "show", ledger]) == 0
    assert "[bold]" in shown(capsys)
    assert cli.main(["ledger", "verify", ledger]) == 0
    assert cli.main(["predict", str(out), "--task", HOSTILE, "日本 \x1b[31m\u202e\n", "plain"]) == 0
    lines = [line for line in shown(capsys).splitlines() if "\t" in line]
    assert lines[0].endswith("\t日本 \\u001b[31m\\u202e\\n") and lines[0].count("\t") == 2
    assert cli.main(["graft", HOSTILE, *quick, "--sparsity", "0.01", "--out", str(graft)]) == 0
    assert cli.main(["report", str(graft)]) == 0
    assert cli.main(["apply", str(graft), "--out", str(tmp_path / "model")]) == 0
    shown(capsys)
    for path in [*out.glob("*.*"), *graft.glob("*.*"), tmp_path / "model" / "README.md"]:
        if path.suffix in (".json", ".md"):
            assert all(line.isprintable() for line in path.read_text().split("\n")), path
    assert json.loads((out / "results.json").read_text())["tasks"] == [HOSTILE]


def test_an_error_shows_hostile_names_escaped(data: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["run", "\x1b[2J", "--data", str(data), "--model", "\u202e"]) == 2
    assert "\\x1b[2J" in shown(capsys)


@pytest.mark.figures
def test_a_task_may_have_a_long_name(
    data: Path, model_directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name may be as long as a folder's, though files of fine-tuned models are named after tasks."""
    monkeypatch.chdir(tmp_path)
    quick = ["--data", str(data), "--model", str(model_directory("bert")), "--shots", "4", "--steps", "1"]
    assert cli.main(["run", LONG, *quick, "--sparsity", "0.01"]) == 0
    assert cli.main(["graft", LONG, *quick, "--sparsity", "0.01", "--out", "g" * 250]) == 0
    assert cli.main(["apply", "g" * 250, "--out", "a" * 250]) == 0


def test_the_live_display_reads_no_markup_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    out = io.StringIO()
    live = ShownProgress(Console(file=out, width=140, force_terminal=True), live=True)
    with live.job(["[/x] \x1b[2J"]), live.monitor("[/x] \x1b[2J").phase("[/red] \u202e", "train", 1) as on_step:
        on_step(1, 0.5)
    assert r"[/x] \u001b[2J" in out.getvalue() and "[/red] \\u202e" in out.getvalue()
