"""The choice of a parent inside a trainer: the task of a ledger on whose weights some batches are read best, or θ_pre.

A head is not trained yet when a task begins, so what the head reads is probed, see `forgetfree.training.parents`. A model
without a head of its own, as those that write texts, is judged by its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from forgetfree.core.readout_model import in_evaluation_mode
from forgetfree.errors import UsageError
from forgetfree.ledger.switch import LedgerSwitch

#: What losses of PyTorch leave out: a row or token without a label.
NO_LABEL = -100


@torch.no_grad()
def parent_of_batches(
    model: nn.Module,
    switch: LedgerSwitch,
    heads: Sequence[nn.Module],
    batches: Sequence[Any],
    sizes: Sequence[int],
    loss: Callable[[Any], Tensor],
) -> str:
    """Return the task that a new one should stand on; empty: none, θ_pre, which the model holds before and after.

    Args:
        model: the model.
        switch: between the tasks of its ledger.
        heads: the modules that the new task trains whole.
        batches: of the new task's rows; with heads, dictionaries with ``labels``.
        sizes: the number of rows of each.
        loss: the model's mean loss over a batch's rows.

    Raises:
        UsageError: the batches have no labels, or fractions as labels; or no layer of a head reads one vector for each.
    """
    from forgetfree.training import parents

    found = dict[str, Sequence[float]]()
    try:
        with in_evaluation_mode(model):
            for parent in ("", *switch.ledger.tasks):
                switch.to(switch.ledger.stage(parent))
                if heads:
                    found[parent] = parents.cross_validation(*_read(model, heads, batches, loss))
                else:
                    losses = [float(loss(batch)) for batch in batches]
                    found[parent] = (float(np.average(losses, weights=sizes)),)
    finally:
        switch.to(0)
    return parents.better_parent(found)


def _read(
    model: nn.Module, heads: Sequence[nn.Module], batches: Sequence[Any], loss: Callable[[Any], Tensor]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Return what the heads read of labelled rows or tokens ``(n, H)``, and the labels ``(n,)`` or ``(n, n_labels)``."""
    features, labels = [], []
    for batch in batches:
        targets = _labels_of(batch)
        are_numbers = _are_numbers(targets)
        with _passes(model, heads) as passes:
            loss(batch)
        found = passes.of_each(targets.shape if are_numbers else targets.shape[:1])
        if found is None:
            raise UsageError(
                "parent='auto' probes what a linear layer of the head reads of each row, and none reads one vector a row. Give "
                "the parent's name, or leave parent= out."
            )
        if are_numbers:
            is_labelled = targets != NO_LABEL
            found, targets = found[is_labelled.to(found.device)], targets[is_labelled]
        features.append(found.float().cpu().numpy())
        labels.append(targets.cpu().numpy().astype(np.int64))
    return np.concatenate(features), np.concatenate(labels)


def _labels_of(batch: Any) -> Tensor:
    """Return the labels of a batch, which are numbers of classes, or 0 and 1."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        raise UsageError(
            "parent='auto' reads labels: expected dictionaries with 'labels' as batches=…. Give the parent's name, or "
            "leave parent= out."
        )
    if labels.is_floating_point() and not bool(((labels == 0) | (labels == 1)).all()):
        raise UsageError(
            "parent='auto' tells classes apart, and these labels are fractions. Give the parent's name, or leave parent= out."
        )
    return labels


def _are_numbers(labels: Tensor) -> bool:
    """Return whether labels number the classes of rows ``(n,)`` or tokens ``(n, L)``; others are 0 and 1 for each class."""
    return not labels.is_floating_point() and labels.dtype != torch.bool


@dataclass
class _Passes:
    """What the linear layers of heads read and return ``(…, H)``, and what a model answers ``(n, n_labels)``."""

    read: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    answers: list[Tensor] = field(default_factory=list)

    def of_each(self, shape: Sequence[int]) -> Tensor | None:
        """Return one vector for each row or token ``(*shape, H)``; ``None`` where no layer reads that.

        Where a layer reads all tokens of a row, as in decoders, it is the vector of the token by which the model answers.
        """
        for x, _ in self.read:
            if x.shape[:-1] == shape:
                return x
        for x, y in self.read:
            for answer in self.answers:
                if x.dim() == 3 and answer.shape == (*shape, y.shape[-1]) and len(x) == len(answer):
                    is_answer = (y.to(answer.dtype) == answer.unsqueeze(1)).all(-1)
                    if bool(is_answer.any(1).all()):
                        return x[torch.arange(len(x), device=x.device), is_answer.int().argmax(1)]
        return None


@contextmanager
def _passes(model: nn.Module, heads: Sequence[nn.Module]) -> Iterator[_Passes]:
    """Give what is read and answered inside."""
    passes = _Passes()

    def read(_: nn.Module, given: Sequence[Any], named: Mapping[str, Any], y: Tensor) -> None:
        passes.read.append((next(iter((*given, *named.values()))), y))

    def answer(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(logits := getattr(output, "logits", None), Tensor):
            passes.answers.append(logits)

    layers = [layer for head in heads for layer in head.modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_hook(read, with_kwargs=True) for layer in layers]
    hooks.append(model.register_forward_hook(answer))
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()
