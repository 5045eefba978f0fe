"""Operations that a device is given, counted where there is none, by phase.

Where the processor's Python decides how long a step on a GPU takes, these counts are its speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import simulated_gpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operations that launch nothing, beside views.
FREE = {
    "_has_compatible_shallow_copy_type",
    "_local_scalar_dense",
    "_unsafe_view",
    "alias",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "is_same_size",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
}
#: The tensors that one kernel of an operation on lists takes.
LISTED = {"_fused_adamw_": 30, "_foreach": 100}


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
        name = func._schema.name.partition("::")[2]
        returns = func._schema.returns
        alias = returns[0].alias_info if returns else None
        is_view = alias is not None and not alias.is_write and name != "_to_copy"
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        there = any(map(simulated_gpu.is_on_gpu, given)) or (not given and simulated_gpu._Operations.makes_there)
        there |= name == "scalar_tensor"  # of attention with a mask, in C++
        if there and not is_view and name not in FREE and not simulated_gpu._Operations.is_moving:
            size = next((size for prefix, size in LISTED.items() if name.startswith(prefix)), 0)
            self.kernels[self.phase] += -(-len(args[0]) // size) if size else 1
        return func(*args, **(kwargs or {}))
