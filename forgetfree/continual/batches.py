"""Batches of an Avalanche data set as they are planned, and the generators that plugins draw from."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.plugins.clock import Clock
from avalanche.training.templates.base_sgd import PeriodicEval
from avalanche.training.utils import cycle
from torch import Tensor, nn
from torch.utils.data import DataLoader

from forgetfree.continual.task_training import Training
from forgetfree.data.examples import Examples
from forgetfree.learning.encoded_task import EncodedTask
from forgetfree.parallel.parts import WHOLE, Part
from forgetfree.results.answers import Answers


def loader(data: Any, batches: Sequence[Sequence[int]], num_workers: int) -> Any:
    """Return a data loader of the batches, each a list of row numbers."""
    return DataLoader(
        data,
        batch_sampler=[list(batch) for batch in batches],
        collate_fn=data.collate_fn,
        num_workers=num_workers,
        generator=torch.Generator(),  # the loader must draw neither from dropout's generator nor during training
    )


def in_turn(
    dataloader: Any, planned: Any, parts: Sequence[Part], updates: int, done: int
) -> Iterator[tuple[Any, Part]]:
    """Return the mini-batches of a phase, with the part of a batch that each is.

    Args:
        dataloader: the planned one, or a plugin's own.
        planned: the loader of ``parts``.
        parts: of all batches.
        updates: of the phase.
        done: those that a checkpoint says are done.
    """
    if dataloader is not planned:  # a plugin's own, such as replay's: round and round, for as many steps
        return ((batch, WHOLE) for batch in islice(cycle(dataloader), updates))
    if done:
        ends = [number for number, part in enumerate(parts, 1) if part.last]
        parts = parts[ends[done - 1] :]
        planned = loader(planned.dataset, [part.rows for part in parts], planned.num_workers)
    return zip(planned, parts, strict=False)


def answers_in_order(
    task: EncodedTask,
    rows: Examples | None,
    order: Sequence[int],
    collected: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> Answers:
    """Return the answers on a task's rows, or on some of them, in the rows' order.

    Args:
        task: the task.
        rows: the rows that were answered; ``None`` where a plugin, or a user, put others together.
        order: their numbers among the task's, as they were answered.
        collected: of each batch its logits, its labels, and how many of both each row has.
    """
    logits, labels, counts = map(torch.cat, zip(*collected, strict=True))
    in_order = torch.argsort(torch.tensor(order).repeat_interleave(counts), stable=True)
    return task.kind.answers(task.definition, logits[in_order], labels[in_order], rows)


def lengths_of(data: Any, model: nn.Module) -> list[int]:
    """Return the tokens per row of rows that a plugin put together; 0 where rows are no texts."""
    tokens: Any = getattr(model, "tokens", None)
    if tokens is None:
        return [0] * len(data)
    return [int(tokens.attention_mask(data[i][0].unsqueeze(0)).sum()) for i in range(len(data))]


def alone(plugins: Iterable[Any]) -> bool:
    """Say whether no plugin beside Avalanche's own is there, which may read and change batches and the tensors' gradients."""
    return all(isinstance(plugin, (EvaluationPlugin, PeriodicEval, Clock)) for plugin in plugins)


def uncut(training: Training) -> Training:
    """Return the training without numbered parts, for where other code than ours meets its batches.

    Every process then computes whole batches, with the same bits as the others.
    """
    return replace(training, options=replace(training.options, parts=None))


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
