"""Objects that are named as ``package.module:object``, and those that installed packages add by entry points."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from operator import attrgetter
from typing import Any, Literal

from forgetfree.display import brief
from forgetfree.errors import ForgetfreeError, UnknownNameError, UsageError, first_line

#: What packages may add.
Group = Literal["strategies", "streams", "kinds", "metrics"]


@dataclass(frozen=True)
class Entry:
    """One registered name.

    Attributes:
        target: ``package.module:object``.
        summary: one line.
        origin: the plug-in and its package, for messages; none: ours.
    """

    target: str
    summary: str = ""
    origin: str = ""

    def load(self, check: Callable[[Any], Any] = lambda found: found) -> Any:
        """Import the target and return what ``check`` makes of it.

        Raises:
            UsageError: it cannot be imported, or ``check`` refuses it; the message names it and the reason.
        """
        module, _, attribute = self.target.partition(":")
        try:
            return check(attrgetter(attribute)(importlib.import_module(module)))
        except (Exception, SystemExit) as error:  # a package may do anything while it is imported
            text = str(error) if isinstance(error, ForgetfreeError) else f"{type(error).__name__}: {error}"
            reason = " ".join(text.split()).rstrip(".")
            remedy = "Fix or uninstall that package." if self.origin else "Install forgetfree again."
            raise UsageError(
                f"{self.origin or 'A part of forgetfree'} ({self.target}) cannot be used: {reason}. {remedy}"
            ) from error


def entry_points_of(group: Group) -> EntryPoints:
    """Return the entry points of a group. Every package's are read for it, so once, and again where one was installed."""
    return _read_points(f"forgetfree.{group}", places())


def places() -> tuple[tuple[str, int], ...]:
    """Return where packages are installed, and when that last changed."""
    return tuple((place, _changed(place)) for place in sys.path)


@lru_cache(maxsize=8)
def _read_points(group: str, places: tuple[tuple[str, int], ...]) -> EntryPoints:
    return entry_points(group=group)


def _changed(place: str) -> int:
    """Return when something was last put into a folder of `sys.path`, or 0 where there is none."""
    return os.stat(place or ".").st_mtime_ns if os.path.isdir(place or ".") else 0


def package_of(point: EntryPoint) -> str:
    """Return the name of the package that an entry point is of."""
    return point.dist.name if point.dist else "unknown"


def plugins(group: Group, is_ours: Callable[[str], bool]) -> dict[str, Entry]:
    """Return what installed packages add to a group, by name.

    Args:
        group: one of the four.
        is_ours: whether a name is one of ours, which no package takes.
    """
    entries: dict[str, Entry] = {}
    for point in sorted(entry_points_of(group), key=package_of):
        if not is_ours(point.name):  # of two packages with one name, the first by its own name counts
            origin = f"The plug-in {point.name!r} of package {package_of(point)!r}"
            entries.setdefault(point.name, Entry(point.value, f"from {package_of(point)}", origin))
    return entries


def class_of_module(name: str, check: Callable[[Any], Any]) -> Any:
    """Return the strategy class of a name ``package.module:Class``, of what can be imported or lies in the working directory.

    Args:
        name: it.
        check: returns the class, or raises ``UsageError`` if it is no strategy.

    Raises:
        UsageError: there is no such module, it is broken, or the class is no strategy.
        UnknownNameError: the module has no such class.
    """
    module, _, attribute = name.partition(":")
    if module.endswith(".py") or not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise UsageError(
            f"A strategy of your own is named MODULE:CLASS, got {brief(name)}. Write my_strategy:MyStrategy for the class "
            "MyStrategy in the file my_strategy.py of this directory."
        )
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last, so that no file there hides a library's module
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a module may do anything while it is imported
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise UsageError(
                f"The strategy {name} is not found: no module {error.name} is installed or lies in {here}. Start forgetfree in "
                "the directory of the module's file, or correct the name."
            ) from error
        reason = f"{type(error).__name__}: {first_line(error)}".rstrip(".")
        raise UsageError(f"The module of the strategy {name} cannot be imported: {reason}. Correct it.") from error
    if not hasattr(loaded, attribute):
        own = [each.__name__ for each in vars(loaded).values() if isinstance(each, type) and each.__module__ == module]
        raise UnknownNameError(f"class of the module {module}:", attribute, own)
    try:
        return check(getattr(loaded, attribute))
    except UsageError as error:
        raise UsageError(f"{name} is no strategy: {first_line(error).rstrip('.')}. See docs/plug-in.md.") from error
