"""Texts of users as they may be shown."""

from __future__ import annotations

import json

import pytest

from forgetfree.display import brief, counted, escaped, json_text

REAL = [
    "plain English, with punctuation: \\ | * _ < > & ~",
    "日本語 中文 한국어",
    "Grüße, naïve café, e\u0301 with a combining accent",
    "👩\u200d💻 👍🏽 🇨🇭 \u2764\ufe0f",  # joiners, skin tones, flags, presentation
    "שלום עולם",
    "مرحبا، می\u200cخواهم",
    "ภาษาไทย हिन्दी",
    "x² − γ·θ ≤ ½ … “quoted” — dashed",
]


def test_one_thing_is_named_in_the_singular() -> None:
    assert [counted(1, "row"), counted(0, "entry"), counted(1000, "training row")] == [
        "1 row",
        "0 entries",
        "1,000 training rows",
    ]


@pytest.mark.parametrize("text", REAL)
def test_real_text_is_shown_as_it_is(text: str) -> None:
    assert escaped(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x07", r"\u001b[31mred\u0007"),
        ("two\nlines\r\n", r"two\nlines\r\n"),
        ("a\tb", r"a\tb"),
        ("\x9b2J\x7f\x00", r"\u009b2J\u007f\u0000"),
        ("abc\u202edcba\u2066\u2069\u200e\u200f\u061c", r"abc\u202edcba\u2066\u2069\u200e\u200f\u061c"),
        ("a\u2028b\u2029c\x85d", r"a\u2028b\u2029c\u0085d"),
        ("\udcff", r"\udcff"),
    ],
)
def test_what_acts_on_a_terminal_is_escaped_once(text: str, shown: str) -> None:
    assert escaped(text) == shown
    assert escaped(shown) == shown


def test_json_that_is_shown_says_the_same() -> None:
    value = {"task\x1b[2J": ["日本語", "a\nb", "\u202e", "\x9b", "\udcff", 1.5, None]}
    text = json_text(value, indent=1)
    assert json.loads(text) == value
    assert "日本語" in text
    assert all(character == "\n" or character.isprintable() for character in text)


def test_a_long_value_is_cut() -> None:
    assert brief("x" * 100) == "'" + "x" * 59 + "…"
    assert brief(["a"]) == "['a']"
