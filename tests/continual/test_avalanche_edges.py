"""Experiences that are parts, copies or others' own; one test set for all; the model called without task labels."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import small_vision as vision
import torch
from avalanche.benchmarks import (
    benchmark_from_datasets,
    benchmark_with_validation_stream,
    class_incremental_benchmark,
    dataset_benchmark,
    ni_benchmark,
    split_continuous_linear_decay_stream,
    split_online_stream,
    task_incremental_benchmark,
    with_classes_timeline,
    with_task_labels,
)
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.core import SupervisedPlugin
from compared import different, everything
from torch import nn

from forgetfree import registry
from forgetfree.continual.benchmark_stream import benchmark_stream
from forgetfree.errors import OptionError, TaskError, UsageError

#: Those that a task may be given to in parts.
ONLINE = [name for name in registry.STRATEGIES if registry.strategy(name).online]
AT_ONCE = [name for name in registry.STRATEGIES if name not in [*ONLINE, "lora", "o-lora", "gem"]]


def online(stream: Any, size: int = 20, **arguments: Any) -> list[Any]:
    """The training stream cut into sub-experiences of ``size`` rows."""
    return list(split_online_stream(stream.benchmark.train_stream, size, seed=0, **arguments))


class Rows(SupervisedPlugin):
    """The inputs of each batch, and how many updates there were."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[torch.Tensor] = []

    def before_forward(self, strategy: Any, **_: Any) -> None:
        self.batches.append(strategy.mb_x.clone())


# -- Parts of an experience ------------------------------------------------------------------------------


@pytest.mark.parametrize("boundaries", [True, False])
@pytest.mark.parametrize("scenario", ["task", "class", "domain"])
def test_a_part_belongs_to_the_task_it_was_cut_from(scenario: str, boundaries: bool) -> None:
    stream = vision.stream(scenario)
    parts = online(stream, access_task_boundaries=boundaries)
    assert len(parts) > 3
    for part in parts:
        expected = stream.tasks[part.origin_experience.current_experience]
        assert stream.task_of(part) is expected
        assert stream.task_of(part.train()) is expected  # hides where it is from, unless boundaries are known
        assert stream.task_of(part.eval()) is expected


