"""Seeds derived from names, so that no phase depends on what ran before it."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *words: object) -> int:
    """Return a 63-bit seed for one purpose: equal for equal ``seed`` and words, unrelated otherwise.

    Because every phase draws from its own seed, ``fine-tune`` and the separate fine-tuning inside
    ``grafting-continual`` are the same, and a resumed run ends as one that was not interrupted.
    """
    text = "\x1f".join([str(seed), *map(str, words)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
