"""Merging: fine-tune θ_pre on each task alone, and predict for all learned tasks with one merged model.

A task vector is τ_t = θ_t − θ_pre (Ilharco et al., 2023): here at the entries γ_t of a graft, and 0 elsewhere. Every rule is
entrywise. Its arguments are the values θ_t and the masks γ_t of T grafts at n entries ``(T, n)``, where θ_t is θ_pre outside of
γ_t, and θ_pre ``(n,)``. It returns the merged values ``(n,)``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgetfree.continual.region_strategy import RegionStrategy
from forgetfree.continual.strategy_parts import Training
from forgetfree.continual.stream import Stream
from forgetfree.continual.task_inference import TaskwiseOptions
from forgetfree.core.regions import Region
from forgetfree.core.selection import budget, most_moved
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Ledger
from forgetfree.models.state import ModelState
from forgetfree.options import option
from forgetfree.results.run_folder import LEDGER
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.training_options import LocalizationOptions

#: The ledger of the grafts that are merged.
GRAFTS = "grafts.safetensors"
#: Number of entries that are merged at a time.
_STRETCH = 2**20


def task_arithmetic(theta: Tensor, gamma: Tensor, pre: Tensor, weight: float) -> Tensor:
    """Return θ_pre + λ Σ_t τ_t (Ilharco et al., 2023, arXiv:2212.04089, §2)."""
    return pre + weight * (theta - pre).sum(0)


def ties(theta: Tensor, gamma: Tensor, pre: Tensor, weight: float) -> Tensor:
    """Return θ_pre + λ times the mean of the τ_t with the elected sign (Yadav et al., 2023, arXiv:2306.01708, alg. 1).

    The elected sign is the sign of Σ_t τ_t; + where the sum is 0. The grafts are already trimmed.
    """
    vectors = theta - pre
    elected = torch.where(vectors.sum(0) >= 0, 1, -1)
    agrees = vectors.sign() == elected
    return pre + weight * (vectors * agrees).sum(0) / agrees.sum(0).clamp(min=1)


def stitch(theta: Tensor, gamma: Tensor, pre: Tensor) -> Tensor:
    """Return the mean of the values over the grafts that have an entry: Localize-and-Stitch (He et al., 2024).

    That is θ_pre + Σ_t γ'_t ⊙ τ_t with γ'_t = γ_t / Σ_u γ_u (arXiv:2408.13656, §3). An entry of a single graft keeps its
    value, bit for bit.
    """
    return (theta * gamma).sum(0) / gamma.sum(0)


def merged_graft(grafts: Sequence[Graft], theta_pre: Tensor, rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Graft:
    """Return one graft, with the entries of all ``grafts``.

    Args:
        grafts: one graft per task, all for the same θ_pre and on the CPU.
        theta_pre: θ_pre, ``(N,)``, on the CPU.
        rule: maps θ_t, γ_t and θ_pre at some entries to the merged values.
    """
    region = reduce(or_, (graft.region for graft in grafts))
    merged = torch.empty(len(region), dtype=theta_pre.dtype, device="cpu")
    for start in range(0, len(region), _STRETCH):
        entries = region.indices[start : start + _STRETCH]
        pre = theta_pre[entries].double()
        theta, gamma = (
            pre.repeat(len(grafts), 1),
            torch.zeros(len(grafts), len(entries), dtype=torch.bool, device="cpu"),
        )
        for number, graft in enumerate(grafts):
            if len(graft.region):
                place = torch.searchsorted(graft.region.indices, entries).clamp(max=len(graft.region) - 1)
                gamma[number] = graft.region.indices[place] == entries
                theta[number] = torch.where(gamma[number], graft.values[place].double(), pre)
        merged[start : start + _STRETCH] = rule(theta, gamma, pre).to(merged.dtype)
    return Graft(region, merged)


class TaskArithmeticOptions(TaskwiseOptions):
    """Task arithmetic, with λ of Yadav et al. (2023, §4.2), where no validation rows choose it."""

    weight: float = option(0.4, "λ: factor on the sum of the task vectors", above=0)


class TiesOptions(TaskwiseOptions):
    """TIES, with λ and k of Yadav et al. (2023, §4.2)."""

    weight: float = option(1.0, "λ: factor on the merged task vector", above=0)
    density: float = option(0.2, "k: share of the entries that each task vector keeps", above=0, at_most=1)


class StitchOptions(TaskwiseOptions, LocalizationOptions):
    """Localize-and-Stitch."""


class Merging(RegionStrategy):
    """Fine-tune θ_pre on each task alone, keep of θ_ft the entries that the rule needs, and merge those of all tasks.

    The merged model of all learned tasks predicts for every task, with the task's own readout; before a task is learned, with
    an untrained readout. Both the grafts, which the next merge needs, and the merged model are stored: see `_GraftFiles`.
    """

    forget_free = False
    resumable = True

    def setup(self) -> None:
        """Open a ledger of grafts, in which tasks are independent."""
        self.open_ledger("alone")
        self.storage = _GraftFiles(self)
        self._merged: tuple[int, Graft] | None = None

    @abstractmethod
    def kept_region(self, task: EncodedTask, tuned: ModelState) -> tuple[Region, float]:
        """Return the entries of θ_ft to keep, and their allowed share of the space."""

    @abstractmethod
    def rule(self, theta: Tensor, gamma: Tensor, pre: Tensor) -> Tensor:
        """Return the merged values ``(n,)`` of θ_t and γ_t ``(T, n)`` with θ_pre ``(n,)``."""

    def begin(self, task: EncodedTask) -> Training:
        """Fine-tune θ_pre on the task alone; nothing is trained after that."""
        tuned = self.fine_tuned(task)
        region, sparsity = self.kept_region(task, tuned)
        return self.region_training(task, region, tuned, sparsity=sparsity, steps=0, options=self.options)

    def answering(self, task: EncodedTask) -> AbstractContextManager[None]:
        """Answer with the merged model."""
        return self.ledger_model.with_graft(self.merged())

    def merged(self) -> Graft:
        """Return the merged graft on θ_pre, which is computed once after each task."""
        records = self.ledger.records
        if self._merged is None or self._merged[0] != len(records):
            grafts = [record.owned for record in records] or [Graft(Region.empty(), self.pre_trained.theta[:0])]
            self._merged = len(records), merged_graft(grafts, self.pre_trained.theta, self.rule)
        return self._merged[1]


class _GraftFiles:
    """Stores two ledgers: the grafts, to learn further tasks, and the merged model, to answer with."""

    def __init__(self, strategy: Merging) -> None:
        self._strategy = strategy

    def save(self, directory: Path) -> None:
        """Write both."""
        self._strategy.ledger_model.save(directory, GRAFTS)
        self.merged_ledger().save(directory / LEDGER)

    def load(self, directory: Path) -> None:
        """Load the ledger of the grafts; the other is made from it."""
        self._strategy.ledger_model.load(directory, GRAFTS)

    def bytes_kept(self) -> int:
        """Count both."""
        merged = self.merged_ledger().size_in_bytes if self._strategy.ledger.records else 0
        return self._strategy.ledger_model.bytes_kept() + merged

    def merged_ledger(self) -> Ledger:
        """Return the merged model as a ledger, which answers as the strategy does, each task with its own readout.

        Its composition is ``selection``: the first task owns all entries, and the region of each task is the whole of them.
        """
        grafts, merged = self._strategy.ledger, self._strategy.merged()
        ledger = Ledger(grafts.space, grafts.fingerprint, "selection", grafts.binding)
        nothing = Graft(Region.empty(), merged.values[:0])
        for number, record in enumerate(grafts.records):
            owned, share = nothing if number else merged, len(merged.region) / len(grafts.space)
            ledger.append(replace(record, region=merged.region, owned=owned, sparsity=share, buffers={}))
        return ledger


class MergeTaskArithmetic(Merging):
    """Task arithmetic: θ_pre + λ Σ_t (θ_t − θ_pre) (Ilharco et al., 2023, arXiv:2212.04089)."""

    Options = TaskArithmeticOptions

    def rule(self, theta: Tensor, gamma: Tensor, pre: Tensor) -> Tensor:
        """Return the merged values: see `task_arithmetic`."""
        return task_arithmetic(theta, gamma, pre, self.options.weight)

    def kept_region(self, task: EncodedTask, tuned: ModelState) -> tuple[Region, float]:
        """Return all entries that moved."""
        return most_moved(self.pre_trained.theta, tuned.theta, len(self.space)), 1.0


class MergeTies(Merging):
    """TIES: trim each task to its most moved entries, elect a sign per entry, and average the values with this sign.

    Yadav et al., 2023, arXiv:2306.01708, alg. 1. Each task is trimmed once, and only the trimmed entries are stored.
    """

    Options = TiesOptions

    @classmethod
    def check(cls, options: Any, stream: Stream) -> None:
        """Refuse a density that leaves no entry."""
        budget(len(stream.model.space()), options.density)

    def rule(self, theta: Tensor, gamma: Tensor, pre: Tensor) -> Tensor:
        """Return the merged values: see `ties`."""
        return ties(theta, gamma, pre, self.options.weight)

    def kept_region(self, task: EncodedTask, tuned: ModelState) -> tuple[Region, float]:
        """Return the most moved entries."""
        share = self.options.density
        return most_moved(self.pre_trained.theta, tuned.theta, budget(len(self.space), share)), share


class MergeStitch(Merging):
    """Localize-and-Stitch: one localized region per task; values are averaged where regions overlap.

    He et al., 2024, arXiv:2408.13656. Difference: regions are found by the search of grafting (eqs. 3 and 4 of
    arXiv:2302.06600), by the rows of fine-tuning, and not by a search with an L1 penalty.
    """

    Options = StitchOptions

    def rule(self, theta: Tensor, gamma: Tensor, pre: Tensor) -> Tensor:
        """Return the merged values: see `stitch`."""
        return stitch(theta, gamma, pre)

    def kept_region(self, task: EncodedTask, tuned: ModelState) -> tuple[Region, float]:
        """Return the task's localized region."""
        return self.localize(task, tuned), self.options.sparsity
