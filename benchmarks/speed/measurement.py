"""Shared by the speed scripts: contenders are timed in turns, and compared by the ratios of each turn."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        what: the name of the measurement, such as ``region step / dense step, s = 1e-3, fp32``.
        value: the median, in ``unit``.
        low: the first quartile of the turns; None if nothing was repeated.
        high: the third quartile.
        at_most: the most that the project accepts; None for a figure without a goal.
        limit: the least possible value, if known.
        unit: the unit of the value; a ratio has none.
        seconds: the median times of the two compared contenders, in seconds.
    """

    what: str
    value: float
    low: float | None = None
    high: float | None = None
    at_most: float | None = None
    limit: float | None = None
    unit: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the median is at most what the project accepts."""
        return self.at_most is None or self.value <= self.at_most


def alternate(
    contenders: Mapping[str, Callable[[], object]], *, turns: int = 9, warm_up: int = 1, repeats: int = 1
) -> dict[str, np.ndarray]:
    """Time each contender once a turn, so that a slow moment of the machine affects all of them.

    With an accelerator, a time ends when all its work is done.

    Args:
        contenders: functions by name; each must do the same work at every call.
        turns: the number of turns that count.
        warm_up: the number of turns before these.
        repeats: calls of a contender in one turn; the times are of one call.

    Returns:
        Seconds ``(turns,)`` by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    wait: Callable[[], None] = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    enabled = gc.isenabled()
    gc.disable()
    try:
        for turn in range(warm_up + turns):
            for name, call in contenders.items():
                wait()
                start = time.perf_counter()
                for _ in range(repeats):
                    call()
                wait()
                if turn >= warm_up:
                    seconds[name].append((time.perf_counter() - start) / repeats)
            gc.collect()
    finally:
        if enabled:
            gc.enable()
    return {name: np.array(each) for name, each in seconds.items()}


def ratio(
    what: str,
    seconds: Mapping[str, np.ndarray],
    ours: str,
    other: str,
    *,
    at_most: float | None = None,
    limit: float | None = None,
) -> Figure:
    """Return the ratio of two contenders: the median and the quartiles of the turns' ratios.

    Args:
        what: the name of the line.
        seconds: the result of `alternate`.
        ours: the contender above the line.
        other: the contender below it.
        at_most: the most that the project accepts.
        limit: the least possible value.
    """
    low, median, high = np.quantile(seconds[ours] / seconds[other], [0.25, 0.5, 0.75])
    medians = {name: float(np.median(seconds[name])) for name in (ours, other)}
    return Figure(what, float(median), float(low), float(high), at_most, limit, "", medians)


def measured(name: str, turns: int, threads: int) -> tuple[str, list[Figure]]:
    """Return the title of a script and its figures."""
    torch.set_num_threads(threads)
    script = import_module(f"benchmarks.speed.{name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # e.g. warnings of PEFT
        return (script.__doc__ or name).splitlines()[0], script.figures(turns)


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measure the most bytes that tensors made inside held at one time: activations and gradients included.

    Temporary memory inside an operation is not counted, nor is memory that the allocator caches.

    Args:
        there: tensors that do not count, even if they are written to.
    """

    def __init__(self, *there: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._there = {tensor.untyped_storage()._cdata for tensor in there}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._made = 0  # bytes of live tensors, and of tensors freed since the last check
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count its new tensors."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:  # sparse parts count themselves
                continue
            self.count(tensor)
        if self._made > self.bytes:
            self._live = {key: held for key, held in self._live.items() if not held[0].expired()}  # type: ignore[no-untyped-call]
            self._made = sum(size for _, size in self._live.values())
            self.bytes = max(self.bytes, self._made)
        return made

    def count(self, tensor: Tensor) -> None:
        """Count a tensor as long as it lives."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._there and storage._cdata not in self._live:
            self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
            self._made += storage.nbytes()
