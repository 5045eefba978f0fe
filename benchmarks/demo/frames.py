"""Fill sentence frames from word pools."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

Row = tuple[str, str | None, int | tuple[int, ...] | tuple[str, ...]]
Pools = Mapping[str, Sequence[str]]

SPLITS = ("train", "validation", "test")

_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa])(?= (?:[aeio]|u(?!ni[qftv]|s)|honest|hour)(?!ne[ -]))")


def read_pools(words: Mapping[str, str]) -> dict[str, list[str]]:
    """Read word pools from their written form: entries between bars, broken over lines."""
    return {slot: [" ".join(word.split()) for word in entries.split("|")] for slot, entries in words.items()}


def draw(rng: random.Random, pool: Sequence[T], count: int) -> list[T]:
    """Draw ``count`` different entries of ``pool``.

    Python promises the same numbers across versions only for ``random()``, so nothing else is used.
    """
    left = list(pool)
    return [left.pop(int(rng.random() * len(left))) for _ in range(count)]


def fill(rng: random.Random, frame: str, pools: Pools) -> str:
    """Fill each ``{slot}`` of ``frame`` from its pool, no entry twice, and write "an" for "a" where needed."""
    slots = _SLOT.findall(frame)
    drawn = {slot: draw(rng, pools[slot], slots.count(slot)) for slot in sorted(set(slots))}
    return _ARTICLE.sub(r"\1n", _SLOT.sub(lambda match: drawn[match[1]].pop(), frame))


def distinct(rng: random.Random, frames: Sequence[str], pools: Pools, count: int) -> list[str]:
    """Make ``count`` different texts; the frames take turns, so that every label has each equally often."""
    texts: list[str] = []
    while len(texts) < count:
        text = fill(rng, frames[len(texts) % len(frames)], pools)
        if text not in texts:
            texts.append(text)
    return texts
