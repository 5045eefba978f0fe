"""Other trainers: three tasks in TRL's SFTTrainer, with `learning` and with one LoRA, on SmolLM2 as it is and in 4 bits."""

from __future__ import annotations

import copy
import random
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.results import Measurement, SectionResults, Value, promise
from benchmarks.gpu.superni import unpack_smollm2
from forgetfree import Ledger, answering, learning
from forgetfree.models.loading import load_model

#: Rows of a task, tokens of a row, and steps of 8 rows.
ROWS, TOKENS, STEPS = 64, 48, 30
TASKS = ("a", "b", "c")


def measurements(bench: Bench, results: SectionResults) -> Iterator[Measurement]:
    """Yield both ways on both bases."""
    if find_spec("trl") is None:
        yield Measurement("three tasks", 1, lambda: [Value("SFTTrainer", "left out: trl is not installed", shown=True)])
        return
    for base in ("", *([", 4 bits"] if find_spec("bitsandbytes") else [])):
        for way in ("learning", "LoRA (PEFT)"):
            name = f"three tasks in SFTTrainer, {way}{base}"
            yield Measurement(name, 60, partial(three_tasks, bench, way, in_4_bits=bool(base)))


def model_of(bench: Bench, *, in_4_bits: bool) -> tuple[Any, Any]:
    """Return SmolLM2 and its tokenizer, or a tiny Llama."""
    if bench.tiny:
        loaded = bench.llama("tiny", "generate", "float32")
    else:
        unpack_smollm2(bench)
        loaded = load_model("smollm2", "generate")
    model: Any = loaded.model.backbone
    if not in_4_bits:
        return model.to(bench.device), loaded.tokenizer
    from transformers import BitsAndBytesConfig

    options: Any = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    how = BitsAndBytesConfig(**options)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        packed = type(model).from_pretrained(place, quantization_config=how, device_map={"": bench.device})
    return packed, loaded.tokenizer


def three_tasks(bench: Bench, way: str, *, in_4_bits: bool) -> Iterator[Value]:
    """Learn three tasks of random texts, and compare the first one's loss right after learning and at the end."""
    model, tokenizer = model_of(bench, in_4_bits=in_4_bits)
    rows, tokens, steps = (16, 12, 3) if bench.tiny else (ROWS, TOKENS, STEPS)
    draw = random.Random(0)
    texts = {
        name: [draw.choices(range(10, min(10_000, model.config.vocab_size)), k=tokens) for _ in range(rows)]
        for name in TASKS
    }
    train = partial(in_sft_trainer, bench, tokenizer, steps)
    seconds = list[float]()
    if way == "learning":
        ledger = Ledger.of_model(model)
        before = copy.deepcopy(model.state_dict())
        for name in TASKS:
            with learning(model, ledger, name, batches=batches_of(bench, texts[name])):
                seconds.append(train(model, texts[name]))
            if name == TASKS[0]:
                with answering(model, ledger, name):
                    first = loss_of(bench, model, texts[name])
        with answering(model, ledger, TASKS[0]):
            last = loss_of(bench, model, texts[TASKS[0]])
        same = all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        yield promise("the loss of the first task has the same bits after the later ones", first == last)
        yield promise("the model holds θ_pre afterwards, bit for bit", same)
    else:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name in TASKS:
            seconds.append(train(model, texts[name]))
            if name == TASKS[0]:
                first = loss_of(bench, model, texts[name])
        last = loss_of(bench, model, texts[TASKS[0]])
    yield Value(
        "loss of the first task, after the last minus right after it was learned", last - first, "nats", shown=True
    )
    yield Value("a step", 1e3 * sum(seconds) / len(seconds) / steps, "ms", shown=True)


def in_sft_trainer(bench: Bench, tokenizer: Any, steps: int, model: Any, texts: list[list[int]]) -> float:
    """Train on texts, and return the seconds."""
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    how: Any = {"max_steps": steps, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "bf16": False}
    how |= {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as out:
        arguments = SFTConfig(out, use_cpu=bench.device.type == "cpu", **how)
        rows = Dataset.from_dict({"input_ids": texts})
        trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
        begin = time.perf_counter()
        trainer.train()
        if bench.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - begin


def batches_of(bench: Bench, texts: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Return texts as batches of 8 rows."""
    ids = torch.tensor(texts, device=bench.device)
    return [{"input_ids": part, "labels": part} for part in torch.split(ids, 8)]


@torch.no_grad()
def loss_of(bench: Bench, model: Any, texts: list[list[int]]) -> float:
    """Return the mean loss of texts."""
    model.eval()
    losses = [float(model(**batch).loss) for batch in batches_of(bench, texts)]
    return sum(losses) / len(losses)
