"""Shared start of ``python tests/fuzz`` and ``python tests/kill``: one thread, a seed, a folder of its own and a clock."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported


@dataclass
class Campaign:
    """A folder, a clock, and the failures so far.

    Attributes:
        folder: all files of the campaign are written here.
        begin: the time at the start, by `time.monotonic`.
        failures: one text per failure; the folder is kept if there are any.
    """

    folder: Path
    begin: float = field(default_factory=time.monotonic)
    failures: list[str] = field(default_factory=list)

    def say(self, what: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{what} ({time.monotonic() - self.begin:.0f} s)", flush=True)


def parser_of(name: str, description: str | None, seed: str) -> argparse.ArgumentParser:
    """Return the argument parser of ``python tests/NAME``; ``seed`` is the help text of ``--seed``."""
    parser = argparse.ArgumentParser(prog=f"python tests/{name}", description=description)
    parser.add_argument("--seed", type=int, default=0, help=seed)
    return parser


@contextmanager
def campaign(name: str) -> Iterator[Campaign]:
    """Yield a new campaign, and remove its folder at the end unless something failed."""
    new = Campaign(Path(tempfile.mkdtemp(prefix=f"{name}-")))
    try:
        yield new
    finally:
        if not new.failures:
            shutil.rmtree(new.folder, ignore_errors=True)
