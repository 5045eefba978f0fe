"""Ledgers of 10 to 10,000 tasks: the time and the bytes of one task do not grow with the number of tasks.

python -m benchmarks.speed ledger_growth

The model has 21.3 M graftable entries, and every task a random region of 2,000. "A task" of load and save is their time over
the number of tasks; `forgetfree ledger verify` takes as long as load.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.speed.measurement import Figure, alternate, ratio
from forgetfree.continual.region_strategy import StandsOn
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Ledger, Record
from forgetfree.ledger.switch import LedgerSwitch

TASKS = (10, 100, 1_000, 10_000)
#: The entries of a region.
ENTRIES = 2_000


def encoder() -> nn.Module:
    """Return a model with twice minilm's layers, and few words."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=1_000, hidden_size=384, num_hidden_layers=12, num_attention_heads=12, intermediate_size=1_536
    )
    model: nn.Module = BertModel(config, add_pooling_layer=False)
    return model.train(False)


def record_of(ledger: Ledger, task: str, region: Region, parent: str, generator: torch.Generator) -> Record:
    """Return a record with normal values."""
    free = ledger.free(region, parent)
    values = torch.randn(len(free), generator=generator).mul_(0.05)
    return Record(task, region, Graft(free, values), len(region) / len(ledger.space), parent=parent)


def ledger_of(space: ParameterSpace, tasks: int, entries: int, stands_on: StandsOn = "union") -> Ledger:
    """Return a ledger of random regions."""
    made, generator = Ledger(space, "f" * 64), torch.Generator().manual_seed(tasks)
    for task in range(tasks):
        region = Region.of(torch.randint(0, len(space), (entries,), generator=generator))
        parent = made.last if stands_on == "union" else ""
        made.append(record_of(made, f"task-{task}", region, parent, generator))
    return made


def next_records(ledger: Ledger, count: int) -> Iterator[Record]:
    """Yield records of `ENTRIES` entries each, which no task owns."""
    generator = torch.Generator().manual_seed(0)
    free = (~ledger.owned().mask(len(ledger.space))).nonzero().squeeze(1)
    chosen: Tensor = free[torch.randperm(len(free), generator=generator)[: count * ENTRIES]]
    for number, part in enumerate(torch.split(chosen, ENTRIES)):
        region = Region(part.sort().values)
        yield record_of(ledger, f"new-{number}", region, ledger.last, generator)


def resident() -> int:
    """Return the bytes of memory that this process holds, or 0 if the system does not report it."""
    gc.collect()
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * 4096 if file.exists() else 0


def figures(turns: int = 9) -> list[Figure]:
    """Measure on synthetic regions."""
    model = encoder()
    space = ParameterSpace.of(model)
    ledgers, held = dict[int, Ledger](), dict[int, int]()
    for tasks in TASKS:
        before = resident()
        ledgers[tasks] = ledger_of(space, tasks, ENTRIES)
        held[tasks] = resident() - before
    found = []
    with tempfile.TemporaryDirectory() as directory:
        files = {tasks: Path(directory) / f"{tasks}.safetensors" for tasks in TASKS}
        whole: dict[str, dict[int, float]] = {"save": {}, "load": {}}
        for tasks, file in files.items():  # long enough to be measured once
            for what, action in (("save", ledgers[tasks].save), ("load", Ledger.load)):
                begin = perf_counter()
                action(file)
                whole[what][tasks] = (perf_counter() - begin) / tasks
        first, last = TASKS[1], TASKS[-1]
        for what, times in whole.items():
            named = {f"{n:,} tasks": each for n, each in times.items()}
            value = times[last] / times[first]
            found.append(Figure(f"{what}, a task: of {last:,} / of {first:,}", value, at_most=1.5, seconds=named))
        sizes = {n: file.stat().st_size / n for n, file in files.items()}
        found.append(
            Figure(f"bytes of the file, a task: of {last:,} / of {first:,}", sizes[last] / sizes[first], at_most=1.1)
        )
        found.append(Figure(f"bytes of the file, a task of {last:,}", sizes[last], unit="B"))
    if held[last]:
        found.append(Figure(f"memory, a task of {last:,}", held[last] / last, unit="B"))
    new = {n: next_records(ledgers[n], (turns + 1) * 3) for n in TASKS}
    appends = {f"{n:,} tasks": lambda n=n: ledgers[n].append(next(new[n])) for n in TASKS}
    seconds = alternate(appends, turns=turns, repeats=3)
    low, median, high = np.quantile(1000 * seconds[f"{last:,} tasks"], [0.25, 0.5, 0.75])
    appended = Figure(f"append to {last:,} tasks", float(median), float(low), float(high), 5, unit="ms")
    found[:0] = [appended, _flat("append", seconds, at_most=1.5)]
    found.append(_switch(model, ledgers, turns))
    return found


def _switch(model: nn.Module, ledgers: dict[int, Ledger], turns: int) -> Figure:
    switches = {n: LedgerSwitch(ledger, model, check=False) for n, ledger in ledgers.items()}

    def flip(tasks: int) -> None:
        switches[tasks].to(7)
        switches[tasks].to(8)

    flips = {f"{n:,} tasks": lambda n=n: flip(n) for n in ledgers}
    seconds = alternate(flips, turns=turns, repeats=5)
    for switch in switches.values():
        switch.to(0)
    return _flat("switch to the task before and back", seconds, at_most=1.5)


def _flat(what: str, seconds: dict[str, np.ndarray], *, at_most: float | None = None) -> Figure:
    least, most = f"{TASKS[0]:,} tasks", f"{TASKS[-1]:,} tasks"
    return ratio(f"{what}: of {most} / of {least}", seconds, most, least, at_most=at_most, limit=1)
