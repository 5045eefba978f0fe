"""Streams of tasks on Avalanche: benchmarks, strategies, the adapter for its plugins."""

from forgetfree.models.deferred import UNUSED, deferred

with deferred(*UNUSED):
    import avalanche  # noqa: F401
