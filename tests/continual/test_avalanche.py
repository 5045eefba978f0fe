"""Our strategies in an Avalanche program: its benchmarks, networks, plain loop, metrics, loggers and plugins.

Frozen tensors are compared bit for bit, BatchNorm's statistics included.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_vision as vision
import torch
from avalanche.benchmarks import (
    benchmark_from_datasets,
    benchmark_with_validation_stream,
    class_incremental_benchmark,
    task_incremental_benchmark,
    tensors_benchmark,
)
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.core import SupervisedPlugin
from avalanche.evaluation.metrics import accuracy_metrics, bwt_metrics, forgetting_metrics, loss_metrics
from avalanche.logging import TextLogger
from avalanche.training.plugins import EarlyStoppingPlugin, EvaluationPlugin, LRSchedulerPlugin
from compared import different, everything
from torch import nn

from forgetfree import registry
from forgetfree.continual.stream import benchmark_stream
from forgetfree.errors import LedgerError, ModelError, OptionError, UsageError
from forgetfree.models.state import StateStore
from forgetfree.results import metrics

#: Forget-free strategies that can train any network.
FORGET_FREE = [name for name in registry.STRATEGIES if registry.strategy(name).forget_free and name != "lora"]
Answers = dict[str, np.ndarray[Any, Any]]


def answers(strategy: Any) -> Answers:
    """Return the logits of the last evaluation."""
    return {name: found.logits.copy() for name, found in strategy.predictions.items()}


def run(strategy: Any, benchmark: Any) -> list[Answers]:
    """Train and evaluate in a plain Avalanche loop, and return the logits after each experience."""
    rows = []
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
        rows.append(answers(strategy))
    return rows


# -- Any network -----------------------------------------------------------------------------------------


@pytest.mark.sampled("grafting-continual-mlp", "wsn-mlp")
@pytest.mark.parametrize("kind", vision.NETWORKS)
@pytest.mark.parametrize("name", [name for name in FORGET_FREE if registry.strategy(name).taskwise])
def test_each_tasks_model_stays_where_the_task_is_withheld(name: str, kind: str, tmp_path: Path) -> None:
    """Later tasks may change which model answers, but not the model and readout of each task."""
    stream = vision.stream("class", kind)
    strategy = vision.make(name, stream, store=StateStore(tmp_path))
    learned: list[dict[str, torch.Tensor]] = []
    for task, experience in zip(stream.tasks, stream.benchmark.train_stream, strict=True):
        strategy.train(experience)
        strategy.eval(stream.benchmark.test_stream)
        learned.append(own_model(strategy, task))
    for task, model in zip(stream.tasks, learned, strict=True):
        assert different(own_model(strategy, task), model) == []
    last = answers(strategy)
    strategy.save(tmp_path)
    fresh = vision.make(name, vision.stream("class", kind), store=strategy.store)
    fresh.load(tmp_path)
    fresh.eval(fresh.stream.benchmark.test_stream)
    assert different(answers(fresh), last) == []
    for task, model in zip(fresh.stream.tasks, learned, strict=True):
        assert different(own_model(fresh, task), model) == []


def own_model(strategy: Any, task: Any) -> dict[str, torch.Tensor]:
    """Return the backbone and the readout that belong to a task."""
    with strategy.answering(task):
        tensors = everything(strategy.model.backbone)
    return tensors | {f"readout.{name}": tensor for name, tensor in strategy.readouts[task.name].items()}


def test_a_pre_trained_network_is_where_all_tasks_start_from() -> None:
    """θ_pre is the given network, last layer and statistics included; the network itself stays unchanged."""
    network = vision.network("conv")
    network(vision.digits()[0][:100])  # updates the statistics
    before = everything(network)
    stream = benchmark_stream(vision.split_digits("task"), network)
    strategy = vision.make("grafting-continual", stream)
    strategy.eval(stream.benchmark.test_stream)
    network.eval()
    for task in stream.tasks:
        with torch.no_grad():
            assert torch.equal(
                network(vision.inputs(task.test)), torch.as_tensor(strategy.predictions[task.name].logits)
            )
    run(strategy, stream.benchmark)
    assert different(everything(network), before) == []


# -- Benchmarks ------------------------------------------------------------------------------------------


def classification(split: str) -> Any:
    return as_classification_dataset(vision.part(split))


def by_class() -> Any:
    return class_incremental_benchmark(
        {"train": classification("train"), "test": classification("test")},
        class_order=list(range(10)),
        num_experiences=5,
    )


def validated(scenario: str) -> Any:
    return benchmark_with_validation_stream(vision.split_digits(scenario), validation_size=0.2)


def tensors(*labels: int) -> Any:
    """Return the same rows in experiences with these task labels."""
    train, test = ([vision.part(split).tensors] * len(labels) for split in ("train", "test"))
    return tensors_benchmark(train_tensors=train, test_tensors=test, task_labels=list(labels))


BENCHMARKS: dict[str, tuple[Callable[[], Any], str]] = {
    "nc_benchmark with task labels": (lambda: vision.split_digits("task"), "task"),
    "dataset_benchmark": (vision.permuted_digits, "domain"),
    "task_incremental_benchmark": (lambda: task_incremental_benchmark(by_class()), "task"),
    "with a validation stream": (lambda: validated("class"), "class"),
    "with task labels and a validation stream": (lambda: validated("task"), "task"),
    "tensors_benchmark": (lambda: tensors(0, 0), "domain"),
}


@pytest.mark.sampled("tensors_benchmark")
@pytest.mark.filterwarnings("ignore::UserWarning:avalanche")
@pytest.mark.parametrize("kind", BENCHMARKS)
def test_what_is_known_at_inference_is_read_off_the_benchmark(kind: str) -> None:
    """Benchmarks may have task labels in experiences, only in the data set, or nowhere."""
    make, scenario = BENCHMARKS[kind]
    benchmark = make()
    stream = benchmark_stream(benchmark, vision.network("mlp"))
    assert stream.scenario == scenario
    assert [task.name for task in stream.tasks] == [f"experience-{i}" for i in range(len(stream.tasks))]
    for name in ("continual-ft", "replay", "ewc", "grafting-continual"):
        strategy = vision.make(name, stream, steps=2)
        for row in run(strategy, benchmark):
            assert [len(row[task.name]) for task in stream.tasks] == [len(task.test) for task in stream.tasks]


@pytest.mark.filterwarnings("ignore:stream generator will be converted:UserWarning")
def test_rows_of_a_validation_stream_choose_between_masks() -> None:
    with_validation = benchmark_stream(validated("class"), vision.network("mlp")).tasks[0]
    without = vision.stream("class", experiences=5).tasks[0]
    assert len(with_validation.train) + len(with_validation.validation) == len(without.train)
    assert without.validation.digest == without.train.digest
    assert with_validation.validation.digest != with_validation.train.digest


# -- Refusals --------------------------------------------------------------------------------------------


class Softmaxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = vision.network("mlp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).softmax(1)


def unpaired() -> Any:
    return benchmark_from_datasets(train=[classification("train")] * 3, test=[classification("test")] * 2)


#: A benchmark, a network, and the reason why they do not fit.
REFUSED: list[tuple[Callable[[], Any], Callable[[], nn.Module], type[Exception], str]] = [
    (lambda: vision.split_digits("class"), lambda: vision.network("mlp", 8), UsageError, "Give it at least 10 outputs"),
    (lambda: vision.split_digits("class"), Softmaxed, ModelError, "other operations follow it"),
    (lambda: vision.split_digits("class"), lambda: nn.Conv2d(1, 1, 1), ModelError, "Its linear layers: none"),
    (unpaired, lambda: vision.network("mlp"), UsageError, "got 3 of train, 2 of test. Create one with"),
    (lambda: tensors(0, 1, 1), lambda: vision.network("mlp"), UsageError, r"labels \[\[0\], \[1\], \[1\]\], expected 0, 1"),
    (lambda: tensors(1, 0), lambda: vision.network("mlp"), UsageError, r"\[\[1\], \[0\]\], expected 0, 1, 2"),
]  # fmt: skip


@pytest.mark.parametrize(("benchmark", "network", "error", "message"), REFUSED)
def test_what_does_not_go_together_is_refused(benchmark: Any, network: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        benchmark_stream(benchmark(), network())


# -- Metrics and loggers ---------------------------------------------------------------------------------


def evaluator(*loggers: Any) -> EvaluationPlugin:
    loggers = loggers or (TextLogger(io.StringIO()),)  # Avalanche warns without a logger
    return EvaluationPlugin(
        accuracy_metrics(epoch=True, experience=True, stream=True),
        loss_metrics(epoch=True, experience=True, stream=True),
        forgetting_metrics(experience=True, stream=True),
        bwt_metrics(experience=True, stream=True),
        loggers=list(loggers),
    )


@pytest.mark.sampled("continual-ft-class", "grafting-continual-task")
@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("name", ["continual-ft", "grafting-continual"])
def test_avalanches_forgetting_is_our_backward_transfer_with_the_sign_turned(name: str, scenario: str) -> None:
    """Forgetting of an experience is first − last score, averaged over all experiences but the last."""
    stream = vision.stream(scenario)
    strategy = vision.make(name, stream, evaluator=evaluator())
    strategy.eval(stream.benchmark.test_stream)
    matrix = [[strategy.predictions[task.name].score("accuracy") for task in stream.tasks]]
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
        found = strategy.eval(stream.benchmark.test_stream)
        matrix.append([strategy.predictions[task.name].score("accuracy") for task in stream.tasks])
    transfer = metrics.summarize(matrix)["bwt"]
    assert transfer is not None
    assert found["StreamForgetting/eval_phase/test_stream"] == pytest.approx(-transfer)
    assert found["StreamBWT/eval_phase/test_stream"] == pytest.approx(transfer)
    for k in range(2):
        name = f"ExperienceForgetting/eval_phase/test_stream/Task00{k if scenario == 'task' else 0}/Exp00{k}"
        assert found[name] == pytest.approx(matrix[k + 1][k] - matrix[-1][k])


# -- Plugins ---------------------------------------------------------------------------------------------


class Updates(SupervisedPlugin):
    """Counts the updates of each task."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def before_training_exp(self, strategy: Any, **_: Any) -> None:
        self.counts.append(0)

    def after_update(self, strategy: Any, **_: Any) -> None:
        self.counts[-1] += 1


