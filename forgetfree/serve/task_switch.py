"""Puts a ledger's tasks into an ordinary transformers model, which then answers as the run did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from forgetfree.core.readout_model import BY_WORDS, LINEAR, body_of, in_evaluation_mode
from forgetfree.errors import RunError, UsageError
from forgetfree.files import StrPath
from forgetfree.kinds.networks import naming_labels
from forgetfree.ledger.ledger import Ledger, Record
from forgetfree.ledger.switch import LedgerSwitch, refusing_steps
from forgetfree.models.loading import readout_of
from forgetfree.results.run_folder import LEDGER, check_own
from forgetfree.serve.source import saved_file


class TaskSwitch:
    """Switches a transformers model between its own weights and the tasks of a ledger.

    While a task is in place, the model has the task's weights and is in evaluation mode, and its ``config`` names the task's
    labels. The ``logits`` of its output come from the task's linear readout, or from its head in another trainer, with or
    without a head in the model: they are computed from the body's hidden states as in training. Their shape is ``(B, n)``, or
    ``(B, L, n)`` for a task that labels words, where a word has the logits at its first token. A readout by label words adds
    no layer, so such a model keeps its own logits, which include those of the words. `to` with ``None`` restores weights,
    output, configuration and modes.

    >>> switch = TaskSwitch("runs/first", model)  # doctest: +SKIP
    >>> with switch.task("sst2"):  # doctest: +SKIP
    ...     logits = model(**inputs).logits

    Args:
        ledger: the ledger, its file, or a run's directory, for its first ledger (grafting-continual's, if there is one).
        model: an ``AutoModel`` or any ``AutoModelFor…`` with the weights that the stream was trained on.

    Raises:
        LedgerError: the ledger belongs to another model, or its file is damaged.
        RunError: the directory has no saved strategy, or one without a ledger.
    """

    def __init__(self, ledger: Ledger | StrPath, model: Any) -> None:
        self.ledger = ledger if isinstance(ledger, Ledger) else Ledger.load(_file_of(Path(ledger)))
        #: The readout of the logits; with label words, the model's own logits are used.
        self._readout = self.ledger.binding.readout if self.ledger.binding else "linear"
        self._model, self._body = model, body_of(model)
        self._switch = LedgerSwitch(self.ledger, self._body if self._readout in LINEAR else model)
        #: The changes to the model by the task in place, except for the weights.
        self._present = ExitStack()
        self._hidden: Tensor | None = None

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks, in order."""
        return self.ledger.tasks

    def to(self, task: str | None) -> None:
        """Make the model answer ``task``; ``None``: restore the model itself.

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
        """Yield the model, which answers ``task``; it is restored after the block."""
        self.to(task)
        try:
            yield self._model
        finally:
            self.to(None)

    def _note(self, body: nn.Module, inputs: Any, output: Any) -> None:
        self._hidden = getattr(output, "last_hidden_state", None)

    def _reader(self, record: Record) -> Any:
        """Return a hook that puts a task's logits into the model's output: one vector per row, or one per position."""
        readout = readout_of(self.ledger, record.task, self._model.config)

        def read(model: nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> Any:
            hidden, self._hidden = self._hidden, None
            if hidden is None or not hasattr(output, "keys"):
                raise UsageError(
                    "The model returned a tuple, expected an output with names. Leave out return_dict=False."
                )
            ids, mask = args[0] if args else inputs.get("input_ids"), inputs.get("attention_mask")
            if ids is None and self._readout == "classifier":
                raise UsageError("The head reads input_ids, too, and the model was called without. Give them.")
            dtype = hidden.dtype if self._readout == "classifier" else None
            output["logits"] = readout.to(hidden.device, dtype).logits(hidden, ids, mask)
            return output

        return read


def _file_of(place: Path) -> Path:
    """Return the ledger's file: ``place`` itself, or the ledger in the run's directory ``place``."""
    if not place.is_dir():
        check_own(place)
        return place
    file = saved_file(place)
    if file.name != LEDGER:
        raise RunError(
            f"{place} holds no ledger, but {file.name} of {file.parts[-3]}. Answer from it by Predictor.of_run."
        )
    return file
