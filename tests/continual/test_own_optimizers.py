"""Optimisers and schedules of the user, compared with equivalent named ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from forgetfree import registry
from forgetfree.options import by_name, function_named, recorded
from forgetfree.training.single_task import fine_tuned_key
from forgetfree.training.training_options import TrainingOptions, rate_at, scheduled_rate

STEPS = 3
SMALL = {"steps": STEPS, "batch_size": 4}
GRAFTING = {"sparsity": 0.05, "mask_steps": 1, "mask_batch_size": 8}


def sgd(groups: Any) -> torch.optim.Optimizer:
    """Return the optimiser of ``optimizer=sgd`` with a rate of 0.1."""
    return torch.optim.SGD(groups, lr=0.1, weight_decay=1e-4)


def linear(done: int) -> float:
    """Return the rate factor of ``schedule=linear``."""
    return max(0.0, (STEPS - done) / STEPS)


def answers(name: str, stream: Any, **options: Any) -> dict[str, Any]:
    cls = registry.strategy(name)
    strategy = cls(stream=stream, options=cls.Options(**(SMALL | options)))
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
    return {task: found.logits for task, found in strategy.evaluate().items()}


@pytest.mark.sampled("continual-ft-own1", "grafting-continual-own2")
@pytest.mark.parametrize(
    ("name", "own"),
    [("fine-tune", {}), ("continual-ft", {}), ("grafting-continual", GRAFTING), ("bitfit", {}), ("replay", {})],
)
def test_a_function_does_what_the_named_one_does_to_the_bit(name: str, own: Any, tiny_stream: Any) -> None:
    """This holds for whole models, readouts and regions, in fine-tuning and after it."""
    named = answers(name, tiny_stream(), **own, optimizer="sgd", learning_rate=0.1)
    mine = answers(name, tiny_stream(), **own, optimizer=sgd, schedule=linear)
    other = answers(name, tiny_stream(), **own, optimizer=sgd, schedule=lambda done: 1.0)
    assert named.keys() == mine.keys()
    for task in named:
        assert (named[task] == mine[task]).all()
    assert any((mine[task] != other[task]).any() for task in mine)


def test_a_warm_up_multiplies_a_schedule_of_ones_own() -> None:
    options = TrainingOptions(schedule=lambda done: 0.5**done, warmup=0.5)
    assert [rate_at(done, 4, options) for done in range(4)] == [0.5, 0.5, 0.25, 0.125]
    assert [scheduled_rate(options, 4)(step) for step in (1, 4)] == [1e-2 * 0.5, 1e-2 * 0.125]
    assert scheduled_rate(TrainingOptions(optimizer=sgd), 4)(1) != scheduled_rate(TrainingOptions(), 4)(
        1
    )  # NaN: the rate is unknown


def test_what_is_recorded_is_a_name_and_what_has_one_is_found_by_it() -> None:
    options = TrainingOptions(optimizer="torch.optim:RMSprop", schedule=linear)
    assert options.optimizer is torch.optim.RMSprop
    written = recorded(options)
    assert written["optimizer"] == "torch.optim.rmsprop:RMSprop" and written["schedule"].endswith(":linear")
    assert json.loads(json.dumps(written)) == written
    assert by_name(torch.optim.RMSprop) == "torch.optim.rmsprop:RMSprop"
    assert function_named(by_name(torch.optim.RMSprop)) is torch.optim.RMSprop
    local = lambda done: 1.0  # noqa: E731
    assert by_name(local) is local and by_name("adamw") == "adamw"


def test_fine_tuned_models_of_two_functions_are_two(tiny_stream: Any) -> None:
    """They have one name, but a shared store must never mix them up."""
    stream = tiny_stream(stream="sst2")
    (task,) = stream.tasks

    def key(optimizer: Any) -> str:
        options = TrainingOptions(steps=1, optimizer=optimizer)
        return fine_tuned_key(stream.loaded, task, stream.pre_trained, options, 0, torch.device("cpu"))

    slow, fast = (lambda groups, rate=rate: torch.optim.SGD(groups, lr=rate) for rate in (1e-3, 1e-1))
    assert key(slow) == key(slow) != key(fast)
    assert key(torch.optim.RMSprop) == key("torch.optim:RMSprop") != key("sgd")
