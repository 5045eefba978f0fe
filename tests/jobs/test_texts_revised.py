"""Tasks of texts that are taken back, met again, and merged: what stays is written with the same token ids and losses."""

from __future__ import annotations

from pathlib import Path

import prompted
import pytest

from forgetfree import Predictor, cli

STRATEGY = "grafting-continual"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    model = prompted.write_model("Llama", place / "model", chats=True)
    return prompted.run(prompted.write_data(place / "data"), model, place / "run", STRATEGY)


def test_a_task_that_is_met_again_changes_no_text(run: Path, tmp_path: Path) -> None:
    assert cli.main(["ledger", "update", str(run), "--task", "first", "--out", str(tmp_path / "again")]) == 0
    before, after = prompted.answers_of_run(run, STRATEGY), prompted.answers_of_run(tmp_path / "again", STRATEGY)
    assert all(before[task].same_as(after[task]) for task in prompted.TASKS)
    old, new = Predictor.of_run(run), Predictor.of_run(tmp_path / "again")
    assert list(new.tasks) == [*prompted.TASKS, "first@2"]
    assert new.answer("first@1", ["great film"]) == old.answer("first", ["great film"])


def test_a_task_that_is_taken_back_changes_no_earlier_text(run: Path, tmp_path: Path) -> None:
    assert cli.main(["ledger", "remove", str(run), "--task", "chat", "--out", str(tmp_path / "less")]) == 0
    assert prompted.answers_of_run(run, STRATEGY)["first"].same_as(
        prompted.answers_of_run(tmp_path / "less", STRATEGY)["first"]
    )
    assert list(Predictor.of_run(tmp_path / "less").tasks) == ["first", "last"]


def test_other_answers_than_the_run_s_are_noticed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is trained."""
    from forgetfree.models import generation

    write = generation.write
    monkeypatch.setattr(generation, "write", lambda *args, **how: [ids[:1] for ids in write(*args, **how)])
    assert cli.main(["ledger", "update", str(run), "--task", "first", "--out", str(tmp_path / "again")]) == 1
    assert "does not answer first bit for bit" in capsys.readouterr().err


def test_ledgers_of_texts_are_merged_with_their_scores(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "both.safetensors")
    ledger = str(run / STRATEGY / "seed-0" / "ledger.safetensors")
    words = ["ledger", "merge", str(run), ledger, "--as-versions", "--out", out, "--data", str(run.parent / "data")]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    score = prompted.answers_of_run(run, STRATEGY)["last"].score("exact_match")
    assert f"last@2 (was last) of {ledger}" in said and f"score {100 * score:.1f} % before" in said
    model = str(run.parent / "model")
    assert cli.main(["ledger", "verify", out, "--model", model]) == 0
    both, one = Predictor.of_run(out, model=model), Predictor.of_run(run)
    (written,) = both.answer("last@2", ["great film"])
    assert written.text == one.answer("last", ["great film"])[0].text
