"""`forgetfree graft --fine-tuned` takes an adapter of PEFT, merged as PEFT merges it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import HEADS, write_adapter
from safetensors.torch import load_file, save_file

from forgetfree import cli
from forgetfree.data.sources import load_task
from forgetfree.errors import ModelError
from forgetfree.ledger.graft import Graft
from forgetfree.models import peft_adapter
from forgetfree.models.fine_tuned_directory import load_fine_tuned


@pytest.mark.sampled("prompt-how1")
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, {}) for kind in HEADS),
        ("classifier", {"target_modules": r".*\.(query|value|intermediate\.dense)"}),
        ("classifier", {"init_lora_weights": "pissa"}),
        ("classifier", {"use_dora": True}),
    ],
)
def test_an_adapter_is_read_as_the_model_that_peft_merges(
    kind: str, how: dict[str, Any], model_directory: Callable[[str], Path], data_directory: Path, tmp_path: Path
) -> None:
    model = model_directory(HEADS[kind][0])
    merged = write_adapter(kind, model, tmp_path / "lora", **how)
    rows = load_task("sst2", str(data_directory))
    given = load_fine_tuned(str(tmp_path / "lora"), str(model), rows.task)
    assert given.loaded.readout == kind and given.architecture == type(merged).__name__
    theirs = dict(merged.named_parameters())
    for spec, values in zip(given.model.space().tensors, given.model.space().views(given.theta), strict=True):
        assert torch.equal(values, theirs[spec.name]), spec.name


def test_the_command_grafts_it(
    model_directory: Callable[[str], Path], data_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_directory("bert-pooler")
    merged = write_adapter("classifier", model, tmp_path / "lora")
    command = ["graft", "sst2", "--data", str(data_directory), "--model", str(model), "--shots", "4"]
    command += ["--fine-tuned", str(tmp_path / "lora"), "--sparsity", "1", "--set", "mask_steps=0"]
    assert cli.main([*command, "--out", str(tmp_path / "out")]) == 0
    graft = Graft.load(tmp_path / "out" / "bare-graft/seed-0/graft.safetensors")
    assert graft.space is not None and graft.origin is not None and graft.origin.readout == "classifier"
    body = dict(merged.base_model.named_parameters())
    held = np.zeros(len(graft.region), dtype=np.float32)
    for number, local, where in graft.space.split(graft.region.indices):
        held[where] = body[graft.space.tensors[number].name].detach().view(-1)[local].numpy()
    assert (held == graft.values.numpy()).all() and len(held) > 1000
    tuned, grafted = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    assert grafted["matrix"] == tuned["matrix"] and grafted["agreement"] == [1]
    assert not [each for each in capsys.readouterr().out.splitlines() if "/tmp/tmp" in each]


def test_adapters_that_do_not_fit_are_refused(
    model_directory: Callable[[str], Path], data_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bert, lora = model_directory("bert-pooler"), tmp_path / "lora"
    write_adapter("classifier", bert, lora)
    weights, config = lora / "adapter_model.safetensors", json.loads((lora / "adapter_config.json").read_text())
    tensors = load_file(weights)

    def refusal(code: int, model: Path = bert, task: str = "sst2") -> str:
        command = ["graft", task, "--data", str(data_directory), "--model", str(model), "--sparsity", "0.1"]
        command += ["--shots", "4", "--fine-tuned", str(lora), "--out", str(tmp_path / "out")]
        assert cli.main(command) == code
        assert not (tmp_path / "out").exists()
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error

    assert "The classes of" in (said := refusal(2, task="ag_news")) and str(lora) in said and "/tmp/tmp" not in said
    assert "the model that it was made from to --model" in refusal(2, model_directory("gpt2"))
    save_file({name: tensor for name, tensor in tensors.items() if "classifier" not in name}, weights)
    assert "it would be random" in refusal(2)
    save_file({name: tensor for name, tensor in tensors.items() if "layer.1" not in name}, weights)
    assert "does not fit this BertForSequenceClassification" in refusal(1)
    save_file(tensors, weights)
    (lora / "adapter_config.json").write_text(json.dumps(config | {"task_type": "QUESTION_ANS", "auto_mapping": None}))
    assert "does not say which network it belongs to" in refusal(2)
    (lora / "adapter_config.json").write_text("{")
    assert "is not valid JSON" in refusal(1)


@pytest.fixture
def lora(model_directory: Callable[[str], Path], tmp_path: Path) -> Path:
    write_adapter("classifier", model_directory("bert-pooler"), tmp_path / "lora")
    return tmp_path / "lora"


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_modules": "((.*)*)*x"}, "such as '((.*)*)*x', take more than"),
        ({"rank_pattern": {"((.*)*)*x": 4}}, "such as '((.*)*)*x', take more than"),
        ({"target_modules": ["query"] * 1000}, "names 1,000 modules (target_modules)"),
        ({"r": 10**8}, "query.lora_A.weight' should have shape (100000000, 16), got (2, 16)"),
        ({"rank_pattern": {"query": 10**8}}, "should have shape (100000000, 16), got (2, 16)"),
        ({"peft_type": "VERA", "r": 10**9}, "is in the file and not in the network"),
        ({"layer_replication": [[0, 2]] * 500}, "repeats layers of its model"),
        ({"init_lora_weights": "pissa_niter_1000000000"}, "must be at most 100 rounds"),
    ],
)
def test_an_adapter_that_asks_for_endless_time_or_memory_is_refused(
    model_directory: Callable[[str], Path],
    lora: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.setattr(peft_adapter, "MOST_SECONDS", 0.5)
    file = lora / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError) as caught:
        load_fine_tuned(str(lora), str(model_directory("bert-pooler")), load_task("sst2", "demo").task)
    assert said in str(caught.value)


def test_weights_that_are_a_pipe_or_a_head_without_end_are_refused(
    model_directory: Callable[[str], Path], lora: Path
) -> None:
    model, task = str(model_directory("bert-pooler")), load_task("sst2", "demo").task
    weights = lora / "adapter_model.safetensors"
    tensors = load_file(weights)
    (head,) = (name for name in tensors if name.endswith("classifier.weight"))
    save_file(tensors | {head: torch.zeros(10**9, 0)}, weights)
    with pytest.raises(ModelError, match="has 1,000,000,000 labels"):
        load_fine_tuned(str(lora), model, task)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(ModelError, match=r"no adapter_model\.safetensors that is a file"):
        load_fine_tuned(str(lora), model, task)
