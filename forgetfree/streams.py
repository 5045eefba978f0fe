"""The Avalanche bridge of streams: tasks by name become an Avalanche benchmark and a model that reads it.

The only place, with the strategies, that imports Avalanche.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from avalanche.benchmarks import benchmark_from_datasets, with_classes_timeline, with_task_labels
from avalanche.benchmarks.utils import AvalancheDataset, ConstantSequence, DataAttribute
from avalanche.models.dynamic_modules import MultiTaskModule

from forgetfree.data.encoding import EncodedRows
from forgetfree.data.sampling import evenly, k_shot
from forgetfree.data.sources import Rows, TaskRows, default_data, load_tasks
from forgetfree.models.loading import LoadedModel, load_model
from forgetfree.models.state import ModelState
from forgetfree.models.task_model import TaskModel
from forgetfree.seeds import derive_seed
from forgetfree.tasks import TaskDefinition


class StreamModel(TaskModel, MultiTaskModule):
    """A `TaskModel` that Avalanche knows as one with task labels."""

    def adaptation(self, experience: Any) -> None:
        """Nothing to adapt: the readouts of all tasks are there from the start."""


@dataclass(frozen=True)
class StreamTask:
    """One task of a stream, encoded for its model.

    Attributes:
        definition: what it is.
        label: its task label, which is its position in the stream.
        shots: training rows of the rarest label.
        train, validation, test: the rows as token ids.
        fingerprint: of all the task's rows, before sampling.
    """

    definition: TaskDefinition
    label: int
    shots: int
    train: EncodedRows
    validation: EncodedRows
    test: EncodedRows
    fingerprint: str

    @property
    def name(self) -> str:
        """The task's name."""
        return self.definition.name


@dataclass(frozen=True)
class Stream:
    """Tasks in order, the model that reads them, and the Avalanche benchmark made of them.

    Attributes:
        name: as it was asked for.
        tasks: in order.
        loaded: the model with its tokenizer and fingerprint. Strategies train this very model, one at a time.
        seed: of the k-shot samples and the readouts' first weights.
        pristine: what the model held at first: every strategy starts from it.
    """

    name: str
    tasks: tuple[StreamTask, ...]
    loaded: LoadedModel
    seed: int
    pristine: ModelState

    @property
    def model(self) -> TaskModel:
        """The model all strategies train."""
        return self.loaded.model

    @cached_property
    def benchmark(self) -> Any:
        """The Avalanche benchmark: ``train_stream``, ``validation_stream``, ``test_stream``, with task labels."""
        splits = {
            split: [_dataset(getattr(task, split)) for task in self.tasks] for split in ("train", "validation", "test")
        }
        return with_classes_timeline(with_task_labels(benchmark_from_datasets(**splits)))

    def task(self, label: int) -> StreamTask:
        """The task of a task label."""
        return self.tasks[label]


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

    Raises:
        UsageError, DataError, ModelError: see `load_tasks` and `load_model`.
    """
    return make_stream(
        stream,
        load_tasks(stream, data or default_data()),
        load_model(model, readout, model_class=StreamModel, graftable=graftable),
        shots=shots,
        seed=seed,
        test_limit=test_limit,
    )


def make_stream(
    name: str,
    tasks: Sequence[TaskRows],
    loaded: LoadedModel,
    *,
    shots: int | None = None,
    seed: int = 0,
    test_limit: int | None = None,
) -> Stream:
    """A stream of tasks that are already read, for a model that is already loaded; arguments as `load_stream`."""
    encoded = []
    for rows in tasks:
        task = rows.task
        label = loaded.model.add_task(loaded.head(task), seed)
        encoder, pad = loaded.encoder(task), loaded.model.tokens.pad
        train = rows.train
        if shots is not None:
            train = k_shot(train, shots, derive_seed(seed, "shots", task.name), task.name)

        def encode(part: Rows, label: int = label, encoder: Any = encoder, pad: int = pad) -> EncodedRows:
            return EncodedRows.of(encoder(part), part.labels, label, pad)

        encoded.append(
            StreamTask(
                task,
                label,
                min(train.labels.count(i) for i in range(len(task.labels))),
                encode(train),
                encode(rows.validation),
                encode(rows.test.take(evenly(len(rows.test), test_limit))),
                rows.fingerprint(),
            )
        )
    return Stream(name, tuple(encoded), loaded, seed, ModelState.of(loaded.model))


def _dataset(rows: EncodedRows) -> AvalancheDataset:
    labels = DataAttribute(ConstantSequence(rows.task, len(rows)), "targets_task_labels", use_in_getitem=True)
    targets = DataAttribute(rows.targets, "targets")
    return AvalancheDataset([rows], data_attributes=[targets, labels], collate_fn=rows.collate)
