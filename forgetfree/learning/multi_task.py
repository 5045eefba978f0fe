"""One model for several tasks, and one region for several of its skills (paper, §5.1 and C.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from random import Random

import torch
from torch.nn import functional as F

from forgetfree.core.batch_loss import Batch, check_loss
from forgetfree.core.mask import learn_regions
from forgetfree.core.readout_model import autocast
from forgetfree.core.regions import Region
from forgetfree.core.trained import WholeTensors, in_training
from forgetfree.learning.fine_tuning import full_steps
from forgetfree.learning.localization import LocalizationOptions, mask_batches, mask_loss, mask_options
from forgetfree.learning.single_task import SingleTask
from forgetfree.learning.training import TrainingOptions, Update, plan, scheduled_rate, training_mode
from forgetfree.models.state import ModelState
from forgetfree.seeds import derive_seed


def train_together(benches: Sequence[SingleTask], options: TrainingOptions) -> ModelState:
    """Fine-tune θ_pre on all tasks, each batch from a task drawn at random, for the sum of their steps (paper, C.1).

    Args:
        benches: the tasks, on one model.
        options: how to train.

    Returns:
        The model with the readouts of all tasks.

    Raises:
        TrainingError: the loss is not finite.
    """
    first, model = benches[0], benches[0].model
    steps = sum(full_steps(options, bench.task) for bench in benches)
    seed = derive_seed(first.seed, "multi-task")
    turns = Random(derive_seed(seed, "tasks")).choices(benches, k=steps)
    plans = {b.task.name: iter(plan(b.task.train.lengths, options, turns.count(b), seed)) for b in benches}
    trained = WholeTensors(first.space.parameters(model.backbone))
    readouts = [p for bench in benches for p in model.readout_module(bench.task.label).parameters()]
    anchors = [parameter.detach().clone() for parameter in trained.parameters] if options.l1 else []
    with ExitStack() as stack:
        for bench in benches:
            stack.enter_context(bench.holding(bench.pre))
        on_step = stack.enter_context(first.monitor.phase("all tasks", "fine_tune", steps))
        stack.enter_context(in_training(model, trained, readouts))
        first.monitor.learning_rate(scheduled_rate(options, steps))
        update = Update(trained.parameters, readouts, options, steps, anchors)
        torch.manual_seed(derive_seed(seed, "dropout"))
        training_mode(model, options.dropout)
        for step, bench in enumerate(turns, 1):
            x, y, t = (part.to(first.device) for part in bench.task.train.batch(next(plans[bench.task.name])))
            update.optimizer.zero_grad()
            with autocast(options.precision, first.device.type):
                logits = model(x, t)
            loss = F.cross_entropy(logits.float(), y)
            update.backward(loss)
            trained.collect()
            update.before_step()
            update.step()
            trained.write()
            on_step(step, check_loss(float(loss.detach()), step))
        return ModelState.of(model, [bench.task.name for bench in benches])


def purified(
    benches: Sequence[SingleTask], trained: ModelState, region: Region, options: LocalizationOptions, steps: int
) -> Region:
    """Return a region of the same size after steps on S that lower the sum of the tasks' losses (paper, §5.1).

    Args:
        benches: the tasks, on one model.
        trained: that model after `train_together`.
        region: γ_base, such as the union of the tasks' regions.
        options: how S is learned.
        steps: on S.
    """
    first = benches[0]
    rows = min(options.mask_batch_size, *(len(bench.task.train) for bench in benches))  # every task counts the same
    mask = replace(mask_options(options, rows, steps), steps=steps, evaluate_every=steps)

    def batches() -> Iterator[list[Batch]]:
        seeds = (derive_seed(bench.seed, "purify", bench.task.name) for bench in benches)
        each = [
            mask_batches(bench.task.train, mask, seed, options, first.device)
            for bench, seed in zip(benches, seeds, strict=True)
        ]
        for of_tasks in zip(*each, strict=True):
            yield [batch for of_task in of_tasks for batch in of_task]

    with ExitStack() as stack:
        for bench in benches:
            stack.enter_context(bench.holding(replace(trained, theta=first.pre.theta)))
        first.model.eval()
        on_step = stack.enter_context(first.monitor.phase("all tasks", "localize", steps))
        (found,) = learn_regions(
            first.model.backbone,
            first.space,
            first.pre.theta.to(first.device),
            trained.theta.to(first.device),
            batches(),
            mask_loss(first.model, options),
            sparsities=[len(region) / len(first.space)],
            base=region,
            options=mask,
            on_step=on_step,
        )
    return found.region
