"""Modules that a library imports and hardly uses are imported when one of their functions is first called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Deferred(ModuleType):
    """Stands for a module until one of its functions is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # find_spec, by which libraries ask for optional ones, reads it

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is not self:
            return getattr(importlib.import_module(self.__name__), name)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return lambda *args, **keywords: getattr(self, name)(*args, **keywords)  # as `from MODULE import NAME` takes it


@contextmanager
def deferred(*names: str) -> Iterator[None]:
    """Within the block, importing one of these modules costs nothing; afterwards it is imported as ever."""
    stands_for = {name: _Deferred(name) for name in names if name not in sys.modules}
    sys.modules.update(stands_for)
    try:
        yield
    finally:
        for name in stands_for:
            del sys.modules[name]
