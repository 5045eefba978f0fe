"""``precision=auto`` is decided once, written down, and repeated by whoever goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forgetfree.core import readout_model
from forgetfree.core.readout_model import autocast, native_precision
from forgetfree.jobs.config import with_precision
from forgetfree.jobs.run_config import RunConfig
from forgetfree.learning.training import fine_tuned_key, predict
from forgetfree.learning.training_options import TrainingOptions, for_device
from forgetfree.registry import strategy
from forgetfree.testing import tiny_stream


@pytest.fixture(params=["bf16", "fp32"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: request.param == "bf16", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    return request.param


def test_the_processor_decides(native: str) -> None:
    assert native_precision("cpu") == native
    assert native_precision("mps") == "fp32"
    with autocast("auto", "cpu"):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if native == "bf16" else torch.float32)


def test_a_strategy_knows_what_was_taken(native: str) -> None:
    cls = strategy("grafting-continual")
    made = cls(stream=tiny_stream(), options=cls.Options(precision="auto", sparsity=0.05))
    assert made.options.precision == made.ledger.binding.precision == native
    assert for_device(TrainingOptions(precision="fp16"), "cpu").precision == "fp16"
    assert TrainingOptions().precision == "fp32"


def test_what_was_taken_is_written_and_repeated(native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(
        stream="sst2", settings={"precision": "auto", "fine-tune.precision": "auto"}, device="cpu", out=str(tmp_path)
    )
    assert with_precision(config).settings == {"precision": native, "fine-tune.precision": native}
    begun = {"precision": "fp32" if native == "bf16" else "bf16"}  # on another machine
    (tmp_path / "config.json").write_text(json.dumps({"run": {"set": begun}}))
    assert with_precision(config).settings == begun | {"fine-tune.precision": native}
    for damaged in ("", "[]", '{"run": 3}', '{"run": {"set": 1}}'):
        (tmp_path / "config.json").write_text(damaged)
        assert with_precision(config).settings["precision"] == native
    given = RunConfig(stream="sst2", settings={"precision": "fp32"}, out=str(tmp_path))
    assert with_precision(given) is given and readout_model.native_precision("cpu") == native


def test_the_recipe_of_a_model_may_say_auto(native: str, tmp_path: Path) -> None:
    config = RunConfig(stream="sst2", model="minilm", strategies=("fine-tune",), device="cpu", out=str(tmp_path))
    assert with_precision(config).settings == {"precision": native}
    assert with_precision(replace(config, settings={"precision": "fp32"})).settings == {"precision": "fp32"}
    assert with_precision(replace(config, model="bert-base-uncased")).settings == {}


def test_training_in_bf16_may_answer_in_fp32() -> None:
    def learned(**options: Any) -> tuple[Any, list[Tensor]]:
        stream = tiny_stream()
        made = cls(stream=stream, options=cls.Options(precision="bf16", sparsity=0.05, steps=4, **options))
        for experience in stream.benchmark.train_stream:
            made.train(experience)
        made.eval(stream.benchmark.test_stream)
        return made, [torch.as_tensor(made.predictions[task.name].logits) for task in stream.tasks]

    cls = strategy("grafting-continual")
    stream = tiny_stream()
    of = stream.loaded, stream.tasks[0], stream.pre_trained
    keys = {
        fine_tuned_key(*of, cls.Options(answer_precision=each, steps=4), 0, torch.device("cpu"))
        for each in (None, "fp32", "bf16")
    }
    assert len(keys) == 1  # one fine-tuned model serves them all
    narrow, answers = learned()
    wide, exact = learned(answer_precision="fp32")
    assert narrow.ledger.binding.precision == "bf16" and wide.ledger.binding.precision == "fp32"
    for one, other in zip(narrow.ledger.records, wide.ledger.records, strict=True):  # the same is learned
        assert torch.equal(one.owned.values, other.owned.values)
    for task, bf16, fp32 in zip(wide.stream.tasks, answers, exact, strict=True):
        assert not torch.equal(bf16, fp32)
        with wide.answering(task):
            assert torch.equal(predict(wide.model, task.test, precision="fp32"), fp32)
        with narrow.answering(narrow.stream.tasks[task.label]):
            assert torch.equal(predict(narrow.model, task.test, precision="bf16"), bf16)
    assert for_device(TrainingOptions(answer_precision="auto"), "cpu").answering["precision"] == native_precision("cpu")
