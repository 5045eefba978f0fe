"""PackNet: train all free entries, keep a share of them, release the rest to later tasks (Mallya & Lazebnik, 2018)."""

from __future__ import annotations

from typing import Any

from forgetfree.continual.region_strategy import LedgerOptions, RegionStrategy
from forgetfree.continual.strategy_parts import Training
from forgetfree.continual.stream import Stream
from forgetfree.core.parameters import weight_matrices
from forgetfree.core.selection import most_moved_by_tensor
from forgetfree.options import option
from forgetfree.training.encoded_task import EncodedTask


class PackNetOptions(LedgerOptions):
    """Options of training, pruning and retraining."""

    keep: float = option(
        0.25, "share of each tensor's free entries that a task keeps; the paper: 0.5 or 0.25", above=0, at_most=1
    )
    region_steps: int | None = option(
        None,
        "number of updates after pruning; none: half as many as before it, like the authors' 10 epochs after 20",
        at_least=0,
    )

    def region_updates(self, full: int) -> int:
        """Return the number of updates of retraining, for a task with ``full`` updates in training."""
        return super().region_updates(-(-full // 2))


class PackNet(RegionStrategy):
    """Train all free weights, prune by magnitude, retrain what is left (Mallya & Lazebnik, 2018, arXiv:1711.05769, §3).

    A task starts from the union of all tasks so far and trains the weight matrices; biases, normalisations and the
    entries that earlier tasks own do not change, bit for bit. In each matrix, it keeps the share `keep` of the free entries
    with the largest magnitude and retrains only those; the others are free again. If no entry is free,
    only the readout is trained.

    Differences to the paper:
    - The pre-trained network is the base of all tasks and belongs to none; the paper prunes it first and loses some
      of it. So a released entry is reset to θ_pre and not to 0, and its magnitude is that of its change, |θ − θ_pre|.
    - Retraining decays its learning rate again from its full value; the authors' code keeps the tenth at which training ended.
      Here, most of the change is pruned, so more must be learned again.
    - ⌊keep · n⌋ of n free entries are kept, but at least one. Frozen entries count in the gradient's norm where
      `max_gradient_norm` clips it.
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
        """Train all free entries, keep the share that moved most in each tensor, and retrain these."""
        owned, space = self.ledger.taken(self.ledger.last), self.space
        matrices, is_free = weight_matrices(space), ~owned.mask(len(space))
        trained = None
        if any(bool(view.any()) for i, view in enumerate(space.views(is_free)) if i in matrices):
            tensors = space.parameters(self.model.backbone)
            untrained = self.pre_trained.readouts[task.name]
            trained = self.training_result(task, [tensors[i] for i in matrices], frozen=owned, readout=untrained)
        pre = self.pre_trained.theta
        after = pre if trained is None else trained.theta
        return self.region_training(
            task,
            most_moved_by_tensor(space, matrices, pre, after, self.options.keep, is_free),
            trained,
            rate_for=len(space),  # retraining uses the learning rate of training
        )
