"""Streams of tasks on Avalanche: benchmarks, strategies, the adapter for its plugins."""
