"""Defers modules that Avalanche imports and hardly uses: they are imported when one of their names is first used.

Without this, the first training step of a command takes twice as long to begin. ``importlib.util.LazyLoader`` does not help:
Avalanche imports names from these modules, which loads them.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Name(type):
    """A stand-in for a class of a deferred module, with the calls, attributes and instances of that class."""

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        return cls._real()(*args, **keywords)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._real(), name)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls._real())

    def _real(cls) -> Any:
        return getattr(importlib.import_module(cls.__module__), cls.__name__)


class _Deferred(ModuleType):
    """Stands for a module until one of its names is used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # find_spec, with which libraries look for optional packages, reads it

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is not self:
            return getattr(importlib.import_module(self.__name__), name)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        within = sys.modules.get(f"{self.__name__}.{name}")
        return within or _Name(name, (), {"__module__": self.__name__})


@contextmanager
def deferred(*names: str) -> Iterator[None]:
    """Inside the block, put a stand-in for each of these modules; it imports the module when one of its names is used.

    Imported objects stay alive, so the garbage collector is off inside the block.
    """
    stands_for = {name: _Deferred(name) for name in names if name not in sys.modules}
    sys.modules.update(stands_for)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        for name in stands_for:
            del sys.modules[name]
        if collects:
            gc.enable()
