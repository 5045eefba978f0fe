"""Strategies by name with small options, and their values to compare bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from avalanche.core import SupervisedPlugin
from compared import everything, logits
from torch import Tensor

from forgetfree import registry
from forgetfree.continual.strategy import ContinualStrategy
from forgetfree.continual.strategy_parts import Training

#: Momentum and decay for every strategy: both can move an entry that has no gradient.
SMALL: dict[str, Any] = {
    **{"steps": 4, "batch_size": 4},
    **{"optimizer": "momentum", "learning_rate": 0.05, "weight_decay": 0.1},
}
GRAFTING: dict[str, Any] = {"sparsity": 0.05, "mask_steps": 2, "mask_batch_size": 12}
OWN: dict[str, dict[str, Any]] = {
    "grafting-continual": GRAFTING,
    "graft-retrain": GRAFTING,
    "bare-graft": GRAFTING,
    "packnet": {"keep": 0.25},
    "wsn": {"capacity": 0.2, "mask_every": 1},
    "lora": {"rank": 4, "lora_learning_rate": 0.5, "learning_rate": 0.01},
    "o-lora": {"rank": 4, "lora_learning_rate": 0.5, "learning_rate": 0.01},
    "merge-task-arithmetic": {"weight": 0.5},
    "merge-ties": {"density": 0.3},
    "merge-stitch": {"sparsity": 0.4, "mask_steps": 2},
}
#: Models with a readout and an optimiser; each readout and each optimiser occurs once.
SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert-momentum": ("bert", "linear", {}),
    "roberta-adamw": (
        "roberta-mlm",
        "prompt",
        {"optimizer": "adamw", "learning_rate": 0.003, "lora_learning_rate": None},
    ),
    "gpt2-sgd": ("gpt2-lm", "causal", {"optimizer": "sgd"}),
}


class Plain(ContinualStrategy):
    """Trains everything, and answers with the one model as it is."""

    def begin(self, task: Any) -> Training:
        return self.everything(task)

    def answering(self, task: Any) -> Any:
        return nullcontext()


def make(name: str, stream: Any, *, seed: int = 0, **changes: Any) -> Any:
    """Return a strategy; a name that is not an option of any strategy is passed to the constructor."""
    cls = registry.strategy(name)
    known = cls.Options.model_fields
    everywhere = {key for each in OWN for key in registry.strategy(each).Options.model_fields}
    options = {key: value for key, value in (SMALL | OWN.get(name, {}) | changes).items() if key in known}
    rest = {key: value for key, value in changes.items() if key not in everywhere | set(known)}
    return cls(stream=stream, options=cls.Options(**options), seed=seed, **rest)


def learned_rows(strategy: Any) -> list[dict[str, Tensor]]:
    """Train on the whole stream, and return the logits before it and after each task."""
    rows = [logits(strategy)]
    for experience in strategy.stream.benchmark.train_stream:
        strategy.train(experience)
        rows.append(logits(strategy))
    return rows


def theta_of(strategy: Any) -> Tensor:
    """Return the model's current graftable tensors, flat."""
    flat: Tensor = strategy.space.flatten(strategy.model.backbone)
    return flat


class Watch(SupervisedPlugin):
    """Records the flat entries that any update of a task moved from their start, and the other tensors that changed."""

    def before_training_exp(self, strategy: Any, **_: Any) -> None:
        self.start, self.rest = theta_of(strategy), everything(strategy.model)
        self.moved, self.updates = torch.zeros_like(self.start, dtype=torch.bool), 0

    def after_update(self, strategy: Any, **_: Any) -> None:
        self.moved |= theta_of(strategy) != self.start
        self.updates += 1

    def moved_tensors(self, strategy: Any) -> set[str]:
        """Return the names of changed tensors outside the parameter space."""
        inside = {f"backbone.{spec.name}" for spec in strategy.space.tensors}
        after = everything(strategy.model)
        return {name for name, was in self.rest.items() if name not in inside and not torch.equal(was, after[name])}
