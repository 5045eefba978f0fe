"""What results.json says of a ledger."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from forgetfree.core.regions import distribution
from forgetfree.results.parameter_kinds import layer_of, parameter_kind

if TYPE_CHECKING:
    from forgetfree.ledger import Ledger

Json = dict[str, Any]


def ledger_summary(ledger: Ledger | None) -> dict[str, Any] | None:
    """Return what results.json says of a ledger."""
    if ledger is None:
        return None
    return {
        "tasks": ledger.tasks,
        "composition": ledger.composition,
        **({"alone": [record.alone for record in ledger.records]} if ledger.composition == "auto" else {}),
        "region_size": [len(record.region) for record in ledger.records],
        "owned_size": [len(record.owned.region) for record in ledger.records],
        "tensor_bytes": ledger.size_in_bytes,
        "overlap": ledger.overlap(),
        "places": _places(ledger),
    }


def _places(ledger: Ledger) -> list[Json]:
    """Return how many entries of each layer and kind the space has, and how many of them each task owns."""
    regions = [record.owned.region for record in ledger.records]
    owned = [distribution(region, ledger.space, _place) for region in regions]
    sizes = Counter[tuple[str, str]]()
    for tensor in ledger.space.tensors:
        sizes[_place(tensor.name)] += tensor.size
    return [
        {"layer": layer, "kind": kind, "entries": size, "owned": [counts[layer, kind] for counts in owned]}
        for (layer, kind), size in sizes.items()
    ]


def _place(name: str) -> tuple[str, str]:
    return layer_of(name), parameter_kind(name)
