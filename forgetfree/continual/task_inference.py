"""Which model answers the rows of a task: its own, or, where the stream withholds the task at inference, one for all.

Where the task is withheld (the stream's ``scenario`` is ``class`` or ``domain``), a strategy with one model for all tasks
answers with it. One with a model per task (`taskwise`) answers with that of the last task, every label read by the readout
of the last task that has it; or, with ``task_inference=router``, each row with the model of the task whose answer, among
its own labels, has the least entropy as a share of the largest they could have. During training, the task in training is
the last. Labels of no such task get the lowest logit there is; before any task, the untrained model answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from forgetfree.continual.task_training import Answer
from forgetfree.core.readout_model import LOWEST
from forgetfree.core.tensors import load_tensors_, tensors_of
from forgetfree.learning.encoded_task import EncodedTask
from forgetfree.learning.training import TrainingOptions
from forgetfree.options import option


@dataclass(frozen=True, kw_only=True)
class TaskwiseOptions(TrainingOptions):
    """Options that strategies with a model per task take beside those of training."""

    task_inference: Literal["last", "router"] = option(
        "last",
        "where the stream withholds the task: the model of the last task (for unions, the one with all tasks), or for each row "
        "that of the task whose answer has the least entropy",
    )


def answer_for(strategy: Any, task: EncodedTask) -> AbstractContextManager[Answer | None]:
    """Return a context in which the model answers for ``task``; it yields what answers in the model's place, if anything.

    Args:
        strategy: a `ContinualStrategy`, at rest or during training.
        task: whose rows.
    """
    training = strategy.training
    if strategy.stream.scenario != "task" and strategy.taskwise:
        routed = strategy.options.task_inference == "router" and strategy.learned
        return _by_router(strategy) if routed else _by_last(strategy)
    if training is not None and (training.task is task or strategy.stream.scenario != "task"):
        return nullcontext(training.answer)
    context: AbstractContextManager[Answer | None] = strategy.answering(task)
    return context


@contextmanager
def _by_last(strategy: Any) -> Iterator[Answer]:
    """Answer with the last task's model; each label's row of the readout is that of the last task that has it."""
    with _readout_kept(strategy), _model_of(strategy, strategy.learned[-1:]) as answer:
        readout = strategy.model.readout_module(0)
        readouts = [(task, strategy.readouts[task.name]) for task in strategy.learned]
        if strategy.training is not None:
            readouts.append((strategy.training.task, tensors_of(readout)))
        with torch.no_grad():
            for name, tensor in readout.state_dict(keep_vars=True).items():
                for task, its_own in readouts:
                    rows = list(task.classes)
                    tensor[rows] = its_own[name][rows].to(tensor.device)
        seen = {label for task, _ in readouts for label in task.classes}
        unseen = [label for label in range(strategy.model.heads[0].n_labels) if readouts and label not in seen]

        def read(x: Tensor, labels: Any) -> Tensor:
            logits: Tensor = answer(x, labels)
            if unseen:
                logits[:, unseen] = LOWEST
            return logits

        yield read


@contextmanager
def _by_router(strategy: Any) -> Iterator[Answer]:
    """Answer each row by the task whose answer has the least entropy, as a share of its labels' largest entropy."""

    def route(x: Tensor, labels: Any) -> Tensor:
        answers, entropies = [], []
        for task in strategy.learned:
            with _readout_kept(strategy), strategy.answering(task) as answer:
                load_tensors_(strategy.model.readout_module(0), strategy.readouts[task.name])
                answers.append(_among(task, (answer or strategy.model)(x, labels)))
            entropies.append(_share_of_entropy(task, answers[-1]))
        if (training := strategy.training) is not None:
            answers.append(_among(training.task, (training.answer or strategy.model)(x, labels)))
            entropies.append(_share_of_entropy(training.task, answers[-1]))
        best = torch.stack(entropies).argmin(0)
        return torch.stack(answers)[best, torch.arange(len(best), device=best.device)]

    yield route


def _among(task: EncodedTask, logits: Tensor) -> Tensor:
    """Keep the logits of the task's own labels, and give the others the lowest."""
    hidden = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
    hidden[list(task.classes)] = False
    return logits.masked_fill(hidden, LOWEST)


def _share_of_entropy(task: EncodedTask, logits: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(logits.softmax(1)).sum(1)
    return entropy / math.log(max(2, len(task.classes)))


@contextmanager
def _model_of(strategy: Any, last: list[EncodedTask]) -> Iterator[Answer]:
    """Make the model that of the last task; during training, and before any task, leave it as it is."""
    if strategy.training is not None:
        yield strategy.training.answer or strategy.model
    elif not last:
        yield strategy.model
    else:
        with strategy.answering(last[0]) as answer:
            yield answer or strategy.model


@contextmanager
def _readout_kept(strategy: Any) -> Iterator[None]:
    """Restore the readout that all tasks share, at the end."""
    readout = strategy.model.readout_module(0)
    before = tensors_of(readout)
    try:
        yield
    finally:
        load_tensors_(readout, before)
