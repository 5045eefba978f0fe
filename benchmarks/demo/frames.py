"""Fill sentence frames from word pools."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

Row = tuple[str, str | None, int]
Pools = Mapping[str, Sequence[str]]

SPLITS = ("train", "validation", "test")

_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa])(?= (?:[aeio]|u(?!ni[qftv]|s)|honest|hour)(?!ne[ -]))")


def read_pools(words: Mapping[str, str]) -> dict[str, list[str]]:
    """Word pools from the form in which they are written down: entries between bars, broken over lines."""
    return {slot: [" ".join(word.split()) for word in entries.split("|")] for slot, entries in words.items()}


def draw(rng: random.Random, pool: Sequence[T], count: int) -> list[T]:
    """``count`` different entries of ``pool``.

    Python promises the same numbers across versions for ``random()`` alone, so nothing else is used.
    """
    left = list(pool)
    return [left.pop(int(rng.random() * len(left))) for _ in range(count)]


def fill(rng: random.Random, frame: str, pools: Pools) -> str:
    """``frame`` with each ``{slot}`` drawn from its pool, no entry twice, and "a" made "an" where due."""
    slots = _SLOT.findall(frame)
    drawn = {slot: draw(rng, pools[slot], slots.count(slot)) for slot in sorted(set(slots))}
    return _ARTICLE.sub(r"\1n", _SLOT.sub(lambda match: drawn[match[1]].pop(), frame))


def distinct(rng: random.Random, frames: Sequence[str], pools: Pools, count: int) -> list[str]:
    """``count`` different texts, the frames taken in turn so that every label sees each equally often."""
    texts: list[str] = []
    while len(texts) < count:
        text = fill(rng, frames[len(texts) % len(frames)], pools)
        if text not in texts:
            texts.append(text)
    return texts
