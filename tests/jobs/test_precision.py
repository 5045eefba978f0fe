"""``precision=auto`` is decided once, written down, and repeated by whoever goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forgetfree.core import readout_model
from forgetfree.core.readout_model import autocast, native_precision
from forgetfree.jobs.config import with_precision
from forgetfree.jobs.run_config import RunConfig
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
