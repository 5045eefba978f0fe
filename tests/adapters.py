"""Adapters of PEFT on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

HEADS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "classifier": ("bert-pooler", AutoModelForSequenceClassification, {"task_type": "SEQ_CLS"}),
    "prompt": ("bert-mlm", AutoModelForMaskedLM, {}),
    "causal": ("gpt2-lm", AutoModelForCausalLM, {"task_type": "CAUSAL_LM", "fan_in_fan_out": True}),
}


def write_adapter(kind: str, model: Path, out: Path, **changes: Any) -> Any:
    """Write a LoRA adapter whose product is not 0, and return the network with it merged, by PEFT."""
    _, loader, how = HEADS[kind]
    torch.manual_seed(0)
    network = loader.from_pretrained(model)
    targets = ["c_attn", "c_fc"] if kind == "causal" else ["query", "value", "intermediate.dense"]
    adapted: Any = peft.get_peft_model(network, peft.LoraConfig(r=2, **{"target_modules": targets} | how | changes))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(out)
    return adapted.merge_and_unload().eval()
