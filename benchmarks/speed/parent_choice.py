"""Choosing a parent: among a thousand earlier tasks, of which the eight nearest are probed, and among sixteen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.speed.ledger_growth import ledger_of
from benchmarks.speed.measurement import Figure, alternate, ratio
from forgetfree.data.sources import load_tasks
from forgetfree.ledger.switch import LedgerSwitch
from forgetfree.models.loading import load_model
from forgetfree.training.encoded_task import EncodedTask
from forgetfree.training.parents import better_parent, nearest_tasks, probe
from forgetfree.training.single_task import SingleTask
from forgetfree.training.training_options import TrainingOptions

#: Numbers of earlier tasks, and the entries of each.
FEW, MANY, ENTRIES = 16, 1_000, 10_646


def figures(turns: int = 9) -> list[Figure]:
    """Measure with minilm and the demo's reviews, 32 rows a label; the earlier tasks are the same rows under other names."""
    rows = load_tasks("sst2", "demo")[0]
    single = SingleTask.of(load_model("minilm", "linear"), rows, shots=32, device="cpu")
    model, task, options = single.model.eval(), single.task, TrainingOptions()
    switches = {
        count: LedgerSwitch(ledger_of(model.space(), count, ENTRIES, "alone"), model.backbone, check=False)
        for count in (FEW, MANY)
    }
    centres: dict[str, Any] = {}

    def named(name: str) -> EncodedTask:
        return replace(task, definition=replace(task.definition, name=name))

    def choose(count: int) -> None:
        switch, found = switches[count], {}
        switch.to(0)
        earlier = [named(name) for name in switch.ledger.tasks]
        for parent in ("", *nearest_tasks(model, task, earlier, centres)):
            switch.to(switch.ledger.stage(parent))
            found[parent] = probe(model, task, options)
        switch.to(0)
        better_parent(found)

    drawn = torch.Generator().manual_seed(0)
    size = model.hidden_size
    centres |= {name: torch.randn(size, generator=drawn).numpy() for name in switches[MANY].ledger.tasks}
    ways = {f"{count:,} tasks": lambda count=count: choose(count) for count in switches}
    seconds = alternate(ways, turns=turns)
    what = f"choosing a parent: among {MANY:,} / among {FEW}"
    return [ratio(what, seconds, f"{MANY:,} tasks", f"{FEW} tasks", at_most=1.0)]
