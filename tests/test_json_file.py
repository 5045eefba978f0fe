"""JSON that somebody may have changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forgetfree import json_file
from forgetfree.errors import ReportError
from forgetfree.json_file import MOST_DEPTH, check_fields, is_number, is_table, parse_json, read_json


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_values_come_back() -> None:
    assert parse_json('{"a": [1, 2.5, null, true, "\\u00fc\\ud83d\\ude00"]}') == {"a": [1, 2.5, None, True, "ü😀"]}
    assert parse_json(nested(MOST_DEPTH)) is not None
    assert len(parse_json("[" + ",".join(["[]"] * 500) + "]")) == 500  # many brackets, not deep


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        (nested(MOST_DEPTH + 2), "nested more than 100 deep"),
        (nested(100_000), "nested more than 100 deep"),
        ('{"a":' * 100_000, "nested more than 100 deep"),
        ('["\\udcff"]', r"holds '\\udcff', half of a surrogate pair"),
        ('{"\\ud800": 1}', r"holds '\\ud800', half of a surrogate pair"),
        ("[NaN]", "NaN is no number of JSON"),
        ("[-Infinity]", "-Infinity is no number of JSON"),
        ("[1e999]", "1e999 is no number of JSON"),
        ("9" * 5000, "Exceeds the limit"),
    ],
)
def test_what_is_no_json_or_cannot_be_used_is_a_value_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_a_file_that_cannot_be_read_is_the_readers_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"

    def message() -> str:
        with pytest.raises(ReportError) as caught:
            read_json(path, ReportError, "Make it again.", lambda value: check_fields("", value, {"a": int}))
        return str(caught.value).removeprefix(str(path))

    assert message() == " cannot be read: No such file or directory. Make it again."
    path.mkdir()
    assert message() == " cannot be read: it is a directory, expected a file. Make it again."
    path.rmdir()
    os.mkfifo(path)
    assert message() == " cannot be read: it is a pipe or a device, expected a file. Make it again."
    path.unlink()
    path.write_bytes(b"\xff")
    assert message().startswith(" is not valid JSON: 'utf-8' codec can't decode byte 0xff")
    path.write_text("[")
    assert message() == " is not valid JSON: Expecting value: line 1 column 2 (char 1). Make it again."
    path.write_text("[1]")
    assert message() == ": the content must be an object, got [1]. Make it again."
    path.write_text('{"a": true}')
    assert message() == ": a must be an integer, got True. Make it again."
    path.write_text("{}")
    assert message() == ": a is missing, it must be an integer. Make it again."
    monkeypatch.setattr(json_file, "MOST_BYTES", 1000)
    path.write_text(" " * 1001)
    assert message() == " cannot be read: it has 1,001 bytes, and at most 1,000 are read. Make it again."


def test_numbers_and_tables() -> None:
    assert is_number(1) and is_number(-2.5) and is_number(0.5, 0, 1)
    assert not any(map(is_number, (True, "1", None, 10**400, float("nan"), float("inf"))))
    assert is_table([[0, 0.5]], 1, 2, most=1) and not is_table([[0, 1.5]], 1, 2, most=1) and not is_table([0], 1, 1)