@pytest.mark.sampled("cumulative-task", "der-class")
@pytest.mark.parametrize("scenario", ["task", "class", "domain"])
@pytest.mark.parametrize("name", ONLINE)
def test_a_task_is_learned_in_parts(name: str, scenario: str) -> None:
    """Each by its share of the task's updates, on its rows; forgotten and evaluated as ever."""
    stream = vision.stream(scenario)
    watch = Rows()
    strategy = vision.make(name, stream, plugins=[watch])
    parts = stream.parts(40)
    before = {task: found.logits.copy() for task, found in strategy.evaluate().items()}
    for part in parts:
        task, met = stream.task_of(part), len(watch.batches)
        strategy.train(part)
        share = len(part.dataset) / len(task.train)
        assert len(watch.batches) - met == -(-12 * len(part.dataset) // len(task.train)) >= 12 * share
        assert strategy.learned[-1] is task
        if name == "continual-ft":
            known = {row.numpy().tobytes() for row, *_ in part.dataset}
            assert {row.numpy().tobytes() for batch in watch.batches[met:] for row in batch} <= known
    assert [task.label for task in strategy.learned] == [0, 1, 2]
    after = strategy.evaluate()
    assert not any(np.array_equal(before[task], after[task].logits) for task in before)
    assert strategy.bytes_kept() > 0


def test_parts_draw_from_seeds_of_their_own() -> None:
    """Else dropout and batches would be the same in every part."""
    stream = vision.stream("task")
    strategy = vision.make("continual-ft", stream)
    parts = online(stream)
    seeds = set()
    for experience in [*parts, *stream.benchmark.train_stream]:
        strategy.experience = experience
        seeds.add(strategy.phase_seed("train", strategy.task))
    assert len(seeds) == len(parts) + 3
    strategy.experience = None
    assert strategy.phase_seed("train", stream.tasks[0]) in seeds


@pytest.mark.sampled("graft-retrain", "grafting-continual")
@pytest.mark.parametrize("name", AT_ONCE)
def test_a_strategy_that_learns_a_task_at_once_refuses_a_part(name: str) -> None:
    stream = vision.stream("task")
    strategy = vision.make(name, stream)
    before = everything(stream.model)
    message = (
        rf"{type(strategy).__name__} learns a task at once, from all of its rows, got part 3 of experience-0 \(20 of \d+ "
        r"rows\). Train on the experience that it was cut from, or by a strategy that learns in parts: "
        "continual-ft, replay, der, cumulative."
    )
    with pytest.raises(UsageError, match=message):
        strategy.train(online(stream)[3])
    assert different(before, everything(stream.model)) == []
    assert strategy.learned == []


@pytest.mark.sampled("replay")
@pytest.mark.parametrize("name", ["replay", "der"])
def test_memories_are_balanced_over_tasks_whatever_their_parts(name: str) -> None:
    """Of rows in equal parts, none of which is preferred; more parts than rows remembered, too."""
    stream = vision.stream("task")
    strategy = vision.make(name, stream, mem_size=12, steps=20)
    parts = online(stream, 4)
    for part in parts:
        strategy.train(part)
    memory = getattr(strategy, "avalanche_plugin", strategy).storage_policy.buffer
    assert len(parts) > len(memory) == 12
    assert [sorted(memory.targets_task_labels).count(label) for label in range(3)] == [4, 4, 4]
    of_part = {row.numpy().tobytes(): number for number, part in enumerate(parts) for row, *_ in part.dataset}
    assert len({of_part[memory[i][0].numpy().tobytes()] for i in range(12)}) > 8


def test_a_memory_without_a_row_for_each_task_is_refused() -> None:
    message = "replay shares its memory out over the tasks, got mem_size=2 for 3 tasks. Set mem_size=3 or more."
    with pytest.raises(OptionError, match=message):
        vision.make("replay", vision.stream("task"), mem_size=2)


def test_parts_of_several_experiences_belong_to_no_task() -> None:
    stream = vision.stream("class")
    mixed = list(
        split_continuous_linear_decay_stream(
            stream.benchmark.train_stream, 10, iters_per_virtual_epoch=3, beta=4, shuffle=True
        )
    )
    strategy = vision.make("continual-ft", stream)
    with pytest.raises(
        UsageError, match="Experience 4 of the stream 'train' has rows of several experiences, so it is of no"
    ):
        strategy.train(mixed[4])


# -- Whose experiences -----------------------------------------------------------------------------------


def others() -> Iterator[tuple[str, Any, Any]]:
    """What differs, the stream, and an experience that is none of its own."""
    stream = vision.stream("task")
    yield "another benchmark", stream, vision.split_digits("task", 3).train_stream[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apart = benchmark_with_validation_stream(stream.benchmark, validation_size=0.2)
    yield "other rows", stream, next(iter(apart.train_stream))
    yield "a part of another", stream, online(vision.stream("task"))[0]


@pytest.mark.sampled("another benchmark")
@pytest.mark.parametrize("name", [name for name, *_ in others()])
def test_experiences_of_another_benchmark_are_refused(name: str) -> None:
    stream, other = next((stream, other) for each, stream, other in others() if each == name)
    message = (
        r"Experience \d of the stream 'train' is none of this stream's own: expected an experience of stream.benchmark"
    )
    strategy = vision.make("continual-ft", stream)
    before = everything(stream.model)
    for call in (strategy.train, strategy.eval, stream.task_of):
        with pytest.raises(UsageError, match=message):
            call(other)
    assert different(before, everything(stream.model)) == []
    strategy.train(stream.benchmark.train_stream[0])  # nothing is left behind
    assert set(strategy.evaluate()) == {task.name for task in stream.tasks}


@pytest.mark.sampled("continual-ft", "grafting-continual")
@pytest.mark.parametrize("name", ["continual-ft", "replay", "grafting-continual", "packnet"])
def test_batchnorm_trains_on_rows_that_leave_a_single_one_over(name: str) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))
    stream = benchmark_stream(vision.split_digits("task", 3), network)
    rows = len(stream.tasks[0].train)
    strategy = vision.make(name, stream, batch_size=next(size for size in range(3, rows) if rows % size == 1), steps=50)
    strategy.train(stream.benchmark.train_stream[0])
    assert [task.name for task in strategy.learned] == [stream.tasks[0].name]


@pytest.mark.parametrize("name", ["continual-ft", "joint", "grafting-continual"])
def test_only_training_experiences_are_trained_on(name: str) -> None:
    stream = vision.stream("task")
    strategy = vision.make(name, stream)
    message = (
        r"Experience 1 of the stream 'test' is no training experience. Train on stream.benchmark.train_stream\[1\]"
    )
    with pytest.raises(UsageError, match=message):
        strategy.train(stream.benchmark.test_stream[1])


@pytest.mark.sampled("grafting-continual")
@pytest.mark.parametrize("name", ["continual-ft", "joint", "grafting-continual"])
def test_copies_that_avalanche_makes_are_the_streams_own(name: str) -> None:
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
        strategy = vision.make(name, stream)
        for experience in experiences:
            strategy.train(experience, eval_streams=[])
        strategy.eval(decorated.test_stream)
        answers = {task: found.logits for task, found in strategy.predictions.items()}
        if expected is not None:
            assert different(expected, answers) == []
        expected = answers


