"""Streams of tasks on Avalanche: benchmarks, strategies, the adapter for its plugins."""

from forgetfree.deferred import deferred

#: What Avalanche 0.6 imports at its top level and calls in functions only: a third of the time that its import takes.
UNUSED = ("gdown", "qpsolvers", "torchmetrics", "torchmetrics.functional", "wandb")

with deferred(*UNUSED):
    import avalanche  # noqa: F401
