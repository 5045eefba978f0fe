"""The operations that a step launches on a device: if Python limits the speed, their number decides it."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

#: Operations that launch nothing, besides views.
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
#: The number of tensors per kernel in operations on lists.
LISTED = {"_fused_adamw_": 30, "_foreach": 100}


def launches(func: Any, args: Any) -> int:
    """Return the approximate number of kernels that an operation launches."""
    name = func._schema.name.partition("::")[2]
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    is_view = alias is not None and not alias.is_write and name != "_to_copy"
    if is_view or name in FREE:
        return 0
    size = next((size for prefix, size in LISTED.items() if name.startswith(prefix)), 0)
    return -(-len(args[0]) // size) if size else 1


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernels while it is entered.

    Attributes:
        count: the number of kernels so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += launches(func, args)
        return func(*args, **(kwargs or {}))
