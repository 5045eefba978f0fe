"""A task of texts that starts from somebody's adapter of PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import prompted
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from forgetfree import Predictor
from forgetfree.core.body import body_of
from forgetfree.errors import ModelError
from forgetfree.models.loading import load_model
from forgetfree.models.peft_adapter import AdapterStart

pytestmark = pytest.mark.long

LOADERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Llama": (AutoModelForCausalLM, {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "up_proj"]}),
    "T5": (AutoModelForSeq2SeqLM, {"task_type": "SEQ_2_SEQ_LM", "target_modules": ["q", "wi"]}),
}


def write_adapter(family: str, model: Path, out: Path) -> Any:
    loader, how = LOADERS[family]
    torch.manual_seed(0)
    adapted: Any = peft.get_peft_model(loader.from_pretrained(model), peft.LoraConfig(r=2, **how))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(out)
    return adapted.merge_and_unload().eval()


@pytest.mark.parametrize("family", LOADERS)
def test_fine_tuning_on_texts_begins_at_the_merged_adapter(family: str, tmp_path: Path) -> None:
    model = prompted.write_model(family, tmp_path / "model")
    merged = write_adapter(family, model, tmp_path / "lora")
    loaded = load_model(str(model), "generate")
    start = AdapterStart.of(str(tmp_path / "lora"), str(model))
    assert start.check(loaded.model) == ()
    own: Any = load_model(str(model), "generate").model
    body_of(own.backbone).load_state_dict(body_of(merged).state_dict())
    assert torch.equal(start.theta(loaded.model), own.space().flatten(own.backbone))
    assert not torch.equal(start.theta(loaded.model), loaded.model.space().flatten(loaded.model.backbone))
    data = prompted.write_data(tmp_path / "data")
    how: dict[str, Any] = {"steps": 2, "starts": {"first": str(tmp_path / "lora")}, "upper_triangle": False}
    out = prompted.run(data, model, tmp_path / "out", "fine-tune", **how)
    assert json.loads((out / "results.json").read_text())["starts"] == {"first": start.sha256}
    (written,) = Predictor.of_run(out).answer("first", [prompted.prompts(11, 11)[0]])
    assert written.text == prompted.answers_of_run(out, "fine-tune")["first"].texts[0]


def test_an_adapter_of_another_model_is_refused_before_training(tmp_path: Path) -> None:
    model = prompted.write_model("Llama", tmp_path / "model")
    write_adapter("T5", prompted.write_model("T5", tmp_path / "t5"), tmp_path / "lora")
    data, starts = prompted.write_data(tmp_path / "data"), {"first": str(tmp_path / "lora")}
    with pytest.raises(ModelError, match="is for AutoModelForSeq2SeqLM, and"):
        prompted.run(data, model, tmp_path / "out", "grafting-continual", starts=starts)
