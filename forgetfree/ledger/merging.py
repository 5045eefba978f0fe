"""Grafts of one base model merged into one, entry by entry (`forgetfree.core.merging`), which answers all their tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from forgetfree.core.base_regions import budget, most_moved
from forgetfree.core.merging import DENSITY, MergeRule, check_merge, merged_values
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.ledger.binding import Binding
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Ledger
from forgetfree.ledger.records import Record

#: Entries that are merged at a time.
_STRETCH = 2**20


def merged_graft(
    grafts: Sequence[Graft],
    theta_pre: Tensor,
    rule: MergeRule,
    weight: float | None = None,
    density: float | None = None,
) -> Graft:
    """Return one graft, with the entries of all ``grafts``.

    Args:
        grafts: one a task, all of one θ_pre and on the CPU.
        theta_pre: θ_pre, ``(N,)``, on the CPU.
        rule: how, see `forgetfree.core.merging`.
        weight: λ, of task arithmetic and TIES; default: `forgetfree.core.merging.WEIGHTS`.
        density: k, of TIES; default: `forgetfree.core.merging.DENSITY`.

    Raises:
        OptionError: the rule has no such setting, or a value is out of range.
    """
    check_merge(rule, weight, density)
    if rule == "ties":
        grafts = [trimmed(graft, theta_pre, DENSITY if density is None else density) for graft in grafts]
    region = reduce(or_, (graft.region for graft in grafts))
    merged = torch.empty(len(region), dtype=theta_pre.dtype, device="cpu")
    for start in range(0, len(region), _STRETCH):
        entries = region.indices[start : start + _STRETCH]
        pre = theta_pre[entries].double()
        theta, gamma = (
            torch.stack(each) for each in zip(*(_values_and_mask(graft, entries, pre) for graft in grafts), strict=True)
        )
        merged[start : start + _STRETCH] = merged_values(rule, theta, gamma, pre, weight).to(merged.dtype)
    return Graft(region, merged)


def trimmed(graft: Graft, theta_pre: Tensor, density: float) -> Graft:
    """Return the graft's most moved entries, at most the share ``density`` of all entries: the trimming of TIES.

    Args:
        graft: its entries.
        theta_pre: θ_pre, ``(N,)``.
        density: k of Yadav et al.
    """
    indices = graft.region.indices
    most = most_moved(theta_pre[indices], graft.values, budget(len(theta_pre), density, "density")).indices
    return Graft(Region(indices[most]), graft.values[most])


def _values_and_mask(graft: Graft, entries: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    """Return θ_t at ``entries``, θ_pre where the graft holds nothing, and γ_t there."""
    if not len(graft.region):
        return pre, torch.zeros(len(entries), dtype=torch.bool, device="cpu")
    place = torch.searchsorted(graft.region.indices, entries).clamp(max=len(graft.region) - 1)
    gamma = graft.region.indices[place] == entries
    return torch.where(gamma, graft.values[place].double(), pre), gamma


def merged_ledger(
    space: ParameterSpace, fingerprint: str, binding: Binding | None, merged: Graft, records: Iterable[Record]
) -> Ledger:
    """Return a ledger whose tasks are all answered with the same entries, and each with its own readout.

    Its composition is ``selection``: the first task owns all entries, and the region of each task is the whole of them.

    Args:
        space: the parameter space of the base model.
        fingerprint: that of the base model.
        binding: what else answers depend on.
        merged: the merged entries.
        records: one a task, of which names, readouts, definitions and classes are taken.
    """
    ledger = Ledger(space, fingerprint, "selection", binding)
    nothing = Graft(Region.empty(), merged.values[:0])
    for number, record in enumerate(records):
        owned, share = nothing if number else merged, len(merged.region) / len(space)
        ledger.append(replace(record, region=merged.region, owned=owned, sparsity=share, buffers={}))
    return ledger
