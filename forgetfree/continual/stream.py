"""A stream: tasks in order, the model that learns them, the strategy that owns it, and their Avalanche benchmark.

Only this package and the strategies import Avalanche.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, cast, get_args

import torch
from avalanche.benchmarks import (
    benchmark_from_datasets,
    with_classes_timeline,
    with_task_labels,
)
from avalanche.benchmarks.utils import ConstantSequence, DataAttribute, TaskAwareSupervisedClassificationDataset
from avalanche.models.dynamic_modules import MultiTaskModule
from torch import Tensor, nn

from forgetfree.core.fingerprint import fingerprint_of
from forgetfree.core.readout_model import ReadoutModel
from forgetfree.data.columns import ReadOptions
from forgetfree.data.encoding import drop_bad_rows
from forgetfree.data.examples import DatasetExamples, EncodedRows, OneLength
from forgetfree.data.rows import TaskRows, tell
from forgetfree.data.sources import check_form, default_data, load_tasks
from forgetfree.display import tell_note
from forgetfree.errors import ModelError, RunError, UnknownNameError, UsageError, first_line
from forgetfree.kinds.kind import readout_for
from forgetfree.models.loading import LoadedModel, check_in_memory, load_model
from forgetfree.models.state import ModelState
from forgetfree.models.task_model import ModuleModel, TaskModel
from forgetfree.recipes import ModelDtype
from forgetfree.tasks import EvaluatedOn, Scenario, TaskDefinition
from forgetfree.training.encoded_task import EncodedTask, encode_task, label_spaces

#: The attribute of a network that holds its `Owner`; a copy of the network copies it, too.
_OWNER = "_owner"


class WithTaskLabels(MultiTaskModule):
    """The class by which Avalanche recognises a model with task labels."""

    def adaptation(self, experience: Any) -> None:
        """Adapt nothing: the readouts of all tasks exist from the start."""


class StreamModel(TaskModel, WithTaskLabels):
    """A `TaskModel` that Avalanche recognises as a model with task labels."""

    @classmethod
    def of(cls, loaded: LoadedModel, *, shared_readout: bool) -> StreamModel:
        """Return a model on a loaded model's backbone that has no readouts so far.

        Raises:
            UsageError: its weights have changed since it was loaded.
        """
        model = cast(TaskModel, loaded.model)
        if fingerprint_of(model.backbone, anew=True) != loaded.fingerprint:
            raise UsageError(
                f"The weights of {loaded.name!r} have changed since it was loaded, perhaps by a strategy on an "
                "earlier stream. Load the model again for each stream."
            )
        return cls(
            model.backbone,
            model.tokens,
            model.readout,
            pooling=model.pooling,
            head=model.head,
            dropout=model.dropout,
            graftable=model._graftable,
            shared_readout=shared_readout,
        )


class BenchmarkModel(ModuleModel, WithTaskLabels):
    """A `ModuleModel` that Avalanche recognises as a model with task labels."""


@dataclass(eq=False)
class Owner:
    """The strategy that a model belongs to, by the name of its class: the last strategy that was created on it."""

    name: str


@dataclass(frozen=True)
class Stream:
    """Tasks in order, the model that learns them, and their Avalanche benchmark.

    >>> stream = load_stream("qnli,sst2", data="demo", shots=16)  # doctest: +SKIP
    >>> [task.name for task in stream.tasks]  # doctest: +SKIP
    ['qnli', 'sst2']

    Attributes:
        name: its name, as given to `load_stream`.
        tasks: in order.
        loaded: the model with its tokenizer and fingerprint. It belongs to the last strategy that was created on it.
        seed: the seed of the k-shot samples and of the readouts' initial weights.
        pre_trained: the initial state of the model, from which every strategy starts.
        benchmark: the Avalanche benchmark with a ``train_stream`` and a ``test_stream``.
        scenario: whether the task is known at inference, see `load_stream`.
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
        """Return the model that a strategy trains."""
        return self.loaded.model

    def copy(self) -> Stream:
        """Return a stream with the same rows and its own model, for another strategy."""
        model = copy.deepcopy(self.model)
        vars(model.backbone).pop(_OWNER, None)
        return replace(self, loaded=replace(self.loaded, model=model))

    def claim(self, name: str) -> Owner:
        """Give the model, reset to θ_pre, to a new strategy of this name; an earlier strategy is refused from then on."""
        self.pre_trained.load_(self.model)
        vars(self._backbone)[_OWNER] = owner = Owner(name)
        return owner

    def check_owner(self, owner: Owner) -> None:
        """Raise ``RunError`` if the model now belongs to another strategy."""
        if (other := vars(self._backbone)[_OWNER]) is not owner:
            raise RunError(
                f"{owner.name} has lost its model to another strategy ({other.name}), which was created later on the "
                "same stream and started from θ_pre. Give each strategy its own stream: stream.copy()."
            )

    @cached_property
    def _backbone(self) -> nn.Module:
        """The network that holds the owner. Streams over one loaded model share it; adapters may wrap it later."""
        return self.model.backbone

    def task_of(self, experience: Any, *, training: bool = False) -> EncodedTask:
        """Return the task of an experience of the benchmark, or of a copy of one with the same rows.

        Args:
            experience: an experience of any stream of the benchmark, such as ``train_stream`` and ``test_stream``.
            training: whether it is to be trained on.

        Raises:
            UsageError: it belongs to another benchmark, or is part of an experience, or is no training experience.
        """
        own = experience.logging()  # in training, an experience hides its stream and position
        place: int | None = own._current_experience  # the public property fails where there is none
        candidates = [self._datasets["train"]] if training else [*self._datasets.values()]
        if place is None or not any(place < len(each) and each[place] is own.dataset for each in candidates):
            raise UsageError(
                f"Experience {place} of the stream {getattr(own._origin_stream, 'name', None)!r} does not belong to "
                f"this stream{' for training' if training else ''}: expected a whole experience of stream.benchmark, "
                "got other rows. Give one of stream.benchmark.train_stream, or make a stream of the other benchmark."
            )
        return self.tasks[place]

    @cached_property
    def _datasets(self) -> dict[str, list[Any]]:
        """The data sets of each stream's experiences; copies of an experience share them."""
        return {
            name.removesuffix("_stream"): [experience.dataset for experience in islice(stream, len(self.tasks))]
            for name, stream in vars(self.benchmark).items()
            if name.endswith("_stream")
        }


