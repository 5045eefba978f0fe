"""Texts that no task trains: their loss, before a stream and after it, tells what it cost a model's general ability."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from forgetfree.core.readout_model import ReadoutModel
from forgetfree.data.encoding import Encoder
from forgetfree.data.examples import EncodedRows
from forgetfree.data.rows import Rows
from forgetfree.data.sampling import evenly
from forgetfree.data.sources import Data, load_task
from forgetfree.data.table_files import format_of, read_table
from forgetfree.data.text_files import encoding_of, lines_of, unpacked_limit
from forgetfree.display import is_text
from forgetfree.errors import DataError, UnknownNameError, UsageError
from forgetfree.learning.training import token_losses
from forgetfree.learning.training_options import TrainingOptions
from forgetfree.models.loading import LoadedModel
from forgetfree.tasks import TaskDefinition

#: Tokens of a batch: the logits of each are as many as the vocabulary has tokens.
_BATCH_TOKENS = 2048
#: Readouts of models that predict the next token.
_NEXT_TOKEN = ("causal", "generate")


@dataclass(frozen=True)
class TextsAside:
    """Texts that no task trains, encoded for a model.

    Attributes:
        rows: the texts, with the tokens that are predicted marked.
        note: what a user should know of texts that are longer than the model reads; empty if none is.
    """

    rows: EncodedRows
    note: str = ""

    @classmethod
    def of(cls, place: str, data: Data | Any, loaded: LoadedModel, limit: int | None = None) -> Self:
        """Return the texts of a place.

        Args:
            place: a text file with a text a line; a file of rows with a column ``text``; or a task, by its name in ``data``,
                its folder or its file: the right texts of its test rows, after their prompts, or else the texts of these rows.
            data: as `load_task` takes it.
            loaded: the model.
            limit: texts that are read, at most, spread evenly.

        Raises:
            UsageError: there is no such place, or the model predicts no next token.
            DataError: there are no texts.
        """
        if loaded.readout not in _NEXT_TOKEN:
            raise UsageError(
                "--held-aside tells the loss of a causal language model on each next token, and the readout "
                f"{loaded.readout!r} predicts none. Use --readout causal or generate, or leave --held-aside out."
            )
        definition, rows = _read(place, data)
        rows = rows.take(evenly(len(rows), limit))
        if definition.writes and rows.labels[0]:
            encoder = loaded.encoder(definition)
            ids, labels, _ = encoder.learned(rows)  # type: ignore[attr-defined]
        elif loaded.writes_apart:
            raise UsageError(
                f"--held-aside {place} holds texts without prompts, and an encoder-decoder continues prompts. Give a task with "
                "prompts and their answers."
            )
        else:
            encoder = Encoder(loaded.tokenizer, None, loaded.max_length, closed=False)
            whole = [ids for ids in encoder(rows) if len(ids) > 1]
            ids, labels = [[~token for token in each[:-1]] for each in whole], [each[1:] for each in whole]
        if not ids:
            raise DataError(f"--held-aside {place} has no text of two tokens or more. Give other texts.")
        encoded = EncodedRows.of(ids, labels, 0, loaded.pad, definition.kind)
        return cls(encoded, encoder.cut_note("text that no task trains", len(rows)))

    @property
    def counts(self) -> dict[str, int]:
        """How many ``texts`` there are, and how many of their ``tokens`` are predicted."""
        return {"texts": len(self.rows), "tokens": sum(self.rows.counts)}

    def loss(self, model: ReadoutModel, options: TrainingOptions) -> float:
        """Return the mean cross-entropy of a token, in nats, by the model as it is."""
        rows = self.rows
        batch_size = max(1, min(options.rows_at_once, _BATCH_TOKENS // max(rows.lengths)))
        losses = token_losses(model, rows, batch_size=batch_size, precision=options.answering["precision"])
        return float(losses.double().mean())


def _read(place: str, data: Data | Any) -> tuple[TaskDefinition, Rows]:
    """Return the texts of a place, without labels unless they answer prompts, and the task that they are of."""
    path, definition = Path(place), TaskDefinition(f"{place}, held aside", "generation", ())
    stem, form = format_of(path.name)
    if path.is_file() and form in ("", "txt"):
        encoding, _ = encoding_of(path, unpacked_limit(path))
        return definition, _texts([line.strip() for line in lines_of(path, encoding)], place)
    if path.is_file() and "text" in (table := read_table(path)).columns:
        return definition, _texts(table.columns["text"], place)
    try:
        found = load_task(stem if form else path.name, place) if path.exists() else load_task(place, data)
    except UnknownNameError as error:
        raise UsageError(
            f"--held-aside {place} is no file or folder of texts, and no task of --data. {error}"
        ) from error
    if found.task.writes:
        return found.task, found.test
    return definition, _texts(["\n".join(texts) for texts in found.test.texts], place)


def _texts(cells: Any, place: str) -> Rows:
    texts = tuple(text for text in cells if is_text(text) and text.strip())
    if not texts:
        raise DataError(f"--held-aside {place} holds no text. Give a text a line, or a column 'text'.")
    return Rows(texts, (), ((),) * len(texts))
