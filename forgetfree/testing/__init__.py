"""Checks that a strategy or a stream of your own keeps its contract: `check_strategy`, `check_stream`.

    from forgetfree.testing import check_strategy

    def test_my_strategy() -> None:
        check_strategy(MyStrategy, my_option=3)

Both raise one `forgetfree.errors.ConformanceError` that names every fault found, the tasks and tensors that differ,
and the hook to look at. They need no download: they run on `tiny_stream`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgetfree.errors import ConformanceError as ConformanceError
    from forgetfree.testing.strategy_contract import check_strategy as check_strategy
    from forgetfree.testing.stream_contract import check_stream as check_stream
    from forgetfree.testing.tiny import tiny_stream as tiny_stream

_HOME = {
    "ConformanceError": "forgetfree.errors",
    "check_strategy": "forgetfree.testing.strategy_contract",
    "check_stream": "forgetfree.testing.stream_contract",
    "tiny_stream": "forgetfree.testing.tiny",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    # On first use: the tiny model must be usable without Avalanche, too.
    if name not in _HOME:
        raise AttributeError(f"module 'forgetfree.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
