"""An encoder without an LM head gets one that fills in masked words, and is then read by prompts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import masked_lm
from forgetfree.data.sources import load_task
from forgetfree.models.loading import load_model


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["masked_lm", *arguments])
    masked_lm.main()


@pytest.mark.sampled(share=0.15)
def test_an_encoder_learns_to_fill_in_words_and_is_read_by_prompts(
    model_directory, data_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[float] = []
    train = masked_lm.train_masked_lm
    monkeypatch.setattr(masked_lm, "train_masked_lm", lambda *a, **k: losses.extend(train(*a, **k)))
    out, encoder = tmp_path / "lm", str(model_directory("bert"))
    common = ["--data", str(data_directory), "--model", encoder, "--task", "sst2", "--task", "qnli", "--steps", "50"]
    common += ["--learning-rate", "1e-2"]
    call(monkeypatch, *common, "--out", str(out))
    assert len(losses) == 50 and sum(losses[-10:]) < 0.9 * sum(losses[:10])
    loaded = load_model(str(out))
    assert loaded.readout == "prompt"
    backbone = loaded.model.backbone
    assert torch.equal(backbone.get_input_embeddings().weight, backbone.get_output_embeddings().weight)
    call(monkeypatch, *common, "--out", str(tmp_path / "again"))
    assert load_model(str(tmp_path / "again")).fingerprint == loaded.fingerprint


def test_only_training_texts_are_read_each_once(data_directory: Path) -> None:
    texts = masked_lm.training_texts(["qnli", "sst2"], str(data_directory))
    qnli, sst2 = (load_task(name, str(data_directory)).train for name in ("qnli", "sst2"))
    assert len(texts) == len(set(texts))
    assert set(texts) == {*qnli.first, *qnli.second, *sst2.first}
