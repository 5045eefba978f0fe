"""Streams without the task at inference: which model answers, compared with cases by hand and slow reference loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import small_vision as vision
import torch
from avalanche.benchmarks import tensors_benchmark
from avalanche.core import SupervisedPlugin
from compared import different, everything, learn, logits
from torch import Tensor, nn
from torch.nn import functional as F
from withheld import INFERENCE, TASKWISE, a_stream, kind_of, text_stream

from forgetfree.continual.stream import benchmark_stream
from forgetfree.core.readout_model import LOWEST
from forgetfree.errors import UsageError

pytestmark = pytest.mark.long

MakeStream = Callable[..., Any]
ALL = [(scenario, kind) for scenario in ("class", "domain") for kind in ("text", *vision.NETWORKS)]
#: Strategies with a model for each task.
ANSWERING = [
    *((name, scenario, kind) for name in ("fine-tune", "grafting-continual") for scenario, kind in ALL),
    *(("lora", scenario, "text") for scenario in ("class", "domain")),
]


# -- Labels ----------------------------------------------------------------------------------------------


def test_class_numbers_the_labels_of_all_tasks_in_a_row(tiny_stream: MakeStream) -> None:
    """There are 2 + 4 + 2 labels: qnli has 0 and 1, ag_news 2 to 5, sst2 6 and 7."""
    stream = text_stream(tiny_stream, "class")
    assert [task.classes for task in stream.tasks] == [(0, 1), (2, 3, 4, 5), (6, 7)]
    for task in stream.tasks:
        for rows in (task.train, task.validation, task.test):
            assert set(rows.labels.tolist()) == set(task.classes)
    assert [readout.n_labels for readout in stream.model.readouts] == [8, 8, 8]
    assert len({stream.model.readout_module(task) for task in range(3)}) == 1


def test_domain_shares_the_labels(tiny_stream: MakeStream) -> None:
    stream = text_stream(tiny_stream, "domain")
    assert [task.classes for task in stream.tasks] == [(0, 1), (0, 1)]
    assert len({stream.model.readout_module(task) for task in range(2)}) == 1


@pytest.mark.parametrize(("scenario", "kind"), [("class", "text"), ("domain", "conv")])
def test_no_batch_names_the_task(tiny_stream: MakeStream, scenario: str, kind: str) -> None:
    stream = a_stream(tiny_stream, scenario, kind)
    for split in ("train", "test"):
        for experience in getattr(stream.benchmark, f"{split}_stream"):
            assert experience.task_labels == [0]
            assert {int(experience.dataset[i][2]) for i in range(3)} == {0}
    for task in stream.tasks:
        assert set(task.test.batch([0, 1])[2].tolist()) == {0}


def test_readouts_that_would_name_the_task_are_refused(tiny_stream: MakeStream) -> None:
    for scenario in ("class", "domain"):
        with pytest.raises(UsageError, match=f"scenario={scenario} needs --readout linear, got prompt"):
            tiny_stream("roberta-mlm", "prompt", scenario=scenario)
    with pytest.raises(UsageError, match=r"got qnli: 2, ag_news: 4, sst2: 2\. Use scenario=class"):
        tiny_stream("bert", "linear", scenario="domain")
    with pytest.raises(UsageError, match=r"Unknown scenario 'instance'\. Known: class, domain, task"):
        tiny_stream("bert", "linear", scenario="instance")


# -- The last task's model -------------------------------------------------------------------------------


def features(strategy: Any, task: Any, rows: Any) -> Tensor:
    """Return the readouts' inputs for all ``rows``, in one batch, from the backbone that belongs to ``task``."""
    with strategy.answering(task), torch.no_grad():
        strategy.model.eval()
        found: Tensor = strategy.model.features(rows.batch(range(len(rows)))[0])
        return found


