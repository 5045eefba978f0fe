"""The Avalanche bridge of streams: tasks by name become an Avalanche benchmark, or the other way round.

This room, the strategies and their tests are all that import Avalanche.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, get_args

import torch
from avalanche.benchmarks import (
    benchmark_from_datasets,
    split_online_stream,
    with_classes_timeline,
    with_task_labels,
)
from avalanche.benchmarks.scenarios import CLScenario, DatasetExperience, EagerCLStream
from avalanche.benchmarks.utils import (
    ConstantSequence,
    DataAttribute,
    TaskAwareSupervisedClassificationDataset,
)
from avalanche.models.dynamic_modules import MultiTaskModule
from torch import Tensor, nn

from forgetfree.continual.experiences import check_streams, named, place_of, task_label, whole
from forgetfree.continual.turn import Turn, turn_of
from forgetfree.core.body import fingerprint_of
from forgetfree.core.readout_model import ReadoutModel, TaskHead
from forgetfree.data.encoding import EncodedRows
from forgetfree.data.examples import DatasetExamples, OneLength
from forgetfree.data.rows import TaskRows
from forgetfree.data.sources import default_data, load_tasks
from forgetfree.errors import ModelError, UsageError
from forgetfree.learning.encoded_task import EncodedTask, encode_task, label_spaces
from forgetfree.models.loading import LoadedModel, load_model
from forgetfree.models.module_model import ModuleModel
from forgetfree.models.state import ModelState
from forgetfree.models.task_model import TaskModel
from forgetfree.tasks import MAX_LENGTH, EvaluatedOn, Scenario, TaskDefinition


class StreamModel(TaskModel, MultiTaskModule):
    """A `TaskModel` that Avalanche knows as one with task labels."""

    @classmethod
    def of(cls, loaded: LoadedModel, *, shared_readout: bool) -> StreamModel:
        """Make a model on a loaded model's backbone that has no readouts so far.

        Args:
            loaded: the model; it gets no readout.
            shared_readout: see `ReadoutModel`.

        Raises:
            UsageError: it is none that `load_model` gives, or its weights are not those that were loaded.
        """
        model = loaded.model
        if type(model) not in (TaskModel, cls) or not isinstance(model, TaskModel):
            raise UsageError(f"A stream needs a model as load_model gives it, got a {type(model).__name__}.")
        if fingerprint_of(model.backbone) != loaded.fingerprint:
            raise UsageError(
                f"The weights of {loaded.name!r} are no longer those that were loaded: something has trained them, perhaps a "
                "strategy of an earlier stream. Load the model again for each stream."
            )
        return cls(
            model.backbone,
            model.tokens,
            model.readout,
            read_last=model.read_last,
            dropout=model.dropout.p,
            graftable=model._graftable,
            shared_readout=shared_readout,
        )

    def adaptation(self, experience: Any) -> None:
        """Nothing to adapt: the readouts of all tasks are there from the start."""


class BenchmarkModel(ModuleModel, MultiTaskModule):
    """A `ModuleModel` that Avalanche knows as one with task labels."""

    def adaptation(self, experience: Any) -> None:
        """Nothing to adapt: the readouts of all experiences are there from the start."""


@dataclass(frozen=True)
class Stream:
    """Tasks in order, the model that reads them, and their Avalanche benchmark.

    Attributes:
        name: as it was asked for.
        tasks: in order.
        loaded: the model with its tokenizer and fingerprint. Strategies train this very model, in turns.
        seed: of the k-shot samples and the readouts' first weights.
        pre_trained: what the model held at first: every strategy starts from it.
        benchmark: the Avalanche benchmark with a ``train_stream`` and a ``test_stream``.
        scenario: what is known at inference.
    """

    name: str
    tasks: tuple[EncodedTask, ...]
    loaded: LoadedModel
    seed: int
    pre_trained: ModelState
    benchmark: Any
    scenario: Scenario = "task"

    @property
    def model(self) -> ReadoutModel:
        """Return the model that all strategies train."""
        return self.loaded.model

    @cached_property
    def turn(self) -> Turn:
        """Whose turn it is to use the model, among the strategies of all streams over its backbone."""
        return turn_of(self.model.backbone)

    def task_of(self, experience: Any, *, training: bool = False) -> EncodedTask:
        """Return the task of an experience of the benchmark, of a copy with the same rows, or of a part that Avalanche cut off.

        Args:
            experience: of any stream of the benchmark, such as ``train_stream`` and ``test_stream``.
            training: whether it is to be trained on.

        Raises:
            UsageError: it is of another benchmark, has rows of several experiences, or is no training experience.
        """
        own = whole(experience)
        place = place_of(own)
        streams = [
            name
            for name, datasets in self._datasets.items()
            if any(i == place and dataset is own.dataset for i, dataset in enumerate(datasets))
        ]
        if place is None or not streams:
            raise UsageError(
                f"{named(own)} is none of this stream's own: expected an experience of stream.benchmark, or a part of one, got "
                "other rows. Train and evaluate on the benchmark that the stream is of, or make a stream of the other one."
            )
        if training and "train" not in streams:
            raise UsageError(
                f"{named(own)} is no training experience. Train on stream.benchmark.train_stream[{place}]."
            )
        return self.tasks[place]

    def parts(self, rows: int, seed: int = 0) -> list[Any]:
        """Cut the training experiences into parts of ``rows`` rows each, shuffled by ``seed``: Avalanche's online stream."""
        return list(split_online_stream(self.benchmark.train_stream, rows, seed=seed))

    @cached_property
    def _datasets(self) -> dict[str, list[Any]]:
        """Return the data sets of each stream's experiences; copies of an experience share them."""
        return {
            name.removesuffix("_stream"): [experience.dataset for experience in islice(stream, len(self.tasks))]
            for name, stream in vars(self.benchmark).items()
            if name.endswith("_stream")
        }


