"""Bitwise comparisons of model tensors, and of the answers of strategies and runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from forgetfree.testing.trials import tensors as everything

__all__ = ["assert_same", "different", "everything", "learn", "logits", "run_logits", "state_of"]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a model's state dict."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def different(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that differ."""
    assert one.keys() == other.keys()
    pairs = {name: (torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one}
    return [name for name, (a, b) in pairs.items() if a.dtype != b.dtype or not torch.equal(a, b)]


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert different(one, other) == []


def logits(strategy: Any) -> dict[str, Tensor]:
    """Return the strategy's current logits for every task of its stream."""
    return {name: torch.from_numpy(answers.logits) for name, answers in strategy.evaluate().items()}


def learn(strategy: Any, count: int | None = None) -> Any:
    """Train the strategy on the first ``count`` tasks of its stream, and return it."""
    for experience in list(strategy.stream.benchmark.train_stream)[:count]:
        strategy.train(experience)
    return strategy


def run_logits(run: Path, strategy: str, task: str) -> Tensor:
    """Return the logits of a run's strategy after the last task, with seed 0."""
    return load_file(run / strategy / "seed-0" / "predictions.safetensors")[f"{task}/logits"]
