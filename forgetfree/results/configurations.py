"""What a report calls the configurations of a strategy: its name, with the options that tell them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forgetfree.display import NULL
from forgetfree.options import typed
from forgetfree.results.costs import NEED_FINE_TUNED

Json = dict[str, Any]
_NEED_GRADIENTS = ("taylor", "gradient", "snip", "gallop")


def labels_of(strategy: str, variants: Sequence[Json], always: Sequence[str] = ()) -> list[str]:
    """Return for each configuration the strategy's name, with the options that are not the same in all, or always told.

    An option that is set to nothing goes without saying, and so does one `without_effect`, unless that is all there is to tell
    or others have the same label then.

    Args:
        strategy: its name.
        variants: its options in each configuration.
        always: options that are told wherever they stand.
    """
    short = [_label(strategy, each, variants, always, without_effect(each)) for each in variants]
    return [
        label if short.count(label) == 1 else _label(strategy, each, variants, always)
        for label, each in zip(short, variants, strict=True)
    ]


def _label(
    strategy: str, options: Json, variants: Sequence[Json], always: Sequence[str], idle: frozenset[str] = frozenset()
) -> str:
    keys = dict.fromkeys(key for variant in variants for key in variant)
    telling = [k for k in keys if k in always or any(other.get(k) != options.get(k) for other in variants)]
    telling = [k for k in telling if k not in options or options[k] is not None] or telling
    telling = [k for k in telling if k not in idle]
    if not telling:
        return strategy
    return f"{strategy} ({', '.join(f'{key}={typed(options[key]) if key in options else NULL}' for key in telling)})"


def without_effect(options: Json) -> frozenset[str]:
    """Return which options of a region change nothing beside the others: those of a search beside ``region_from=movement``."""
    how, start, idle = options.get("region_from"), options.get("region_start"), set[str]()
    if how is None:  # an older file, or a strategy that chooses no region so
        return frozenset()
    if how not in ("mask", "midpoint"):
        idle |= {key for key in options if key.startswith("mask_")} | {"validation_rows"}
    if how != "mask":
        idle |= {"base", "base_fraction", "mask_score_init"}
    if how != "fisher" and (how, options.get("base")) != ("mask", "fisher"):
        idle.add("fisher_rows")
    if how not in _NEED_GRADIENTS:
        idle.add("gradient_rows")
    if how in NEED_FINE_TUNED:
        idle.add("readout_steps")
    else:
        idle.add("region_start")
    if start != "scaled" or how not in NEED_FINE_TUNED:
        idle.add("largest_scale")
        if options.get("composition") != "auto":
            idle.add("choice_rows")
    return frozenset(idle)
