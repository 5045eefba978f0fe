"""GraftingContinual: a tiny region per task, trained once and then frozen (paper, §5.2 and C.3)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

from forgetfree.continual.region_strategy import RegionStrategy, SkillOptions
from forgetfree.continual.strategy_parts import Training
from forgetfree.continual.stream import Stream
from forgetfree.errors import OptionError
from forgetfree.models.state import ModelState
from forgetfree.options import option
from forgetfree.training.encoded_task import EncodedTask


class GraftingOptions(SkillOptions):
    """Options of grafting, and of the evaluation at the end of the stream."""

    composition: Literal["union", "alone"] = option(
        "union",
        "weights that a task's region is trained on; union: θ_pre with the regions of all earlier tasks, as in the "
        "paper; alone: θ_pre, so that regions may overlap and no task depends on the order",
    )
    warm_start: bool = option(
        False,
        "start the fine-tuning of each task from θ_ft of the task before instead of θ_pre, with a new readout; requires "
        "region_from=movement, and implies among=free",
    )
    final_union: bool = option(False, "also evaluate the final union on all tasks")


class GraftingContinual(RegionStrategy):
    """For each task: fine-tune θ_pre on it alone, localize γ_n, train γ_n minus what is owned, commit (C.3).

    Each task is inferred with θ_pre and the union of the regions up to its own, so later tasks cannot change it.
    With ``composition=alone`` each task has its own region on θ_pre instead.
    With ``warm_start``, θ_ft is trained on all tasks in turn. θ_ft forgets, but no task is inferred with it: it only selects γ,
    the free entries that moved most, and γ is trained on the weights that the task stands on. So nothing is forgotten.

    Where the paper is silent: the entries of γ_n that earlier tasks own keep those tasks' values; the linear readout
    starts from the fine-tuned one and is trained with the region. If earlier tasks own all of γ_n, only the readout
    is trained. Before a task is learned, the union of all regions so far predicts for it; with ``alone``, θ_pre does.
    """

    Options = GraftingOptions
    resumable = True

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse options that contradict each other."""
        if options.composition == "alone" and options.final_union:
            raise OptionError("composition=alone makes no union, but final_union evaluates one. Leave one of them out.")
        if options.warm_start and options.region_from != "movement":
            raise OptionError(
                "warm_start=true chooses γ by what fine-tuning moved: expected region_from=movement, got "
                f"{options.region_from}. Set region_from=movement, or leave warm_start out."
            )

    def setup(self) -> None:
        """Open a ledger in which each task stands on the one before it, or on θ_pre."""
        extra_bytes = 0
        if self.options.warm_start:
            extra_bytes = replace(self.pre_trained, readouts={}).size_in_bytes  # θ_ft, from which the next task starts
            self.options = self.options.model_copy(update={"among": "free"})  # what earlier tasks own moved most
        self.open_ledger(self.options.composition, extra_bytes)
        self._in_turn: tuple[int, ModelState | None] = (0, None)  # a number of tasks, and θ_ft trained on them in turn

    def begin(self, task: EncodedTask) -> Training:
        """Find γ_n, and train its entries that no task below owns, on top of the tasks below."""
        # (1) Fine-tune θ_pre on t_n alone, and localize γ_n: the mask scores S by gradient steps on the loss of the graft
        #     θ(γ) = γ ⊙ θ_ft + (1 − γ) ⊙ θ_pre (eq. 1), with γ = γ_base ⊙ (1 − σ(S)) + (1 − γ_base) ⊙ σ(S) (eqs. 3, 4).
        #     Beyond C.3, region_from names other ways to choose γ_n, some of which need no θ_ft; and θ_ft may start from θ_ft
        #     of the task before.
        if self.options.warm_start:
            tuned = self._tuned = self._fine_tuned_in_turn(task)
        else:
            tuned = self.fine_tuned(task)
        region = self.localize(task, tuned)

        # (2) Starting from the union graft so far, train only γ_n \ ∪_{i<n} γ_i: from θ_ft or θ_pre, as the options say.
        return self.region_training(task, region, start=tuned)

    def _fine_tuned_in_turn(self, task: EncodedTask) -> ModelState:
        """Return θ_ft of a task, trained on the learned tasks in turn and then on it; models in the store are reused."""
        count, state = self._in_turn
        for each in self.learned[count:]:  # none, unless they were loaded
            state = self.fine_tuned(each, start=state)
        return self.fine_tuned(task, start=state)

    def commit(self, task: EncodedTask, training: Training) -> None:
        """(3) Record the task's entries in the ledger, with their values."""
        self.ledger_model.commit(self.ledger_model.record(training))
        if self.options.warm_start:
            self._in_turn = len(self.learned) + 1, self._tuned

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """(4) Answer for t_k with θ_pre under the union of the regions of t_1..t_k, or under its own region alone."""
        return self.ledger_model.of(task)

    def extra_results(self) -> dict[str, Any]:
        """Return the scores of the final union on all tasks, to compare with the union per task."""
        return {"union": self.ledger_model.union_scores()} if self.options.final_union else {}
