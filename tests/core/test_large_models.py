"""Memory to choose and train a region in a model of eight billion parameters, counted on meta tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.speed.measurement import PeakMemory
from forgetfree.core import products, selection
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.readout_model import body_of
from forgetfree.core.regions import Region
from forgetfree.core.selection import PlainTensors, budget, each_gradient, saliency
from forgetfree.core.trained import RegionParameters, trainable
from forgetfree.training.step import layer_checkpoints

#: Rows, tokens per row, and answer tokens per row, for which logits are computed.
ROWS, TOKENS, ANSWER = 8, 512, 48


def peak_with_weights(model: torch.nn.Module) -> PeakMemory:
    """Return a counter that includes a model's weights until they are freed: training a region moves them."""
    peak = PeakMemory()
    for tensor in model.parameters():
        peak.count(tensor)
    return peak


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Llama 3.1's shape in bfloat16, on the meta device. Code that must read a value is replaced."""
    monkeypatch.setattr(selection, "check_loss", lambda loss, step: 0.0)
    monkeypatch.setattr(selection, "_check_finite", lambda sizes: None)
    kept = SimpleNamespace(**vars(torch))
    kept.unique = lambda values, return_inverse: (values, torch.empty_like(values))  # an upper bound
    monkeypatch.setattr(products, "torch", kept)
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return model.eval()


def loss_of(model: Any) -> Tensor:
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long, device="meta")
    mask = torch.ones(ROWS, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta")
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, -ANSWER:]
    logits = model.lm_head(hidden.reshape(-1, hidden.shape[-1])).float()
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device="meta"))


@pytest.mark.slow
def test_eight_billion_fit_on_one_card(llama: Any) -> None:
    """Choosing γ takes less than 22 GB, and training it less than 20 GB (the weights are 16 GB)."""
    body = body_of(llama)
    space = ParameterSpace.of(body)
    count = budget(len(space), 1e-4)
    largest = max(space.tensors, key=lambda spec: spec.size)

    class Loss:
        scale = 1.0

        def __call__(self, batch: Any) -> float:
            loss_of(llama).backward()  # type: ignore[no-untyped-call]
            return 0.0

    tensors = space.parameters(body)
    checkpoints: Any = layer_checkpoints(SimpleNamespace(backbone=llama), True)  # type: ignore[arg-type]
    with checkpoints, peak_with_weights(llama) as choosing:
        each_gradient(
            PlainTensors(body, space),
            [None],
            Loss(),
            lambda number, gradient: saliency("snip", gradient, tensors[number]),
        )
    best, scores = selection._Highest(space, count, None, ()), torch.rand(largest.size)
    with PeakMemory(scores) as ranking:  # the ranking must read values, so it is measured on the CPU
        best.add(space.tensors.index(largest), scores)
    with peak_with_weights(llama) as training:
        region = RegionParameters(body, space, Region(torch.arange(0, len(space), len(space) // count)), llama)
        with layer_checkpoints(SimpleNamespace(backbone=llama), True), trainable(llama, []), region.sampling():  # type: ignore[arg-type]
            loss_of(llama).backward()  # type: ignore[no-untyped-call]
            torch.optim.AdamW(region.parameters).step()
            region.write()
    chosen, trained = (choosing.bytes + ranking.bytes) / 1e9, training.bytes / 1e9
    print(
        f"{len(space):,} graftable entries, in GB: to choose {count:,} of them {chosen:.1f}, to train them {trained:.1f}"
    )
    assert 16 < chosen < 22 and 16 < trained < 20
