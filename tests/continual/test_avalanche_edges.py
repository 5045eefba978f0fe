"""Experiences that are parts, copies, or of other streams; models that are called without task labels."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import small_vision as vision
import torch
from avalanche.benchmarks import (
    benchmark_with_validation_stream,
    class_incremental_benchmark,
    split_online_stream,
    task_incremental_benchmark,
    with_classes_timeline,
    with_task_labels,
)
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.core import SupervisedPlugin
from compared import different, everything
from torch import nn

from forgetfree.continual.stream import benchmark_stream
from forgetfree.errors import TaskError, UsageError

# -- Experiences of other streams ------------------------------------------------------------------------


def others() -> Iterator[tuple[str, Any, Any]]:
    """Yield a name, a stream, and an experience that does not belong to it."""
    stream = vision.stream("task")
    yield "another benchmark", stream, vision.split_digits("task", 3).train_stream[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apart = benchmark_with_validation_stream(stream.benchmark, validation_size=0.2)
    yield "other rows", stream, next(iter(apart.train_stream))
    yield "a part of its own", stream, next(iter(split_online_stream(stream.benchmark.train_stream, 20, seed=0)))


@pytest.mark.sampled("another benchmark")
@pytest.mark.parametrize("name", [name for name, *_ in others()])
def test_experiences_of_another_benchmark_are_refused(name: str) -> None:
    stream, other = next((stream, other) for each, stream, other in others() if each == name)
    message = r"Experience \d of the stream '\w+' does not belong to this stream.*: expected a whole experience"
    strategy = vision.make("continual-ft", stream)
    before = everything(stream.model)
    for call in (strategy.train, strategy.eval, stream.task_of):
        with pytest.raises(UsageError, match=message):
            call(other)
    assert different(before, everything(stream.model)) == []
    strategy.train(stream.benchmark.train_stream[0])  # a refusal changes nothing
    assert set(strategy.evaluate()) == {task.name for task in stream.tasks}


@pytest.mark.parametrize("name", ["replay", "grafting-continual"])
def test_batchnorm_trains_on_rows_that_leave_a_single_one_over(name: str) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))
    stream = benchmark_stream(vision.split_digits("task", 3), network)
    rows = len(stream.tasks[0].train)
    strategy = vision.make(name, stream, batch_size=next(size for size in range(3, rows) if rows % size == 1), steps=50)
    strategy.train(stream.benchmark.train_stream[0])
    assert [task.name for task in strategy.learned] == [stream.tasks[0].name]


def test_only_training_experiences_are_trained_on() -> None:
    stream = vision.stream("task")
    strategy = vision.make("joint", stream)
    message = (
        r"Experience 1 of the stream 'test' does not belong to this stream for training.*stream.benchmark.train_stream"
    )
    with pytest.raises(UsageError, match=message):
        strategy.train(stream.benchmark.test_stream[1])


def test_copies_that_avalanche_makes_are_the_streams_own() -> None:
    parts = {split: as_classification_dataset(vision.part(split, 6)) for split in ("train", "test")}
    classes = class_incremental_benchmark(parts, class_order=list(range(6)), num_experiences=3)
    benchmark = task_incremental_benchmark(classes)
    stream = benchmark_stream(benchmark, vision.network("mlp"))
    decorated = with_classes_timeline(with_task_labels(benchmark))
    first, second, third = benchmark.train_stream
    copies = [
        [first.train(), second.eval(), third.logging()],
        [*benchmark.train_stream[0:1], *benchmark.train_stream[1:]],
        list(decorated.train_stream),
    ]
    expected = None
    for experiences in copies:
        strategy = vision.make("grafting-continual", stream)
        for experience in experiences:
            strategy.train(experience, eval_streams=[])
        strategy.eval(decorated.test_stream)
        answers = {task: found.logits for task, found in strategy.predictions.items()}
        if expected is not None:
            assert different(expected, answers) == []
        expected = answers


# -- Without task labels ---------------------------------------------------------------------------------


class Calls(SupervisedPlugin):
    """Calls the model without task labels, as a plugin for a single task would, during every task."""

    def __init__(self) -> None:
        super().__init__()
        self.compared = 0

    def same(self, strategy: Any) -> None:
        if strategy.is_training:
            strategy.model.eval()
        with torch.no_grad():
            assert torch.equal(strategy.model(strategy.mb_x), strategy.model(strategy.mb_x, strategy.mb_task_id))
        if strategy.is_training:
            strategy.model.train()
        self.compared += 1

    def after_forward(self, strategy: Any, **_: Any) -> None:
        self.same(strategy)

    def after_eval_iteration(self, strategy: Any, **_: Any) -> None:
        if strategy.stream.scenario == "task":
            self.same(strategy)

    def after_training_exp(self, strategy: Any, **_: Any) -> None:
        strategy.model.eval()
        x = strategy.experience.dataset[0][0].unsqueeze(0).to(strategy.device)
        assert torch.equal(strategy.model(x), strategy.model(x, strategy.task.label))


@pytest.mark.sampled("continual-ft-class", "grafting-continual-class")
@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("name", ["continual-ft", "grafting-continual", "ewc"])
def test_a_plugin_that_calls_the_model_without_task_labels_is_answered(name: str, scenario: str) -> None:
    """The readout of the task in training or evaluation answers, also for evaluations during training."""
    stream = vision.stream(scenario)
    calls = Calls()
    strategy = vision.make(name, stream, dropout=False, eval_every=4, peval_mode="iteration")
    strategy.plugins.append(calls)  # called also after the evaluation at the end of training
    for experience in stream.benchmark.train_stream:
        strategy.train(experience, eval_streams=[stream.benchmark.test_stream])
        strategy.eval(stream.benchmark.test_stream)
    assert calls.compared > 30


def test_without_task_labels_and_without_a_task_the_model_says_what_is_missing() -> None:
    stream = vision.stream("task")
    x = vision.inputs(stream.tasks[0].test)[:2]
    message = (
        "has 3 readouts and no task is in training or evaluation: give task_labels, one of 0 (experience-0), 1 (exp"
    )
    strategy = vision.make("continual-ft", stream, device="cpu")
    for _ in range(2):
        with pytest.raises(TaskError, match=re.escape(message)):
            stream.model(x)
        strategy.train(stream.benchmark.train_stream[0])
        strategy.evaluate()
    shared = vision.stream("class").model.eval()
    assert torch.equal(shared(x), shared(x, 2))
    one = vision.stream("task", experiences=1).model.eval()
    assert torch.equal(one(x), one(x, 0))
