"""Give an encoder an LM head, so that prompts work: ``python -m benchmarks.masked_lm --data DIR --out DIR``.

Use it where the only model at hand is ``minilm``, which has no LM head. It trains the encoder and a new head, tied to the
word embeddings, on masked tokens (Devlin et al., 2019, §3.1) of the tasks' training texts, without their labels. Few
steps give a weak language model, but it predicts label words at the mask as any other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import DataCollatorForLanguageModeling, get_linear_schedule_with_warmup

from forgetfree.data.sources import load_task
from forgetfree.errors import ForgetfreeError
from forgetfree.files import make_directory
from forgetfree.jobs.run_directory import refuse_used
from forgetfree.models.location import locate
from forgetfree.models.model_files import read_config, read_tokenizer, read_weights

#: Tasks of single texts and of pairs, from several domains.
TASKS = ("sst2", "mr", "mpqa", "cr", "ag_news", "qnli", "snli", "mnli", "mrpc", "qqp")
#: The most word pieces of a text.
MAX_LENGTH = 48


def training_texts(tasks: Sequence[str], data: str) -> list[str]:
    """Return all texts of the training rows, each once, in order."""
    texts: dict[str, None] = {}
    for name in tasks:
        train = load_task(name, data).train
        texts |= dict.fromkeys((*train.first, *train.second))
    return list(texts)


def train_masked_lm(
    model: Any, tokenizer: Any, texts: Sequence[str], *, steps: int, batch_size: int, learning_rate: float, seed: int
) -> list[float]:
    """Train all of ``model`` to fill in masked tokens, with AdamW; return the loss of every step, in nats per token."""
    torch.manual_seed(seed)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 20, steps)  # type: ignore[no-untyped-call]
    losses = []
    model.train()
    for step in range(steps):
        masked = False
        while not masked:  # in a few short texts, chance may mask no token
            rows = torch.randint(len(texts), (batch_size,)).tolist()
            batch = collate([tokenizer(texts[i], truncation=True, max_length=MAX_LENGTH) for i in rows])
            labels = batch.pop("labels")
            masked = bool((labels != -100).any())
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.base_model(**batch).last_hidden_state
            # The vocabulary is large and few tokens are masked: the head reads only those.
            logits = model.cls(hidden[labels != -100])
        loss = cross_entropy(logits.float(), labels[labels != -100])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            print(f"{step + 1}/{steps} loss {sum(losses[-100:]) / 100:.3f}", file=sys.stderr, flush=True)
    return losses


def main() -> None:
    """Train and save: a directory for ``--model``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True, help="data directory, as in forgetfree run")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--model", default="minilm", help="an encoder of the BERT architecture (default: minilm)")
    parser.add_argument("--task", action="append", help=f"default: {', '.join(TASKS)}")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        texts = training_texts(options.task or TASKS, options.data)
        path = locate(options.model)
        architecture = read_config(path, options.model).model_type
        if architecture != "bert":
            parser.error(
                f"--model must be of the BERT architecture, got {architecture}. Give an encoder such as minilm."
            )
        make_directory(options.out)
        refuse_used(options.out, "Give another directory.")
        torch.manual_seed(options.seed)  # for the weights of the head
        model, missing = read_weights(path, "AutoModelForMaskedLM", options.model)
        if lacking := [name for name in missing if name.startswith(model.base_model_prefix)]:
            parser.error(
                f"--model {options.model!r} lacks {lacking[0]!r}, which would be random. Save the model whole."
            )
        tokenizer = read_tokenizer(path, options.model)
    except ForgetfreeError as error:
        parser.error(str(error))
    print(f"{len(texts):,} texts", file=sys.stderr)
    train_masked_lm(
        model,
        tokenizer,
        texts,
        steps=options.steps,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    model.eval().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