def load_stream(
    stream: str,
    *,
    data: str | None = None,
    model: str = "minilm",
    readout: str = "auto",
    shots: int | None = None,
    seed: int = 0,
    test_limit: int | None = None,
    graftable: str | None = None,
    max_length: int = MAX_LENGTH,
    scenario: Scenario = "task",
    evaluate_on: EvaluatedOn = "test",
) -> Stream:
    """Load tasks and model, sample, tokenise once.

    Args:
        stream: a registered stream such as ``qnli-agnews-sst2``, or task names separated by commas.
        data: ``hub``, ``demo`` or a directory; default: ``FORGETFREE_DATA`` if set, else ``hub``.
        model: ``minilm``, a directory in Hugging Face layout, or a hub name.
        readout: ``auto``, ``linear``, ``prompt`` or ``causal``.
        shots: training rows per label; default: all.
        seed: of the sample and of the readouts' first weights.
        test_limit: evaluate on at most this many test rows, spread evenly; default: all.
        graftable: regular expression over parameter names; only tensors it is found in may be grafted and trained.
        max_length: tokens a row is read at, at most.
        scenario: what is known at inference: the ``task``; or not the task, and all tasks' labels are told apart by one
            readout (``class``) or are the same labels for all (``domain``).
        evaluate_on: ``validation`` puts the test rows away and scores validation rows, to choose options by.

    Raises:
        UsageError, DataError, ModelError: see `load_tasks` and `load_model`.
    """
    check_scenario(scenario)
    return make_stream(
        stream,
        load_tasks(stream, data or default_data(), evaluate_on),
        load_model(model, readout, graftable=graftable, max_length=max_length),
        shots=shots,
        seed=seed,
        test_limit=test_limit,
        scenario=scenario,
    )


def make_stream(
    name: str,
    tasks: Sequence[TaskRows],
    loaded: LoadedModel,
    *,
    shots: int | None = None,
    seed: int = 0,
    test_limit: int | None = None,
    scenario: Scenario = "task",
) -> Stream:
    """Make a stream of tasks that are already read, for a model that is already loaded; arguments as `load_stream`.

    Raises:
        UsageError: the scenario needs a linear readout, or (``domain``) tasks with as many labels each; or the model has
            been trained since it was loaded.
    """
    definitions, labels = label_spaces([rows.task for rows in tasks], loaded, scenario)
    loaded = replace(loaded, model=StreamModel.of(loaded, shared_readout=scenario != "task"))
    encoded = [
        encode_task(replace(rows, task=task), loaded, shots=shots, seed=seed, test_limit=test_limit, labels=space)
        for rows, task, space in zip(tasks, definitions, labels, strict=True)
    ]
    return Stream(name, tuple(encoded), loaded, seed, ModelState.of(loaded.model), _benchmark(encoded), scenario)