# -- Making a stream ------------------------------------------------------------------------------------


def load_stream(
    stream: str | Sequence[str] | None = None,
    *,
    data: str | Mapping[str, Any] | None = None,
    model: str | nn.Module = "minilm",
    tokenizer: Any = None,
    text_column: str | Sequence[str] | None = None,
    label_column: str | Sequence[str] | None = None,
    kind: str | Sequence[str] | None = None,
    map_label: str | Sequence[str] | None = None,
    skip_bad_rows: bool = False,
    metric: str | Sequence[str] | None = None,
    readout: str = "auto",
    shots: int | None = None,
    seed: int = 0,
    test_limit: int | None = None,
    graftable: str | None = None,
    max_length: int | None = None,
    dtype: ModelDtype = "float32",
    scenario: Scenario = "task",
    evaluate_on: EvaluatedOn = "test",
) -> Stream:
    """Load tasks and model, sample the training rows, and tokenise all rows once.

    >>> stream = load_stream("qnli,sst2", data="demo", shots=16)  # doctest: +SKIP

    Args:
        stream: a registered stream such as ``qnli-agnews-sst2``, or task names: separated by commas, or as a list; default:
            the tasks of ``data``, in order.
        data: ``hub``, ``demo``, a directory, a file of rows, or a list of files, each a task named after the file; default:
            ``FORGETFREE_DATA`` if set, else ``hub``. Or the rows of each task, by name: a path, a ``datasets.Dataset`` or
            ``DatasetDict``, a pandas ``DataFrame``, a list of dicts, or a dict of splits of these.
        model: ``minilm``, a directory in Hugging Face layout, or a hub name; or a ``PreTrainedModel``, which is copied. Any
            other network learns an Avalanche benchmark: see `benchmark_stream`.
        tokenizer: the tokenizer of a ``PreTrainedModel``.
        text_column: the column with the texts, two for pairs; ``TASK=COLUMN`` for one task; default: by common names.
        label_column: the column with the labels; ``TASK=COLUMN`` for one task; default: ``label``, or by common names.
        kind: kind of the tasks, such as ``generation``; ``TASK=KIND`` for one task; default: inferred from its columns.
        map_label: rename a label, ``OLD=NEW``; ``TASK:OLD=NEW`` for one task; without ``NEW``, its rows are
            left out.
        skip_bad_rows: skip rows that cannot be used, which otherwise are an error.
        metric: the metric, or ``TASK=METRIC`` for each of several tasks; default: the metric of the task's kind.
        readout: ``auto``, ``linear``, ``prompt`` or ``causal``.
        shots: training rows per label, or sentences per kind of entity; default: all.
        seed: random seed for sampling and for the readouts' initial weights.
        test_limit: maximum number of test rows, spread evenly; default: all.
        graftable: regular expression for parameter names; only matching tensors may be grafted and trained.
        max_length: maximum number of tokens per row; default: 128, or 1,024 for generation, at most the limit of the
            model.
        dtype: see `forgetfree.models.loading.load_model`.
        scenario: whether the task is known at inference: ``task``; or unknown, and one readout distinguishes all tasks' labels
            (``class``) or all tasks share the same labels (``domain``).
        evaluate_on: ``validation`` scores validation rows instead of test rows, to choose options.

    Raises:
        UsageError, DataError, ModelError: see `load_tasks` and `load_model`.
    """
    if scenario not in get_args(Scenario):
        raise UnknownNameError("scenario", scenario, get_args(Scenario))
    if data is not None:
        check_form(data)
    if tokenizer is not None or not isinstance(model, str):
        check_in_memory(model, tokenizer)
    options = ReadOptions.of(text_column, label_column, skip_bad_rows, metric, kind, map_label)
    tasks = load_tasks(stream, data or default_data(), evaluate_on, options)
    definitions = [rows.task for rows in tasks]
    readout = readout_for(readout, definitions)
    loaded = load_model(
        model,
        readout,
        tokenizer=tokenizer,
        graftable=graftable,
        max_length=max_length,
        dtype=dtype,
        tasks=definitions,
    )
    tasks = [drop_bad_rows(rows, loaded.encoder(rows.task), skip_bad_rows) for rows in tasks]
    tell(tasks)
    tell_note(loaded.note)
    name = stream if isinstance(stream, str) else ",".join(rows.task.name for rows in tasks)
    made = make_stream(name, tasks, loaded, shots=shots, seed=seed, test_limit=test_limit, scenario=scenario)
    for task in made.tasks:
        tell_note(task.note)
        tell_note(task.few_rows)
    return made


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
    """Create a stream from tasks and a model that are already loaded; arguments as for `load_stream`.

    Raises:
        UsageError: the scenario needs a linear readout, or (``domain``) tasks with the same number of labels; or the model
            has been trained since it was loaded.
    """
    definitions, labels = label_spaces([rows.task for rows in tasks], loaded, scenario)
    loaded.check_words(definitions)
    loaded = replace(loaded, model=StreamModel.of(loaded, shared_readout=scenario != "task"))
    drawn: dict[str, Any] = {"shots": shots, "seed": seed, "test_limit": test_limit}
    encoded = [
        encode_task(replace(rows, task=task), loaded, labels=space, **drawn)
        for rows, task, space in zip(tasks, definitions, labels, strict=True)
    ]
    return Stream(name, tuple(encoded), loaded, seed, ModelState.of(loaded.model), _benchmark(encoded), scenario)


