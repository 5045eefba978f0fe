"""Steps of `learning` in other trainers, compared with steps of our own loop and of LoRA in the same trainer.

python -m benchmarks.speed trainers

Times are CPU times, which a busy machine changes least. In trainers, a turn is a whole training, and all steps but the first
count. SmolLM2 is measured if it has been fetched.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from benchmarks.speed.measurement import Figure, PeakMemory, ratio
from benchmarks.speed.region_step import found_region
from forgetfree import Ledger, learning
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import body_of
from forgetfree.core.regions import Region, grafted
from forgetfree.core.trained import RegionParameters, in_training
from forgetfree.errors import ForgetfreeError
from forgetfree.models.location import locate
from forgetfree.trainers.attachment import AttachedRegion

ROWS, TOKENS, STEPS = 8, 48, 3
#: The arguments of trainers besides the output directory.
ARGUMENTS: Mapping[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": ROWS,
    "learning_rate": 1e-3,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}
#: Takes some steps, and notifies the clock after each.
Steps = Callable[[Any, "Clock"], None]


class Clock(TrainerCallback):
    """The CPU time at which each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time."""
        self.ends.append(time.process_time())


def rows_of(model: Any, rows: int = ROWS, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Return rows of random tokens with their labels: the tokens, or one of two classes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 20_000, (rows, tokens), generator=generator)
    labels = ids if model.get_output_embeddings() else torch.randint(2, (rows,), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def plain_step(model: Any, batch: dict[str, Tensor]) -> Callable[[], None]:
    """Return a plain PyTorch step of AdamW on the trainable parameters."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def own_step(stack: ExitStack, model: Any, space: ParameterSpace, region: Region) -> Callable[[], None]:
    """Return the same step of a region, as the loops of this library take it."""
    body, batch = body_of(model), rows_of(model)
    stack.enter_context(grafted(body, space, region, space.gather(body, region.indices)))
    trained = RegionParameters(body, space, region)
    head = list(model.classifier.parameters()) if hasattr(model, "classifier") else []
    stack.enter_context(in_training(model, trained, head))
    optimizer = torch.optim.AdamW([*trained.parameters, *head], lr=1e-3)

    def step() -> None:
        model(**batch).loss.backward()
        trained.collect()
        optimizer.step()
        optimizer.zero_grad()
        trained.write()

    return step


def in_trainer(out: str, model: Any, clock: Clock) -> None:
    """Take steps in transformers' Trainer."""
    rows = Dataset.from_dict({name: each.tolist() for name, each in rows_of(model, ROWS * STEPS).items()})
    Trainer(model, TrainingArguments(out, **ARGUMENTS), train_dataset=rows, callbacks=[clock]).train()


def in_sft_trainer(out: str, tokenizer: Any, model: Any, clock: Clock) -> None:
    """Take steps in TRL's SFTTrainer, which uses gradient checkpointing by default."""
    rows = Dataset.from_dict({"input_ids": rows_of(model, ROWS * STEPS)["input_ids"].tolist()})
    arguments = SFTConfig(out, **ARGUMENTS)
    SFTTrainer(model, arguments, train_dataset=rows, callbacks=[clock], processing_class=tokenizer).train()


def timed(step: Callable[[], None], steps: int, clock: Clock) -> None:
    """Take some steps after one that does not count."""
    for _ in range(steps + 1):
        step()
        clock.on_step_end()


def in_our_loop(space: ParameterSpace, region: Region, model: Any, clock: Clock) -> None:
    """Take the steps of a region in our own loop."""
    with ExitStack() as stack:
        timed(own_step(stack, model, space, region), STEPS - 1, clock)


def within(steps: Steps, region: Region, model: Any, clock: Clock) -> None:
    """Take steps within `learning`."""
    with learning(model, Ledger.of_model(model), "task", region=region):
        steps(model, clock)


def memory_of(space: ParameterSpace, region: Region, model: Any) -> float:
    """Return the peak bytes of region steps besides model and activations, as multiples of all entries' bytes.

    The steps use one row of 4 tokens, with negligible activations; the trained values stay in the model.
    """
    with PeakMemory(*model.parameters()) as peak:
        attached = AttachedRegion(model, body_of(model), space, region)
        with attached.attached([model.classifier] if hasattr(model, "classifier") else []):
            step = plain_step(model, rows_of(model, 1, 4))
            step()
            step()
    return float(peak.bytes / (4 * len(space)))


def seconds_of(contenders: Mapping[str, Callable[[Clock], None]], turns: int) -> dict[str, np.ndarray]:
    """Return the CPU seconds ``(turns,)`` of a step, of each contender in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, run in contenders.items():
            run(clock := Clock())
            seconds[name].append((clock.ends[-1] - clock.ends[0]) / (len(clock.ends) - 1))
    return {name: np.array(each) for name, each in seconds.items()}


def compared(name: str, model: Any, trainer: str, steps: Steps, turns: int) -> Iterator[Figure]:
    """Yield the figures of a model in plain loops and in a trainer."""
    space = Ledger.of_model(model).space
    region = found_region(space)
    what = f"{name}, a step of learning in {{}}"
    with ExitStack() as stack:
        other = copy.deepcopy(model)
        ours = own_step(stack, other, space, region)
        stack.enter_context(learning(model, Ledger.of_model(model), "task", region=region))
        steps_of = {"plain loop": plain_step(model, rows_of(model)), "own loop": ours}
        loops = seconds_of({name: partial(timed, step, 1) for name, step in steps_of.items()}, turns)
    yield ratio(what.format("a plain loop / of our own"), loops, "plain loop", "own loop", at_most=1.05)
    lora = get_peft_model(other, LoraConfig(r=8, target_modules="all-linear"))
    if hasattr(model, "classifier"):
        lora.classifier.requires_grad_(True)
    contenders: dict[str, Callable[[Clock], None]] = {
        "own loop": partial(in_our_loop, space, region, model),
        trainer: partial(within, steps, region, model),
        "LoRA": partial(steps, lora),
    }
    if trainer != "Trainer":
        del contenders["own loop"]
    seconds = seconds_of(contenders, turns)
    if trainer == "Trainer":
        yield ratio(what.format("Trainer / of our own loop"), seconds, trainer, "own loop", at_most=1.05)
    yield ratio(what.format(f"{trainer} / of LoRA (PEFT) there"), seconds, trainer, "LoRA", at_most=0.9)
    memory = memory_of(space, region, model)
    yield Figure(f"{name}, most memory of learning beside model and activations", memory, at_most=0.05, unit="N")


def figures(turns: int = 9) -> list[Figure]:
    """Measure on rows of 48 tokens, 8 a step; a region of 0.1 % and LoRA of rank 8 on all linear layers."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = AutoModelForSequenceClassification.from_pretrained(locate("minilm"), num_labels=2, **still)
    with tempfile.TemporaryDirectory() as out:
        found = list(compared("MiniLM", encoder, "Trainer", partial(in_trainer, out), turns))
        try:
            place = locate("smollm2")
        except ForgetfreeError:
            return found
        writer, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
        steps = partial(in_sft_trainer, out, tokenizer)
        return [*found, *compared("SmolLM2-135M", writer, "SFTTrainer", steps, min(turns, 3))]
