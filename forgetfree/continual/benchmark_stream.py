"""A stream over an Avalanche benchmark, and any network that ends in a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from avalanche.benchmarks.scenarios import CLScenario, DatasetExperience, EagerCLStream
from avalanche.models.dynamic_modules import MultiTaskModule
from torch import Tensor, nn

from forgetfree.continual.stream import Stream, WithTaskLabels, place_of
from forgetfree.core.readout_model import TaskHead, fingerprint_of
from forgetfree.data.examples import DatasetExamples
from forgetfree.errors import ModelError, UsageError, first_line
from forgetfree.models.loading import LoadedModel
from forgetfree.models.state import ModelState
from forgetfree.models.task_model import ModuleModel
from forgetfree.tasks import Scenario, TaskDefinition
from forgetfree.training.encoded_task import EncodedTask


class BenchmarkModel(ModuleModel, WithTaskLabels):
    """A `ModuleModel` that Avalanche knows as one with task labels."""


def benchmark_stream(
    benchmark: Any,
    network: nn.Module,
    *,
    head: str | None = None,
    graftable: str | None = None,
    seed: int = 0,
    name: str = "benchmark",
) -> Stream:
    """Make a stream over an Avalanche benchmark, such as ``nc_benchmark`` makes, and any network that ends in a linear layer.

    Each experience is a task: ``experience-0``, ``experience-1``, … The scenario is ``task`` where experiences have task
    labels of their own (each then has its own readout), ``domain`` where all have the same classes, else ``class``.

    Args:
        benchmark: with a ``train_stream`` and a ``test_stream`` of as many experiences, in the same order; or with a single
            test experience for all (new instances, ``complete_test_set_only``): each task is then tested on its rows of the
            classes that the task has. Rows of a ``valid_stream``, else of the training stream, choose between masks.
        network: from inputs to logits of all classes; it is copied, and left as it is.
        head: name of its linear layer that reads out; default: the last.
        graftable: regular expression over parameter names; only tensors it is found in may be grafted and trained.
        seed: kept with the stream.
        name: of the stream.

    Raises:
        UsageError: train and test stream do not go together, or the network reads out fewer classes than there are.
        ModelError: the network has no linear layer to read out from, or something follows it.
    """
    _check_streams(benchmark)
    train = list(benchmark.train_stream)
    validation = list(getattr(benchmark, "valid_stream", train))
    if isinstance(network, MultiTaskModule):
        raise UsageError(
            f"{type(network).__name__} asks for task labels itself. Give a network with one last layer for all classes: each "
            "task with a label of its own gets a copy of it."
        )
    classes = [tuple(sorted({int(label) for label in experience.dataset.targets})) for experience in train]
    task_labels = [_task_label(experience) for experience in train]
    scenario = _scenario_of(task_labels, classes)
    test = list(benchmark.test_stream)
    if len(test) == 1 < len(train):
        if scenario == "task":
            raise UsageError(
                f"The benchmark has {len(train)} training experiences with task labels of their own, {task_labels}, and one "
                "test experience, whose rows cannot be read by the readout of each. Give one test experience for each, or all "
                "experiences the same task label."
            )
        benchmark, test = _tests_by_task(benchmark, test[0], classes)
    model = BenchmarkModel(network, head, graftable=graftable, shared_readout=scenario != "task")
    largest = max(map(max, classes))
    if largest >= model.n_labels:
        raise UsageError(
            f"The benchmark has labels up to {largest}, and the network reads out {model.n_labels}. Give it at least "
            f"{largest + 1} outputs."
        )
    _check_reads_out(network, model, train[0].dataset)
    encoded = []
    for position, experiences in enumerate(zip(train, validation, test, strict=True)):
        called = f"experience-{position}"
        label = model.add_task(TaskHead(called, model.n_labels))
        shown = position if scenario == "task" else 0
        rows = tuple(DatasetExamples(part.dataset, part.dataset.targets, shown) for part in experiences)
        definition = TaskDefinition(called, "single", tuple(map(str, classes[position])))
        shots = min(rows[0].labels.tolist().count(label) for label in classes[position])
        fingerprint = f"{name}/{position}"
        encoded.append(EncodedTask(definition, label, shots, rows[0], rows[1], rows[2], fingerprint, classes[position]))
    loaded = LoadedModel(type(network).__name__, model, None, "linear", fingerprint_of(model.backbone))
    return Stream(name, tuple(encoded), loaded, seed, ModelState.of(model), benchmark, scenario)


def _check_streams(benchmark: Any) -> None:
    """Raise unless there are streams to train and to test on, of sizes that go together."""
    names = sorted(benchmark.streams)
    if missing := {"train", "test"} - set(names):
        raise UsageError(
            f"The benchmark has the streams {', '.join(names)}, expected train and test, got no {' and no '.join(missing)}. "
            "Give the benchmark itself; of an online scenario, the one it was made from: parts of its experiences can be "
            "trained on."
        )
    train, test = (len(list(benchmark.streams[split])) for split in ("train", "test"))
    if test not in (1, train):
        raise UsageError(
            f"The benchmark has {train} training and {test} test experiences. Give a benchmark with one test experience for "
            "each training experience, or with one for all."
        )
    validation = len(list(getattr(benchmark, "valid_stream", range(train))))
    if validation != train:
        raise UsageError(
            f"The benchmark has {train} training and {validation} validation experiences. Give a benchmark with one "
            "validation experience for each training experience, or without a valid_stream."
        )


def _task_label(experience: Any) -> int:
    """Return the task label of all rows of an experience; 0 where there is none."""
    # Not every experience that has them says so: after benchmark_with_validation_stream only the data set does.
    labels = set(getattr(experience, "task_labels", getattr(experience.dataset, "targets_task_labels", [0])))
    if len(labels) > 1:
        raise UsageError(
            f"Experience {place_of(experience)} has rows of task labels {sorted(map(int, labels))}. Give each "
            "experience one task label, or none."
        )
    return int(labels.pop())


def _scenario_of(task_labels: list[int], classes: list[tuple[int, ...]]) -> Scenario:
    """Return what is known at inference, by the task labels and the classes of the experiences."""
    if len(set(task_labels)) == 1:
        return "domain" if len(set(classes)) == 1 else "class"
    if len(set(task_labels)) < len(task_labels):
        raise UsageError(
            f"The experiences have task labels {task_labels}. Give each a task label of its own, or all the same."
        )
    for position, label in enumerate(task_labels):
        if label != position:
            raise UsageError(
                f"Experience {position} has task label {label}. Give a benchmark whose task labels are 0, 1, 2, … in order."
            )
    return "task"


def _tests_by_task(benchmark: Any, complete: Any, classes: Sequence[Sequence[int]]) -> tuple[Any, list[Any]]:
    """Give the benchmark a test experience for each task: of its only one, the rows of the task's classes."""
    targets = [int(label) for label in complete.dataset.targets]
    tests = []
    for i, known in enumerate(classes):
        rows = [row for row, label in enumerate(targets) if label in known]
        if not rows:
            raise UsageError(
                f"The benchmark has no test rows of the classes {list(known)} of experience {i}. Give it a test set "
                "with all classes."
            )
        dataset = complete.dataset if len(rows) == len(targets) else complete.dataset.subset(rows)
        tests.append(DatasetExperience(dataset=dataset))
    others = [stream for name, stream in benchmark.streams.items() if name != "test"]
    # The complete test set, too, is the benchmark's own.
    complete_stream = EagerCLStream("complete_test", [DatasetExperience(dataset=complete.dataset)])
    return CLScenario([*others, EagerCLStream("test", tests), complete_stream]), tests


