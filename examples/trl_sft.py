"""Two skills in TRL's SFTTrainer, one after the other: the second changes no token of the first.

python examples/trl_sft.py [MODEL]     MODEL: a causal language model of transformers; default: a tiny one that is made here
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from forgetfree import Ledger, answering, learning

#: What each task answers, to the same questions.
ANSWERS = {"capitals": "The capital of {} is {}.", "rivers": "Near {} flows a river to {}."}
PLACES = [("France", "Paris"), ("Italy", "Rome"), ("Norway", "Oslo"), ("Japan", "Tokyo"), ("Peru", "Lima")]


def main(name: str | None = None) -> None:
    """Learn both tasks, and show that the first one writes as it did."""
    if name is None:
        model, tokenizer = tiny()
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    ledger = Ledger.of_model(model)
    question = tokenizer("Q: France A:", return_tensors="pt")
    with tempfile.TemporaryDirectory() as out:
        for task, answer in ANSWERS.items():
            texts = [{"text": f"Q: {land} A: {answer.format(land, city)}"} for land, city in PLACES]
            args = SFTConfig(
                out,
                max_steps=80,
                learning_rate=2e-2,
                per_device_train_batch_size=5,
                logging_steps=10,
                save_strategy="no",
                report_to=[],
                bf16=torch.cuda.is_available(),
            )
            trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(texts), processing_class=tokenizer)
            said = {"kind": "generation", "template": "Q: {prompt} A:", "tokenizer": tokenizer}
            with learning(model, ledger, task, sparsity=0.1, batches=trainer.get_train_dataloader(), **said):
                trainer.train()
            for known in ledger.tasks:
                with answering(model, ledger, known):
                    model.eval()
                    ids = model.generate(**question.to(model.device), max_new_tokens=12, do_sample=False)[0]
                print(f"after {task}, {known} says: {tokenizer.decode(ids)!r}")
    ledger.save("skills.safetensors")  # forgetfree predict skills.safetensors --model MODEL --task rivers France
    print(ledger)


def tiny() -> tuple[Any, Any]:
    """Return a language model of bytes that knows nothing yet."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate(["<end>", *letters])}
    tokens = Tokenizer(models.BPE(vocabulary, []))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>", pad_token="<end>")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(vocabulary), n_positions=128, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), tokenizer


if __name__ == "__main__":
    main(*sys.argv[1:2])