@pytest.mark.sampled("fine-tune-class-mlp-1", "grafting-continual-class-mlp-1")
@pytest.mark.parametrize("learned", [1, 2])
@pytest.mark.parametrize(("name", "scenario", "kind"), ANSWERING)
def test_each_label_is_read_by_the_last_task_that_has_it(
    tiny_stream: MakeStream, name: str, scenario: str, kind: str, learned: int
) -> None:
    """Each task's readout is the one after its training; labels of tasks not yet learned get the lowest logit."""
    stream = a_stream(tiny_stream, scenario, kind)
    strategy = vision.make(name, stream)
    own: list[dict[str, Tensor]] = []
    for experience in list(stream.benchmark.train_stream)[:learned]:
        strategy.train(experience)
        own.append(dict(strategy.readouts[stream.tasks[len(own)].name]))
    tasks = stream.tasks[:learned]
    found = logits(strategy)
    for task in stream.tasks:
        read = features(strategy, tasks[-1], task.test)
        for label in range(stream.model.readout_of(0).n_labels):
            having = [position for position, each in enumerate(tasks) if label in each.classes]
            if not having:
                assert bool((found[task.name][:, label] == LOWEST).all())
                continue
            readout = own[having[-1]]
            expected = read @ readout["weight"][label] + readout["bias"][label]
            assert torch.allclose(found[task.name][:, label], expected, rtol=1e-4, atol=1e-5)


def test_a_readout_without_bias_gives_unseen_labels_the_lowest_logit_too() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10, bias=False))
    strategy = learn(vision.make("fine-tune", benchmark_stream(vision.split_digits("class"), network)), 2)
    found = logits(strategy)["experience-4"]
    assert bool((found[:, 4:] == LOWEST).all())
    assert bool((found[:, :4] > LOWEST).all())


# -- The router ------------------------------------------------------------------------------------------


@pytest.mark.sampled("fine-tune-class-mlp", "grafting-continual-class-mlp", "lora-class-text")
@pytest.mark.parametrize(("name", "scenario", "kind"), ANSWERING)
def test_the_router_takes_the_least_entropy_of_a_slow_loop(
    tiny_stream: MakeStream, name: str, scenario: str, kind: str
) -> None:
    """The entropy is −Σ p·ln p over a task's own labels, divided by ln of their number; the first of equals is chosen."""
    stream = a_stream(tiny_stream, scenario, kind)
    strategy = learn(vision.make(name, stream, task_inference="router", steps=30))
    found, chosen = logits(strategy), set()
    for task in stream.tasks:
        answers = []
        for candidate in stream.tasks:
            readout = strategy.readouts[candidate.name]
            answers.append(F.linear(features(strategy, candidate, task.test), readout["weight"], readout["bias"]))
        for row in range(len(task.test)):
            entropies = []
            for candidate, answer in zip(stream.tasks, answers, strict=True):
                scores = [math.exp(float(answer[row, label])) for label in candidate.classes]
                chances = [score / sum(scores) for score in scores]
                entropies.append(-sum(p * math.log(p) for p in chances) / math.log(len(chances)))
            best = entropies.index(min(entropies))
            chosen.add(best)
            for label in range(found[task.name].shape[1]):
                expected = float(answers[best][row, label]) if label in stream.tasks[best].classes else LOWEST
                assert float(found[task.name][row, label]) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert len(chosen) > 1  # else there was nothing to choose


def test_entropies_are_compared_as_shares_of_what_they_could_be() -> None:
    """A task of 4 labels with probabilities (.7, .1, .1, .1): 0.940 / ln 4 = 0.678. One of 2, (.75, .25): 0.562 / ln 2 = 0.811.

    The plain entropy would choose the second task, the share chooses the first.
    """
    network = nn.Sequential(nn.Flatten(), nn.Linear(1, 1, bias=False), nn.Linear(1, 6))
    x = torch.ones(12, 1)
    parts = [(x[:4], torch.arange(4)), (x[:2], torch.arange(4, 6))]
    benchmark = tensors_benchmark(train_tensors=parts, test_tensors=parts, task_labels=[0, 0])
    strategy = vision.make("fine-tune", benchmark_stream(benchmark, network), steps=1, task_inference="router")
    learn(strategy)
    chances = {"experience-0": [0.7, 0.1, 0.1, 0.1, 1, 1], "experience-1": [1, 1, 1, 1, 0.75, 0.25]}
    for name, values in chances.items():
        strategy.readouts[name] = {"weight": torch.zeros(6, 1), "bias": torch.tensor(values).log()}
    for found in logits(strategy).values():
        assert torch.allclose(found[:, :4].exp(), torch.tensor([0.7, 0.1, 0.1, 0.1]))
        assert bool((found[:, 4:] == LOWEST).all())


