"""PackNet: train what is free, keep a share of it, release the rest to later tasks (Mallya & Lazebnik, 2018)."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from forgetfree.continual.regions import EncodedTask, Region, RegionOptions, RegionStrategy, Stream, Training
from forgetfree.core.base_regions import top
from forgetfree.core.parameters import at_least_float32, weight_matrices
from forgetfree.options import option


@dataclass(frozen=True, kw_only=True)
class PackNetOptions(RegionOptions):
    """Training, pruning, retraining."""

    keep: float = option(
        0.25, "share of each tensor's free entries a task keeps; the paper: 0.5 or 0.25", above=0, at_most=1
    )
    region_steps: int | None = option(
        None, "updates of retraining; none: half as many as before, as the authors' 10 epochs after 20", at_least=0
    )


class PackNet(RegionStrategy):
    """Train all free weights, prune by magnitude, retrain what is left (Mallya & Lazebnik, 2018, arXiv:1711.05769, §3).

    A task starts from the union of all tasks so far and trains the weight matrices; biases and normalisations stay, and so
    do the entries that earlier tasks own, bit for bit. Of each matrix it keeps the `keep` largest of the free entries and
    trains those alone; the others are free again. Once nothing is free, only the readout is trained.

    Differences to the paper:
    - The pre-trained network is the base of all tasks and belongs to none: the paper prunes it first and loses some
      of it. So a released entry goes back to θ_pre and not to 0, and its magnitude is that of its change, |θ − θ_pre|.
    - Retraining decays its rate over again; the authors' code stays at the tenth at which training ended. Most of the
      change is pruned here, and there is more to regain.
    - Of n free entries ⌊keep · n⌋ are kept, but at least one. Frozen entries are not excluded from the gradient's
      length where `max_gradient_norm` clips it.
    """

    Options = PackNetOptions
    resumable = True

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse a model without a weight matrix."""
        weight_matrices(stream.model.space())

    def setup(self) -> None:
        """Open a ledger in which a task is inferred with the union of all regions up to its own."""
        self.open_ledger("union")

    def begin(self, task: EncodedTask) -> Training:
        """Train all that is free, keep the share of it that moved the most, tensor by tensor, and retrain that."""
        owned = self.ledger.owned()
        is_free = ~owned.mask(len(self.space))
        matrices = weight_matrices(self.space)
        specs = [self.space.tensors[i] for i in matrices]
        wheres = [slice(spec.offset, spec.offset + spec.size) for spec in specs]
        region, trained = Region.empty(), None
        if any(bool(is_free[where].any()) for where in wheres):
            tensors = self.space.parameters(self.model.backbone)
            untrained = self.pre_trained.readouts[task.name]
            trained = self.training_result(task, [tensors[i] for i in matrices], frozen=owned, readout=untrained)
            change = (trained.theta.to(at_least_float32(trained.theta.dtype)) - self.pre_trained.theta).abs_()
            pieces = []
            for where in wheres:
                free = is_free[where]
                count = share(int(free.sum()), self.options.keep)
                pieces.append(top(change[where], count, free).indices + where.start)
            region = Region(torch.cat(pieces))
        return self.region_training(
            task,
            region,
            trained,
            rate_for=len(self.space),  # retraining goes on at the rate of training
            steps=retraining_steps(self.options, self.full_steps(task)),
        )

    def commit(self, task: EncodedTask, training: Training) -> None:
        """Record what is kept; the rest is θ_pre again."""
        self.record(training)

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Answer with the union of what the tasks up to this one keep."""
        return self.ledger_model.of(task)


def retraining_steps(options: PackNetOptions, steps: int) -> int:
    """Return the updates of retraining after so many of training: half as many, unless the options say how many."""
    return -(-steps // 2) if options.region_steps is None else options.region_steps


def share(count: int, keep: float) -> int:
    """``⌊keep · count⌋``, but at least one of any."""
    # The product may lie a rounding error below a whole number: 0.29 · 100.
    return min(count, max(1, math.floor(keep * count + 1e-6)))
