"""JSON that somebody may have changed: it is read within limits, and checked before it is used.

A check raises ``ValueError`` with the place, the expected and the found value; `read_json` converts it into the caller's error.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forgetfree.display import brief, first_twice
from forgetfree.errors import ForgetfreeError, first_line
from forgetfree.files import size_of

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_Made = TypeVar("_Made")
#: The largest file that is read, and the maximum depth of nested lists and objects.
MOST_BYTES, MOST_DEPTH = 256 * 2**20, 100
#: The most faults that one message names.
MOST_FAULTS = 5

#: Phrases in messages of pydantic, and ours.
_WORDS = {
    "a valid array": "a list",
    "a valid integer": "an integer",
    "a valid ": "a ",
    "greater than or equal to ": "at least ",
    "less than or equal to ": "at most ",
}
_KIND_NAMES = {str: "a string", int: "an integer", bool: "true or false", list: "a list", dict: "an object"}
Fields = Mapping[str, type]


def read_json(
    path: Path,
    error: type[ForgetfreeError],
    remedy: str,
    check: Callable[[Any], None] = lambda value: None,
) -> Any:
    """Read a JSON file and check its content.

    Args:
        path: the file.
        error: the error to raise.
        remedy: the last sentence of its message.
        check: raises ``ValueError`` if the content is not valid.

    Raises:
        ForgetfreeError: ``error``, with the file and the reason.
    """
    try:
        value = parse_json(read_bounded(path))
    except OSError as fault:
        raise error(f"{path} cannot be read: {first_line(fault)}. {remedy}") from fault
    except ValueError as fault:
        raise error(f"{path} is not valid JSON: {first_line(fault)}. {remedy}") from fault
    try:
        check(value)
    except ValueError as fault:
        raise error(f"{path}: {first_line(fault)}. {remedy}") from fault
    return value


def read_bounded(path: Path) -> str:
    """Return the text of a file of at most `MOST_BYTES`.

    Raises:
        OSError: the file cannot be read, or is larger.
        ValueError: the file is not in UTF-8.
    """
    if (size := size_of(path)) > MOST_BYTES:
        raise OSError(f"it has {size:,} bytes, and at most {MOST_BYTES:,} are read")
    return path.read_text(encoding="utf-8")


def parse_json(text: str, *, finite: bool = True) -> Any:
    """Return the value of a JSON text.

    Args:
        text: JSON.
        finite: whether numbers must be finite; else ``Infinity`` and ``NaN`` are accepted, as Python writes them.

    Raises:
        ValueError: the text is no JSON, is nested too deep, or has a key twice, a number that is not finite, or half of a
            surrogate pair, which is no character.
    """
    too_deep = f"its lists and objects are nested more than {MOST_DEPTH} deep"
    try:
        number = _finite if finite else float
        value = json.loads(text, parse_float=number, parse_constant=number, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    if text.count("[") + text.count("{") > MOST_DEPTH:  # fewer brackets cannot be nested deeper
        level, depth = [value], 0
        while level := [inner for each in level if isinstance(each, list | dict) for inner in _inside(each)]:
            depth += 1
            if depth > MOST_DEPTH:
                raise ValueError(too_deep)
    if "\\u" in text:  # JSON writes such halves as escapes
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"a text in it holds {half!r}, half of a surrogate pair and no character") from error
    return value


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"the key {first_twice(key for key, _ in pairs)!r} stands twice")
    return value


def _inside(value: list[Any] | dict[str, Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


# -- Checks ----------------------------------------------------------------------------------------------


def checked(kind: type[_Made], value: Any, context: Mapping[str, Any] | None = None) -> _Made:
    """Return a JSON value as an object of ``kind``, such as a dataclass, checked by its annotations (pydantic, strict).

    Args:
        kind: the type of the object. Unknown keys are refused if its ``__pydantic_config__`` forbids them.
        value: a result of `parse_json`, or an object of ``kind`` that was created without a check.
        context: the context of the validators of ``kind``.

    Raises:
        ValueError: the value is not valid; for each fault, the message has the place, the expected and the found value.
    """
    from pydantic import ValidationError

    adapter: TypeAdapter[_Made] = _adapter(kind)  # type: ignore[arg-type]  # a type can be hashed
    try:
        if is_dataclass(value):
            return adapter.validate_python(value, strict=True)
        return adapter.validate_json(json.dumps(value), strict=True, context=context)
    except ValidationError as error:
        faults = [_fault(each) for each in error.errors(include_url=False)]
        more = [f"{len(faults) - MOST_FAULTS} more faults"] * (len(faults) > MOST_FAULTS)
        raise ValueError("; ".join(faults[:MOST_FAULTS] + more)) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _fault(fault: Mapping[str, Any]) -> str:
    """Return pydantic's description of one fault in our words."""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).removeprefix(".")
    key, message = place or "the content", str(fault["msg"])
    if fault["type"] == "missing":
        return f"{key} is missing"
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{key} is not known here"
    expected = message.removeprefix("Value error, ").removeprefix("Input should be ")
    for theirs, ours in _WORDS.items():
        expected = expected.replace(theirs, ours)
    return f"{key} must be {expected}, got {brief(fault['input'])}"


def check(key: str, value: Any, right: bool, expected: str) -> None:
    """Raise ``ValueError``, with the expected value, unless the value at ``key`` is ``right``."""
    if not right:
        raise ValueError(f"{key} must be {expected}, got {brief(value)}")


def check_fields(key: str, value: Any, fields: Fields) -> None:
    """Raise ``ValueError`` unless ``value`` is an object with all ``fields``, each with its type."""
    check(key or "the content", value, isinstance(value, dict), "an object")
    for name, kind in fields.items():
        inner = f"{key}.{name}" if key else name
        if name not in value:
            raise ValueError(f"{inner} is missing, it must be {_KIND_NAMES[kind]}")
        # In Python, unlike in JSON, true and false are integers.
        right = isinstance(value[name], kind) and isinstance(value[name], bool) == (kind is bool)
        check(inner, value[name], right, _KIND_NAMES[kind])


def is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Return whether a JSON value is a finite number in [least, most]."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max and least <= value <= most
