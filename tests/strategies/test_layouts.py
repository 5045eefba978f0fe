"""Promises of forget-free strategies on models whose tensors differ in dtype or memory layout, or are tied."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_vision
import torch
from compared import different, everything, learn, logits
from small_strategies import learned_rows, make
from torch import nn

from forgetfree import registry
from forgetfree.continual.stream import Stream, benchmark_stream, make_stream
from forgetfree.core.fingerprint import fingerprint_of
from forgetfree.core.parameters import ParameterSpace
from forgetfree.core.regions import Region
from forgetfree.core.trained import RegionParameters, WholeTensors
from forgetfree.errors import UsageError
from forgetfree.ledger.switch import LedgerSwitch
from forgetfree.testing.tiny import tiny_model, tiny_task

TASKS = ("qnli", "ag_news", "sst2")
FORGET_FREE = [name for name in registry.STRATEGIES if registry.strategy(name).forget_free]


def bert(change: Any) -> Stream:
    loaded = tiny_model()
    change(loaded.model.backbone)
    loaded = replace(loaded, fingerprint=fingerprint_of(loaded.model.backbone))
    return make_stream("tiny", [tiny_task(name) for name in TASKS], loaded)


def to_mixed(backbone: nn.Module) -> None:
    """Convert to bfloat16 except for normalisations, as large models are often stored."""
    backbone.bfloat16()
    for module in backbone.modules():
        if isinstance(module, (nn.LayerNorm, nn.BatchNorm1d)):
            module.float()


def tie_layers(backbone: Any) -> None:
    backbone.encoder.layer[1] = backbone.encoder.layer[0]


def channels_last() -> Stream:
    network = small_vision.network("conv", 6).to(memory_format=torch.channels_last)
    return benchmark_stream(small_vision.split_digits("task", 3), network)


STREAMS = {
    "mixed": lambda: bert(to_mixed),
    "bf16": lambda: bert(lambda backbone: backbone.bfloat16()),
    "tied": lambda: bert(tie_layers),
    "channels-last": channels_last,
}


#: Strategies and streams; LoRA adapts linear layers, and the convolutional network has none to adapt.
PAIRS = [(name, kind) for name in FORGET_FREE for kind in STREAMS if (name, kind) != ("lora", "channels-last")]


@pytest.mark.sampled("bitfit-mixed", "bitfit-channels-last", "grafting-continual-channels-last", "packnet-mixed")
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_earlier_tasks_keep_their_logits_and_the_model_is_restored(name: str, kind: str, tmp_path: Path) -> None:
    """Logits are equal to the bit after every later task, and in a new strategy after loading; θ_pre is copied back."""
    learner = make(name, STREAMS[kind]())
    _, *rows = learned_rows(learner)
    tasks = [task.name for task in learner.stream.tasks]
    for i, task in enumerate(tasks):
        assert all(torch.equal(rows[i][task], later[task]) for later in rows[i:])
        assert i == 0 or not torch.equal(rows[i][task], rows[i - 1][task])  # the task changed its own logits
    learner.save(tmp_path)
    again = make(name, STREAMS[kind]())
    if name == "fine-tune":  # its models are in its own store
        again.models._store = learner.models._store
    again.load(tmp_path)
    assert different(rows[-1], logits(again)) == []
    if learner.ledger is not None:
        assert_restored(learner, STREAMS[kind]().model.backbone)


def assert_restored(learner: Any, fresh: nn.Module) -> None:
    """Check the weights after every switch, in any dtype; entries without an owner never move."""
    stream, ledger = learner.stream, learner.ledger
    stream.pre_trained.load_(stream.model)
    backbone = stream.model.backbone
    before = everything(backbone)
    space = stream.model.space()
    assert different(everything(fresh), before) == []
    switch = LedgerSwitch(ledger, backbone)
    for stage in (1, 3, 2, 3, 1):
        switch.to(stage)
        held = space.flatten(backbone)
        free = ~ledger.owned().mask(len(space))
        assert torch.equal(held[free], stream.pre_trained.theta[free])
        graft = ledger.graft(ledger.tasks[stage - 1])
        assert torch.equal(held[graft.region.indices], graft.values)
    switch.to(0)
    assert different(everything(backbone), before) == []


def test_scores_and_regions_in_training_are_float32() -> None:
    stream = STREAMS["bf16"]()
    learner = make("grafting-continual", stream)
    space, task = stream.model.space(), stream.tasks[0]
    found = learner.bench(task).localized(learner.fine_tuned(task), learner.options)
    assert found.scores.dtype == torch.float32
    assert len(found.scores.unique()) > 100  # steps of many sizes, more than an 8-bit mantissa could show
    assert RegionParameters(stream.model.backbone, space, found.region).values.dtype == torch.float32


def test_steps_too_small_for_bfloat16_add_up() -> None:
    """A bfloat16 entry near 1 cannot hold a step of 1e-4; fifty steps add up because the vector is float32."""
    layer = nn.Linear(35, 1, bias=False).bfloat16()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    space = ParameterSpace.of(layer)
    trained = RegionParameters(layer, space, Region(torch.arange(35)))
    optimizer = torch.optim.SGD(trained.parameters, lr=1e-4)
    for _ in range(50):
        layer(torch.ones(1, 35, dtype=torch.bfloat16)).sum().backward()
        trained.collect()
        optimizer.step()
        trained.write()
    assert torch.allclose(trained.values, torch.tensor(1 - 50 * 1e-4), atol=1e-5)
    assert bool((layer.weight < 1).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_whole_tensors_take_small_steps_in_half_precision(dtype: torch.dtype) -> None:
    """AdamW moves an entry by about its rate; in float16 the squares of gradients would vanish, and steps be far too long."""
    layer = nn.Linear(35, 1).to(dtype)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    bias = layer.bias.detach().clone()
    trained = WholeTensors([layer.weight])
    optimizer = torch.optim.AdamW(trained.parameters, lr=1e-4, weight_decay=0.0)
    for _ in range(200):
        (layer(torch.ones(1, 35, dtype=dtype)).sum() * 1e-5).backward()
        trained.collect()
        optimizer.step()
        trained.write()
    assert torch.allclose(layer.weight.float(), torch.tensor(1 - 200 * 1e-4), atol=4e-3)
    assert torch.equal(layer.bias, bias) and layer.weight.grad is None


def test_what_runs_avalanches_code_refuses_weights_in_half_precision() -> None:
    with pytest.raises(
        UsageError, match=r"expected float32, got torch\.bfloat16 of '.*'\. Give the network in float32"
    ):
        make("ewc", STREAMS["mixed"]())


def test_buffers_are_right_after_the_model_has_moved() -> None:
    """Moving a model to another device replaces its buffers by new tensors."""
    learner = learn(make("grafting-continual", channels_last()))
    ledger, model = learner.ledger, learner.stream.model
    learner.stream.pre_trained.load_(model)
    switch = LedgerSwitch(ledger, model.backbone)
    before = everything(model.backbone)
    there = dict(model.backbone.named_buffers())
    model.backbone._apply(torch.clone)  # the same as `to` with a single device
    assert all(buffer is not there[name] for name, buffer in model.backbone.named_buffers())
    for record in ledger.records:
        with switch.task(record.task):
            held = everything(model.backbone)
            assert record.buffers and all(torch.equal(held[name], record.buffers[name]) for name in record.buffers)
        assert different(everything(model.backbone), before) == []
