"""Every baseline is compared with Avalanche's own code: the same data, batches and seeds give the same weights to the bit.

The reference is Avalanche's strategy in Avalanche's loop, with one optimiser for all tasks. Its subclass here changes two
things only: it uses the planned batches, because Avalanche shuffles by the global generator, and it seeds the generators
where ours does. The model has no dropout, because Avalanche's plugins switch it on or off.

Where Avalanche's own code is wrong (docs/baselines.md), the comparison avoids the wrong part: see ``SETUPS``.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from avalanche import _annotations
from avalanche.training import plugins, supervised
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn
from torch.utils.data import DataLoader

from forgetfree import registry
from forgetfree.seeds import derive_seed
from forgetfree.training.step import plan
from forgetfree.training.training_options import TrainingOptions

MakeStream = Callable[..., Any]

#: Two epochs over the 24 training rows of a task, so that a plugin's own loader starts again, too.
ROUNDS, STEPS, BATCH, RATE = 2, 12, 4, 0.05


@dataclass(frozen=True)
class Setup:
    """A baseline, and the equivalent strategy of Avalanche.

    Attributes:
        name: the name of ours.
        reference: Avalanche's strategy, or a plugin for its plain strategy.
        options: the options of both, by name.
        ours, theirs: options of only one of them.
        scenario: the scenario of the stream; in ``class``, all tasks share one readout, and no two labels have one number.
        untasked: the reference's model takes no task labels.
        copies: let ``.cpu()`` copy a tensor in the reference.
    """

    name: str
    reference: Any
    options: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    scenario: str = "task"
    untasked: bool = False
    copies: bool = False


ALL_ROWS = {"importance_rows": None}
SETUPS = [
    Setup("replay", plugins.ReplayPlugin, {"mem_size": 10, "batch_size_mem": 3}),
    # Avalanche does not project readouts without a gradient, but has them in the constraint.
    Setup(
        "agem", supervised.AGEM, {"sample_size": 6}, {"patterns_per_experience": 8}, {"patterns_per_exp": 8}, "class"
    ),
    Setup(
        "gem",
        supervised.GEM,
        {"memory_strength": 0.5},
        {"patterns_per_experience": 6},
        {"patterns_per_exp": 6},
        "class",
    ),
    # Avalanche takes labels with one number for one label, even of different tasks.
    Setup("gdumb", supervised.GDumb, {"mem_size": 18}, scenario="class"),
    # As above; Avalanche also calls the model without task labels, and stacks logits, which must have one width.
    Setup(
        "der",
        supervised.DER,
        {"mem_size": 18, "batch_size_mem": 3, "alpha": 0.3, "beta": 0.7},
        scenario="class",
        untasked=True,
    ),
    Setup("ewc", supervised.EWC, {"ewc_lambda": 0.05}, ALL_ROWS, {"mode": "separate"}),
    Setup("online-ewc", supervised.EWC, {"ewc_lambda": 0.05, "decay_factor": 0.8}, ALL_ROWS, {"mode": "online"}),
    # If .cpu() does not copy, as on a CPU, Avalanche's penalty is always 0.
    Setup("si", supervised.SynapticIntelligence, {"si_lambda": 1000.0, "eps": 1e-6}, copies=True),
    Setup("mas", supervised.MAS, {"lambda_reg": 0.1, "alpha": 0.4}, ALL_ROWS),
    # With fewer steps than delta_t, all values are NaN.
    Setup("rwalk", plugins.RWalkPlugin, {"ewc_lambda": 0.2, "ewc_alpha": 0.8, "delta_t": 5}),
    Setup("lwf", supervised.LwF, {"alpha": 0.8, "temperature": 3.0}),
    Setup("cumulative", supervised.Cumulative),
    Setup("joint", supervised.JointTraining),
]


class Untasked(nn.Module):
    """Wraps a model with one readout, so that it takes no task labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x, 0)
        return logits


class Rounds:
    """A data loader of all batches, split into the epochs that Avalanche counts."""

    def __init__(self, loader: DataLoader[Any], batches: int) -> None:
        self._batches, self._size = iter(loader), batches // ROUNDS

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches, self._size)


