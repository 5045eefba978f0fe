"""A step of fine-tuning all of minilm, beside the same step with PyTorch's optimizers as they come.

python -m forgetfree.benchmarks.speed fine_tune_step
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from forgetfree.benchmarks.speed.measurement import Figure, alternate, ratio
from forgetfree.benchmarks.speed.region_step import Batch, all_of, loss_of, plain_step
from forgetfree.continual.streams import load_stream
from forgetfree.core.trained import WholeTensors, in_training
from forgetfree.learning.training import TrainingOptions, Update, plan, training_mode

STEPS = 2


def our_step(stack: ExitStack, model: Any, options: TrainingOptions) -> Callable[[Batch], None]:
    """Return a step as the loops of this library take it."""
    readout = list(model.readout_module(0).parameters())
    trained = WholeTensors(model.space().parameters(model.backbone))
    stack.enter_context(in_training(model, trained, readout))
    update = Update(trained.parameters, readout, options, 1000)

    def step(batch: Batch) -> None:
        update.optimizer.zero_grad()
        update.backward(loss_of(model, batch, options.precision))
        update.before_step()
        update.step()

    return step


def figures(turns: int = 9) -> list[Figure]:
    """Measure on the demo task QNLI, 8 rows a step, without dropout."""
    stream = load_stream("qnli,ag_news", data="demo", model="minilm", readout="linear")
    base: Any = stream.model
    rows: Any = stream.tasks[0].train
    batches = [rows.batch(batch) for batch in plan(rows.lengths, TrainingOptions(), STEPS, 0)]
    training_mode(base, dropout=False)
    with ExitStack() as stack:
        steps: dict[str, Callable[[Batch], None]] = {}
        for optimizer in ("adamw", "sgd"):
            for precision in ("fp32", "bf16"):
                how: Any = {"optimizer": optimizer, "precision": precision}
                options = TrainingOptions(learning_rate=1e-5, schedule="constant", **how)
                steps[f"{optimizer}, {precision}"] = our_step(stack, copy.deepcopy(base), options)
            model = copy.deepcopy(base)
            whole = [*model.space().parameters(model.backbone), *model.readout_module(0).parameters()]
            steps[optimizer] = plain_step(stack, model, whole, optimizer)
        seconds = alternate({name: partial(all_of, step, batches) for name, step in steps.items()}, turns=turns)
    what = "step of fine-tuning, {}, {} / PyTorch's {} as it comes, fp32"
    return [
        ratio(what.format("AdamW", "fp32", "AdamW"), seconds, "adamw, fp32", "adamw", at_most=0.87),
        ratio(what.format("AdamW", "bf16", "AdamW"), seconds, "adamw, bf16", "adamw", at_most=0.6),
        ratio(what.format("SGD", "fp32", "SGD"), seconds, "sgd, fp32", "sgd"),
        ratio(what.format("SGD", "bf16", "SGD"), seconds, "sgd, bf16", "sgd"),
    ]
