"""What was learned apart on one base model, as one: ledgers that keep each task's own entries, or grafts merged into one.

Of ledgers, the order decides: of an entry that several of them own, the first one's value stays, and the tasks of the later
ones are answered with it. All else of a task stays as it was: it is answered with the entries of its own ledger alone. Grafts
are merged entry by entry (`forgetfree.core.merging`), and the merged model answers all their tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from forgetfree.core.base_regions import budget, most_moved
from forgetfree.core.merging import DENSITY, MergeRule, check_merge, merged_values
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.errors import LedgerError, TaskError
from forgetfree.ledger.binding import Binding
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Ledger
from forgetfree.ledger.records import Record
from forgetfree.tasks import next_version

# -- Ledgers --------------------------------------------------------------------------------------------


#: Compositions in which several tasks may have a value for an entry.
_APART = ("alone", "auto")


@dataclass(frozen=True)
class JoinedTask:
    """What became of a task.

    Attributes:
        task: its name in the new ledger.
        ledger: the ledger it comes from.
        name: its name there.
        entries: how many entries it is answered with.
        overlap: how many of them earlier ledgers own.
        changed: how many of these have another value now.
    """

    task: str
    ledger: str
    name: str
    entries: int
    overlap: int
    changed: int


def joined_ledger(ledgers: Mapping[str, Ledger], *, as_versions: bool = False) -> tuple[Ledger, list[JoinedTask]]:
    """Return one ledger for the tasks of several, and what became of each task.

    Where tasks may stand alone in all of them (compositions ``alone`` and ``auto``), regions may overlap and nothing is lost:
    each task stands alone, with all entries that it was answered with. Else the new ledger's composition is ``selection``:
    ownership is disjoint, and each task has the region that it was answered with.

    Args:
        ledgers: by their names in messages, in the order that decides.
        as_versions: let a task whose name is taken become the next version of it, such as ``sst2@2``; default: refuse it.

    Raises:
        LedgerError: they belong to different base models, or compute or read differently; or tasks stand alone in some.
        TaskError: two have a task of one name, and ``as_versions`` is not set, or its labels are others.
    """
    (first, one), *others = ledgers.items()
    for name, other in others:
        _check_alike(first, one, name, other)
    alone = one.composition in _APART
    joined = Ledger(one.space, one.fingerprint, "alone" if alone else "selection", one.binding)
    tasks = []
    for name, ledger in ledgers.items():
        earlier = Region.empty() if alone else joined.owned()
        for record in ledger.records:
            task = _name_in(joined, record.task, name, as_versions)
            defined = record.definition
            if defined is not None and task != record.task:
                _check_labels(joined, defined.labels, record.task, name)
                defined = replace(defined, name=task)
            graft = ledger.graft(record.task)
            region, free = graft.region, joined.free(graft.region)
            owned = Graft(free, graft.values[torch.isin(region.indices, free.indices)])
            joined.append(replace(record, task=task, region=region, owned=owned, definition=defined, alone=False))
            overlap = region & earlier
            now = joined.graft(task).values
            counts = len(region), len(overlap), int((now != graft.values).sum())
            tasks.append(JoinedTask(task, name, record.task, *counts))
    return joined, tasks


def _check_alike(first: str, one: Ledger, name: str, other: Ledger) -> None:
    remedy = "Merge ledgers that were trained from one base model in one way."
    if one.fingerprint != other.fingerprint or one.space != other.space:
        raise LedgerError(
            f"{first} and {name} belong to different base models: fingerprints {one.fingerprint[:12]} and "
            f"{other.fingerprint[:12]}, spaces of {len(one.space):,} and {len(other.space):,} entries. {remedy}"
        )
    if (one.binding is None) != (other.binding is None):
        raise LedgerError(f"One of {first} and {name} does not say what its answers depend on. {remedy}")
    if one.binding and other.binding and (differ := one.binding.differences(other.binding)):
        raise LedgerError(f"{first} and {name} differ: {'; '.join(differ)}. {remedy}")
    if (one.composition in _APART) != (other.composition in _APART):
        raise LedgerError(
            f"Tasks stand alone in one of {first} ({one.composition}) and {name} ({other.composition}), and share entries in "
            "the other. Merge ledgers of one kind."
        )


def _name_in(joined: Ledger, task: str, ledger: str, as_versions: bool) -> str:
    if task not in joined.tasks:
        return task
    if not as_versions:
        raise TaskError(
            f"Task {task!r} of {ledger} is in an earlier ledger, too. Add --as-versions to have it as "
            f"{next_version(task, joined.tasks)!r}, or remove one of them."
        )
    return next_version(task, joined.tasks)


def _check_labels(joined: Ledger, labels: tuple[str, ...], task: str, ledger: str) -> None:
    known = joined.records[joined.position(task)].definition
    if known is not None and known.labels != labels:
        raise TaskError(
            f"Task {task!r} of {ledger} has the labels {', '.join(labels)}, in an earlier ledger {', '.join(known.labels)}: "
            "they are no versions of one task. Run one of them under another name."
        )


# -- Grafts ---------------------------------------------------------------------------------------------


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
