"""JSON files that a user may have changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from forgetfree import json_file
from forgetfree.errors import RunError
from forgetfree.json_file import MOST_DEPTH, check_fields, checked, is_number, parse_json, read_json


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_values_come_back() -> None:
    assert parse_json('{"a": [1, 2.5, null, true, "\\u00fc\\ud83d\\ude00"]}') == {"a": [1, 2.5, None, True, "ü😀"]}
    assert parse_json(nested(MOST_DEPTH)) is not None
    assert len(parse_json("[" + ",".join(["[]"] * 500) + "]")) == 500  # many brackets, but not nested deep


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        (nested(MOST_DEPTH + 2), "nested more than 100 deep"),
        ('{"a":' * 100_000, "nested more than 100 deep"),
        ('{"\\ud800": 1}', r"holds '\\ud800', half of a surrogate pair"),
        ("[NaN]", "NaN is not a finite number"),
        ("[1e999]", "1e999 is not a finite number"),
        ("9" * 5000, "Exceeds the limit"),
    ],
)
def test_what_is_no_json_or_cannot_be_used_is_a_value_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_a_file_that_cannot_be_read_is_the_readers_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"

    def message() -> str:
        with pytest.raises(RunError) as caught:
            read_json(path, RunError, "Make it again.", lambda value: check_fields("", value, {"a": int}))
        return str(caught.value).removeprefix(str(path))

    assert message() == " cannot be read: No such file or directory. Make it again."
    path.mkdir()
    assert message() == " cannot be read: it is a directory, expected a file. Make it again."
    path.rmdir()
    path.write_bytes(b"\xff")
    assert message().startswith(" is not valid JSON: 'utf-8' codec can't decode byte 0xff")
    path.write_text("[")
    assert message() == " is not valid JSON: Expecting value: line 1 column 2 (char 1). Make it again."
    path.write_text('{"a": true}')
    assert message() == ": a must be an integer, got True. Make it again."
    path.write_text("{}")
    assert message() == ": a is missing, it must be an integer. Make it again."
    monkeypatch.setattr(json_file, "MOST_BYTES", 1000)
    path.write_text(" " * 1001)
    assert message() == " cannot be read: it has 1,001 bytes, and at most 1,000 are read. Make it again."


@dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Whole:
    kind: Literal["a", "b"]
    share: Annotated[float, Field(ge=0, le=1)]
    parts: tuple[Part, ...] = ()

    __pydantic_config__ = {"extra": "forbid", "revalidate_instances": "always"}  # noqa: RUF012


def test_a_value_becomes_an_object_by_its_annotations() -> None:
    value = {"kind": "a", "share": 1, "parts": [{"name": "one", "sizes": [1, 2]}]}
    assert checked(Whole, value) == Whole("a", 1.0, (Part("one", (1, 2)),))
    assert checked(list[Part], [{"name": "one"}]) == [Part("one")]
    assert checked(Whole, Whole("b", 0.5)) == Whole("b", 0.5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "the content must be an object, got []"),
        ({}, "kind is missing; share is missing"),
        ({"kind": "c", "share": 2}, "kind must be 'a' or 'b', got 'c'; share must be at most 1, got 2"),
        ({"kind": "a", "share": True}, "share must be a number, got True"),
        ({"kind": "a", "share": -1, "colour": 3}, "share must be at least 0, got -1; colour is not known here"),
        ({"kind": "a", "share": 0, "parts": [{"name": 3}]}, "parts[0].name must be a string, got 3"),
        (Whole("a", 0.5, parts=["one"]), "parts must be a tuple, got ['one']"),  # type: ignore
        ([{"name": i} for i in range(9)], "[4].name must be a string, got 4; 4 more faults"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_each_place(value: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        checked(list[Part] if message.startswith("[") else Whole, value)
    assert str(caught.value).endswith(message)


def test_what_is_a_number() -> None:
    assert is_number(1) and is_number(-2.5) and is_number(0.5, 0, 1)
    assert not any(map(is_number, (True, "1", None, 10**400, float("nan"), float("inf"))))
