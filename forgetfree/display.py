"""Text for people: users' texts made safe for a terminal, numbers with their unit, and the standard streams.

A standard stream may be a terminal, a pipe that nobody reads, closed, ``None``, or an application's console.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TextIO, cast

#: Printed for a missing number or an option that is not set.
NULL = "—"
#: Characters that move a cursor, colour a terminal, end a line, change the direction of text, or are no characters at all:
#: controls, the two separators, bidirectional controls and lone surrogates. Joiners and marks belong to real text.
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
#: Further characters that no font shows, in addition to the categories Cf and Cc: fillers and variation selectors.
_FILLERS = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")


def escaped(text: str) -> str:
    r"""Return ``text`` on one line that cannot act on a terminal, with control characters escaped as in JSON.

    >>> print(escaped("日本語 \x1b[31m\nred"))
    日本語 \u001b[31m\nred
    """
    return _UNSHOWN.sub(lambda found: _SHORT.get(found[0]) or _code(found[0]), text)


def _is_invisible(char: str) -> bool:
    if char.isascii():
        return not (char.isprintable() or char.isspace())
    return unicodedata.category(char) in ("Cc", "Cf") or _FILLERS.match(char) is not None


def is_blank(text: str) -> bool:
    r"""Return whether ``text`` has no visible character.

    >>> [is_blank(text) for text in ("", " \u200b\n", "\u200ba")]
    [True, True, False]
    """
    return all(char.isspace() or _is_invisible(char) for char in text)


def without_invisible(text: str) -> str:
    """Return ``text`` without invisible characters, such as a zero-width space, and without white space around it."""
    return "".join(char for char in text if not _is_invisible(char)).strip()


def with_invisible(text: str) -> str:
    """Return ``text`` with its invisible characters escaped as in JSON."""
    return "".join(_code(char) if _is_invisible(char) else char for char in text)


def _code(char: str) -> str:
    return f"\\u{ord(char):04x}" if char <= "\uffff" else f"\\U{ord(char):08x}"


def nfc(text: str) -> str:
    """Return ``text`` in Unicode normal form NFC: file systems and programs write é with one code point or with two."""
    return unicodedata.normalize("NFC", text)


def escaped_lines(text: str) -> str:
    """Return ``text`` `escaped`, except for the line breaks before indented lines, which are a table in a message."""
    return "\n  ".join(map(escaped, text.split("\n  ")))


def is_text(value: Any) -> bool:
    """Return whether a value is a text that UTF-8 can encode, so without half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def brief(value: Any, most: int = 60) -> str:
    """Return the ``repr`` of a value, cut to ``most`` characters, for messages."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def first_twice(names: Iterable[str]) -> str | None:
    """Return the first name that occurs more than once; ``None`` if all are different."""
    counts = Counter(names)
    return next((name for name, count in counts.items() if count > 1), None)


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return the first ``most`` names, and the number of the others."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def counted(count: int, what: str) -> str:
    """Return a count with its noun; ``what`` is the noun in the singular.

    >>> counted(1, "row"), counted(0, "entry"), counted(1000, "training row")
    ('1 row', '0 entries', '1,000 training rows')
    """
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural}"


@dataclass(frozen=True)
class Scale:
    """The format of numbers of one kind in every table, figure and line.

    >>> Scale().titled("loss"), Scale().text(0.6931), PERCENT.titled("score"), PERCENT.with_unit(0.8125)
    ('loss', '0.693', 'score (%)', '81.2 %')

    Attributes:
        factor: the factor that numbers are multiplied by.
        unit: the unit after the number; empty for none.
        decimals: digits after the point.
    """

    factor: float = 1.0
    unit: str = ""
    decimals: int = 3

    def text(self, number: float) -> str:
        """Return a number without its unit; a dash for NaN."""
        if math.isnan(number):
            return NULL
        return f"{self.factor * number:z.{self.decimals}f}"  # z: no minus sign before 0.0

    def with_unit(self, number: float) -> str:
        """Return a number with its unit."""
        return f"{self.text(number)} {self.unit}".rstrip()

    def titled(self, name: str) -> str:
        """Return the title of an axis or a column: the name of the numbers, and their unit."""
        return f"{name} ({self.unit})" if self.unit else name


#: The scale of shares, which lie in [0, 1].
PERCENT = Scale(100.0, "%", 1)
#: The scale of all other numbers.
PLAIN = Scale()


def json_text(value: Any, indent: int) -> str:
    """Return ``value`` as readable JSON, in which characters that could act on a terminal are escaped.

    Raises:
        ValueError: a number is not finite.
    """
    lines = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False).split("\n")
    return "\n".join(map(escaped, lines)) + "\n"


# -- Standard streams ------------------------------------------------------------------------------------


class Screen(io.TextIOBase):
    """A stream that people watch. Missing methods and failures of the stream raise no error, which could lose a result.

    Args:
        stream: a stream, an object that has only some of a stream's methods, or ``None``.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text; a character that the stream cannot encode is escaped by its number."""
        with suppress(Exception):
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        with suppress(Exception):
            self._stream.flush()

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        with suppress(Exception):
            return bool(self._stream.isatty())
        return False


def stderr() -> TextIO:
    """Return the current standard error as a `Screen`."""
    return cast(TextIO, Screen(sys.stderr))


def tell(message: str) -> None:
    """Print one line on stderr; nothing for an empty text."""
    if message:
        print(escaped(message), file=stderr(), flush=True)


#: The notes of the current command; ``None`` outside of commands.
_told: ContextVar[set[str] | None] = ContextVar("told", default=None)


@contextmanager
def each_note_once() -> Iterator[None]:
    """Within the block, `tell_note` prints each note once, even if the same rows or the same model are loaded again."""
    before = _told.set(set())
    try:
        yield
    finally:
        _told.reset(before)


def tell_note(text: str) -> None:
    """Print a note on stderr; nothing for an empty text, or for a note already printed within `each_note_once`."""
    told = _told.get()
    if not text or (told is not None and text in told):
        return
    if told is not None:
        told.add(text)
    tell(f"note: {text}")


def open_closed_streams() -> None:
    """Open the null device in place of each closed standard stream, permanently.

    Otherwise the next opened file gets the stream's number, and the output of libraries to this number goes into the file.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
