"""`forgetfree export --format onnx`: a graph that answers as the exported model does, for batches and texts of any size."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forgetfree import cli
from forgetfree.serve import onnx_model

MakeRun = Callable[..., Path]
LONG = " ".join(["a joy from start to end"] * 40)


def answers(directory: Path, texts: list[Any], **how: Any) -> torch.Tensor:
    """Return the graph's logits, by the tokenizer beside it."""
    import onnxruntime
    from transformers import AutoTokenizer

    batch = AutoTokenizer.from_pretrained(directory)(texts, padding=True, truncation=True, return_tensors="pt", **how)
    session = onnxruntime.InferenceSession(directory / "model.onnx")
    names = {each.name for each in session.get_inputs()}
    return torch.from_numpy(session.run(None, {key: each.numpy() for key, each in batch.items() if key in names})[0])


@pytest.mark.sampled(share=0.25)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "task"), [("bert", "qnli"), ("roberta", "ag_news"), ("gpt2", "sst2")])
def test_the_graph_answers_as_the_model_does(finished_run: MakeRun, tmp_path: Path, kind: str, task: str) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = str(finished_run(kind, "continual-ft"))
    assert cli.main(["export", run, "--task", task, "--out", str(tmp_path / "model")]) == 0
    assert cli.main(["export", run, "--task", task, "--format", "onnx", "--out", str(tmp_path / "graph")]) == 0
    assert not list((tmp_path / "graph").glob("*.safetensors*"))
    assert json.loads((tmp_path / "graph" / "config.json").read_text())["id2label"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for texts in (["dull"], ["dull", LONG, "what a bore", "Who wrote it?", "x"]):
        pairs = [(text, "It was Ada.") for text in texts] if task == "qnli" else texts
        batch = tokenizer(pairs, padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            expected = model(**batch).logits
        assert (answers(tmp_path / "graph", pairs) - expected).abs().max() < 1e-4


def test_what_is_not_installed_is_named_before_any_work(
    finished_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(onnx_model, "find_spec", lambda name: None if name == "onnxscript" else found(name))
    words = ["export", str(tmp_path / "no-run"), "--task", "sst2", "--format", "onnx", "--out", str(tmp_path / "graph")]
    assert cli.main(words) == 2
    assert "ONNX needs onnxscript, not installed: pip install 'forgetfree[onnx]'" in capsys.readouterr().err


def test_what_has_no_head_is_refused_and_leaves_nothing(
    finished_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(finished_run("bert-mlm", "continual-ft")), tmp_path / "graph"
    assert cli.main(["export", run, "--task", "sst2", "--format", "onnx", "--out", str(out)]) == 2
    assert "ONNX is written of models with a classification head" in capsys.readouterr().err
    assert not out.exists()
    assert cli.main(["export", run, "--task", "sst2", "--format", "onix", "--out", str(out)]) == 2
    assert "Did you mean 'onnx'?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_graph_that_answers_otherwise_is_not_kept(
    finished_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnx_model, "TOLERANCE", -1.0)
    run, out = str(finished_run("bert", "continual-ft")), tmp_path / "graph"
    assert cli.main(["export", run, "--task", "sst2", "--format", "onnx", "--out", str(out)]) == 1
    assert "The graph answers otherwise than the model: its logits differ by" in capsys.readouterr().err
    assert not out.exists()
