"""Options as frozen dataclasses: typed, bounded, described; filled from ``--set key=value``, a flag or a file.

Pydantic reads and checks the values; the messages are ours.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from forgetfree.display import brief
from forgetfree.errors import OptionError, UnknownNameError

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")
#: A function as an option: itself, or its name ``package.module:function``.
Function = Callable[..., Any]
#: Where an option stands in the help of a command.
HelpGroup = Literal["What to learn", "How to learn", "How to run"]
#: The largest whole number that an option takes.
_MOST = 2**31 - 1
_BOUNDS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}
_TYPE_NAMES: dict[Any, str] = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "a text"},
    **{type(None): "none", Mapping[str, Any]: "a table", Function: "package.module:function"},
    **{Mapping[str, str]: "a table of texts", tuple[str, ...]: "a list of texts", tuple: "a list"},
}


def typed(value: Any) -> str:
    """Return the value of an option as one types it.

    >>> typed(False), typed(None), typed([0, 1]), typed(1e-4)
    ('false', 'none', '0, 1', '0.0001')
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={typed(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(typed, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def option(
    default: Any,
    help: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    flag: bool = False,
    group: HelpGroup = "What to learn",
    placeholder: str = "N",
) -> Any:
    """Return a dataclass field with all that is to be said of an option: meaning, bounds, and how the command line has it.

    Args:
        default: the default, or what makes it.
        help: what it means.
        above: bound that the value must exceed, as pydantic names bounds.
        at_least: lower bound.
        at_most: upper bound.
        flag: of what ``--set`` reaches: whether it has a flag of its own, too.
        group: where the help of a command has it.
        placeholder: what stands for its value in the help.
    """
    bounds = {"gt": above, "ge": at_least, "le": at_most}
    metadata: dict[str, Any] = {
        "help": help,
        "flag": flag,
        "group": group,
        "placeholder": placeholder,
    }
    metadata |= {name: bound for name, bound in bounds.items() if bound is not None}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all options: checks types and bounds when it is made, and reports all faults together."""

    def __post_init__(self) -> None:
        if faults := faults_in(self):
            raise OptionError(f"{'; '.join(faults)}.", faults)


def describe(options: type[Options]) -> list[dict[str, str]]:
    """Return name, type, default and help of every option, as a user would type them."""
    hints = typing.get_type_hints(options)
    return [
        {
            **{"name": each.name, "type": type_name(hints[each.name]), "default": typed(each.default)},
            "help": each.metadata.get("help", ""),
        }
        for each in dataclasses.fields(options)
    ]


def build(options: type[T], values: Mapping[str, Any], owner: str) -> T:
    """Return ``options(**values)``, where values may still be text.

    Args:
        options: the dataclass.
        values: option names to values; texts are read as the option's type.
        owner: whose options they are, for messages.

    Raises:
        UnknownNameError: no such option; lists the known ones.
        OptionError: a value of the wrong type or out of range.
    """
    hints = typing.get_type_hints(options)
    for name in values:
        if name not in hints:
            raise UnknownNameError(f"option of {owner}", name, hints)
    try:
        return options(**{name: read_value(value, hints[name]) for name, value in values.items()})
    except OptionError as error:
        raise OptionError(f"Options of {owner}: {error}", error.parts) from error


def read_value(value: Any, hint: Any) -> Any:
    """Return what a text or a path, or each of several, says; what says nothing of the type stays, to be reported later."""
    from pydantic import TypeAdapter, ValidationError

    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    is_one = isinstance(value, str) or not isinstance(value, Sequence)
    if typing.get_origin(hint) is tuple and is_one:
        value, is_one = [value], False
    several = [each for each in (hint, *typing.get_args(hint)) if typing.get_origin(each) is tuple]
    if several and not is_one:
        return tuple(read_value(each, typing.get_args(several[0])[0]) for each in value)
    if not isinstance(value, str):
        return value
    if type(None) in _choices(hint) and value.lower() in ("none", "null"):
        return None
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError:
        return value


def faults_in(options: Any, show: Callable[[str], str] = str) -> list[str]:
    """Check a frozen dataclass, and make of each value what its type says, e.g. 1.0 of 1.

    Args:
        options: an instance of the dataclass.
        show: makes what a message calls an option of its name.

    Returns:
        What is wrong, each fault as ``NAME must be …, got …``.
    """
    from pydantic import ValidationError

    faults: list[str] = []
    for name, (adapter, hint) in _adapters(options.__class__).items():
        value = getattr(options, name)
        try:
            if isinstance(value, str) and ":" in value and Function in _choices(hint):
                value = function_named(value)
            object.__setattr__(options, name, adapter.validate_python(value))
        except OptionError as error:
            faults.append(f"{show(name)}: {str(error).rstrip('.')}")
        except ValidationError as error:
            wrong = error.errors()
            if _is_union(hint):  # a number out of bounds is none of the words beside it
                wrong = [each for each in wrong if each["type"] in _BOUNDS] or wrong
            faults += dict.fromkeys(
                f"{show(name)} must be {_expected(each, hint)}, got {brief(each['input'])}" for each in wrong
            )
        except OverflowError:
            faults.append(f"{show(name)} must be finite, got {math.inf}")
    return faults


def function_named(name: str) -> Function:
    """Import the function of a name ``package.module:function``.

    Raises:
        OptionError: there is none.
    """
    module, _, attribute = name.partition(":")
    try:
        function = attrgetter(attribute)(importlib.import_module(module))
    except (Exception, SystemExit) as error:  # a module may do anything while it is imported
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise OptionError(f"{brief(name)} cannot be imported: {reason}. Write package.module:function.") from error
    if not callable(function):
        raise OptionError(f"{brief(name)} is no function, but {brief(function)}. Write package.module:function.")
    return function  # type: ignore[no-any-return]


def name_of_function(function: Function) -> str:
    """Return the name of a function in its module, which need not lead back to it: that of a lambda does not."""
    named = function if hasattr(function, "__qualname__") else type(function)  # a partial function has no name
    return f"{named.__module__}:{named.__qualname__}"


def by_name(value: Any) -> Any:
    """Return the name of a function that can be imported by it; anything else as it is."""
    if not callable(value) or (name := name_of_function(value)).startswith("__main__:"):
        return value
    try:
        return name if function_named(name) is value else value
    except OptionError:
        return value


def recorded(options: Options) -> dict[str, Any]:
    """Return options by name, for a file: functions by their names."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {name: name_of_function(value) if callable(value) else value for name, value in values.items()}


@cache
def _adapters(options: Any) -> dict[str, tuple[TypeAdapter[Any], Any]]:
    """Return what checks each option of a dataclass as it is: no text for a number, no number that is not finite."""
    from pydantic import ConfigDict, Field, TypeAdapter

    hints = typing.get_type_hints(options, include_extras=True)
    adapters: dict[str, tuple[TypeAdapter[Any], Any]] = {}
    for field in dataclasses.fields(options):
        hint: Any = hints[field.name]
        bounds = {name: bound for name, bound in field.metadata.items() if name in ("gt", "ge", "le")}
        if int in _choices(hint):
            bounds.setdefault("le", _MOST)
        strict = ConfigDict(strict=True, allow_inf_nan=False)
        bounded: Any = Annotated[hint, Field(**bounds)]
        if _is_union(hint):
            parts = typing.get_args(hint)
            bounded = typing.Union[  # noqa: UP007 (of parts that are computed)
                tuple(Annotated[part, Field(**bounds)] if part in (int, float) else part for part in parts)
            ]
        adapters[field.name] = TypeAdapter(bounded, config=strict), hint
    return adapters


def type_name(hint: Any) -> str:
    """Return a type as a user reads it, e.g. ``a number or none``."""
    known = (_TYPE_NAMES.get(each) or _TYPE_NAMES.get(typing.get_origin(each), str(each)) for each in _choices(hint))
    return " or ".join(known)


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type, e.g. ``"a"`` and ``"b"`` of ``Literal["a", "b"]``."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return tuple(choice for part in typing.get_args(hint) for choice in _choices(part))
    if origin is Annotated:
        return _choices(typing.get_args(hint)[0])
    return typing.get_args(hint) if origin is Literal else (hint,)


def _is_union(hint: Any) -> bool:
    """Return whether a value may have one of several types."""
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _expected(error: ErrorDetails, hint: Any) -> str:
    if error["type"] == "finite_number":
        return "finite"
    if error["type"] in _BOUNDS:
        (bound,) = error["ctx"].values()
        return (
            f"{_BOUNDS[error['type']]} {bound:,}" if isinstance(bound, int) else f"{_BOUNDS[error['type']]} {bound:g}"
        )
    of_item = error["loc"] and typing.get_origin(hint) is tuple
    return type_name(typing.get_args(hint)[0] if of_item else hint)