@pytest.mark.filterwarnings("ignore:stream generator will be converted:UserWarning")
def test_all_streams_of_the_benchmark_can_be_evaluated() -> None:
    benchmark = benchmark_with_validation_stream(vision.split_digits("class"), validation_size=0.2)
    stream = benchmark_stream(benchmark, vision.network("mlp"))
    strategy = vision.make("continual-ft", stream)
    for each in (benchmark.train_stream, benchmark.valid_stream, benchmark.test_stream):
        strategy.eval(each)
        assert set(strategy.predictions) == {task.name for task in stream.tasks}
    assert len(strategy.evaluate()) == 5


# -- One test set for all --------------------------------------------------------------------------------


def new_instances(kind: str) -> Any:
    train, test = vision.part("train"), vision.part("test")
    if kind == "ni_benchmark":
        return ni_benchmark(train, test, n_experiences=3, balance_experiences=True, seed=1)
    if kind == "with task labels":
        return ni_benchmark(train, test, n_experiences=3, balance_experiences=True, seed=1, task_labels=True)
    orders = [torch.arange(i, 300, 3) for i in range(3)]
    parts = [vision.Labelled(train.tensors[0][rows], train.tensors[1][rows]) for rows in orders]
    return dataset_benchmark(parts, [test], complete_test_set_only=True)


@pytest.mark.sampled("joint-ni_benchmark")
@pytest.mark.parametrize("kind", ["ni_benchmark", "complete_test_set_only"])
@pytest.mark.parametrize("name", ["continual-ft", "joint", "fine-tune", "grafting-continual"])
def test_new_instances_are_a_domain_incremental_stream(name: str, kind: str) -> None:
    """Every task is evaluated on the one test set; the answers are the same whichever task they are asked for."""
    benchmark = new_instances(kind)
    stream = benchmark_stream(benchmark, vision.network("mlp"))
    assert (stream.scenario, len(stream.tasks)) == ("domain", 3)
    assert [len(task.test) for task in stream.tasks] == [150, 150, 150]
    strategy = vision.make(name, stream)
    for experience in benchmark.train_stream:
        strategy.train(experience)
        mine = {task: found.logits.copy() for task, found in strategy.evaluate().items()}
        assert set(mine) == {task.name for task in stream.tasks}
        assert all(np.array_equal(mine["experience-0"], logits) for logits in mine.values())
        strategy.eval(benchmark.test_stream)  # a program of Avalanche's own
        assert np.array_equal(strategy.predictions["experience-0"].logits, mine["experience-0"])


def test_of_one_test_set_each_task_has_the_rows_of_its_classes() -> None:
    """As CORe50's: all classes in the test set, some in each experience."""
    parts = vision.split_digits("class")
    whole = as_classification_dataset(vision.part("test"))
    benchmark = benchmark_from_datasets(train=[e.dataset for e in parts.train_stream], test=[whole])
    stream = benchmark_stream(benchmark, vision.network("mlp"))
    assert stream.scenario == "class"
    x, y = vision.part("test").tensors
    for k, task in enumerate(stream.tasks):
        rows = y // 2 == k
        assert torch.equal(task.test.labels, y[rows])
        assert torch.equal(vision.inputs(task.test), x[rows])
    strategy = vision.make("replay", stream)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    assert [len(found.labels) for found in strategy.evaluate().values()] == [len(task.test) for task in stream.tasks]
    strategy.eval(benchmark.test_stream)
    assert len(strategy.predictions["experience-0"].labels) == len(whole)


def test_one_test_set_and_tasks_with_readouts_of_their_own_do_not_go_together() -> None:
    with pytest.raises(
        UsageError,
        match=r"3 training experiences with task labels of their own, \[0, 1, 2\], and one test experience, .*"
        "Give one test experience for each, or all experiences the same task label",
    ):
        benchmark_stream(new_instances("with task labels"), vision.network("mlp"))


def test_other_numbers_of_test_experiences_are_refused() -> None:
    train, test = as_classification_dataset(vision.part("train")), as_classification_dataset(vision.part("test"))
    with pytest.raises(UsageError, match=r"3 training and 2 test experiences. Give .* one test experience for each"):
        benchmark_stream(benchmark_from_datasets(train=[train] * 3, test=[test] * 2), vision.network("mlp"))
    with pytest.raises(UsageError, match=r"no test rows of the classes \[0, 1\] of experience 0"):
        parts = vision.split_digits("class")
        other = parts.test_stream[1].dataset
        benchmark_stream(
            benchmark_from_datasets(train=[e.dataset for e in parts.train_stream], test=[other]), vision.network("mlp")
        )


# -- Without task labels ---------------------------------------------------------------------------------


class Calls(SupervisedPlugin):
    """Calls the model as a plugin for a single task would, at every point there is a task."""

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
    """By the readout of the task in training or evaluation; evaluated during training, too."""
    stream = vision.stream(scenario)
    calls = Calls()
    strategy = vision.make(name, stream, dropout=False, eval_every=4, peval_mode="iteration")
    strategy.plugins.append(calls)  # also after the evaluation at the end of training
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
