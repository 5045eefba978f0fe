"""A CUDA graph without a GPU: a step is recorded once as its list of operations, and replayed on other inputs.

Like a CUDA graph, a replay takes nothing from Python: shapes and the storages of persistent tensors stay, and no value is
read. If a replay gives the same bits as running the step, a CUDA graph can capture it; a step that reads a value is refused.
"""

from __future__ import annotations

from typing import Any

import simulated_gpu
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten


class Tape(TorchDispatchMode):
    """Records the operations that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, int] = {}  # the number of each tensor made by an operation, by its id
        self._kept: list[Tensor] = []  # keeps the tensors alive, so that their ids are not reused
        self._operations: list[tuple[Any, list[Any], dict[int, int], Any, list[int | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, how = tree_flatten((args, kwargs or {}))
        there = any(isinstance(each, Tensor) and simulated_gpu.is_on_gpu(each) for each in given)
        if there and simulated_gpu.waits(func, args):
            raise RuntimeError(f"{func.name()} reads a value: a step that does so cannot be captured.")
        before = {
            i: self._made[id(each)]
            for i, each in enumerate(given)
            if isinstance(each, Tensor) and id(each) in self._made
        }
        made = func(*args, **(kwargs or {}))
        numbers: list[int | None] = []
        for each in tree_flatten(made)[0]:
            is_new = isinstance(each, Tensor) and not any(each is other for other in given)
            numbers.append(len(self._kept) if is_new else None)
            if is_new:
                self._made[id(each)] = len(self._kept)
                self._kept.append(each)
        self._operations.append((func, given, before, how, numbers))
        return made

    @torch.no_grad()
    def replay(self, *wanted: Tensor) -> list[Tensor]:
        """Run all operations again, and return the new values of some recorded tensors."""
        now: dict[int, Any] = {}
        with _disable_current_modes():  # the simulation does not know where a recorded operation makes its tensors
            for func, given, before, how, numbers in self._operations:
                flat = [now[before[i]] if i in before else each for i, each in enumerate(given)]
                args, kwargs = tree_unflatten(flat, how)
                made = tree_flatten(func(*args, **kwargs))[0]
                now |= {number: each for number, each in zip(numbers, made, strict=True) if number is not None}
        return [now[self._made[id(each)]] for each in wanted]
