"""Streams by name: ordered lists of task names."""

from __future__ import annotations

STREAMS: dict[str, tuple[str, ...]] = {
    # Table 4 of Panigrahi et al., 2023.
    "qnli-agnews-sst2": ("qnli", "ag_news", "sst2"),
}
