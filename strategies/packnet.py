"""PackNet: train what is free, keep a share of it, release the rest to later tasks (Mallya & Lazebnik, 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from forgetfree.continual.ledger_strategy import LedgerStrategy, RegionOptions, RegionToTrain
from forgetfree.continual.streams import EncodedTask, Stream
from forgetfree.core.base_regions import top
from forgetfree.core.parameters import at_least_float32, entries, weight_matrices
from forgetfree.core.regions import Region
from forgetfree.core.tensors import load_tensors_, tensors_of
from forgetfree.core.trained import WholeTensors
from forgetfree.learning.training import TrainingOptions, fine_tune
from forgetfree.models.state import ModelState
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
    region_learning_rate: float | None = option(None, "of retraining; none: that of fine-tuning", above=0)


class PackNet(LedgerStrategy):
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

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """There must be a weight matrix."""
        super().check(options, stream)
        weight_matrices(stream.model.space())

    def localize(self, task: EncodedTask) -> RegionToTrain:
        """Train all that is free and keep the share of it that moved the most, tensor by tensor."""
        self._switch.to(len(self.ledger.records))
        owned = self.ledger.owned()
        is_free = ~owned.mask(len(self.space))
        matrices = [self.space.tensors[i] for i in weight_matrices(self.space)]
        wheres = [slice(spec.offset, spec.offset + spec.size) for spec in matrices]
        if not any(bool(is_free[where].any()) for where in wheres):
            return RegionToTrain(Region.empty(), 0.0)
        theta, readout = self._train_free(task, owned)
        wide = at_least_float32(theta.dtype)
        change = (theta.to(wide) - self.pristine.theta).abs_()
        kept = []
        for where in wheres:
            free = is_free[where]
            count = share(int(free.sum()), self.options.keep)
            kept.append(top(change[where], count, free).indices + where.start)
        region = Region(torch.cat(kept))
        return RegionToTrain(region, len(region) / len(self.space), theta, readout)

    def _train_free(self, task: EncodedTask, owned: Region) -> tuple[Tensor, dict[str, Tensor]]:
        """θ ``(N,)`` and the readout after training; the model is as it was."""
        model, steps = self.task_model, self.full_steps(task)
        tensors = self.space.parameters(model.backbone)
        places = [entries(tensors[i].detach(), local) for i, local, _ in self.space.split(owned.indices)]
        frozen = [(flat, at, flat[at]) for flat, at in places]
        before = ModelState.of(model, [task.name])
        readout = model.readout_module(task.label)
        load_tensors_(readout, self.pristine.readouts[task.name])
        try:
            with self.phase("fine_tune", task, steps) as on_step:

                def after_update(step: int, loss: float) -> None:
                    for flat, at, values in frozen:  # momentum and decay move them without a gradient
                        flat[at] = values
                    on_step(step, loss)

                fine_tune(
                    model,
                    task.train,
                    self.options,
                    steps=steps,
                    seed=self.phase_seed("fine_tune", task),
                    on_step=after_update,
                    trained=WholeTensors(tensors[i] for i in weight_matrices(self.space)),
                )
            return self.space.flatten(model.backbone).cpu(), tensors_of(readout)
        finally:
            before.load_(model, [task.name])

    def steps(self, task: EncodedTask) -> int:
        """Of retraining: half of the others."""
        steps = super().steps(task)
        return -(-steps // 2) if self.options.region_steps is None else steps

    def region_budget(self) -> int:
        """All: retraining goes on at the rate of training."""
        return len(self.space)


def share(count: int, keep: float) -> int:
    """``⌊keep · count⌋``, but at least one of any."""
    # The product may lie a rounding error below a whole number: 0.29 · 100.
    return min(count, max(1, math.floor(keep * count + 1e-6)))
