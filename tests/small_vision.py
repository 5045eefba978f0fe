"""Small image benchmarks by Avalanche's generators, and networks with deterministic weights; no download."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from avalanche.benchmarks import dataset_benchmark, nc_benchmark
from avalanche.models import SimpleMLP
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from forgetfree import registry
from forgetfree.continual.stream import Stream, benchmark_stream
from forgetfree.data.examples import Examples

NETWORKS = ("mlp", "conv")
#: Few steps, at rates high enough to learn; decay and momentum, so that an unfrozen entry would move.
OPTIONS: dict[str, Any] = {
    "steps": 12,
    "batch_size": 8,
    "learning_rate": 0.05,
    "optimizer": "momentum",
    "weight_decay": 0.01,
    "sparsity": 0.2,
    "mask_steps": 2,
    "ewc_lambda": 1.0,
    "mem_size": 20,
}


class Labelled(TensorDataset):
    """Tensors with the ``targets`` that Avalanche's generators read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y)
        self.targets = y.tolist()


@cache
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)


def part(split: str, classes: int = 10, rows: int = 300) -> Labelled:
    """Return the first rows of the first classes for ``train``, or the last rows for ``test``."""
    x, y = digits()
    x, y = x[y < classes], y[y < classes]
    chosen = slice(0, rows) if split == "train" else slice(len(y) - rows // 2, None)
    return Labelled(x[chosen], y[chosen])


def split_digits(scenario: str, experiences: int = 5) -> Any:
    """Return two classes an experience; with ``task`` also task labels and classes from 0, with ``class`` neither."""
    task, parts = scenario == "task", [part(split, 2 * experiences) for split in ("train", "test")]
    return nc_benchmark(*parts, experiences, task_labels=task, shuffle=False, class_ids_from_zero_in_each_exp=task)


def permuted_digits(experiences: int = 3) -> Any:
    """Return experiences with all classes, each with its pixels in another order."""
    orders = [torch.randperm(64, generator=torch.Generator().manual_seed(i)) for i in range(experiences)]

    def permuted(split: str) -> list[Labelled]:
        x, y = part(split).tensors
        return [Labelled(x.flatten(1)[:, order].reshape(x.shape), y) for order in orders]

    return dataset_benchmark(permuted("train"), permuted("test"))


def network(kind: str, classes: int = 10) -> nn.Module:
    """Return Avalanche's MLP with dropout, or a small convolutional network with BatchNorm; the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "mlp":
            return SimpleMLP(num_classes=classes, input_size=64, hidden_size=24, drop_rate=0.2)
        return nn.Sequential(
            *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()),
            nn.Linear(8 * 16, classes),
        )


def stream(scenario: str, kind: str = "mlp", experiences: int = 3) -> Stream:
    """Return a new stream over one of the benchmarks."""
    benchmark = permuted_digits(experiences) if scenario == "domain" else split_digits(scenario, experiences)
    return benchmark_stream(benchmark, network(kind))


def make(name: str, stream: Stream, **changes: Any) -> Any:
    """Return a strategy by name, with its options from `OPTIONS`; a change that is no option goes to the constructor."""
    cls = registry.strategy(name)
    known = cls.Options.model_fields
    options = {key: value for key, value in (OPTIONS | changes).items() if key in known}
    rest = {key: value for key, value in changes.items() if key not in known}
    return cls(stream=stream, options=cls.Options(**options), **rest)


def inputs(rows: Examples) -> Tensor:
    """Return all inputs of a task, whose rows have one length."""
    return rows.batch(range(len(rows)))[0]


def benchmark_rows(experience: Any) -> tuple[Tensor, Tensor]:
    """Return all inputs and labels of an experience."""
    rows = [experience.dataset[i] for i in range(len(experience.dataset))]
    return torch.stack([row[0] for row in rows]), torch.tensor([int(row[1]) for row in rows])