def _benchmark(tasks: Sequence[EncodedTask]) -> Any:
    """Return the Avalanche benchmark: ``train_stream``, ``validation_stream``, ``test_stream``, with task labels."""
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


# -- Over an Avalanche benchmark, for any network that ends in a linear layer ----------------------------------


def benchmark_stream(
    benchmark: Any,
    network: nn.Module,
    *,
    head: str | None = None,
    graftable: str | None = None,
    seed: int = 0,
    name: str = "benchmark",
) -> Stream:
    """Create a stream from an Avalanche benchmark, such as ``nc_benchmark``'s, and a network that ends with a linear layer.

    Each experience is a task: ``experience-0``, ``experience-1``, … The scenario is ``task`` where experiences have task
    labels of their own (each then has its own readout), ``domain`` where all have the same classes, else ``class``.

    Args:
        benchmark: has a ``train_stream`` and a ``test_stream`` with the same number of experiences, in the same order. Masks
            are chosen on the rows of a ``valid_stream``, if there is one, else of the training stream.
        network: maps inputs to logits of all classes; it is copied and not changed.
        head: name of the last linear layer of the network, which computes the logits; default: the last one.
        graftable: regular expression for parameter names; only matching tensors may be grafted and trained.
        seed: stored with the stream.
        name: the name of the stream.

    Raises:
        UsageError: the streams or their task labels do not match, or the network has fewer outputs than there are classes.
        ModelError: the network has no linear layer to read out from, or something follows it.
    """
    parts = {split: list(stream) for split, stream in benchmark.streams.items() if split in ("train", "valid", "test")}
    sizes = {split: len(experiences) for split, experiences in parts.items()}
    if not {"train", "test"} <= parts.keys() or len(set(sizes.values())) > 1:
        got = ", ".join(f"{size} of {split}" for split, size in sizes.items()) or "none"
        raise UsageError(
            "A benchmark needs a train and a test stream, and optionally a valid stream, all with the same number "
            f"of experiences, got {got}. Create one with Avalanche's benchmark_from_datasets(train=[…], test=[…]), "
            "with one dataset per task."
        )
    train, test = parts["train"], parts["test"]
    classes = [tuple(sorted({int(label) for label in experience.dataset.targets})) for experience in train]
    scenario = _scenario_of(train, classes)
    model = BenchmarkModel(network, head, graftable=graftable, shared_readout=scenario != "task")
    largest = max(map(max, classes))
    if largest >= model.n_labels:
        raise UsageError(
            f"The benchmark has labels up to {largest}, but the network has {model.n_labels} outputs. Give it at "
            f"least {largest + 1} outputs."
        )
    _check_reads_out(network, model, train[0].dataset)
    encoded = []
    for position, experiences in enumerate(zip(train, parts.get("valid", train), test, strict=True)):
        called = f"experience-{position}"
        label = model.add_task(called, model.n_labels)
        shown = position if scenario == "task" else 0
        rows = tuple(DatasetExamples(part.dataset, part.dataset.targets, shown) for part in experiences)
        definition = TaskDefinition(called, "single", tuple(map(str, classes[position])))
        shots = min(rows[0].labels.tolist().count(label) for label in classes[position])
        fingerprint = f"{name}/{position}"
        encoded.append(EncodedTask(definition, label, shots, rows[0], rows[1], rows[2], fingerprint, classes[position]))
    loaded = LoadedModel(type(network).__name__, model, None, "linear", fingerprint_of(model.backbone))
    return Stream(name, tuple(encoded), loaded, seed, ModelState.of(model), benchmark, scenario)


