"""Gradient checkpointing gives the same bits and keeps less for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from forgetfree import registry
from forgetfree.errors import OptionError
from forgetfree.models.task_model import ModuleModel
from forgetfree.training.step import layer_checkpoints

MakeStream = Callable[..., Any]
OPTIONS: dict[str, Any] = {"steps": 3, "batch_size": 4, "sparsity": 0.01, "mask_steps": 2, "mask_batch_size": 8}
MODELS = [("bert", "linear"), ("gpt2-lm", "causal"), ("roberta-mlm", "prompt")]


def learned(stream: Any, **changes: Any) -> Any:
    cls = registry.strategy("grafting-continual")
    options = OPTIONS | {"learning_rate": 0.05} | changes
    strategy = cls(stream=stream, options=cls.Options(**options), device="cpu")
    strategy.train(stream.benchmark.train_stream[0])
    return strategy.ledger.records[0]


@pytest.mark.parametrize(("kind", "readout"), MODELS)
@pytest.mark.parametrize("source", ["mask", "gradient"])
@pytest.mark.sampled("mask-gpt2-lm-causal", "gradient-bert-linear")
def test_every_phase_ends_in_the_same_bits(tiny_stream: MakeStream, kind: str, readout: str, source: str) -> None:
    """The phases are fine-tuning or a readout, the choice of a region, and its training, with dropout."""

    def stream() -> Any:
        made = tiny_stream(kind, readout)
        made.model.backbone.config.use_cache = False  # cached keys have another memory layout, and round differently
        return made

    plain, again = (learned(stream(), region_from=source, gradient_checkpointing=wanted) for wanted in (False, True))
    assert plain.region == again.region
    assert torch.equal(plain.owned.values, again.owned.values)
    assert all(torch.equal(each, again.readout[name]) for name, each in plain.readout.items())


@pytest.mark.parametrize(("kind", "readout"), MODELS[:2])
def test_less_is_kept_for_the_backward_pass(tiny_stream: MakeStream, kind: str, readout: str) -> None:
    stream = tiny_stream(kind, readout)
    model, rows = stream.model, stream.tasks[0].train
    x, _, t = rows.batch(range(8))

    def kept(wanted: bool) -> int:
        sizes = dict[int, int]()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with layer_checkpoints(model, wanted), torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            model(x, t)
        return sum(sizes.values())

    assert kept(True) < 0.7 * kept(False)
    assert "forward" not in vars(model.backbone)


def test_a_network_without_layers_is_refused() -> None:
    model = ModuleModel(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)))
    model.add_task("toy", 2)
    with pytest.raises(OptionError, match="needs a list of layers of one class, which Sequential does not have"):
        layer_checkpoints(model, True).__enter__()
