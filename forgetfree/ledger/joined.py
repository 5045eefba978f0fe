"""Ledgers of one base model, trained apart, as one.

The order of the ledgers decides: of an entry that several of them own, the first one's value stays, and the tasks of the later
ones are answered with it. All else of a task stays as it was: it is answered with the entries of its own ledger alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from forgetfree.core.regions import Region
from forgetfree.errors import LedgerError, TaskError
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Ledger
from forgetfree.tasks import next_version

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
