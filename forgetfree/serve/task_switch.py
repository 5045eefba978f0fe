"""A ledger's tasks in an ordinary transformers model of one's own, which answers as the run did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgetfree.core.parameters import load_tensors_
from forgetfree.core.readout_model import BY_WORDS, LINEAR, body_of, in_evaluation_mode
from forgetfree.errors import LedgerError, RunError, UsageError
from forgetfree.files import StrPath
from forgetfree.kinds.kind import kind_of
from forgetfree.kinds.networks import naming_labels
from forgetfree.ledger.ledger import Ledger, Record
from forgetfree.ledger.switch import LedgerSwitch, refusing_steps
from forgetfree.models.heads import HiddenRows, make_head, read_head
from forgetfree.models.loading import reads_last
from forgetfree.models.task_model import mean_of_tokens
from forgetfree.results.run_folder import LEDGER, check_own
from forgetfree.serve.source import saved_file
from forgetfree.serve.weights import missing_definition

#: From hidden states ``(B, L, H)``, token ids and attention mask to logits.
Logits = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


class TaskSwitch:
    """Switches a transformers model between its own weights and the tasks of a ledger.

    While a task is in place, the model has the task's weights and is in evaluation mode, its ``config`` names the task's
    labels, and the ``logits`` of its output are those of the task's linear readout, or of its head in another trainer, whatever
    head the model has or lacks: they are computed from the body's hidden states as in training. They are ``(B, n)``, or
    ``(B, L, n)`` for a task that labels words: a word's are those at its first token. A readout by label words adds no layer,
    so such a model keeps its own logits, and the words' logits are among them. `to` with ``None`` gives back weights, output,
    configuration and modes as they were.

    >>> switch = TaskSwitch("runs/first", model)  # doctest: +SKIP
    >>> with switch.task("sst2"):  # doctest: +SKIP
    ...     logits = model(**inputs).logits

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
        #: What the task in place has changed of the model beside its weights.
        self._present = ExitStack()
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
        record = None if position is None else self.ledger.records[position]
        reader = None if record is None or self._readout in BY_WORDS else self._reader(record)
        self._present.close()
        self._switch.to(0 if position is None else position + 1)
        if record is None:
            return
        self._present.enter_context(in_evaluation_mode(self._model))
        self._present.enter_context(refusing_steps(self._model, record.task))
        if record.definition is not None:
            self._present.enter_context(naming_labels(self._model.config, record.definition.labels))
        if reader is not None:
            for hook in (
                self._body.register_forward_hook(self._note),
                self._model.register_forward_hook(reader, with_kwargs=True),
            ):
                self._present.callback(hook.remove)

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

    def _reader(self, record: Record) -> Any:
        """Return a hook that puts the logits of a task into the model's output: of the row, or at all its positions."""
        logits = self._head(record) if self._readout == "classifier" else self._linear(record)

        def read(model: nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> Any:
            hidden, self._hidden = self._hidden, None
            if hidden is None or not hasattr(output, "keys"):
                raise UsageError(
                    "The model returned a tuple, expected an output with names. Leave out return_dict=False."
                )
            ids, mask = args[0] if args else inputs.get("input_ids"), inputs.get("attention_mask")
            output["logits"] = logits(hidden, ids, mask)
            return output

        return read

    def _head(self, record: Record) -> Logits:
        """Return what reads hidden states by a head of transformers' own."""
        binding, config = self.ledger.binding, self._model.config
        if binding is None or (definition := record.definition) is None:
            raise LedgerError(missing_definition(record.task))
        head = make_head(binding.architecture, config, len(definition.labels), config.pad_token_id)
        load_tensors_(head, record.own_readout)

        def logits(hidden: Tensor, ids: Tensor | None, mask: Tensor | None) -> Tensor:
            if ids is None:
                raise UsageError("The head reads input_ids, too, and the model was called without. Give them.")
            return read_head(head.to(hidden.device, hidden.dtype), HiddenRows(hidden, ids, mask))

        return logits

    def _linear(self, record: Record) -> Logits:
        """Return what reads hidden states by a linear readout."""
        if "weight" not in (tensors := record.own_readout):
            raise LedgerError(missing_definition(record.task))
        labels, width = tensors["weight"].shape
        # Its usual first weights would be drawn from the caller's generator.
        device = next(self._body.parameters()).device
        readout = nn.Linear(width, labels, device="meta").to_empty(device=device)
        load_tensors_(readout, tensors)
        last = reads_last(self._model.config)
        every_token = record.definition is not None and not kind_of(record.definition).one_label_a_row

        def logits(hidden: Tensor, ids: Tensor | None, mask: Tensor | None) -> Tensor:
            if self._readout == "mean":
                ones = torch.ones(hidden.shape[:2], device=hidden.device)
                hidden = mean_of_tokens(hidden, ones if mask is None else mask)
            elif not every_token:
                rows = torch.arange(len(hidden), device=hidden.device)
                hidden = hidden[rows, _last(mask, hidden) if last else torch.zeros_like(rows)]
            read: Tensor = readout.to(hidden.device)(hidden.to(readout.weight.dtype))
            return read

        return logits


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
