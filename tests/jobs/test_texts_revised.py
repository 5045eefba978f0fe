"""Tasks of texts are taken back, or learned on top of others: the other tasks keep their token ids and losses."""

from __future__ import annotations

import json
from pathlib import Path

import prompted
import pytest

from forgetfree import Predictor, cli

pytestmark = pytest.mark.long

STRATEGY = "grafting-continual"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    model = prompted.write_model("Llama", place / "model", chats=True)
    return prompted.run(prompted.write_data(place / "data"), model, place / "run", STRATEGY)


def test_a_further_task_changes_no_text(run: Path, tmp_path: Path) -> None:
    """A task is taken back and learned again; the texts of the other tasks stay the same."""
    less, again = tmp_path / "less", tmp_path / "again"
    assert cli.main(["run", "--on", str(run), "--without", "chat", "--out", str(less)]) == 0
    assert cli.main(["run", "chat", "--on", str(less), "--out", str(again)]) == 0
    before, after = prompted.answers_of_run(less, STRATEGY), prompted.answers_of_run(again, STRATEGY)
    assert all(before[task].same_as(after[task]) for task in ("first", "last"))
    assert list(Predictor.of_run(again).tasks) == ["first", "last", "chat"]


def test_other_answers_than_the_run_s_are_noticed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command fails if the other tasks would be answered differently."""
    from forgetfree.kinds import decoding

    write = decoding.write
    monkeypatch.setattr(decoding, "write", lambda *args, **how: [ids[:1] for ids in write(*args, **how)])
    assert cli.main(["run", "--on", str(run), "--without", "chat", "--out", str(tmp_path / "less")]) == 1
    assert "the predictions for first differ" in capsys.readouterr().err


def test_losses_on_texts_that_no_task_trains_are_carried_or_measured_again(run: Path, tmp_path: Path) -> None:
    """If the last task is taken back, its losses are carried over; if the first is, the others are trained and measured."""
    lines = tmp_path / "texts.txt"
    lines.write_text("great film movie\nterrible movie\n")
    how = {"steps": 2, "held_out": str(lines)}
    whole = prompted.run(run.parent / "data", run.parent / "model", tmp_path / "whole", STRATEGY, **how)
    (before,) = json.loads((whole / "results.json").read_text())["runs"]
    for task, kept in (("last", ["first", "chat"]), ("first", ["chat", "last"])):
        out = tmp_path / f"without-{task}"
        assert cli.main(["run", "--on", str(whole), "--without", task, "--out", str(out)]) == 0
        results = json.loads((out / "results.json").read_text())
        after = results["runs"][0]["held_out"]
        assert (results["tasks"], len(after["by_task"])) == (kept, 2)
        assert after["before"] == after["after"] == before["held_out"]["before"]
        if task == "last":
            assert after["by_task"] == before["held_out"]["by_task"][:2]
