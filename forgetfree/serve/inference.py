"""Answers from a finished run: its model with what the ledger holds for a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgetfree.core.readout_model import Precision
from forgetfree.core.tensors import load_tensors_
from forgetfree.data.encoding import EncodedRows
from forgetfree.data.rows import Rows
from forgetfree.display import brief, is_text
from forgetfree.errors import LedgerError, ModelError, RunError, UsageError
from forgetfree.files import StrPath
from forgetfree.learning.training import predict
from forgetfree.ledger import Ledger, LedgerSwitch, MixedBatchModel, check_binding, check_definitions
from forgetfree.models.loading import LoadedModel, load_model
from forgetfree.results.config_file import load_run, located
from forgetfree.tasks import MAX_LENGTH, TaskDefinition


@dataclass(frozen=True)
class Answer:
    """The label of one text, and its probability."""

    label: str
    probability: float


class Predictor:
    """A model and a ledger that answer for every task of a run.

    Args:
        loaded: the base model, with no tasks yet.
        ledger: the run's ledger.
        tasks: definitions of its tasks in the order of the stream, if they are known apart from the ledger. They must equal
            the ledger's own, which ledgers of version 0.2 do not have.
        shared_labels: of a ledger of version 0.2: whether all tasks' labels had one readout (``scenario=class``).
        precision: of a ledger of version 0.2: what it answered in.

    Raises:
        LedgerError: the ledger belongs to another model, or would not answer as it did; the message says what differs.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        ledger: Ledger,
        tasks: Sequence[TaskDefinition] = (),
        *,
        shared_labels: bool = False,
        precision: Precision = "fp32",
    ) -> None:
        self._loaded, self.ledger = loaded, ledger
        self._precision = ledger.binding.precision if ledger.binding else precision
        self._switch = LedgerSwitch(ledger, loaded.model.backbone, fingerprint=loaded.fingerprint)
        check_binding(ledger, loaded.binding(self._precision), "The ledger")
        given = {task.name: task for task in tasks}
        check_definitions(ledger, given, "the run's config.json")
        self._tasks: dict[str, TaskDefinition] = {}
        first_labels = _first_labels(tasks) if shared_labels else {}
        for record in ledger.records:
            definition = record.definition or given.get(record.task)
            if definition is None:
                raise LedgerError(
                    f"The ledger holds task {record.task!r}, which the run's config.json does not define. "
                    "The two belong to different runs."
                )
            self._tasks[record.task] = definition
            label = loaded.model.add_task(loaded.head(definition))
            readout = loaded.model.readout_module(label)
            expected = {name: tuple(tensor.shape) for name, tensor in readout.state_dict().items()}
            first, count = first_labels.get(record.task, 0), len(definition.labels)
            classes = list(record.classes or range(first, first + count))
            stored = {name: _rows(tensor, classes) for name, tensor in record.readout.items()}
            got = {name: tuple(tensor.shape) for name, tensor in stored.items()}
            if expected != got:
                raise LedgerError(
                    f"The ledger's readout of task {record.task!r} does not fit the model: expected {expected}, got {got}. "
                    "Load the model and readout the stream was trained with."
                )
            load_tensors_(readout, stored)
        self._mixed = MixedBatchModel(loaded.model, self._switch, pad=loaded.pad, precision=self._precision)

    @classmethod
    def of_run(
        cls, directory: StrPath, seed: int | None = None, strategy: str | None = None, model: str | None = None
    ) -> Predictor:
        """Return the predictor of a run directory.

        Args:
            directory: what ``forgetfree run --out`` wrote.
            seed: the seed of the ledger; default: the first.
            strategy: the strategy of the ledger; default: ``grafting-continual``, or else the first.
            model: the run's model, if it has moved; its weights must be the same.

        Raises:
            RunError: it is no run directory, or holds no ledger.
            LedgerError, ModelError: ledger and model do not fit.
        """
        run = Path(directory)
        config = load_run(run)
        file = find_ledger(run, seed, strategy)
        ledger, described = Ledger.load(file), config["model"]
        readout, max_length = described["readout"], described.get("max_length", MAX_LENGTH)
        if ledger.binding:
            readout, max_length = ledger.binding.readout, ledger.binding.max_length
        own = located(described["name"], run)
        try:
            return cls(
                load_model(model or own, readout, max_length=max_length),
                ledger,
                [TaskDefinition.of_fields(task) for task in config["tasks"]],
                shared_labels=config.get("scenario") == "class",
                precision=_precision_of(config, file.parts[-3]),
            )
        except (LedgerError, ModelError) as error:
            if model is None:
                raise
            raise type(error)(f"{error} The run was made with the model {own!r}.") from error

    def definition(self, task: str) -> TaskDefinition:
        """Return the task's definition.

        Raises:
            TaskError: the ledger does not hold it.
        """
        self.ledger.position(task)
        return self._tasks[task]

    def logits(self, task: str, rows: Rows, *, batch_size: int = 64) -> Tensor:
        """Return the logits ``(n, n_labels)`` of rows from the model that infers ``task``."""
        definition = self.definition(task)
        model = self._loaded.model
        label = model.task_label(task)
        encoded = EncodedRows.of(self._loaded.encoder(definition)(rows), rows.labels, label, self._loaded.pad)
        with self._switch.task(task):
            return predict(model, encoded, batch_size=batch_size, precision=self._precision)

    def answer(self, task: str, texts: Sequence[str | tuple[str, ...]]) -> list[Answer]:
        """Return the labels of texts (or pairs of texts).

        Args:
            task: a task of the ledger.
            texts: a tuple for each row, with one text, or two if the task is about pairs; a text alone is a tuple of one.

        Raises:
            UsageError: a single text for a task over pairs, or the other way round; or one that is no text.
        """
        rows = self._rows(task, texts)
        return [_answer(self._tasks[task], logits) for logits in self.logits(task, rows)] if len(rows) else []

    def answer_mixed(self, tasks: Sequence[str], texts: Sequence[str | tuple[str, ...]]) -> list[Answer]:
        """Return the labels of texts of any tasks, in about the time of as many texts of one: see `MixedBatchModel`.

        Args:
            tasks: the task of each text.
            texts: as for `answer`.

        Raises:
            UsageError: there are more texts than tasks, or fewer; or a text does not fit its task.
            TaskError: the ledger does not hold a task.
        """
        if len(tasks) != len(texts):
            raise UsageError(f"Expected a task for each text: got {len(texts)} texts and {len(tasks)} tasks.")
        encoded: dict[int, Tensor] = {}
        for task in dict.fromkeys(tasks):
            numbers = [number for number, other in enumerate(tasks) if other == task]
            rows = self._rows(task, [texts[number] for number in numbers])
            encoded |= zip(numbers, map(torch.tensor, self._loaded.encoder(self._tasks[task])(rows)), strict=True)
        answers: list[Answer] = []
        for start in range(0, len(tasks), 64):
            named = tasks[start : start + 64]
            logits = self._mixed.answer([encoded[start + i] for i in range(len(named))], named)
            answers += [_answer(self._tasks[task], row) for task, row in zip(named, logits, strict=True)]
        return answers

    def _rows(self, task: str, texts: Sequence[str | tuple[str, ...]]) -> Rows:
        """Return checked texts as rows of ``task``."""
        wanted = len(self.definition(task).text_columns)
        if isinstance(texts, str):
            raise UsageError(f"Expected a list of texts, got the text {brief(texts)}. Give [{brief(texts)}].")
        texts = [(text,) if isinstance(text, str) else text for text in texts]
        for number, text in enumerate(texts, 1):
            if halves := [part for part in text if not is_text(part)]:
                raise UsageError(
                    f"Text {number}, {brief(halves[0])}, holds half of a surrogate pair, which is no character: it was perhaps "
                    "not written in UTF-8. Write it in UTF-8."
                )
            if len(text) != wanted:
                raise UsageError(
                    f"Task {task!r} reads {'one text' if wanted == 1 else 'pairs of texts'}, got {len(text)} text(s) in "
                    f"{text[0][:40]!r}. {'' if wanted == 1 else 'Separate the two by a tab, or give them as two arguments.'}"
                )
        columns = [tuple(column) for column in zip(*texts, strict=True)] or [()]
        return Rows(columns[0], columns[1] if wanted == 2 and texts else (), (0,) * len(texts))


