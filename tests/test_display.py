"""Output for people: texts of users, and standard streams that are closed, missing, or replaced by another object."""

from __future__ import annotations

import doctest
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import forgetfree
from forgetfree import display, options
from forgetfree.cli.refusal import fail
from forgetfree.display import escaped, json_text, stderr, tell, tell_note
from forgetfree.jobs.progress import TaskLearned, make_progress

ROOT = Path(__file__).parents[1]

#: Texts with combining accents, joiners, skin tones, flags, and a non-joiner, among others.
REAL = [
    "plain: \\ | * _ < > & ~",
    "日本語",
    "Grüße, cafe\u0301",
    "👩\u200d💻 👍🏽 🇨🇭 \u2764\ufe0f",
    "می\u200cخواهم",
    "ภาษาไทย",
]


@pytest.mark.parametrize("module", [display, options])
def test_examples_in_docstrings_are_true(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


@pytest.mark.parametrize("name", sorted({*forgetfree.__all__} - {"__version__"}))
def test_every_public_name_has_an_example_which_is_true(name: str) -> None:
    (example, *_) = doctest.DocTestFinder(recurse=False).find(
        public := getattr(forgetfree, name), name, globs={**vars(sys.modules[public.__module__])}
    )
    assert example.examples
    assert not doctest.DocTestRunner().run(example).failed


def test_real_text_is_shown_as_it_is() -> None:
    assert list(map(escaped, REAL)) == REAL


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


# -- Standard streams ------------------------------------------------------------------------------------


class Console:
    """An object by which an application may replace a standard stream."""

    def __init__(self, error: Exception | None = None) -> None:
        self.text, self._error = "", error

    def write(self, text: str) -> None:
        if self._error is not None:
            raise self._error
        self.text += text


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        pytest.param(lambda: None, None, id="none"),
        pytest.param(lambda: Console(BrokenPipeError()), None, id="pipe"),
        pytest.param(Console, "γ", id="write-alone"),
        pytest.param(lambda: io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True), r"\u03b3", id="ascii"),
    ],
)
def test_whatever_stands_for_stderr_costs_nothing_and_gets_what_it_takes(
    make: Callable[[], Any], shown: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = make()
    monkeypatch.setattr(sys, "stderr", stream)
    tell("a line: γ")
    tell_note("of γ")
    progress = make_progress(stderr())
    with progress.job(["γ seed 0"]):
        progress.hear(TaskLearned("γ seed 0", 1, []))
    assert fail("It failed: γ.", 3) == 3
    got = stream.buffer.getvalue().decode() if isinstance(stream, io.TextIOWrapper) else getattr(stream, "text", None)
    if shown:
        assert [line.split(":")[0] for line in str(got).splitlines() if shown in line] == [
            "a line",
            "note",
            "1/1 tasks, 0",
            "forgetfree",
        ]
    assert capsys.readouterr().out == ""  # nothing goes to stdout instead


def test_no_file_gets_the_number_of_a_stream_that_is_closed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from forgetfree.display import open_closed_streams\n"
        "open_closed_streams()\n"
        "with open('results', 'w') as file:\n"
        "    os.write(1, b'noise of a library'), os.write(2, b'noise of a library')\n"
        "    print('said'), print('said', file=sys.stderr), sys.stdin.read()\n"
        "    file.write('numbers')\n"
    )
    words = f"PYTHONPATH={ROOT} {sys.executable} script.py <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", words], cwd=tmp_path).returncode == 0
    assert (tmp_path / "results").read_text() == "numbers"
