"""Files of text: unpacked, in the encoding they are written in (UTF-8, UTF-16 or Windows-1252), line by line, within bounds.

All characters of Latin-1 that can be seen are written alike in Windows-1252.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from forgetfree.errors import DataError
from forgetfree.files import size_of

#: How the names of packed files end; the first ending is that of files that are not.
PACKED = ("", ".gz", ".zst")
#: The largest file that is read, in bytes (unpacked), and the longest line, in characters.
MOST_BYTES, MOST_LINE = 4 * 2**30, 16 * 2**20
#: A packed file that unpacks to more than so many times its size holds no data; what unpacks to few bytes may.
MOST_TIMES, FEW_BYTES = 1000, 256 * 2**20
_PIECE, _BEGIN = 2**20, 2**12
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
#: A character of several bytes in UTF-8.
_WIDE = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_BEYOND_ASCII = bytes(range(0x80, 0x100))
#: How many words are looked at.
_MOST_WORDS = 100_000
#: Words of other alphabets, read as Windows-1252, hold no letter of ASCII.
_FOREIGN = re.compile(r"[^\W\d_a-zA-Z]{3,}")
_WORD = re.compile(r"[\w\u0080-\uffff]+")


def check_size(path: Path | str, size: int, unit: str, most: int) -> None:
    """Raise ``DataError`` if ``path`` holds more of a unit than is read."""
    if size > most:
        raise DataError(f"{path} holds {size:,} {unit}, and at most {most:,} are read. Take a part of its rows.")


def unpacked_limit(path: Path) -> int:
    """Return how many bytes of a file are read at most, unpacked."""
    most = max(FEW_BYTES, MOST_TIMES * size_of(path)) if path.is_file() else MOST_BYTES  # a pipe has no size
    return min(MOST_BYTES, most)


@contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """Open a file, unpacked where it is packed."""
    if path.suffix not in PACKED[1:]:
        with path.open("rb") as plain:
            yield plain
        return
    import pyarrow

    # Unlike gzip's and zstandard's own readers, it knows a file that was cut off, and reads all frames of one.
    with pyarrow.input_stream(str(path), compression="detect") as file:
        yield io.BufferedReader(file)


@contextmanager
def open_text(path: Path, encoding: str) -> Iterator[TextIO]:
    """Open a text file, unpacked where it is packed."""
    with open_binary(path) as file:
        yield io.TextIOWrapper(file, encoding=encoding, newline="")


def lines_of(path: Path, encoding: str) -> Generator[str, None, None]:
    """Yield the lines of a text file, unpacked where it is packed.

    Raises:
        DataError: the file, or a line of it, is too large.
    """
    number, length, most = 0, 0, unpacked_limit(path)
    with open_text(path, encoding) as file:
        while line := file.readline(MOST_LINE + 1):
            number, length = number + 1, length + len(line)
            check_size(path, length, "characters or more when unpacked", most)
            if len(line) > MOST_LINE:
                raise DataError(
                    f"{path}, line {number}: expected at most {MOST_LINE:,} characters, got more. Write one row a line, or "
                    "shorten the text."
                )
            yield line


# -- Encoding --------------------------------------------------------------------------------------------


def encoding_of(path: Path, most: int) -> tuple[str, str]:
    """Return the encoding of a text file as Python calls it, and what a user should know of it; nothing of UTF-8.

    Args:
        path: the file.
        most: how many bytes to look at.

    Raises:
        DataError: it is in none of the three; the message names the first byte that is wrong.
    """
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with open_binary(path) as file:
            while (piece := file.read(_PIECE)) and read < most:
                if not read and piece.startswith(_UTF_16) and not piece.startswith(codecs.BOM_UTF32_LE):
                    return "utf-16", f"{path.name} is read in UTF-16"
                if not read and (encoding := _unmarked(piece)):
                    return encoding, f"{path.name} is read in UTF-16"
                read += len(piece)
                decoder.decode(piece)
        decoder.decode(b"", final=read < most)
        return "utf-8-sig", ""
    except UnicodeDecodeError:
        with open_binary(path) as file:
            return "cp1252", _check_windows(path, file, most)


def _unmarked(piece: bytes) -> str:
    """Return in which UTF-16 a file begins that has no byte order mark, by where zeros stand; nothing where it is in none."""
    places = [piece[:_BEGIN:2].count(0), piece[1:_BEGIN:2].count(0)]
    most, least = max(places), min(places)
    is_wide = most > len(piece[:_BEGIN]) / 4 and least < most / 10  # half of the characters or more are of ASCII
    return ("utf-16-le" if places[1] == most else "utf-16-be") if is_wide else ""


def _check_windows(path: Path, file: BinaryIO, most: int) -> str:
    """Return what to say of a file that is not in UTF-8; raise ``DataError`` if it seems not to be in Windows-1252 either."""
    read = number = wide = narrow = words = foreign = 0
    faults, example = dict[str, str](), ""
    while (lines := file.read(_PIECE) + file.readline(_PIECE)) and read < most:
        for codec in {"UTF-8", "Windows-1252"} - faults.keys():
            try:
                lines.decode(codec)
            except UnicodeDecodeError as error:
                byte = f"byte 0x{lines[error.start]:02x} at position {read + error.start:,} of the file"
                line = number + 1 + lines.count(b"\n", 0, error.start)
                faults[codec] = f"line {line}: {byte} is no character of {codec}"
        rest, count = _WIDE.subn(b"", lines)
        wide, narrow = wide + count, narrow + len(rest) - len(rest.translate(None, _BEYOND_ASCII))
        if words < _MOST_WORDS:
            text = lines.decode("Windows-1252", "replace")
            beyond = [word for word in _WORD.findall(text) if not word.isascii()]
            words, foreign = words + len(beyond), foreign + len(_FOREIGN.findall(text)) + text.count("\0")
            example = example or next((f", as in {word[:40]!r}" for word in beyond), "")
        read, number = read + len(lines), number + lines.count(b"\n")
    is_damaged = 10 * wide > narrow  # characters of UTF-8, and some bytes that are none
    if not is_damaged and "Windows-1252" not in faults and 10 * foreign <= words:
        return f"{path.name} is read in Windows-1252{example}"
    fault = faults["UTF-8"] if is_damaged else faults.get("Windows-1252", faults["UTF-8"])
    raise DataError(
        f"{path}, {fault}, and the whole file seems to be in none of UTF-8, UTF-16 and Windows-1252. Write the file again, in "
        "UTF-8."
    )
