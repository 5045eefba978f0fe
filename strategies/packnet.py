"""PackNet: train what is free, keep a share of it, release the rest to later tasks (Mallya & Lazebnik, 2018)."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from forgetfree.continual.regions import RegionOptions, RegionStrategy, TaskRegions, check_region_rate
from forgetfree.continual.strategy import Training
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.continual.task_training import Skill
from forgetfree.core.base_regions import top
from forgetfree.core.parameters import at_least_float32, entries, weight_matrices
from forgetfree.core.regions import Region
from forgetfree.core.tensors import load_tensors_
from forgetfree.core.trained import WholeTensors
from forgetfree.models.state import ModelState
from forgetfree.options import option
from forgetfree.training.training_options import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class PackNetOptions(RegionOptions):
    """Training, pruning, retraining."""

    keep: float = option(
        0.25, "share of each tensor's free entries a task keeps; the paper: 0.5 or 0.25", above=0, at_most=1
    )
    region_steps: int | None = option(
        None, "updates of retraining; none: half as many as before, as the authors' 10 epochs after 20", at_least=0
    )
    region_learning_rate: float | None = option(None, "of retraining; none: that of fine-tuning", above=0)


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

    Options: ClassVar[type[TrainingOptions]] = PackNetOptions
    resumable: ClassVar[bool] = True

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse a model without a weight matrix."""
        check_region_rate(options)
        weight_matrices(stream.model.space())

    def setup(self) -> None:
        """Make an empty ledger, in which a task is inferred with the union of all regions up to its own."""
        self.regions = TaskRegions(self, "union")

    def begin(self, task: EncodedTask) -> Training:
        """Train all that is free, keep the share of it that moved the most, tensor by tensor, and retrain that."""
        self.regions.ledger.check_new(task.name)
        owned = self.regions.ledger.owned()
        is_free = ~owned.mask(len(self.space))
        matrices = [self.space.tensors[i] for i in weight_matrices(self.space)]
        wheres = [slice(spec.offset, spec.offset + spec.size) for spec in matrices]
        region, trained = Region.empty(), None
        if any(bool(is_free[where].any()) for where in wheres):
            trained = self._train_free(task, owned)
            change = (trained.theta.to(at_least_float32(trained.theta.dtype)) - self.pre_trained.theta).abs_()
            pieces = []
            for where in wheres:
                free = is_free[where]
                count = share(int(free.sum()), self.options.keep)
                pieces.append(top(change[where], count, free).indices + where.start)
            region = Region(torch.cat(pieces))
        return self.regions.training(
            task,
            Skill(region, len(region) / len(self.space)),
            trained,
            budget=len(self.space),  # retraining goes on at the rate of training
            steps=retraining_steps(self.options, self.full_steps(task)),
        )

    def commit(self, task: EncodedTask, training: Training) -> None:
        """Record what is kept; the rest is θ_pre again."""
        self.regions.commit(training)

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Answer with the union of what the tasks up to this one keep."""
        return self.regions.answering(task)

    def _train_free(self, task: EncodedTask, owned: Region) -> ModelState:
        """Return what training leaves; the model is as it was."""
        model = self.model
        tensors = self.space.parameters(model.backbone)
        places = [entries(tensors[i].detach(), local) for i, local, _ in self.space.split(owned.indices)]
        frozen = [(flat, at, flat[at]) for flat, at in places]

        def freeze() -> None:
            for flat, at, values in frozen:  # momentum and decay move them without a gradient
                flat[at] = values

        with self.holding():
            load_tensors_(model.readout_module(task.label), self.pre_trained.readouts[task.name])
            matrices = WholeTensors(tensors[i] for i in weight_matrices(self.space))
            self.bench(task).train_(self.options, "fine_tune", matrices, after_update=freeze)
            return ModelState.of(model, [task.name])


def retraining_steps(options: PackNetOptions, steps: int) -> int:
    """Return the updates of retraining after so many of training: half as many, unless the options say how many."""
    return -(-steps // 2) if options.region_steps is None else options.region_steps


def share(count: int, keep: float) -> int:
    """``⌊keep · count⌋``, but at least one of any."""
    # The product may lie a rounding error below a whole number: 0.29 · 100.
    return min(count, max(1, math.floor(keep * count + 1e-6)))
