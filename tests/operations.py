"""Operations that a device is given, counted where there is none, by phase.

Where the processor's Python decides how long a step on a GPU takes, these counts are its speed.
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
    """Counts operations on the simulated GPU while it is entered, and what goes to and fro.

    Attributes:
        phase: what operations are counted under now.
        kernels: operations that launch something, by phase.
        traffic: see `simulated_gpu.traffic`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.kernels: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count under a phase inside."""
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
        there |= func is torch.ops.aten.scalar_tensor.default  # of attention with a mask, in C++
        if there and not simulated_gpu._Operations.is_moving:
            self.kernels[self.phase] += launches(func, args)
        return func(*args, **(kwargs or {}))
