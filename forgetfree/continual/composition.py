"""``composition=auto``: a task's region is trained on θ_pre alone and on the union, and the better of both is recorded."""

from __future__ import annotations

from dataclasses import replace

from forgetfree.continual.regions import RegionStrategy
from forgetfree.continual.strategy import EncodedTask, Training
from forgetfree.core.regions import Region
from forgetfree.data.sampling import representative
from forgetfree.models.state import ModelState
from forgetfree.training.loop import loss_of

#: Validation rows, at most, by whose loss is chosen what is recorded.
CHOICE_ROWS = 512


def better_training(strategy: RegionStrategy, task: EncodedTask, tuned: ModelState, region: Region) -> Training:
    """Return the training on the union; at its end it gives way to what was trained alone, if that has the lower loss.

    The region is trained alone first, by the plain loop; on the union, Avalanche's plugins meet the training. The loss is that
    on validation rows, at most `CHOICE_ROWS`.

    Args:
        strategy: its ledger is of composition ``auto``, and has a union.
        task: the task.
        tuned: θ_ft, with the readout that is trained further.
        region: γ, sought where the options say.
    """
    options = strategy.options
    rows = task.validation.subset(representative(task.validation.targets, CHOICE_ROWS))

    def loss() -> float:
        return loss_of(strategy.model, task, rows, options)

    with strategy.ledger_model.base(union=False):
        own = strategy.localize(task, tuned) if options.localize_at == "union" else region
        alone = strategy.region_training(task, own, start=tuned, alone=True)
        try:
            strategy.bench(task).train_(
                alone.options,
                "train",
                alone.trained,
                alone.steps,
                logged=False,  # one training a task is
                about=("alone",),
            )
            record, loss_alone = strategy.ledger_model.record(alone), loss()
        finally:
            strategy.ledger_model.roll_back()
    training = strategy.region_training(task, region, start=tuned)

    def better() -> Training:
        if loss_alone < loss():
            strategy.ledger_model.put_alone(task, record)
            return replace(training, skill=alone.skill)
        return training

    return replace(training, finish=better)
