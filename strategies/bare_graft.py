"""A bare graft: find a task's region and put fine-tuning's values there, without training it (paper, §2)."""

from __future__ import annotations

from pathlib import Path

from forgetfree.continual.region_strategy import RegionStrategy
from forgetfree.continual.strategy_parts import Training
from forgetfree.continual.task_inference import TaskwiseOptions
from forgetfree.models.state import ModelState
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.training_options import LocalizationOptions

#: The graft of a stream of one task, beside the ledger.
GRAFT = "graft.safetensors"


class BareGraftOptions(TaskwiseOptions, LocalizationOptions):
    """Options of a graft without further training: those of fine-tuning and localization."""


class BareGraft(RegionStrategy):
    """For each task: fine-tune θ_pre on it alone, localize γ, and graft: θ(γ) = γ ⊙ θ_ft + (1 − γ) ⊙ θ_pre (eq. 1).

    The region is not trained. Each task is independent of the others, so regions may overlap and no task depends on the
    order. The readout is the fine-tuned one. Where ``region_from`` needs no θ_ft, γ takes the values of θ_ft all the same.
    """

    Options = BareGraftOptions
    resumable = True

    def setup(self) -> None:
        """Open a ledger in which tasks are independent."""
        self.open_ledger("alone")
        self.storage = _LedgerAndGraft(self)

    def begin(self, task: EncodedTask) -> Training:
        """Fine-tune θ_pre on the task alone, localize γ, and copy the values of θ_ft there, without further updates."""
        tuned = self.fine_tuned(task)
        region = self.localize(task, tuned)
        training = self.region_training(task, region, start=tuned, steps=0, options=self.options)
        tuned.load_beside_theta_(self.model, [task.name])
        return training


class _LedgerAndGraft:
    """Writes the ledger; for a stream of one task, also the graft as a file of its own."""

    def __init__(self, strategy: BareGraft) -> None:
        self._strategy = strategy
        self.load, self.bytes_kept = strategy.ledger_model.load, strategy.ledger_model.bytes_kept

    def save(self, directory: Path) -> None:
        """Write the ledger, and the graft of a stream of one task."""
        strategy = self._strategy
        strategy.ledger_model.save(directory)
        if len(strategy.stream.tasks) > 1 or not strategy.ledger.records:
            return
        (task,), (record,), pre = strategy.stream.tasks, strategy.ledger.records, strategy.pre_trained
        theta = pre.theta.clone()
        theta[record.region.indices] = record.owned.values.to(theta)
        state = ModelState(theta, {task.name: record.readout}, {**pre.buffers, **record.buffers})
        strategy.bench(task).graft(state, record.region, record.sparsity).save(directory / GRAFT)
