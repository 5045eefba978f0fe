"""Grafts of one base model merged into a ledger, in which all tasks are answered by the same merged values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from forgetfree.core.body import body_prefix
from forgetfree.core.merging import MergeRule, check_merge
from forgetfree.core.parameters import ParameterSpace
from forgetfree.errors import GraftError, UsageError
from forgetfree.ledger import Ledger, merged_graft, merged_ledger
from forgetfree.ledger.graft import Graft, GraftOrigin
from forgetfree.ledger.records import Record
from forgetfree.models.loading import dtype_of, load_model
from forgetfree.serve.apply import base_model_name

#: What must be the same in all grafts, and what it is called.
_SHARED = {
    "fingerprint": "base model",
    "readout": "readout",
    "max_length": "maximum length",
    "tokenizer": "tokenizer",
    "network": "configuration of the base model",
}


def merge_grafts(
    grafts: Mapping[str, Graft],
    rule: MergeRule,
    *,
    model: str | None = None,
    weight: float | None = None,
    density: float | None = None,
) -> Ledger:
    """Return the merged grafts as a ledger: see `forgetfree.ledger.merged_ledger`.

    Args:
        grafts: by the name of their file, for messages.
        rule: how, see `forgetfree.core.merging`.
        model: the base model; default: by the name that the grafts have for it.
        weight: see `forgetfree.ledger.merged_graft`.
        density: see `forgetfree.ledger.merged_graft`.

    Raises:
        UsageError: the grafts cannot be merged; the message says which differ in what.
        GraftError, LedgerError: a graft says too little, or belongs to another model.
    """
    check_merge(rule, weight, density)
    origins = _origins(grafts)
    first = origins[0]
    own = grafts[next(iter(grafts))].space
    assert own is not None  # of every graft with an origin
    name = base_model_name(model, *grafts.values())
    loaded = load_model(name, first.readout, max_length=first.max_length, dtype=dtype_of(own))
    backbone = loaded.model.backbone
    prefix = body_prefix(backbone)
    space = ParameterSpace(tuple(replace(spec, name=f"{prefix}{spec.name}") for spec in own.tensors))
    one = next(iter(grafts.values()))
    one.apply_(backbone).apply_(backbone, check=False)  # compares weights and configuration; all grafts have the same
    if first.tokenizer and first.tokenizer != loaded.tokenizer_digest:
        raise GraftError(f"The grafts were made with another tokenizer than {loaded.name!r} has. Give their own model.")
    merged = merged_graft(list(grafts.values()), space.flatten(backbone), rule, weight, density)
    records = [
        Record(
            origin.task.name,
            graft.region,
            graft,
            origin.sparsity,
            graft.readout,
            definition=origin.task,
            classes=tuple(range(len(origin.task.labels))),
        )
        for origin, graft in zip(origins, grafts.values(), strict=True)
    ]
    return merged_ledger(space, loaded.fingerprint, loaded.binding("fp32"), merged, records)


def _origins(grafts: Mapping[str, Graft]) -> list[GraftOrigin]:
    """Return where the grafts come from, after checking that they can be merged."""
    if len(grafts) < 2:
        raise UsageError(f"There is nothing to merge: expected two grafts or more, got {len(grafts)}.")
    origins: dict[str, GraftOrigin] = {}
    layouts: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    for name, graft in grafts.items():
        if (origin := graft.origin) is None:
            raise GraftError(
                f"{name} does not say for which task and model it was made. Give one that `forgetfree graft` made."
            )
        if origin.readout == "classifier":
            raise GraftError(
                f"{name} is read by a fine-tuned model's own head, and a merged model by readouts of one kind. Give grafts "
                "with the readout linear, prompt or causal."
            )
        if graft.space is None:
            raise GraftError(
                f"{name} does not say which tensors its region means. Give one that `forgetfree graft` made."
            )
        if graft.buffers:
            raise GraftError(f"{name} holds buffers ({', '.join(sorted(graft.buffers))}), and no rule merges those.")
        dtypes[name] = dtype_of(graft.space)
        for other, known in origins.items():
            if known.task.name == origin.task.name:
                raise UsageError(f"{other} and {name} are both of task {origin.task.name!r}. Give one graft a task.")
            compared = [("dtype", dtypes[other], dtypes[name])]  # in another, a model has another fingerprint, too
            compared += [(called, getattr(known, field), getattr(origin, field)) for field, called in _SHARED.items()]
            for called, ours, theirs in compared:
                if ours != theirs:
                    raise UsageError(
                        f"{other} and {name} cannot be merged, they differ in the {called}: {_shown(ours)} and "
                        f"{_shown(theirs)}. Merge grafts that were made from one model in one way."
                    )
        layouts[name] = graft.space.layout_hash
        if layouts[name] != next(iter(layouts.values())):
            raise UsageError(
                f"{next(iter(layouts))} and {name} cannot be merged, their parameter spaces differ. Make them with one "
                "graftable."
            )
        origins[name] = origin
    return list(origins.values())


def _shown(value: object) -> str:
    text = str(value) or "none"
    return text if len(text) <= 20 else f"{text[:12]}…"
