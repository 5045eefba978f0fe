"""The standard streams, which may be a terminal, a pipe that nobody reads, closed, ``None``, or an application's console."""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TextIO, cast

from forgetfree.display import escaped


class Screen(io.TextIOBase):
    """A stream that people watch. Nothing that it lacks or cannot do raises an error, which would cost a result.

    Args:
        stream: a stream, an object that has only some of a stream's methods, or ``None``.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return the stream's, or UTF-8."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write what can be written; of a character that cannot, its number."""
        with suppress(Exception):
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        with suppress(Exception):
            self._stream.flush()

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        with suppress(Exception):
            return bool(self._stream.isatty())
        return False

    def fileno(self) -> int:
        """Return its number.

        Raises:
            OSError: it has none.
        """
        try:
            return int(self._stream.fileno())
        except Exception as error:  # of whatever stands in its place
            raise io.UnsupportedOperation("fileno") from error


def stderr() -> TextIO:
    """Return the standard error of this moment, for who watches."""
    return cast(TextIO, Screen(sys.stderr))


def tell(message: str) -> None:
    """Print one line on stderr, for who watches; on a terminal it is wrapped between words. Nothing of an empty text."""
    if not message:
        return
    text, screen = escaped(message), stderr()
    if screen.isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print(text, file=screen, flush=True)


#: The notes of the command at hand; ``None`` outside of commands.
_told: ContextVar[set[str] | None] = ContextVar("told", default=None)


@contextmanager
def each_note_once() -> Iterator[None]:
    """Within the block, `tell_note` prints a note once, whatever reads the same rows or loads the same model again."""
    before = _told.set(set())
    try:
        yield
    finally:
        _told.reset(before)


def tell_note(text: str) -> None:
    """Print a note on stderr; nothing of an empty text, or of what was told already in `each_note_once`."""
    told = _told.get()
    if not text or (told is not None and text in told):
        return
    if told is not None:
        told.add(text)
    tell(f"note: {text}")


def open_closed_streams() -> None:
    """Open the null device in the place of each standard stream that is closed, for good.

    Else the next file that is opened gets its number, and what libraries write to that number goes into the file.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which gets the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
