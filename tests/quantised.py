"""Tiny language models in 4 and 8 bits, as users load them, and data to train them on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TorchAoConfig,
)

from forgetfree.testing.tiny import pre_trained

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(layers: int = 2) -> Any:
    return LlamaForCausalLM(LlamaConfig(vocab_size=60, num_key_value_heads=2, **SIZES | {"num_hidden_layers": layers}))


def qwen2() -> Any:  # its attention has biases
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=60, num_key_value_heads=2, **SIZES))


def nf4() -> Any:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def int8() -> Any:
    return BitsAndBytesConfig(load_in_8bit=True)


def weights_in_int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


QUANTISATIONS: dict[str, Callable[[], Any]] = {"nf4": nf4, "int8": int8, "torchao int8": weights_in_int8}


def load(make: Callable[[], Any], how: str, place: Path) -> Any:
    """Return a model of `QUANTISATIONS`, loaded from a directory with its unquantised weights."""
    model = pre_trained(make)
    if not place.exists():
        model.save_pretrained(place)
    return type(model).from_pretrained(place, quantization_config=QUANTISATIONS[how](), dtype=torch.float32)


def numbers() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the numbers below 57."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *map(str, range(57))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def counting(step: int) -> Dataset:
    """Return texts that count up by a step."""
    return Dataset.from_list(
        [{"text": " ".join(str((first + step * i) % 57) for i in range(12))} for first in range(0, 57, 3)]
    )


def sft(model: Any, rows: Dataset, place: Path, peft_config: Any = None, **options: Any) -> list[float]:
    """Return the losses of TRL's SFTTrainer on a CPU."""
    from trl import SFTConfig, SFTTrainer

    usual = {
        "max_steps": 20,
        "logging_steps": 5,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "bf16": False,
    }
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    args = SFTConfig(str(place / "out"), **usual | quiet | options)
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=numbers(), peft_config=peft_config)
    trainer.train()
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