# -- The task does not leak ------------------------------------------------------------------------------


def same_rows_everywhere(scenario: str) -> Any:
    """Return a benchmark split by classes or permutations; every test experience holds the same rows of all tasks."""
    source = vision.split_digits("class", 3) if scenario == "class" else vision.permuted_digits()
    parts = [vision.benchmark_rows(experience) for experience in source.test_stream]
    x, y = torch.cat([x[:12] for x, _ in parts]), torch.cat([y[:12] for _, y in parts])
    train = [vision.benchmark_rows(experience) for experience in source.train_stream]
    return tensors_benchmark(train_tensors=train, test_tensors=[(x, y)] * 3, task_labels=[0, 0, 0])


class Midway(SupervisedPlugin):
    """Evaluates all tasks during every task, and compares the model before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def after_training_epoch(self, strategy: Any, **_: Any) -> None:
        before, mode = everything(strategy.model), strategy.model.training
        experience, batch, data = strategy.experience, strategy.mbatch, strategy.dataloader
        strategy.evaluate()
        strategy.experience, strategy.mbatch, strategy.dataloader = experience, batch, data
        strategy.model.train(mode)
        assert different(before, everything(strategy.model)) == []
        self.seen.append({name: found.logits for name, found in strategy.predictions.items()})


@pytest.mark.sampled("class-grafting-continual-last", "class-lora-last", "class-lora-router")
@pytest.mark.parametrize(
    ("name", "inference"),
    [
        *itertools.product(TASKWISE, INFERENCE),
        *((name, "last") for name in ("continual-ft", "replay", "ewc", "o-lora", "gdumb")),
    ],
)
@pytest.mark.parametrize("scenario", ["class", "domain"])
def test_an_input_gets_one_answer_whichever_task_it_is_shown_in(name: str, scenario: str, inference: str) -> None:
    """This is checked after every task, and during each."""
    midway = Midway()
    stream = benchmark_stream(same_rows_everywhere(scenario), vision.network(kind_of(name)))
    assert stream.scenario == scenario
    changes: dict[str, Any] = {"task_inference": inference} if name in TASKWISE else {}
    if "lora" in name:
        changes["learning_rate"] = 0.01  # adapters learn at ten times the rate
    strategy = vision.make(name, stream, plugins=[midway], **changes)
    for experience in stream.benchmark.train_stream:
        strategy.train(experience)
        before = everything(strategy.model)
        found = {name: answer.logits for name, answer in strategy.evaluate().items()}
        assert different(before, everything(strategy.model)) == []
        for answers in (found, midway.seen[-1]):
            for other in answers.values():
                assert np.array_equal(answers["experience-0"], other)
    assert len(midway.seen) == 3
    if scenario == "class" and name in TASKWISE:  # during the first task, only its own labels are answered
        assert bool((midway.seen[0]["experience-2"][:, 2:] == LOWEST).all())


class Interrupt(SupervisedPlugin):
    def after_eval_iteration(self, strategy: Any, **_: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.sampled("fine-tune-last", "grafting-continual-last", "lora-last", "merge-task-arithmetic-last")
@pytest.mark.parametrize("inference", INFERENCE)
@pytest.mark.parametrize("name", TASKWISE)
def test_an_interrupted_evaluation_leaves_the_model_as_it_was(name: str, inference: str) -> None:
    interrupt = Interrupt()
    strategy = learn(vision.make(name, vision.stream("class", kind_of(name)), task_inference=inference))
    before, answers = everything(strategy.model), logits(strategy)
    strategy.plugins.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        strategy.evaluate()
    strategy.plugins.remove(interrupt)
    assert different(before, everything(strategy.model)) == []
    assert different(answers, logits(strategy)) == []