class Planned:
    """Mixin for Avalanche's strategies: it uses the planned batches, and seeds the generators as ours are."""

    def _before_training_exp(self: Any, **kwargs: Any) -> None:
        self.task = self.tasks[self.experience.current_experience]
        self.task_seed = derive_seed(0, "train", self.task.name)
        random.seed(self.task_seed)
        np.random.seed(self.task_seed % 2**32)
        torch.manual_seed(self.task_seed)
        super()._before_training_exp(**kwargs)  # type: ignore[misc]
        torch.manual_seed(derive_seed(self.task_seed, "dropout"))

    def make_train_dataloader(self: Any, **kwargs: Any) -> None:
        data, rows = self.adapted_dataset, self.task.train
        pad = rows.pad  # a token that does not occur in these texts
        own = data is self.experience.dataset
        lengths = rows.lengths if own else [int((data[i][0] != pad).nonzero().max()) + 1 for i in range(len(data))]
        steps = STEPS * len(self.tasks) if isinstance(self, supervised.JointTraining) else STEPS
        batches = plan(lengths, TrainingOptions(batch_size=BATCH), steps, self.task_seed)
        loader = DataLoader(data, batch_sampler=batches, collate_fn=data.collate_fn, generator=torch.Generator())
        self.dataloader = Rounds(loader, steps)


def fresh(tiny_stream: MakeStream, scenario: str) -> Any:
    """Return a stream whose model has no dropout, and requires gradients only where ours does."""
    stream = tiny_stream("bert", "linear", scenario=scenario)
    model = stream.model
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trained = {id(p) for p in (*model.space().parameters(model.backbone), *model.learned_readouts())}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    assert any(not parameter.requires_grad for parameter in model.parameters())  # embeddings are frozen
    return stream


def by_avalanche(tiny_stream: MakeStream, setup: Setup) -> dict[str, Tensor]:
    """Return the final weights of Avalanche's own strategy."""
    stream = fresh(tiny_stream, setup.scenario)
    model = Untasked(stream.model) if setup.untasked else stream.model
    arguments = setup.options | setup.theirs
    kind = setup.reference
    with warnings.catch_warnings(), mock.patch.object(_annotations, "warnings"):  # warnings of Avalanche's @deprecated
        warnings.simplefilter("ignore")
        base: dict[str, Any] = {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=RATE),
            "criterion": nn.CrossEntropyLoss(),
            "train_mb_size": BATCH,
            "train_epochs": ROUNDS,
            "evaluator": EvaluationPlugin(),
        }
        if not issubclass(kind, SupervisedTemplate):
            kind, arguments = SupervisedTemplate, {"plugins": [kind(**arguments)]}
        strategy = type("Reference", (Planned, kind), {})(**base, **arguments)
        strategy.tasks = stream.tasks
        if setup.name == "joint":
            strategy.train(stream.benchmark.train_stream)
        else:
            for experience in stream.benchmark.train_stream:
                strategy.train(experience)
    trained = strategy.model.model if setup.untasked else strategy.model
    return {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}


def by_us(tiny_stream: MakeStream, setup: Setup) -> dict[str, Tensor]:
    """Return the final weights of our strategy."""
    stream = fresh(tiny_stream, setup.scenario)
    cls = registry.strategy(setup.name)
    plain = {"steps": STEPS, "batch_size": BATCH, "learning_rate": RATE, "weight_decay": 0.0, "schedule": "constant"}
    strategy = cls(stream=stream, options=cls.Options(**(plain | setup.options | setup.ours)), seed=0)
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
    assert strategy.model is stream.model
    return {name: parameter.detach().clone() for name, parameter in strategy.model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.sampled("der")
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_ours_is_avalanches(tiny_stream: MakeStream, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = by_us(tiny_stream, setup)
    with monkeypatch.context() as patch:
        if setup.copies:
            patch.setattr(Tensor, "cpu", Tensor.clone)
        theirs = by_avalanche(tiny_stream, setup)
    differing = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert differing == []
    assert all(bool(tensor.isfinite().all()) for tensor in ours.values())
    # The method has an effect: plain training gives other weights.
    naive = Setup(setup.name, supervised.Naive, scenario=setup.scenario)
    assert not same(ours, by_avalanche(tiny_stream, naive))


def test_every_baseline_is_compared() -> None:
    modules = {name: entry.target.split(":")[0].rpartition(".")[2] for name, entry in registry.STRATEGIES.items()}
    baselines = {name for name, module in modules.items() if module in ("avalanche_baselines", "gem", "all_data")}
    assert baselines == {setup.name for setup in SETUPS}
