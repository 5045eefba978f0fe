"""Seeds derived from names."""

from __future__ import annotations

from forgetfree.seeds import derive_seed


def test_a_seed_is_the_same_on_every_machine() -> None:
    """The expected seed is the first eight bytes of SHA-256 over ``0\\x1ftrain\\x1fsst2``, halved."""
    assert derive_seed(0, "train", "sst2") == 0x404F96B8A9C3325


def test_seed_words_and_their_order_all_count() -> None:
    seeds = [
        derive_seed(0, "train", "sst2"),
        derive_seed(1, "train", "sst2"),
        derive_seed(0, "sst2", "train"),
        derive_seed(0, "train"),
        derive_seed(0, "trainsst2"),
        derive_seed(0),
        derive_seed(0, "train", "sst2", 1),
    ]
    assert len(set(seeds)) == len(seeds)
