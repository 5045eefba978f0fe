"""Damage to a file, and what reads it all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def accepted_flips(
    file: Path, load: Callable[[Path], Any], error: type[Exception], positions: Iterable[int]
) -> list[int]:
    """The bytes of which a bit may be flipped without an ``error`` from ``load``; any other exception is raised."""
    sound, accepted = file.read_bytes(), []
    for position in positions:
        flipped = bytearray(sound)
        flipped[position] ^= 1 << (position % 8)
        file.write_bytes(flipped)
        try:
            load(file)
        except error:
            continue
        accepted.append(position)
    return accepted
