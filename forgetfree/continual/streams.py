"""The Avalanche bridge of streams: tasks by name, or rows in memory, become an Avalanche benchmark.

This room, the strategies and their tests are all that import Avalanche.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from avalanche.benchmarks import benchmark_from_datasets, with_classes_timeline, with_task_labels
from avalanche.benchmarks.utils import (
    ConstantSequence,
    DataAttribute,
    TaskAwareSupervisedClassificationDataset,
)
from torch import nn

from forgetfree.continual.benchmark_streams import benchmark_stream, tensor_stream
from forgetfree.continual.stream import BenchmarkModel, Stream, StreamModel
from forgetfree.data.columns import ReadOptions
from forgetfree.data.encoding import drop_bad_rows
from forgetfree.data.examples import EncodedRows, OneLength
from forgetfree.data.rows import TaskRows, tell
from forgetfree.data.sources import check_form, default_data, load_tasks
from forgetfree.display import tell_note
from forgetfree.errors import UsageError
from forgetfree.kinds.kind import readout_for
from forgetfree.models.loading import LoadedModel, is_pretrained, load_model
from forgetfree.models.state import ModelState
from forgetfree.models.task_model import check_own_dtype
from forgetfree.recipes import ModelDtype
from forgetfree.tasks import EvaluatedOn, Scenario
from forgetfree.training.encoded_task import EncodedTask, encode_task, label_spaces


def load_stream(
    stream: str | Sequence[str] | None = None,
    *,
    data: str | Mapping[str, Any] | None = None,
    model: str | nn.Module = "minilm",
    tokenizer: Any = None,
    text_column: str | Sequence[str] | None = None,
    label_column: str | Sequence[str] | None = None,
    kind: str | Sequence[str] | None = None,
    skip_bad_rows: bool = False,
    metric: str | Mapping[str, str] | None = None,
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
    """Load tasks and model, sample, tokenise once.

    Args:
        stream: a registered stream such as ``qnli-agnews-sst2``, or task names: separated by commas, or as a list; default:
            the tasks of ``data``, in order.
        data: ``hub``, ``demo``, a directory, a file of rows, or a list of files, each a task of its name; default:
            ``FORGETFREE_DATA`` if set, else ``hub``. Or the rows of each task, by name: a path, a ``datasets.Dataset`` or
            ``DatasetDict``, a pandas ``DataFrame``, a list of dicts, or a dict of splits of these. For a model that reads
            tensors, see `forgetfree.continual.benchmark_streams.tensor_stream`.
        model: ``minilm``, a directory in Hugging Face layout, or a hub name; or a ``PreTrainedModel``, which is copied; or any
            network that reads tensors and ends in a linear layer.
        tokenizer: of a ``PreTrainedModel``.
        text_column: the column of the texts, two for pairs; ``TASK=COLUMN`` for one task; default: by common names.
        label_column: the column of the labels; ``TASK=COLUMN`` for one task; default: ``label``, or by common names.
        kind: what the tasks ask for, such as ``generation``; ``TASK=KIND`` for one task; default: by its columns.
        skip_bad_rows: leave out rows that cannot be used, which are refused otherwise.
        metric: what answers are scored by, or the metric of each task by its name; default: that of the task's kind.
        readout: ``auto``, ``linear``, ``prompt`` or ``causal``.
        shots: training rows per label, or sentences per kind of entity; default: all.
        seed: of the sample and of the readouts' first weights.
        test_limit: evaluate on at most this many test rows, spread evenly; default: all.
        graftable: regular expression over parameter names; only tensors it is found in may be grafted and trained.
        max_length: tokens a row is read at, at most; default: 128, or 1,024 where a task's answers are texts, as far as the
            model reads.
        dtype: see `forgetfree.models.loading.load_model`; a network that reads tensors keeps its own.
        scenario: what is known at inference: the ``task``; or not the task, and all tasks' labels are told apart by one
            readout (``class``) or are the same labels for all (``domain``).
        evaluate_on: ``validation`` puts the test rows away and scores validation rows, to choose options by.

    Raises:
        UsageError, DataError, ModelError: see `load_tasks` and `load_model`.
    """
    check_scenario(scenario)
    common: dict[str, Any] = {"shots": shots, "seed": seed}
    common |= {"test_limit": test_limit, "scenario": scenario}
    if isinstance(model, nn.Module) and not is_pretrained(model):
        if not isinstance(data, Mapping):
            raise UsageError(
                f"A {type(model).__name__} reads tensors: give them as data={{NAME: (x, y)}}. For texts give a PreTrainedModel "
                "and its tokenizer."
            )
        check_own_dtype(model, dtype)
        names = stream.split(",") if isinstance(stream, str) else list(data if stream is None else stream)
        return tensor_stream(names, data, model, graftable=graftable, evaluate_on=evaluate_on, **common)
    if data is not None:
        check_form(data)
    options = ReadOptions.of(text_column, label_column, skip_bad_rows, metric, kind)
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
    made = make_stream(name, tasks, loaded, **common)
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
    """Make a stream of tasks that are already read, for a model that is already loaded; arguments as `load_stream`.

    Raises:
        UsageError: the scenario needs a linear readout, or (``domain``) tasks with as many labels each; or the model has
            been trained since it was loaded.
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