@torch.no_grad()
def _check_reads_out(network: nn.Module, model: ModuleModel, dataset: Any) -> None:
    """Raise unless the network, its last layer taken out and put back, still computes what it did."""
    rows = [dataset[i][0] for i in range(min(2, len(dataset)))]
    if not all(isinstance(row, Tensor) for row in rows):
        raise UsageError(
            f"The benchmark's rows are of type {type(rows[0]).__name__}, expected tensors. Give it a transform, such as "
            "torchvision's ToTensor."
        )
    x = torch.stack(rows).to(next(network.parameters()).device)
    mode = network.training
    try:
        expected, features = network.eval()(x), model.backbone.eval()(x)
    except Exception as error:
        raise ModelError(
            f"{type(network).__name__} cannot read rows of {x.dtype} and shape {tuple(x.shape[1:])}: {first_line(error)}. Give "
            "rows of the dtype and shape that it takes."
        ) from error
    finally:
        network.train(mode)
        model.backbone.train(mode)
    readout = model.make_linear(TaskHead("", model.n_labels), 0)
    fits = isinstance(features, Tensor) and features.shape[-1] == readout.in_features
    if not fits or not torch.allclose(readout.to(features.dtype)(features), expected, rtol=1e-3, atol=1e-5):
        raise ModelError(
            f"{type(network).__name__} does not end in the layer {model.head_name!r}: something follows it. Name the last "
            "layer as head=…, and leave out what follows, such as a softmax."
        )
