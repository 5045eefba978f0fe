"""Merging as strategies: each task is fine-tuned alone, and one merged model answers all tasks that are learned."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from forgetfree.continual.regions import EncodedTask, Region, RegionStrategy, Stream, Training
from forgetfree.continual.storage import LEDGER, LedgerStorage
from forgetfree.continual.strategy import TaskwiseOptions
from forgetfree.core.base_regions import budget, most_moved
from forgetfree.core.merging import DENSITY, WEIGHTS, MergeRule
from forgetfree.ledger import Ledger, merged_graft, merged_ledger
from forgetfree.ledger.graft import Graft
from forgetfree.models.state import ModelState
from forgetfree.options import option
from forgetfree.training.localization import LocalizationOptions


@dataclass(frozen=True, kw_only=True)
class TaskArithmeticOptions(TaskwiseOptions):
    """Task arithmetic."""

    weight: float = option(WEIGHTS["task-arithmetic"], "λ, by which the sum of the task vectors is multiplied", above=0)


@dataclass(frozen=True, kw_only=True)
class TiesOptions(TaskwiseOptions):
    """TIES."""

    weight: float = option(WEIGHTS["ties"], "λ, by which the merged task vector is multiplied", above=0)
    density: float = option(DENSITY, "k: the share of the entries that each task vector keeps", above=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class StitchOptions(TaskwiseOptions, LocalizationOptions):
    """Localize-and-Stitch."""


class Merging(RegionStrategy):
    """Fine-tune θ_pre on each task alone, keep of θ_ft the entries that the rule needs, and merge those of all tasks.

    A task is answered by the merged model of all learned tasks with its own readout; so is one that is not learned yet, with
    an untrained readout. What is kept are the grafts, of which the next merge is made, and the merged model: see `_GraftFiles`.
    """

    forget_free = False
    resumable = True
    rule: ClassVar[MergeRule]

    def setup(self) -> None:
        """Open a ledger of grafts, in which each task stands alone."""
        self.open_ledger("alone")
        self.storage = _GraftFiles(self)
        self._merged: tuple[int, Graft] | None = None

    @abstractmethod
    def kept_region(self, task: EncodedTask, tuned: ModelState) -> tuple[Region, float]:
        """Return the entries of θ_ft that are kept, and the share of the space that they were allowed."""

    def begin(self, task: EncodedTask) -> Training:
        """Fine-tune θ_pre on the task alone; nothing is trained after that."""
        tuned = self.fine_tuned(task)
        region, sparsity = self.kept_region(task, tuned)
        return self.region_training(task, region, tuned, sparsity=sparsity, steps=0, options=self.options)

    def commit(self, task: EncodedTask, training: Training) -> None:
        """Record the task's entries."""
        self.record(training)

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Answer with the merged model."""
        return self.ledger_model.with_graft(self.merged())

    def merged(self) -> Graft:
        """Return what the merged model holds on top of θ_pre, merged once after each task."""
        records = self.ledger.records
        if self._merged is None or self._merged[0] != len(records):
            settings: dict[str, Any] = {
                name: getattr(self.options, name) for name in ("weight", "density") if hasattr(self.options, name)
            }
            grafts = [record.owned for record in records] or [Graft(Region.empty(), self.pre_trained.theta[:0])]
            self._merged = len(records), merged_graft(grafts, self.pre_trained.theta, self.rule, **settings)
        return self._merged[1]

    def merged_ledger(self) -> Ledger:
        """Return the merged model as a ledger, which answers as this strategy does."""
        grafts = self.ledger
        return merged_ledger(grafts.space, grafts.fingerprint, grafts.binding, self.merged(), grafts.records)


class _GraftFiles:
    """Keeps two ledgers: that of the grafts, to learn further tasks, and the merged one, to answer with."""

    def __init__(self, strategy: Merging) -> None:
        self._strategy = strategy
        self._grafts = LedgerStorage(strategy, strategy.ledger_model, "grafts.safetensors")

    def save(self, directory: Path) -> None:
        """Write both."""
        self._grafts.save(directory)
        self._strategy.merged_ledger().save(directory / LEDGER)

    def load(self, directory: Path) -> None:
        """Read that of the grafts, of which the other is made."""
        self._grafts.load(directory)

    def bytes_kept(self) -> int:
        """Count both."""
        merged = self._strategy.merged_ledger().size_in_bytes if self._strategy.ledger.records else 0
        return self._grafts.bytes_kept() + merged


class MergeTaskArithmetic(Merging):
    """Task arithmetic: θ_pre + λ Σ_t (θ_t − θ_pre) (Ilharco et al., 2023, arXiv:2212.04089)."""

    Options = TaskArithmeticOptions
    rule: ClassVar[MergeRule] = "task-arithmetic"

    def kept_region(self, task: EncodedTask, tuned: ModelState) -> tuple[Region, float]:
        """Return all entries that moved."""
        return most_moved(self.pre_trained.theta, tuned.theta, len(self.space)), 1.0


class MergeTies(Merging):
    """TIES: the most moved entries of each task, a sign elected for each entry, the mean of those that have it.

    Yadav et al., 2023, arXiv:2306.01708, alg. 1. The trimming is done once a task, so no more of it is kept.
    """

    Options = TiesOptions
    rule: ClassVar[MergeRule] = "ties"

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse a density that leaves no entry."""
        budget(len(stream.model.space()), options.density)

    def kept_region(self, task: EncodedTask, tuned: ModelState) -> tuple[Region, float]:
        """Return the most moved entries."""
        share = self.options.density
        return most_moved(self.pre_trained.theta, tuned.theta, budget(len(self.space), share)), share


class MergeStitch(Merging):
    """Localize-and-Stitch: a localized region a task, the mean of the values where regions overlap.

    He et al., 2024, arXiv:2408.13656. Difference: regions are found by the search of grafting (eqs. 3 and 4 of
    arXiv:2302.06600), by the rows of fine-tuning, and not by a search with an L1 penalty.
    """

    Options = StitchOptions
    rule: ClassVar[MergeRule] = "stitch"

    def kept_region(self, task: EncodedTask, tuned: ModelState) -> tuple[Region, float]:
        """Return the task's localized region."""
        return self.localize(task, tuned), self.options.sparsity
