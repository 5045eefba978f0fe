"""Options as frozen dataclasses: typed, bounded, described; filled from ``--set key=value`` or a file."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from forgetfree.display import brief
from forgetfree.errors import OptionError, UnknownNameError

T = TypeVar("T")
#: The largest whole number that an option takes.
_MOST = 2**31 - 1


def option(
    default: Any,
    help: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A dataclass field with its meaning and its bounds."""
    metadata = {"help": help, "above": above, "at_least": at_least, "at_most": at_most}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all options: checks types and bounds as a whole, once, and reports all faults together."""

    def __post_init__(self) -> None:
        faults = []
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and float in _choices(hints[field.name]):
                value = float(value) if abs(value) <= _MOST else math.inf
                object.__setattr__(self, field.name, value)
            if fault := _fault(value, hints[field.name], field.metadata):
                faults.append(f"{field.name} must be {fault}, got {brief(value)}")
        if faults:
            raise OptionError(f"{'; '.join(faults)}.")


@dataclasses.dataclass(frozen=True)
class Description:
    """One option as a reader sees it."""

    name: str
    type: str
    default: str
    help: str


def describe(options: type[Options]) -> list[Description]:
    """Every option with type, default and meaning."""
    hints = typing.get_type_hints(options)
    return [
        Description(field.name, type_name(hints[field.name]), _typed(field.default), field.metadata.get("help", ""))
        for field in dataclasses.fields(options)
    ]


def build(options: type[T], values: Mapping[str, Any], owner: str) -> T:
    """``options(**values)``, where values may still be text.

    Args:
        options: the dataclass.
        values: option names to values; texts are read as the option's type.
        owner: whose options they are, for messages.

    Raises:
        UnknownNameError: no such option; lists the known ones.
        OptionError: a value of the wrong type or out of range.
    """
    hints = typing.get_type_hints(options)
    known = [field.name for field in dataclasses.fields(options)]  # type: ignore[arg-type]  # T is a dataclass
    typed = {}
    for name, value in values.items():
        if name not in known:
            raise UnknownNameError(f"option of {owner}", name, known)
        try:
            typed[name] = parse(value, hints[name], name) if isinstance(value, str) else value
        except OptionError:
            typed[name] = value  # the dataclass reports it, together with all other faults
    try:
        return options(**typed)
    except OptionError as error:
        raise OptionError(f"Options of {owner}: {error}") from error


def parse(text: str, hint: Any, name: str) -> Any:
    """``text`` read as a value of type ``hint``."""
    for choice in _choices(hint):
        if choice is type(None) and text.lower() in ("none", "null"):
            return None
        if choice is bool and text.lower() in ("true", "false", "yes", "no", "on", "off"):
            return text.lower() in ("true", "yes", "on")
        if choice in (int, float):
            try:
                return choice(text)
            except ValueError:
                continue
        if choice is str or text == choice:
            return text
    raise OptionError(f"{name} must be {type_name(hint)}, got {brief(text)}.")


def type_name(hint: Any) -> str:
    """A type as a user reads it, e.g. ``a number or none``."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        type(None): "none",
    }
    return " or ".join(words.get(choice, str(choice)) for choice in _choices(hint))


def _typed(value: Any) -> str:
    """A value as a user would type it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _choices(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a type, e.g. ``"a"`` and ``"b"`` of ``Literal["a", "b"]``."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return tuple(choice for part in typing.get_args(hint) for choice in _choices(part))
    return typing.get_args(hint) if origin is Literal else (hint,)


def _fault(value: Any, hint: Any, bounds: Mapping[str, Any]) -> str:
    choices = _choices(hint)
    kinds = tuple(choice for choice in choices if isinstance(choice, type))
    fits = (isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)) or value in [
        choice for choice in choices if not isinstance(choice, type)
    ]
    if not fits:
        return type_name(hint)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    above, at_least, at_most = (bounds.get(key) for key in ("above", "at_least", "at_most"))
    if isinstance(value, float) and not math.isfinite(value):
        return "finite"
    if isinstance(value, int) and abs(value) > _MOST:
        return f"at most {_MOST:,}"
    if above is not None and value <= above:
        return f"above {above}"
    if at_least is not None and value < at_least:
        return f"at least {at_least}"
    if at_most is not None and value > at_most:
        return f"at most {at_most}"
    return ""
