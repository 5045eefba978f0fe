"""The ledger of a merged model, which answers all its tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from forgetfree.core.binding import Binding
from forgetfree.core.graft import Graft
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.ledger.ledger import Ledger
from forgetfree.ledger.records import Record


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