def check_scenario(scenario: str) -> None:
    """Raise ``UsageError`` unless ``scenario`` is one."""
    if scenario not in get_args(Scenario):
        raise UsageError(f"Unknown scenario {scenario!r}. Known: {', '.join(get_args(Scenario))}.")


def _benchmark(tasks: Sequence[EncodedTask]) -> Any:
    """Make the Avalanche benchmark: ``train_stream``, ``validation_stream``, ``test_stream``, with task labels."""
    parts: dict[str, list[Any]] = {
        split: [getattr(task, split) for task in tasks] for split in ("train", "validation", "test")
    }
    length = max(max(rows.lengths) for split in parts.values() for rows in split)
    splits = {split: [_dataset(rows, length) for rows in each] for split, each in parts.items()}
    return with_classes_timeline(with_task_labels(benchmark_from_datasets(**splits)))


def _dataset(rows: EncodedRows, length: int) -> TaskAwareSupervisedClassificationDataset:
    labels = DataAttribute(ConstantSequence(rows.task, len(rows)), "targets_task_labels", use_in_getitem=True)
    targets = DataAttribute(rows.targets, "targets")
    return TaskAwareSupervisedClassificationDataset(
        [OneLength(rows, length)], data_attributes=[targets, labels], collate_fn=rows.collate
    )


# -- The other way: Avalanche's own benchmarks ------------------------------------------------------------


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
    check_streams(benchmark)
    train = list(benchmark.train_stream)
    validation = list(getattr(benchmark, "valid_stream", train))
    if isinstance(network, MultiTaskModule):
        raise UsageError(
            f"{type(network).__name__} asks for task labels itself. Give a network with one last layer for all classes: each "
            "task with a label of its own gets a copy of it."
        )
    classes = [tuple(sorted({int(label) for label in experience.dataset.targets})) for experience in train]
    given = [task_label(experience) for experience in train]
    if 1 < len(set(given)) < len(given):
        raise UsageError(
            f"The experiences have task labels {given}. Give each a task label of its own, or all the same."
        )
    scenario: Scenario = "class"
    if len(train) > 1 and len(set(given)) == len(train):
        scenario = "task"
    elif len(set(classes)) == 1:
        scenario = "domain"
    test = list(benchmark.test_stream)
    if len(test) == 1 < len(train):
        if scenario == "task":
            raise UsageError(
                f"The benchmark has {len(train)} training experiences with task labels of their own, {given}, and one test "
                "experience, whose rows cannot be read by the readout of each. Give one test experience for each, or all "
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
    tasks = []
    for position, experiences in enumerate(zip(train, validation, test, strict=True)):
        label = model.add_task(TaskHead(f"experience-{position}", model.n_labels))
        shown = given[position] if scenario == "task" else 0
        if scenario == "task" and shown != position:
            raise UsageError(
                f"Experience {position} has task label {shown}. Give a benchmark whose task labels are 0, 1, 2, … in order."
            )
        rows = tuple(DatasetExamples(part.dataset, part.dataset.targets, shown) for part in experiences)
        definition = TaskDefinition(f"experience-{position}", "single", tuple(map(str, classes[position])))
        shots = min(rows[0].labels.tolist().count(label) for label in classes[position])
        fingerprint = f"{name}/{position}"
        tasks.append(EncodedTask(definition, label, shots, rows[0], rows[1], rows[2], fingerprint, classes[position]))
    loaded = LoadedModel(type(network).__name__, model, None, "linear", fingerprint_of(model.backbone))
    return Stream(name, tuple(tasks), loaded, seed, ModelState.of(model), benchmark, scenario)


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
    kept = EagerCLStream("complete_test", [DatasetExperience(dataset=complete.dataset)])
    return CLScenario([*others, EagerCLStream("test", tests), kept]), tests


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
    finally:
        network.train(mode)
        model.backbone.train(mode)
    readout = model.make_linear(TaskHead("", model.n_labels), 0)
    fits = isinstance(features, Tensor) and features.shape[-1] == readout.in_features
    if not fits or not torch.allclose(readout(features), expected, rtol=1e-3, atol=1e-5):
        raise ModelError(
            f"{type(network).__name__} does not end in the layer {model.head_name!r}: something follows it. Name the last "
            "layer as head=…, and leave out what follows, such as a softmax."
        )


__all__ = [
    "BenchmarkModel",
    "EncodedTask",
    "Scenario",
    "Stream",
    "StreamModel",
    "benchmark_stream",
    "check_scenario",
    "load_stream",
    "make_stream",
]
