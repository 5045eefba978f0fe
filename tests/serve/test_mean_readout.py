"""``--readout mean``: a linear layer on the mean of a row's tokens, in training, predictions, exported models and grafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from compared import run_logits
from safetensors.torch import load_file

from forgetfree import Predictor, TaskSwitch, cli
from forgetfree.core.readout import mean_of_tokens
from forgetfree.data.sources import load_tasks
from forgetfree.models.loading import load_model

MakeRun = Callable[..., Path]
MEAN = ("--readout", "mean")


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_it_reads_the_mean_of_the_tokens_and_no_padding(model_directory: Callable[[str], Path], kind: str) -> None:
    loaded = load_model(str(model_directory(kind)), "mean")
    model, pad = loaded.model.eval(), loaded.pad
    ids = [[5, 9, 7, 11, 6], [8, 10]]
    with torch.no_grad():
        x = torch.tensor([ids[0], [*ids[1], pad, pad, pad]])
        got = model.features(x)
        for row, tokens in enumerate(ids):
            hidden = model.backbone(input_ids=torch.tensor([tokens])).last_hidden_state[0]
            mean = sum(hidden[i] for i in range(len(tokens))) / len(tokens)
            assert torch.allclose(got[row], mean, atol=1e-6)


@pytest.mark.sampled("bert")
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_run_is_answered_from_exported_and_switched(
    finished_run: MakeRun, data_directory: Path, model_directory: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    run = finished_run(kind, "grafting-continual", more=MEAN)
    assert json.loads((run / "config.json").read_text())["model"]["readout"] == "mean"
    rows = {each.task.name: each.test for each in load_tasks("qnli,sst2", str(data_directory))}
    predictor = Predictor.of_run(run / "grafting-continual/seed-0/ledger.safetensors", model=str(model_directory(kind)))
    for task in ("qnli", "sst2"):
        expected = run_logits(run, "grafting-continual", task)
        assert torch.equal(predictor.logits(task, rows[task].texts), expected)  # the ledger knows the readout
        out = tmp_path / task
        assert cli.main(["export", str(run), "--task", task, "--out", str(out)]) == 0
        readout = load_file(out / "readout.safetensors")
        assert all(torch.equal(readout[each], tensor) for each, tensor in predictor.readout(task).items())
        assert "on the mean of all tokens" in (out / "README.md").read_text()
        with pytest.raises(Exception):  # noqa: B017  # transformers' own: the model has no head
            transformers.pipeline("text-classification", model=str(out))(["a"])

    model = transformers.AutoModel.from_pretrained(model_directory(kind)).eval()
    switch = TaskSwitch(run, model)
    encoder = predictor.loaded.encoder(predictor.definition("sst2"))
    ids = torch.tensor(encoder(rows["sst2"])[:1])
    switch.to("sst2")
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    assert torch.allclose(logits, predictor.logits("sst2", rows["sst2"].texts)[:1], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_tokens_in_half_precision_have_a_mean(dtype: torch.dtype) -> None:
    hidden, mask = torch.full((1, 512, 3), 200.0, dtype=dtype), torch.ones(1, 512, dtype=torch.int64)
    assert mean_of_tokens(hidden, mask).tolist() == [[200.0] * 3]
