"""Options as pydantic models: typed, bounded, described; filled from Python, ``--set key=value``, a flag or a file.

Pydantic parses and checks the values; the messages are ours.
"""

from __future__ import annotations

import importlib
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args

import pydantic
from cyclopts import Group, Parameter
from pydantic_core import PydanticKnownError

from forgetfree.display import brief
from forgetfree.errors import OptionError, UnknownNameError

if TYPE_CHECKING:
    from pydantic import ValidationInfo
    from pydantic_core import ErrorDetails

AnyOptions = TypeVar("AnyOptions", bound="Options")
#: A function as an option: itself, or its name ``package.module:function``.
Function = Callable[..., Any]
#: A path as an option: a text that the shell completes.
if TYPE_CHECKING:
    Place = str
else:
    Place = str | Path
if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _ModelType
else:
    _ModelType = type(pydantic.BaseModel)
#: The group of an option in the help of a command.
HelpGroup = Literal["What to learn", "How to learn", "How to run"]
GROUPS = {name: Group(name, sort_key=number) for number, name in enumerate(get_args(HelpGroup))}
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
    """Return the value of an option as a user types it.

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
    group: HelpGroup | None = None,
    placeholder: str | None = "N",
) -> Any:
    """Return the field of an option, with its meaning, its bounds, and its flag, if it has one.

    Args:
        default: the default, or a function that returns it.
        help: the meaning.
        above: bound that the value must exceed.
        at_least: lower bound.
        at_most: upper bound. If a word may replace the number, the type has the bounds:
            ``Annotated[int, Field(ge=1)] | Literal["auto"]``.
        group: the group of its flag in the help of a command; ``None``: no flag, only ``--set``.
        placeholder: the placeholder of its value there; ``None``: its choices.
    """
    key = "default_factory" if callable(default) else "default"
    how: dict[str, Any] = {key: default, "gt": above, "ge": at_least, "le": at_most}
    field: Any = pydantic.Field(description=help, **how)
    flag = (
        {"group": GROUPS[group], "metavar": placeholder, "show_choices": placeholder is None}
        if group
        else {"parse": False}
    )
    field.metadata.append(Parameter(**flag))
    return field


class _OptionsType(_ModelType):
    """The metaclass of options, which refuses ``@dataclass`` with a clear message."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "__dataclass_params__":
            raise TypeError(f"{cls.__name__} is a pydantic model, which takes no @dataclass. Remove the decorator.")
        super().__setattr__(name, value)


