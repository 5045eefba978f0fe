"""LoTTO: one model for all tasks, each of which trains a sparse mask of entries outside earlier masks (arXiv:2406.16797)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from forgetfree.continual.region_strategy import RegionOptions
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.strategy_parts import Training
from forgetfree.continual.stream import Stream
from forgetfree.core.parameters import load_tensors_
from forgetfree.core.regions import Region
from forgetfree.core.selection import budget, most_moved
from forgetfree.core.trained import RegionParameters
from forgetfree.options import option
from forgetfree.training.encoded_task import EncodedTask


class LoTTOOptions(RegionOptions):
    """Options of calibration (the fine-tuning) and of the sparse adaptation of the mask (the region)."""

    sparsity: float = option(
        0.1, "size of a task's mask, as a share of the graftable entries; the paper: 0.1", above=0, at_most=1
    )


class LoTTO(ContinualStrategy):
    """Lottery ticket adaptation with mutually sparse masks (Panda et al., 2024, arXiv:2406.16797).

    A task continues from the model that earlier tasks left. Calibration trains all entries that no earlier task moved; the mask
    is the share `sparsity` of all entries, chosen among these as those that moved most; the weights are reset, and only the
    mask's entries are trained. So no entry that an earlier task trained changes again. One model predicts for all tasks, and
    later tasks change its other entries, so predictions for earlier tasks may change.

    Where the paper is silent: in the second training, a linear readout starts from the calibrated one; learning rates are as in
    grafting.
    """

    Options = LoTTOOptions
    resumable = True

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse a sparsity that leaves no entry."""
        budget(len(stream.model.space()), options.sparsity)

    def begin(self, task: EncodedTask) -> Training:
        """Calibrate the mask on the free entries, put the model back, and train the mask."""
        before, backbone = self.space.flatten(self.model.backbone, "cpu"), self.model.backbone
        owned = Region.from_mask(before != self.pre_trained.theta)
        calibrated = self.training_result(task, self.space.parameters(backbone), frozen=owned)
        mask = most_moved(before, calibrated.theta, budget(len(self.space), self.options.sparsity))
        readout, options = self.model.readout_module(task.label), self.options
        load_tensors_(readout, calibrated.readouts[task.name])
        steps = options.region_updates(task.full_steps(options))
        return self.everything(
            task,
            trained=RegionParameters(backbone, self.space, mask),
            steps=steps if len(mask) else 0,  # earlier tasks may have taken every entry
            options=options.for_region(len(self.space), len(mask)),
        )

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Answer with the one model, as it is."""
        return nullcontext()
