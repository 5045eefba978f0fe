"""The exchange between processes that train as one, and end with the bits of one: data parallelism in a fixed order.

All of them run one program on the same seeds, and hold the same weights. What they add up has a fixed number of numbered parts,
a power of two, and is added by a tree over the numbers, ((0+1)+(2+3))+…: whoever holds a part, the sum has the same bits.
Without a group of processes, this one computes all parts in the same way.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from forgetfree.errors import RunError, UsageError, first_line

T = TypeVar("T")


class ProcessLost(RuntimeError):
    """Another process of the group has ended, so nothing can be exchanged any more."""


@dataclass
class _Group:
    """The processes that this one trains with; alone, unless it has `joined` others.

    They do not make up PyTorch's default group: Avalanche and others would take its presence for a request to do it their way.
    """

    rank: int = 0
    size: int = 1
    on_cpu: Any = None
    on_gpu: Any = None
    sent: int = 0

    def channel(self, tensor: Tensor) -> Any:
        """Return what exchanges such a tensor."""
        return self.on_gpu if tensor.is_cuda else self.on_cpu


_alone = _group = _Group()
#: The group that this process is connected with, joined or not.
_connected = _alone


def meeting_point(processes: int, port: int = 0) -> Any:
    """Return where processes of this machine meet: at ``port``, or, for the first of them, at any that is free."""
    leads = not port
    return dist.TCPStore("127.0.0.1", port, processes, leads, wait_for_workers=False)  # type: ignore[attr-defined]


@contextmanager
def connected(rank: int, size: int, store: Any = None, device: str = "cpu") -> Iterator[None]:
    """Be in touch with a group of processes, inside.

    Args:
        rank: the number of this process; 0 leads.
        size: how many there are.
        store: where they meet; default: as the environment says, which ``torchrun`` sets.
        device: where they train: NCCL exchanges between GPUs, gloo between CPUs.
    """
    global _connected
    library: Any = dist
    patience = timedelta(days=1)  # a process may wait for another run that fine-tunes the same model
    with _in_touch():
        if store is None:
            store, _, _ = next(library.rendezvous("env://", rank, size))
        group = _Group(rank, size, library.ProcessGroupGloo(library.PrefixStore("cpu", store), rank, size, patience))
        if device.startswith("cuda"):
            group.on_gpu = library.ProcessGroupNCCL(library.PrefixStore("gpu", store), rank, size, patience)
    _connected = group
    try:
        yield
    finally:
        _connected = _alone


@contextmanager
def joined() -> Iterator[None]:
    """Train as one with the processes that this one is `connected` with, inside."""
    global _group
    _group = _connected
    try:
        yield
    finally:
        _group = _alone


def rank() -> int:
    """Return the number of this process in its group; 0 where there is none."""
    return _group.rank


def size() -> int:
    """Return how many processes train as one; 1 where there is no group."""
    return _group.size


def bytes_sent() -> int:
    """Return how many bytes of gradients and logits this process has sent to others."""
    return _group.sent


def own_parts(parts: int) -> range:
    """Return which of the numbered parts this process computes.

    Raises:
        UsageError: the number of processes does not divide that of the parts.
    """
    if parts % size():
        raise UsageError(f"{size()} processes cannot share {parts} parts evenly. Set parts to a multiple of {size()}.")
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
    slices, channel = torch.empty_like(padded), _group.channel(padded)
    with _in_touch():
        channel.alltoall_base(slices, padded, [], []).wait()
        mine = tree_sum(slices.view(size(), -1).unbind())
        channel.allgather([list(padded.view(size(), -1).unbind())], [mine]).wait()
    _group.sent += 2 * (size() - 1) * mine.numel() * mine.element_size()
    return padded[: len(vector)]


def gathered(own: Sequence[T]) -> list[T]:
    """Return what all processes give in turn, as `own_items` dealt it out.

    They are pickled, as `multiprocessing` does it: between processes of one job, which trust each other, and never in a file.
    """
    if size() == 1:
        return list(own)
    data = torch.frombuffer(bytearray(pickle.dumps(list(own))), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(size())]
    with _in_touch():
        _group.on_cpu.allgather([lengths], [torch.tensor([len(data)], device="cpu")]).wait()
        longest = int(max(lengths))
        buffers = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(size())]
        _group.on_cpu.allgather([buffers], [torch.nn.functional.pad(data, (0, longest - len(data)))]).wait()
    _group.sent += (size() - 1) * longest
    dealt = [pickle.loads(each.numpy().tobytes()) for each in buffers]
    return [dealt[i % size()][i // size()] for i in range(sum(map(len, dealt)))]


def own_items(items: Sequence[T]) -> Sequence[T]:
    """Return the items that this process computes of a list: each process takes every P-th of them."""
    return items[rank() :: size()]


def from_first(value: T) -> T:
    """Return process 0's ``value`` in all of them."""
    if size() == 1:
        return value
    return gathered([value if rank() == 0 else None])[0]  # type: ignore[return-value]


def check_alike(what: str, value: object, remedy: str) -> None:
    """Raise ``RunError``, in all processes, unless ``value`` is the same in all of them."""
    if any(each != value for each in gathered([value])):
        raise RunError(f"The {size()} processes of this run hold different {what}, expected the same. {remedy}")


@contextmanager
def _in_touch() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of gloo or NCCL
        raise ProcessLost(f"Process {rank()} has lost another one: {first_line(error)}") from error
