"""Label names of several tokens, on models with label words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forgetfree import cli

WORDS = ["--shots", "4", "--steps", "1", "--sparsity", "0.1", "--strategy", "grafting-continual"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return three tasks; only the last has all its label names in the tiny vocabularies."""
    for task, labels in (
        ("moods", ("dreadful", "marvellous")),
        ("food", ("great", "very-salty")),
        ("seats", ("great", "terrible")),
    ):
        folder = tmp_path / "data" / task
        folder.mkdir(parents=True)
        for split in ("train", "validation", "test"):
            rows = [{"text": f"the {split} film {i} was", "label": labels[i % 2]} for i in range(12)]
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data"


@pytest.mark.sampled(share=0.15)
@pytest.mark.parametrize("kind", ["bert-mlm", "gpt2-lm"])
def test_auto_falls_back_to_linear_with_a_note(
    kind: str,
    data: Path,
    model_directory: Any,
    tmp_path: Path,
    plans: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = ["--data", str(data), "--model", str(model_directory(kind)), "--out", str(tmp_path / "out")]
    words = ["run", "moods,seats", *WORDS, *usual]
    assert cli.main([*words, "--check"]) == 0
    (plan,) = plans
    assert plan["model"]["readout"] == "linear"
    assert [note for note in plan["notes"] if "'dreadful' of 'moods'" in note]
    assert cli.main(words) == 0
    told = capsys.readouterr().err
    assert told.count("note: The readout is 'linear'") == 1
    assert "'dreadful' of 'moods', 'marvellous' of 'moods'." in told
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model"]["readout"] == "linear"
    assert cli.main(["predict", str(tmp_path / "out"), "--task", "seats", "the film"]) == 0
    assert cli.main([*words, "--resume"]) == 0
    less = ["run", "--on", str(tmp_path / "out"), "--without", "moods", "--out", str(tmp_path / "less")]
    assert cli.main(less) == 0
    assert json.loads((tmp_path / "less" / "config.json").read_text())["model"]["readout"] == "linear"


def test_a_prompt_that_is_asked_for_tells_all_words_of_all_tasks(
    data: Path, model_directory: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ["--data", str(data), "--model", str(model_directory("bert-mlm")), "--out", str(tmp_path / "out")]
    words = ["run", "moods,food", *WORDS, *usual]
    for check in ([], ["--check"]):
        assert cli.main([*words, "--readout", "prompt", *check]) != 0
        told = capsys.readouterr().err
        for words_of_task in ("'dreadful', 'marvellous' of task 'moods'", "'very-salty' of task 'food'"):
            assert told.count(words_of_task) == 1
        assert "maybe" not in told