@pytest.mark.sampled("continual-ft", "grafting-continual")
@pytest.mark.filterwarnings("ignore:Metric Top1_Acc_Stream used by the EarlyStopping:UserWarning")
@pytest.mark.parametrize("name", ["grafting-continual", "fine-tune", "continual-ft"])
def test_early_stopping_stops_a_task_and_leaves_the_others(name: str) -> None:
    """Tasks are evaluated every 2 of at most 40 updates, and are learned in a few."""
    stream = vision.stream("task")
    updates, tests = Updates(), stream.benchmark.test_stream
    strategy = vision.make(
        name,
        stream,
        steps=40,
        evaluator=evaluator(),
        plugins=[updates, EarlyStoppingPlugin(6, "test_stream", peval_mode="iteration")],
        eval_every=2,
        peval_mode="iteration",
    )
    rows = []
    for k, experience in enumerate(stream.benchmark.train_stream):
        strategy.train(experience, eval_streams=[tests[k : k + 1]])
        rows.append({name: found.logits.copy() for name, found in strategy.evaluate().items()})
    assert all(count < 40 for count in updates.counts)
    if strategy.forget_free:
        assert np.array_equal(rows[0]["experience-0"], rows[2]["experience-0"])


def test_a_scheduler_of_ones_own_is_refused_for_it_would_do_nothing() -> None:
    network = vision.network("mlp")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    plugin = LRSchedulerPlugin(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(OptionError, match="every task has its own optimizer"):
        vision.make("continual-ft", vision.stream("task"), plugins=[plugin])


# -- After interrupts and under options ---------------------------------------------------------------------


class InterruptAt(SupervisedPlugin):
    """Raises KeyboardInterrupt after two updates of the first task."""

    def after_update(self, strategy: Any, **_: Any) -> None:
        if strategy.clock.train_exp_iterations == 1:
            raise KeyboardInterrupt


@pytest.mark.sampled("grafting-continual-class", "lora-class")
@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("name", sorted({*FORGET_FREE, "lora"} - {"bare-graft"}))  # bare-graft makes no update here
def test_an_interrupted_first_task_leaves_the_model_as_it_was(name: str, scenario: str) -> None:
    """The comparison covers weights, readouts and BatchNorm's statistics."""
    stream = vision.stream(scenario, "mlp" if name == "lora" else "conv")
    strategy = vision.make(name, stream, plugins=[InterruptAt()])
    before = everything(strategy.model)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(stream.benchmark.train_stream[0])
    assert different(before, everything(strategy.model)) == []


def test_an_interrupted_task_does_not_count_for_cumulative() -> None:
    stream = vision.stream("task", "mlp")
    interrupt = InterruptAt()
    strategy = vision.make("cumulative", stream, plugins=[interrupt])
    with pytest.raises(KeyboardInterrupt):
        strategy.train(stream.benchmark.train_stream[0])
    strategy.plugins.remove(interrupt)
    strategy.train(stream.benchmark.train_stream[0])
    assert len(strategy.dataset) == len(stream.tasks[0].train)


@pytest.mark.parametrize("dropout", [False, True])
def test_batchnorm_gathers_statistics_with_dropout_or_without(dropout: bool) -> None:
    stream = vision.stream("task", "conv")
    strategy = vision.make("continual-ft", stream, dropout=dropout)
    strategy.train(stream.benchmark.train_stream[0])
    buffers = dict(stream.model.named_buffers())
    assert min(int(b) for name, b in buffers.items() if name.endswith("num_batches_tracked")) > 0


def test_a_ledger_of_another_scenario_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    """Only the number of labels shows the difference: the ledger's readouts have 10, the network has 12."""
    strategy = vision.make("bitfit", vision.stream("task", "mlp"))
    strategy.train(strategy.stream.benchmark.train_stream[0])
    strategy.save(tmp_path)
    other = vision.make("bitfit", benchmark_stream(vision.split_digits("task"), vision.network("mlp", 12)))
    with pytest.raises(
        LedgerError, match=r"the readout of task 'experience-0' does not fit: expected .*12.*, got .*10"
    ):
        other.load(tmp_path)
    assert (other.ledger.tasks, other.learned) == ([], [])
