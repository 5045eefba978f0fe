"""A batch with rows of eight tasks, compared with one pass of the base model over the same rows.

python -m benchmarks.speed mixed_batch
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.speed.measurement import Figure, alternate, ratio
from forgetfree.continual.region_strategy import StandsOn
from forgetfree.core.regions import Region
from forgetfree.data.sources import load_tasks
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Ledger, Record
from forgetfree.ledger.mixed_batch import MixedBatchModel
from forgetfree.ledger.switch import LedgerSwitch
from forgetfree.models.loading import LoadedModel, load_model

TASKS = 8
SPARSITY = 1e-4


def mixed_model(loaded: LoadedModel, tasks: int, stands_on: StandsOn, prefix: str = "") -> MixedBatchModel:
    """Return a model for tasks ``0`` … with random regions: the worst case, because learned regions lie in few rows.

    Args:
        loaded: the base model; it gets a readout for each task.
        tasks: the number of tasks.
        stands_on: ``union`` (all earlier tasks) or ``alone`` (θ_pre).
        prefix: the prefix of task names.
    """
    model, space = loaded.model, loaded.model.space()
    generator = torch.Generator().manual_seed(0)
    ledger = Ledger(space, loaded.fingerprint)
    for number in range(tasks):
        task = f"{prefix}{number}"
        region = Region.of(torch.randint(len(space), (round(SPARSITY * len(space)),), generator=generator))
        parent = ledger.last if stands_on == "union" else ""
        owned = ledger.free(region, parent)
        values = space.gather(model.backbone, owned.indices) + 0.02 * torch.randn(len(owned), generator=generator)
        ledger.append(Record(task, region, Graft(owned, values), SPARSITY, parent=parent))
        model.add_task(task, 2 + number % 3)
    return MixedBatchModel(model, LedgerSwitch(ledger, model.backbone, fingerprint=loaded.fingerprint), pad=loaded.pad)


def demo_rows(loaded: LoadedModel, count: int) -> list[Tensor]:
    """Return rows of the three demo tasks, in a random order."""
    tasks = load_tasks("qnli,ag_news,sst2", "demo")
    pool = [ids for each in tasks for ids in loaded.encoder(each.task)(each.train)]
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))[:count]
    return [torch.tensor(pool[i]) for i in order.tolist()]


def base_pass(loaded: LoadedModel, rows: list[Tensor]) -> Callable[[], object]:
    """Return the base model's pass over all rows, with one readout."""
    model, x = loaded.model, pad_sequence(rows, batch_first=True, padding_value=loaded.pad)

    @torch.no_grad()
    def answer() -> Tensor:
        return model.read(model.features(x), 0)

    return answer


def lora_pass(loaded: LoadedModel, rows: list[Tensor]) -> Callable[[], object]:
    """Return PEFT's pass over a mixed batch: LoRA of rank 8 on queries and values, row i for adapter i modulo eight."""
    config = LoraConfig(r=8, target_modules=["query", "value"])
    network: Any = get_peft_model(copy.deepcopy(loaded.model.backbone), config, adapter_name="0").eval()
    for name in map(str, range(1, TASKS)):
        network.add_adapter(name, config)
    x = pad_sequence(rows, batch_first=True, padding_value=loaded.pad)
    model: Any = loaded.model
    inputs: dict[str, Tensor] = model.inputs(x)
    names = [str(i % TASKS) for i in range(len(rows))]

    @torch.no_grad()
    def answer() -> object:
        return network(**inputs, adapter_names=names)

    return answer


def measured(stands_on: StandsOn, sizes: Mapping[int, float], turns: int) -> list[Figure]:
    """Return the ratios for one kind of ledger.

    Args:
        stands_on: as in `mixed_model`.
        sizes: rows per task, and the ratio that the project accepts.
        turns: see `figures`.
    """
    loaded = load_model("minilm", "linear")
    loaded.model.eval()
    mixed = mixed_model(loaded, TASKS, stands_on)
    found = []
    for each, wanted in sizes.items():
        rows = demo_rows(loaded, TASKS * each)
        tasks = [str(i % TASKS) for i in range(len(rows))]
        contenders: dict[str, Callable[[], object]] = {
            "ours": partial(mixed.answer, rows, tasks),
            "base": base_pass(loaded, rows),
        }
        if each == 1:
            contenders["PEFT"] = lora_pass(loaded, rows)
        seconds = alternate(contenders, turns=turns, warm_up=2)
        shape = f"{TASKS} tasks of 1e-4 ({stands_on}), rows a task: {each}"
        found.append(ratio(f"mixed batch / base model, {shape}", seconds, "ours", "base", at_most=wanted, limit=1))
        if each == 1:
            found.append(ratio("PEFT: mixed batch of LoRA / base model, rows a task: 1", seconds, "PEFT", "base"))
    return found


def figures(turns: int = 9) -> list[Figure]:
    """Measure with minilm and rows of the demo tasks of many lengths: the one pass pads all to the longest."""
    return [*measured("union", {1: 1.2, 4: 1.15, 8: 1.0}, turns), *measured("alone", {1: 1.2}, turns)]
