"""Operations that a device is given, counted where there is none: kernels by phase, and values read back.

Where the processor's Python decides how long a step on a GPU takes, these counts are its speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

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
#: Operations whose result the processor waits for.
READS = {"_local_scalar_dense", "_unique2", "equal", "is_nonzero", "masked_select", "nonzero", "unique_dim"}
#: The tensors that one kernel of an operation on lists takes.
LISTED = {"_fused_adamw_": 30, "_foreach": 100}


class Operations(TorchDispatchMode):
    """Counts operations while it is entered.

    Attributes:
        phase: what operations are counted under now.
        kernels: operations that launch something, by phase.
        reads: operations that wait for a value, by phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.kernels: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count under a phase inside."""
        self.phase, before = phase, self.phase
        yield
        self.phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        self.reads[self.phase] += name in READS
        returns = func._schema.returns
        alias = returns[0].alias_info if returns else None
        is_view = alias is not None and not alias.is_write and name != "_to_copy"
        if not is_view and name not in FREE:
            size = next((size for prefix, size in LISTED.items() if name.startswith(prefix)), 0)
            self.kernels[self.phase] += -(-len(args[0]) // size) if size else 1
        return func(*args, **(kwargs or {}))