def _scenario_of(experiences: Sequence[Any], classes: list[tuple[int, ...]]) -> Scenario:
    """Return the scenario, from the task labels and the classes of the experiences."""
    # Not every experience has its task labels: after benchmark_with_validation_stream, only the data set has them.
    labels = [
        sorted({*getattr(each, "task_labels", getattr(each.dataset, "targets_task_labels", [0]))})
        for each in experiences
    ]
    if len(labels) > 1 and labels == [[place] for place in range(len(labels))]:
        return "task"
    if labels != [labels[0][:1]] * len(labels):
        raise UsageError(
            f"The experiences have task labels {labels}, expected 0, 1, 2, … in order, or the same label for all."
        )
    return "domain" if len(set(classes)) == 1 else "class"


@torch.no_grad()
def _check_reads_out(network: nn.Module, model: ModuleModel, dataset: Any) -> None:
    """Raise unless the network computes the same logits with its last layer as a separate readout."""
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
            f"{type(network).__name__} cannot process inputs of {x.dtype} and shape {tuple(x.shape[1:])}: "
            f"{first_line(error)}. Give inputs of the dtype and shape that it expects."
        ) from error
    finally:
        network.train(mode)
        model.backbone.train(mode)
    readout = model.make_layer("", model.n_labels, 0)
    fits = isinstance(features, Tensor) and features.shape[-1] == model.hidden_size
    if not fits or not torch.allclose(readout.to(features.dtype)(features), expected, rtol=1e-3, atol=1e-5):
        raise ModelError(
            f"{type(network).__name__} does not end with the layer {model.head_name!r}: other operations follow it. "
            "Pass the name of the last layer as head=…, and remove operations after it, such as a softmax."
        )