class Options(pydantic.BaseModel, metaclass=_OptionsType):
    """Base of all options: parses texts, checks types and bounds on creation, and reports all faults together.

    >>> class Speed(Options):
    ...     rate: float = option(0.1, "how fast", above=0)
    >>> Speed(rate="0.5").rate
    0.5
    """

    model_config = pydantic.ConfigDict(frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _checked(cls, values: Any, handler: pydantic.ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        for name in values:
            if name not in cls.model_fields:
                raise UnknownNameError(f"option of {info.context or cls.__name__}", name, cls.model_fields)
        try:
            return cls._made(values, handler)
        except OptionError as error:
            raise OptionError(
                f"Options of {info.context}: {error}" if info.context else str(error), error.parts
            ) from None

    @classmethod
    def _made(cls, values: Mapping[str, Any], handler: pydantic.ModelWrapValidatorHandler[Self]) -> Self:
        """Return the options with these values, or raise ``OptionError`` with all their faults."""
        try:
            return handler(values)
        except pydantic.ValidationError as error:
            faults = sentences(cls, error)
            raise OptionError(f"{'; '.join(faults)}.", faults) from None

    @pydantic.field_validator("*")
    @classmethod
    def _limited(cls, value: Any) -> Any:
        if type(value) is int and value > _MOST:
            raise PydanticKnownError("less_than_equal", {"le": _MOST})
        return value

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        try:
            return read_value(value, cls.model_fields[info.field_name or ""].annotation)
        except OptionError as error:  # reported with the others
            raise ValueError(str(error)) from error


def describe(options: type[Options]) -> list[dict[str, str]]:
    """Return name, type, default and help of every option, as a user would type them."""
    return [
        {
            **{"name": name, "type": type_name(field.annotation), "default": typed(field.default)},
            "help": field.description or "",
        }
        for name, field in options.model_fields.items()
    ]


def build(options: type[AnyOptions], values: Mapping[str, Any], owner: str) -> AnyOptions:
    """Return ``options(**values)``; its errors name the owner.

    Args:
        options: the class.
        values: option names to values; texts are read as the option's type.
        owner: the owner of the options, for messages.

    Raises:
        UnknownNameError: there is no such option; the message lists the known ones.
        OptionError: a value has the wrong type or is out of range.
    """
    try:
        return options.model_validate(dict(values), context=owner)
    except pydantic.ValidationError as error:
        faults = sentences(options, error)
        raise OptionError(f"Options of {owner}: {'; '.join(faults)}.", faults) from None


def read_value(value: Any, hint: Any) -> Any:
    """Return the value of a text or a path, or of each of several, parsed by the type ``hint``.

    A text that does not fit the type is returned unchanged, to be reported later.

    Raises:
        OptionError: a function with the name cannot be imported.
    """
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
    if ":" in value and Function in _choices(hint):
        return function_named(value)
    try:
        return pydantic.TypeAdapter(_unbounded(hint)).validate_python(value)
    except pydantic.ValidationError:
        return value


def sentences(options: type[Options], error: pydantic.ValidationError, show: Callable[[str], str] = str) -> list[str]:
    """Return a phrase for each value that pydantic refused, as ``NAME must be …, got …``.

    Args:
        options: the class.
        error: pydantic's error for its values.
        show: maps the name of an option to its name in a phrase.
    """
    refused: dict[str, list[ErrorDetails]] = {}
    for each in error.errors():
        refused.setdefault(str(each["loc"][0]) if each["loc"] else "", []).append(each)
    phrases: list[str] = [_message(each) for each in refused.pop("", ())]
    for name, errors in refused.items():
        hint = options.model_fields[name].annotation
        if _is_union(hint):  # for a number out of bounds, errors on the alternative words do not matter
            depth = min(len(each["loc"]) for each in errors)  # deeper errors concern parts of the value
            whole = [each for each in errors if len(each["loc"]) == depth]
            errors = [each for each in errors if each["type"] in _BOUNDS] or whole
        phrases += dict.fromkeys(_phrase(show(name), each, hint) for each in errors)
    return phrases


def function_named(name: str) -> Function:
    """Import the function with a name ``package.module:function``.

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
    """Return the name ``module:function`` of a function, which cannot always be imported: a lambda's cannot."""
    named = function if hasattr(function, "__qualname__") else type(function)  # a partial function has no name
    return f"{named.__module__}:{named.__qualname__}"


def by_name(value: Any) -> Any:
    """Return the name of a function that can be imported by this name; any other value unchanged."""
    if not callable(value) or (name := name_of_function(value)).startswith("__main__:"):
        return value
    try:
        return name if function_named(name) is value else value
    except OptionError:
        return value


def recorded(options: Options) -> dict[str, Any]:
    """Return options by name, for a file; functions are replaced by their names."""
    return {name: name_of_function(value) if callable(value) else value for name, value in options}


def type_name(hint: Any) -> str:
    """Return a type in words for users, e.g. ``a number or none``."""
    kinds = (each for each in _choices(hint) if each is not Path)  # parsed as a text
    return " or ".join(_TYPE_NAMES.get(each) or _TYPE_NAMES.get(typing.get_origin(each), str(each)) for each in kinds)


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type, e.g. ``"a"`` and ``"b"`` of ``Literal["a", "b"]``."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return tuple(choice for part in typing.get_args(hint) for choice in _choices(part))
    if origin is Annotated:
        return _choices(typing.get_args(hint)[0])
    return typing.get_args(hint) if origin is Literal else (hint,)


def _unbounded(hint: Any) -> Any:
    """Return a type without its bounds, so that a text out of bounds is parsed, too."""
    if typing.get_origin(hint) is Annotated:
        return _unbounded(typing.get_args(hint)[0])
    return typing.Union[tuple(map(_unbounded, typing.get_args(hint)))] if _is_union(hint) else hint  # noqa: UP007


def _is_union(hint: Any) -> bool:
    """Return whether a value may have one of several types."""
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _message(error: ErrorDetails) -> str:
    """Return the sentence of a validator."""
    return str(error["ctx"]["error"]).rstrip(".")


def _phrase(name: str, error: ErrorDetails, hint: Any) -> str:
    """Return the phrase for the fault of an option's value."""
    kind = error["type"]
    if kind == "missing":
        return f"{name} has no default: declare it as {name}: {getattr(hint, '__name__', hint)} = option(default, help)"
    if kind in ("value_error", "assertion_error"):
        return f"{name}: {_message(error)}"
    if kind == "finite_number":
        expected = "finite"
    elif kind in _BOUNDS:
        (bound,) = error["ctx"].values()
        expected = f"{_BOUNDS[kind]} " + (f"{bound:,}" if isinstance(bound, int) else f"{bound:g}")
    else:
        of_item = len(error["loc"]) > 1 and typing.get_origin(hint) is tuple
        expected = type_name(typing.get_args(hint)[0] if of_item else hint)
    return f"{name} must be {expected}, got {brief(error['input'])}"
