"""A strategy whose options name the parents of its tasks."""

from __future__ import annotations

from forgetfree.continual.region_strategy import RegionStrategy, SkillOptions
from forgetfree.continual.strategy_parts import Training
from forgetfree.options import option
from forgetfree.training.encoded_task import EncodedTask


class OnParentsOptions(SkillOptions):
    """Options of grafts, and the parent of each task."""

    parents: str = option("", "TASK=PARENT,…; other tasks stand on θ_pre")


class OnParents(RegionStrategy):
    """Fine-tunes, localizes and trains each task on top of its parent."""

    Options = OnParentsOptions
    resumable = True

    def setup(self) -> None:
        self.open_ledger("parents")

    def begin(self, task: EncodedTask) -> Training:
        parent = tree_of(self.options.parents).get(task.name, "")
        tuned = self.fine_tuned(task, parent)
        return self.region_training(task, self.localize(task, tuned, parent), start=tuned, parent=parent)


def tree_of(parents: str) -> dict[str, str]:
    """Return the parent of each task that has one."""
    return dict(pair.split("=") for pair in parents.split(",") if pair)
