"""Answering from a finished run: its model with what the ledger holds for a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forgetfree.config_file import load_run, located
from forgetfree.data.encoding import EncodedRows
from forgetfree.data.rows import Rows
from forgetfree.display import brief, is_text
from forgetfree.errors import LedgerError, RunError, UsageError
from forgetfree.ledger import Ledger, LedgerSwitch
from forgetfree.models.loading import LoadedModel, load_model
from forgetfree.models.state import load_tensors_
from forgetfree.tasks import MAX_LENGTH, TaskDefinition
from forgetfree.training import predict


@dataclass(frozen=True)
class Answer:
    """The label of one text, and its probability."""

    label: str
    probability: float


class Predictor:
    """A model and a ledger that answer for every task of a run.

    Args:
        loaded: the base model, with no tasks yet.
        ledger: of the run.
        tasks: the definitions of its tasks, in the order of the stream.
        shared_labels: whether all tasks' labels had one readout (``scenario=class``): each task is answered by its own.

    Raises:
        LedgerError: the ledger belongs to another model.
    """

    def __init__(
        self, loaded: LoadedModel, ledger: Ledger, tasks: Sequence[TaskDefinition], *, shared_labels: bool = False
    ) -> None:
        self._loaded, self.ledger = loaded, ledger
        self._switch = LedgerSwitch(ledger, loaded.model.backbone, fingerprint=loaded.fingerprint)
        self._tasks = {task.name: task for task in tasks}
        first_labels = _first_labels(tasks) if shared_labels else {}
        for record in ledger.records:
            if record.task not in self._tasks:
                raise LedgerError(
                    f"The ledger holds task {record.task!r}, which the run's config.json does not define. "
                    "The two belong to different runs."
                )
            label = loaded.model.add_task(loaded.head(self._tasks[record.task]))
            readout = loaded.model.readout_module(label)
            expected = {name: tuple(tensor.shape) for name, tensor in readout.state_dict().items()}
            stored = dict(record.readout)
            if shared_labels:
                first, count = first_labels[record.task], len(self._tasks[record.task].labels)
                stored = {name: tensor[first : first + count] for name, tensor in stored.items()}
            got = {name: tuple(tensor.shape) for name, tensor in stored.items()}
            if expected != got:
                raise LedgerError(
                    f"The ledger's readout of task {record.task!r} does not fit the model: expected {expected}, got {got}. "
                    "Load the model and readout the stream was trained with."
                )
            load_tensors_(readout, stored)

    @classmethod
    def of_run(
        cls, directory: Path, seed: int | None = None, strategy: str | None = None, model: str | None = None
    ) -> Predictor:
        """The predictor of a run directory.

        Args:
            directory: what ``forgetfree run --out`` wrote.
            seed: whose ledger; default: the first there is.
            strategy: whose ledger; default: ``grafting-continual``'s, else the first there is.
            model: the run's model, where it lies elsewhere now; it is told by its weights.

        Raises:
            RunError: it is no run directory, or holds no ledger.
            LedgerError, ModelError: ledger and model do not fit.
        """
        config = load_run(directory)
        tasks = [TaskDefinition.of_fields(task) for task in config["tasks"]]
        described = config["model"]
        held = directory.glob("*/seed-*/ledger.safetensors")
        found = sorted(held, key=lambda p: (p.parts[-3] != "grafting-continual", p))
        ledgers = [
            path
            for path in found
            if strategy in (None, path.parts[-3]) and (seed is None or path.parts[-2] == f"seed-{seed}")
        ]
        if not ledgers:
            of_seed = "" if seed is None else f" of seed {seed}"
            of_strategy = "" if strategy is None else f" of {strategy}"
            names = ", ".join(sorted(f"{path.parts[-3]} ({path.parts[-2]})" for path in found))
            raise RunError(
                f"{directory} holds no ledger{of_strategy}{of_seed}. It holds those of: {names or 'none'}. Run a strategy that "
                "keeps one: grafting-continual, packnet, wsn, bitfit or graft-retrain."
            )
        return cls(
            load_model(
                model or located(described["name"], directory),
                described["readout"],
                max_length=described.get("max_length", MAX_LENGTH),
            ),
            Ledger.load(ledgers[0]),
            tasks,
            shared_labels=config.get("scenario") == "class",
        )

    def definition(self, task: str) -> TaskDefinition:
        """The task's definition.

        Raises:
            TaskError: the ledger does not hold it.
        """
        self.ledger.position(task)
        return self._tasks[task]

    def logits(self, task: str, rows: Rows, *, batch_size: int = 64) -> Tensor:
        """Logits ``(n, n_labels)`` of rows by the model that infers ``task``."""
        definition = self.definition(task)
        model = self._loaded.model
        label = model.task_label(task)
        encoded = EncodedRows.of(self._loaded.encoder(definition)(rows), rows.labels, label, self._loaded.pad)
        with self._switch.task(task):
            return predict(model, encoded, batch_size=batch_size)

    def answer(self, task: str, texts: Sequence[tuple[str, ...]]) -> list[Answer]:
        """Labels of texts (or pairs of texts).

        Raises:
            UsageError: a single text for a task over pairs, or the other way round; or one that is no text.
        """
        definition = self.definition(task)
        wanted = len(definition.text_columns)
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
        if not texts:
            return []
        columns = [tuple(column) for column in zip(*texts, strict=True)]
        rows = Rows(columns[0], columns[1] if wanted == 2 else (), (0,) * len(texts))
        best = torch.softmax(self.logits(task, rows), dim=1).max(1)
        return [
            Answer(definition.labels[label], probability)
            for probability, label in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]


def _first_labels(tasks: Sequence[TaskDefinition]) -> dict[str, int]:
    """Where each task's labels begin among those of all tasks."""
    sizes = [len(task.labels) for task in tasks]
    return {task.name: sum(sizes[:i]) for i, task in enumerate(tasks)}


__all__ = ["Answer", "Predictor"]
