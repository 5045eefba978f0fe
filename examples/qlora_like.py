"""Two skills beside a base in 4 bits, in TRL's SFTTrainer: the second changes no token of the first, and no bit of the base.

python examples/qlora_like.py [MODEL]     MODEL: a causal language model of transformers; default: a tiny one that is made here

pip install forgetfree[quantised] trl
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
from trl_sft import ANSWERS, PLACES, tiny

from forgetfree import Ledger, answering, learning

FOUR_BITS: dict[str, Any] = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.bfloat16 if torch.cuda.is_available() else torch.float32,
}


def main(name: str | None = None) -> None:
    """Learn both tasks, and show that the first one writes as it did."""
    sparsity, rate = (1e-3, 5e-3) if name else (0.1, 2e-2)  # the tiny one has few entries, and knows nothing yet
    with tempfile.TemporaryDirectory() as out:
        if name is None:
            for part in tiny():
                part.save_pretrained(name := f"{out}/tiny")
        model: Any = AutoModelForCausalLM.from_pretrained(name, quantization_config=BitsAndBytesConfig(**FOUR_BITS))
        tokenizer = AutoTokenizer.from_pretrained(name)
        ledger = Ledger.of_model(model)  # whose tasks take effect beside the weights
        question = tokenizer("Q: France A:", return_tensors="pt").to(model.device)
        for task, answer in ANSWERS.items():
            texts = [f"Q: {land} A: {answer.format(land, city)}" for land, city in PLACES]
            rows = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
            labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
            args = SFTConfig(
                out,
                max_steps=40,
                learning_rate=rate,
                per_device_train_batch_size=5,
                logging_steps=10,
                save_strategy="no",
                report_to=[],
                bf16=torch.cuda.is_available(),
            )
            # The trainer is made inside, where the model has something to train: transformers refuses it elsewhere.
            with learning(model, ledger, task, sparsity=sparsity, batches=[{**rows, "labels": labels}]):
                data = Dataset.from_list([{"text": text} for text in texts])
                SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer).train()
            for known in ledger.tasks:
                with answering(model, ledger, known):
                    ids = model.generate(**question, max_new_tokens=12, do_sample=False)[0]
                print(f"after {task}, {known} says: {tokenizer.decode(ids)!r}")
    ledger.save("skills.safetensors")
    print(ledger)


if __name__ == "__main__":
    main(*sys.argv[1:2])
