"""Comparisons bit for bit: of the tensors of models, and of the answers of strategies and runs."""

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
    """A copy of a model's state dict."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def different(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that are not the same in both."""
    assert one.keys() == other.keys()
    pairs = {name: (torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one}
    return [name for name, (a, b) in pairs.items() if a.dtype != b.dtype or not torch.equal(a, b)]


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert different(one, other) == []


def logits(strategy: Any) -> dict[str, Tensor]:
    """What a strategy answers now, for every task of its stream."""
    return {name: torch.from_numpy(answers.logits) for name, answers in strategy.evaluate().items()}


def learn(strategy: Any, count: int | None = None) -> Any:
    """The strategy, once it has learned the first tasks of its stream."""
    for experience in list(strategy.stream.benchmark.train_stream)[:count]:
        strategy.train(experience)
    return strategy


def run_logits(run: Path, strategy: str, task: str) -> Tensor:
    """What a strategy of a run answered at its end, with the seed 0."""
    return load_file(run / strategy / "seed-0" / "predictions.safetensors")[f"{task}/logits"]
