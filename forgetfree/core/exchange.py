"""Several processes train as one, and end with the bits of one: data parallelism in a fixed order.

All of them run one program on the same seeds, and hold the same weights. A batch is cut into a fixed number of numbered
parts, a power of two. Each process computes some of them, and their gradients are added by a tree over the numbers,
((0+1)+(2+3))+…: whoever holds a part, the sum has the same bits. Without a group of processes, this one computes all parts in
the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

T = TypeVar("T")


class ProcessLost(RuntimeError):
    """Another process of the group has ended, so nothing can be exchanged any more."""


@dataclass
class _Place:
    """Where this process stands in its group, and the bytes that it has sent there."""

    rank: int = 0
    size: int = 1
    sent: int = 0


_place = _Place()


@contextmanager
def joined(rank: int, size: int, store: Any = None, device: str = "cpu") -> Iterator[None]:
    """Belong to a group of processes, inside.

    Args:
        rank: the number of this process; 0 leads.
        size: how many there are.
        store: where they meet; default: as the environment says, which ``torchrun`` sets.
        device: where they train: NCCL adds up on GPUs, gloo on CPUs.
    """
    global _place
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    # A process may wait for long: for another run that fine-tunes the same model.
    with _in_touch():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(days=1))
    _place = _Place(rank, size)
    try:
        yield
    finally:
        _place = _Place()
        dist.destroy_process_group()


def rank() -> int:
    """Return the number of this process in its group; 0 where there is none."""
    return _place.rank


def size() -> int:
    """Return how many processes train as one; 1 where there is no group."""
    return _place.size


def bytes_sent() -> int:
    """Return how many bytes of gradients and logits this process has sent to others."""
    return _place.sent


def owned(parts: int) -> range:
    """Return which of the numbered parts this process computes; the group's size divides their number."""
    each = parts // size()
    return range(rank() * each, (rank() + 1) * each)


def tree_sum(addends: Sequence[Tensor]) -> Tensor:
    """Return ((0+1)+(2+3))+… of tensors, a power of two of them."""
    while len(addends) > 1:
        addends = [first + second for first, second in zip(addends[::2], addends[1::2], strict=True)]
    return addends[0]


def summed(vector: Tensor) -> Tensor:
    """Return the `tree_sum` of every process's ``vector`` ``(n,)``, in all of them.

    Each process adds up one slice and hands it round. So it sends 2·(P − 1)/P of the vector, whatever the number P.
    """
    if size() == 1:
        return vector
    padded = torch.nn.functional.pad(vector, (0, -len(vector) % size()))
    slices = torch.empty_like(padded)
    with _in_touch():
        dist.all_to_all_single(slices, padded)
        mine = tree_sum(slices.view(size(), -1).unbind())
        dist.all_gather_into_tensor(padded, mine)
    _place.sent += 2 * (size() - 1) * mine.numel() * mine.element_size()
    return padded[: len(vector)]


def gathered(own: Sequence[T]) -> list[T]:
    """Return what all processes give in turn, as `every` dealt it out."""
    if size() == 1:
        return list(own)
    dealt: list[Any] = [None] * size()
    with _in_touch():
        dist.all_gather_object(dealt, list(own))
    _place.sent += (size() - 1) * sum(_bytes(each) for each in own)
    return [dealt[i % size()][i // size()] for i in range(sum(map(len, dealt)))]


def every(items: Sequence[T]) -> Sequence[T]:
    """Return the items that this process computes of a list: each process takes every P-th of them."""
    return items[rank() :: size()]


def from_first(value: T) -> T:
    """Return process 0's ``value`` in all of them."""
    if size() == 1:
        return value
    held = [value]
    with _in_touch():
        dist.broadcast_object_list(held)
    return held[0]


@contextmanager
def _in_touch() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of gloo or NCCL
        raise ProcessLost(f"Process {rank()} of {size()} has lost another one: {error}") from error


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, tuple) else 0


class PartSum:
    """Adds up loss and gradients of a batch's numbered parts, whichever processes compute them.

    Args:
        parameters: whose gradients; they are on one device.
        parts: how many parts a batch has.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], parts: int) -> None:
        self._parameters = list(parameters)
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._sums: list[tuple[int, Tensor]] = []  # of 2ⁿ parts each, as many as the bits of the number of parts so far

    @torch.no_grad()
    def take(self, loss: Tensor | float) -> None:
        """Take the gradients that the next part has left in the parameters, and its weighted loss."""
        gradients = [parameter.grad for parameter in self._parameters]
        first = self._parameters[0]
        # What no part has a gradient for is to have none in the sum: an optimiser leaves it as it is.
        told = first.new_tensor([float(loss), *(gradient is not None for gradient in gradients)], dtype=torch.float32)
        flat = [
            parameter.new_zeros(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1)
            for parameter in self._parameters
        ]
        addend, count = torch.cat([*flat, told]), 1
        while self._sums and self._sums[-1][0] == count:
            _, before = self._sums.pop()
            addend, count = before.add_(addend), 2 * count
        self._sums.append((count, addend))
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def give(self) -> Tensor:
        """Give the parameters the sum of the gradients over all parts of all processes, and return that of the losses."""
        ((_, own),) = self._sums
        self._sums.clear()
        total = summed(own)
        *pieces, told = torch.split(total, [*self._sizes, 1 + len(self._sizes)])
        for parameter, piece, has_gradient in zip(self._parameters, pieces, told[1:].tolist(), strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.dtype) if has_gradient else None
        return told[0]