def _answer(task: TaskDefinition, logits: Tensor) -> Answer:
    best = torch.softmax(logits, dim=0).max(0)
    return Answer(task.labels[int(best.indices)], float(best.values))


def _precision_of(config: Mapping[str, Any], strategy: str) -> Precision:
    """Return the precision in which a strategy answered in a run of version 0.2."""
    options = config.get("options")
    own = options.get(strategy) if isinstance(options, dict) else None
    return "bf16" if isinstance(own, dict) and own.get("precision") == "bf16" else "fp32"


def find_ledger(run: Path, seed: int | None = None, strategy: str | None = None) -> Path:
    """Return the path of a run's ledger; see `Predictor.of_run`.

    Raises:
        RunError: the run holds none.
    """
    held = run.glob("*/seed-*/ledger.safetensors")
    found = sorted(held, key=lambda path: (path.parts[-3] != "grafting-continual", path))
    ledgers = [
        path
        for path in found
        if strategy in (None, path.parts[-3]) and (seed is None or path.parts[-2] == f"seed-{seed}")
    ]
    if not ledgers:
        of_seed = "" if seed is None else f" of seed {seed}"
        of_strategy = "" if strategy is None else f" of {strategy}"
        names = ", ".join(sorted(f"{path.parts[-3]} ({path.parts[-2]})" for path in found))
        remedy = "Give one of these by --strategy and --seed."
        if not found:
            remedy = "Run a strategy that keeps one: grafting-continual, packnet, wsn, bitfit or graft-retrain."
        raise RunError(f"{run} holds no ledger{of_strategy}{of_seed}. It holds those of: {names or 'none'}. {remedy}")
    return ledgers[0]


def _rows(tensor: Tensor, classes: list[int]) -> Tensor:
    """Return the rows of a task's labels; all rows where the readout has no others."""
    return tensor if max(classes, default=-1) >= len(tensor) else tensor[classes]


def _first_labels(tasks: Sequence[TaskDefinition]) -> dict[str, int]:
    """Return the first label of each task among the labels of all tasks."""
    sizes = [len(task.labels) for task in tasks]
    return {task.name: sum(sizes[:i]) for i, task in enumerate(tasks)}


__all__ = ["Answer", "Predictor"]
