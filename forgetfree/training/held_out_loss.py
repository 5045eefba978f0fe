"""Loss on held-out texts before and after the stream: the price in general ability."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from forgetfree.core.readout_model import ReadoutModel
from forgetfree.data.bad_rows import BadRow, DataFaults, counts_text
from forgetfree.data.columns import READ_DEFAULTS, ReadOptions
from forgetfree.data.encoding import Encoder
from forgetfree.data.examples import EncodedRows
from forgetfree.data.rows import Rows, TaskRows, evenly
from forgetfree.data.sources import Data, load_task
from forgetfree.data.table_files import format_of, read_lines, read_table
from forgetfree.display import counted, is_text
from forgetfree.errors import DataError, UnknownNameError, UsageError
from forgetfree.kinds.kind import kind_of
from forgetfree.models.loading import LoadedModel
from forgetfree.tasks import TaskDefinition
from forgetfree.training.encoded_task import token_losses
from forgetfree.training.training_options import TrainingOptions

#: Maximum number of tokens per batch: each has as many logits as the vocabulary has tokens.
_BATCH_TOKENS = 2048
#: The fault of a row whose text has no next token.
_SHORT = "no text of two tokens or more"
#: Readouts of models that predict the next token.
_NEXT_TOKEN = ("causal", "generate")


@dataclass(frozen=True)
class HeldOutTexts:
    """Texts on which no task is trained, encoded for a model.

    Attributes:
        rows: the texts, with marks on the predicted tokens.
        texts: each text, or its prompt.
        note: a note for the user on texts that exceed the model's maximum length or are left out; empty if there is none.
    """

    rows: EncodedRows
    texts: tuple[str, ...] = ()
    note: str = ""

    @classmethod
    def of(
        cls,
        place: str,
        data: Data | Any,
        loaded: LoadedModel,
        limit: int | None = None,
        options: ReadOptions = READ_DEFAULTS,
    ) -> Self:
        """Return the texts of a place.

        Args:
            place: a text file with a text a line; a file of rows with a column ``text``; or a task, by its name in ``data``,
                its folder or its file: the target texts of its test rows, after their prompts, or else the texts of these rows.
            data: as for `load_task`.
            loaded: the model.
            limit: maximum number of texts, spread evenly.
            options: how the rows of tasks are read, and whether bad ones are left out.

        Raises:
            UsageError: there is no such place, or the model does not predict the next token.
            DataError: there are no texts, or rows of a task are bad, or too long for the model.
        """
        if loaded.readout not in _NEXT_TOKEN:
            raise UsageError(
                "--held-out measures a causal language model's loss on the next token, which the readout "
                f"{loaded.readout!r} does not predict. Use --readout causal or generate, or leave --held-out out."
            )
        definition, rows, lost = _read(place, data, options)
        if rows.labels[0]:
            encoder: Any = loaded.encoder(definition)
            bad: dict[int, BadRow] = encoder.bad_rows(rows) if options.skip_bad_rows else {}
            if 0 < len(bad) < len(rows):
                rows = rows.take([i for i in range(len(rows)) if i not in bad])
                lost += Counter(fault.what for fault in bad.values())
            rows = rows.take(evenly(len(rows), limit))
            read = encoder.read(rows)
            ids, labels = [row.ids for row in read], [row.labels for row in read]
        elif loaded.writes_apart:
            raise UsageError(
                f"--held-out {place} contains texts without prompts, which an encoder-decoder needs. Give a task "
                "with prompts and targets."
            )
        else:
            encoder = Encoder(loaded.tokenizer, None, loaded.max_length, closed=False)
            rows = rows.take(evenly(len(rows), limit))
            whole = [ids for ids in encoder(rows) if len(ids) > 1]
            ids, labels = [[~token for token in each[:-1]] for each in whole], [each[1:] for each in whole]
            lost += Counter({_SHORT: len(rows) - len(whole)})
        if not ids:
            raise DataError(f"--held-out {place} has no text of two tokens or more. Give other texts.")
        encoded = EncodedRows.of(ids, labels, 0, loaded.pad, definition.kind)
        left_out = f"Rows of --held-out {place} were left out: {counts_text(lost)}."
        notes = [encoder.cut_note("held-out text", len(rows)), left_out if lost.total() else ""]
        return cls(encoded, rows.first, " ".join(filter(None, notes)))

    @property
    def counts(self) -> dict[str, int]:
        """The number of ``texts``, and of their ``tokens`` that are predicted."""
        return {"texts": len(self.rows), "tokens": sum(self.rows.counts)}

    def notes(self, tasks: Iterable[TaskRows]) -> list[str]:
        """Return notes for the user on the texts, compared with the training rows of a stream.

        Raises:
            UsageError: all texts are also training rows.
        """
        trained = set[str]()
        for task in tasks:
            trained |= {"\n".join(texts) for texts in task.train.texts}
            trained |= {right[0] for right in task.train.labels} if kind_of(task.task).answer == "text" else set()
        shared = sum(text in trained for text in self.texts)
        if shared == len(self.texts) > 0:
            raise UsageError(
                f"All {counted(shared, 'text')} of --held-out are also training rows, so their loss would not be "
                "held-out. Give other texts."
            )
        note = f"{shared:,} of {counted(len(self.texts), 'text')} of --held-out are also training rows. Remove them."
        return [*filter(None, [self.note]), *([note] if shared else [])]

    def loss(self, model: ReadoutModel, options: TrainingOptions) -> float:
        """Return the mean cross-entropy per token, in nats, of the model in its current state."""
        rows = self.rows
        batch_size = max(1, min(options.evaluation_batch_size, _BATCH_TOKENS // max(rows.lengths)))
        losses = token_losses(model, rows, batch_size)
        return float(losses.double().mean())


def _read(place: str, data: Data | Any, options: ReadOptions) -> tuple[TaskDefinition, Rows, Counter[str]]:
    """Return the task of a place, its texts (with labels if they answer prompts), and the number of rows left out by reason."""
    path, definition = Path(place), TaskDefinition(f"{place}, held out", "generation", ())
    stem, form = format_of(path.name)
    is_file = os.path.isfile(place)  # a Path raises where a name is too long
    if is_file and form in ("", "txt"):
        rows, _ = _texts([line.strip() for line in read_lines(path).columns["text"]], place)
        return definition, rows, Counter()  # empty lines separate texts
    if is_file and "text" in (table := read_table(path)).columns:
        rows, lost = _texts(table.columns["text"], place)
        faults = DataFaults()
        faults.add_rows(table.bad, len(rows), options.skip_bad_rows)
        faults.report()
        return definition, rows, lost + Counter(fault.what for fault in table.bad.faults)
    try:
        if os.path.exists(place):  # the columns that are named for --data are not its own
            own = ReadOptions(skip_bad_rows=options.skip_bad_rows)
            task_rows = load_task(stem if form else path.name, place, options=own)
        else:
            task_rows = load_task(place, data, options=replace(options, metrics=()))  # whatever metrics score the tasks
    except UnknownNameError as error:
        raise UsageError(
            f"--held-out {place} is neither a file or folder of texts nor a task of --data. {error}"
        ) from error
    lost = Counter(task_rows.left_out.get("test", {}).get("faults", {}))
    if kind_of(task_rows.task).answer == "text":
        return task_rows.task, task_rows.test, lost
    rows, without = _texts(["\n".join(texts) for texts in task_rows.test.texts], place)
    return definition, rows, lost + without


def _texts(cells: Sequence[Any], place: str) -> tuple[Rows, Counter[str]]:
    """Return the texts among cells, and how many cells hold none."""
    texts = tuple(text for text in cells if is_text(text) and text.strip())
    if not texts:
        raise DataError(f"--held-out {place} contains no text. Give one text per line, or a column 'text'.")
    return Rows(texts, (), ((),) * len(texts)), Counter({_SHORT: len(cells) - len(texts)})
