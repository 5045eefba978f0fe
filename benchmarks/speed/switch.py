"""Switching one model in memory from task to task, compared with loading the task's weights.

python -m benchmarks.speed switch

If tasks stand alone, a switch restores θ_pre at one region and writes another; in a ledger of unions it does one of the two.
The limit is the time of these writes alone. PEFT's `set_adapter` changes no weights: its model computes the adapter at every
forward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.speed.ledger_growth import ledger_of
from benchmarks.speed.measurement import Figure, alternate, ratio
from forgetfree.continual.region_strategy import StandsOn
from forgetfree.core.parameters import ParameterSpace
from forgetfree.ledger.ledger import Ledger
from forgetfree.ledger.switch import LedgerSwitch
from forgetfree.models.loading import load_model

_WAYS: tuple[StandsOn, ...] = ("alone", "union")


def with_adapters(model: nn.Module) -> nn.Module:
    """Return a copy of the model with two LoRA adapters of rank 8."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["query", "value"])
    adapted: nn.Module = get_peft_model(copy.deepcopy(model), config, adapter_name="first")
    adapted.add_adapter("second", config)  # type: ignore[operator]
    return adapted


def tensor_by_tensor(model: nn.Module, ledger: Ledger) -> None:
    """Switch to one task and to the next as plain PyTorch would: index every tensor."""
    for record in ledger.records[:2]:
        owned = record.owned
        before = ledger.space.gather(model, owned.region.indices)
        ledger.space.scatter_(model, owned.region.indices, owned.values)
        ledger.space.scatter_(model, owned.region.indices, before)


def figures(turns: int = 9) -> list[Figure]:
    """Measure on minilm: to another task and back."""
    model = load_model("minilm", "linear").model.backbone
    plain, other, adapted = copy.deepcopy(model), copy.deepcopy(model), with_adapters(model)
    states = [{name: tensor.clone() for name, tensor in plain.state_dict().items()} for _ in range(2)]
    space, found = ParameterSpace.of(model), list[Figure]()
    flat = torch.zeros(len(space))
    for share, entries in (("1e-3", 10_646), ("1e-4", 1_064)):
        for stands_on in _WAYS:
            ledger = ledger_of(space, 3, entries, stands_on)
            switch, writes = LedgerSwitch(ledger, model, check=False), 4 if stands_on == "alone" else 2
            contenders: dict[str, Callable[[], object]] = {
                "ours": partial(_flip, switch),
                "load_state_dict": lambda: [plain.load_state_dict(state) for state in states],
                "tensor by tensor": partial(tensor_by_tensor, other, ledger),
                "set_adapter": lambda: [adapted.set_adapter(name) for name in ("second", "first")],  # type: ignore[operator]
                "writes": partial(_write, flat, ledger, writes),
            }
            seconds = alternate(contenders, turns=turns, repeats=3)
            limit = float(np.median(seconds["writes"] / seconds["load_state_dict"]))
            what = f"s = {share}, {stands_on}"
            found += [
                ratio(
                    f"switch / load_state_dict, {what}",
                    seconds,
                    "ours",
                    "load_state_dict",
                    at_most=1 / 50,
                    limit=limit,
                ),
                ratio(f"switch / PEFT set_adapter, {what}", seconds, "ours", "set_adapter"),
                ratio(f"switch / the same tensor by tensor, {what}", seconds, "ours", "tensor by tensor"),
            ]
            switch.to(0)
    return found


def _flip(switch: LedgerSwitch) -> None:
    switch.to(2)
    switch.to(1)


def _write(flat: Tensor, ledger: Ledger, writes: int) -> None:
    for number in range(writes):
        owned = ledger.records[number % 2].owned
        flat.scatter_(0, owned.region.indices, owned.values)
