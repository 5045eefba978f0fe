"""Counts of the operations that are launched on a device, by phase, on the simulated GPU.

Where Python on the CPU limits the speed of a step on a GPU, these counts measure that speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import simulated_gpu
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.operations import launches


class Operations(TorchDispatchMode):
    """Counts operations on the simulated GPU and copies to and from it, while entered.

    Attributes:
        phase: the phase to which operations are counted now.
        kernels: operations that launch a kernel, by phase.
        traffic: see `simulated_gpu.traffic`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.kernels: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count operations to this phase inside the block."""
        self.phase, before = phase, self.phase
        yield
        self.phase = before

    def __enter__(self) -> Operations:
        self._before = simulated_gpu.traffic.copy()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.traffic = simulated_gpu.traffic - self._before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        there = any(map(simulated_gpu.is_on_gpu, given)) or (not given and simulated_gpu._Operations.makes_there)
        there |= func is torch.ops.aten.scalar_tensor.default  # made by attention with a mask, in C++
        if there and not simulated_gpu._Operations.is_moving:
            self.kernels[self.phase] += launches(func, args)
        return func(*args, **(kwargs or {}))
