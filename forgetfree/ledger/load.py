"""From a path to what a ledger is made of: whatever version wrote the file, all of it is checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from forgetfree.errors import LedgerError, RegionError, first_line
from forgetfree.files import checksum, read_kind
from forgetfree.ledger import file, legacy_file
from forgetfree.ledger.records import Contents

_Made = TypeVar("_Made")


def read(path: Path, make: Callable[[Contents], _Made]) -> _Made:
    """What ``make`` makes of a file's contents, which are read and verified; see `forgetfree.ledger.Ledger.load`."""
    if path.is_dir():
        raise LedgerError(f"{path} is a directory. Give the path of a ledger.safetensors in it.")
    header, tensors = read_kind(path, "ledger", file.FORMAT, LedgerError, "run the stream again", unnamed=True)
    try:
        parse = legacy_file.parse if header.get("schema") in legacy_file.SCHEMAS else file.parse
        made = make(parse(header, tensors))
        # Last, because the checks above say more.
        if checksum(tensors, header) != header["checksum"]:
            raise RegionError("its contents do not match its checksum.")
    except MemoryError as error:
        raise LedgerError(
            f"{path} belongs to a model that does not fit into memory here: {first_line(error)}. Load it on a larger machine; "
            "if no such model was trained, restore the file from a copy."
        ) from error
    except RegionError as error:
        raise LedgerError(
            f"{path} is not a sound ledger: {str(error).rstrip('.')}. Restore it from a copy, or run the stream again."
        ) from error
    return made
