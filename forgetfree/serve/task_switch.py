"""A ledger's tasks in an ordinary transformers model of one's own, which answers as the run did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.core.body import body_of
from forgetfree.core.readout_model import LINEAR
from forgetfree.core.tensors import load_tensors_
from forgetfree.errors import RunError, UsageError
from forgetfree.files import StrPath
from forgetfree.ledger import Ledger, LedgerSwitch
from forgetfree.models.loading import reads_last
from forgetfree.models.task_model import mean_of_tokens
from forgetfree.results.unit_folder import check_own
from forgetfree.serve.served_task import served
from forgetfree.serve.source import LEDGER, saved_file


class TaskSwitch:
    """Switches a transformers model between its own weights and the tasks of a ledger.

    While a task is in place, the model has the task's weights, its ``config`` names the task's labels, and the ``logits`` of
    its output are those of the task's linear readout, whatever head the model has or lacks: they are computed from the body's
    hidden states as in the run. They are ``(B, n)``, or ``(B, L, n)`` for a task that labels words: a word's are those at its
    first token. A readout by label words adds no layer, so such a model keeps its own logits,
    and the words' logits are among them. `to` with ``None`` gives back weights, output and configuration as they were.

    Args:
        ledger: the ledger, its file, or the directory of a run, whose first ledger it is (grafting-continual's, if there).
        model: made from the weights that the stream was trained on: an ``AutoModel``, or any ``AutoModelFor…``.

    Raises:
        LedgerError: the ledger belongs to another model, or its file is damaged.
        RunError: the directory holds nothing, or what was kept there is no ledger.
    """

    def __init__(self, ledger: Ledger | StrPath, model: Any) -> None:
        self.ledger = ledger if isinstance(ledger, Ledger) else Ledger.load(_file_of(Path(ledger)))
        #: How the logits are read; the model's own where they are label words'.
        self._readout = self.ledger.binding.readout if self.ledger.binding else "linear"
        self._model, self._body = model, body_of(model)
        self._switch = LedgerSwitch(self.ledger, self._body if self._readout in LINEAR else model)
        self._labels = dict(model.config.id2label), dict(model.config.label2id)
        self._hooks: list[Any] = []
        self._hidden: Tensor | None = None

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks, in order."""
        return self.ledger.tasks

    def to(self, task: str | None) -> None:
        """Make the model answer ``task``; ``None``: be itself again.

        Raises:
            TaskError: the ledger does not hold the task.
        """
        position = None if task is None else self.ledger.position(task)
        while self._hooks:
            self._hooks.pop().remove()
        self._switch.to(0 if position is None else position + 1)
        config = self._model.config
        config.id2label, config.label2id = map(dict, self._labels)
        if position is None:
            return
        record = self.ledger.records[position]
        if record.definition is not None:
            config.id2label = dict(enumerate(record.definition.labels))
            config.label2id = {label: number for number, label in config.id2label.items()}
        if self._readout in LINEAR:
            of_words = record.definition is not None and served(record.definition).of_words
            self._hooks = [
                self._body.register_forward_hook(self._note),
                self._model.register_forward_hook(
                    self._reader(record.own_readout, of_words=of_words), with_kwargs=True
                ),
            ]

    @contextmanager
    def task(self, task: str) -> Iterator[Any]:
        """Give the model as it answers ``task``; it is itself again after the block."""
        self.to(task)
        try:
            yield self._model
        finally:
            self.to(None)

    def _note(self, body: nn.Module, inputs: Any, output: Any) -> None:
        self._hidden = getattr(output, "last_hidden_state", None)

    def _reader(self, tensors: dict[str, Tensor], *, of_words: bool) -> Any:
        """Return a hook that puts the logits of a readout into the model's output: of the row, or at all its positions."""
        labels, width = tensors["weight"].shape
        readout = nn.Linear(width, labels, device=next(self._body.parameters()).device)
        load_tensors_(readout, tensors)
        last = reads_last(self._model.config)

        def read(model: nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> Any:
            hidden, self._hidden = self._hidden, None
            if hidden is None or not hasattr(output, "keys"):
                raise UsageError(
                    "The model returned a tuple, expected an output with names. Leave out return_dict=False."
                )
            if self._readout == "mean":
                mask = inputs.get("attention_mask")
                hidden = mean_of_tokens(
                    hidden, torch.ones(hidden.shape[:2], device=hidden.device) if mask is None else mask
                )
            elif not of_words:
                rows = torch.arange(len(hidden), device=hidden.device)
                hidden = hidden[rows, _last(inputs.get("attention_mask"), hidden) if last else torch.zeros_like(rows)]
            output["logits"] = readout.to(hidden.device)(hidden.to(readout.weight.dtype))
            return output

        return read


def _file_of(place: Path) -> Path:
    """Return the ledger's file at a place: itself, or the one in a run's directory."""
    if not place.is_dir():
        check_own(place)
        return place
    file = saved_file(place)
    if file.name != LEDGER:
        raise RunError(
            f"{place} holds no ledger, but {file.name} of {file.parts[-3]}. Answer from it by Predictor.of_run."
        )
    return file


def _last(mask: Tensor | None, hidden: Tensor) -> Tensor:
    """Return the position of each row's last token: ``(B,)``."""
    if mask is None:
        return torch.full((len(hidden),), hidden.shape[1] - 1, device=hidden.device)
    return mask.shape[1] - 1 - mask.long().flip(1).argmax(1)
