"""The README.md of a model that contains a graft: a description, and python that classifies with transformers alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from forgetfree.data.encoding import Encoder, Slot
from forgetfree.display import escaped
from forgetfree.ledger.graft import GraftOrigin
from forgetfree.models.peft_adapter import READOUT
from forgetfree.results.report.page import in_markdown
from forgetfree.serve.kinds import served
from forgetfree.serve.network import Reading


@dataclass(frozen=True)
class Change:
    """What was done to the base model.

    Attributes:
        command: that wrote the model: ``apply`` or ``export``.
        strategy: that trained it; empty for a graft on its own.
        entries: how many parameters differ from the base model's.
        size: how many may.
    """

    command: str
    strategy: str
    entries: int = 0
    size: int = 0


def model_card(origin: GraftOrigin, reading: Reading, change: Change) -> str:
    """Return the model card as Markdown.

    Args:
        origin: the task, and the base model.
        reading: how to read the written model.
        change: what was done to the base model.
    """
    task, pair = origin.task, len(origin.task.text_columns) == 2
    words = (f"{label}: {word!r}" for label, word in zip(task.labels, task.label_words, strict=False))
    return (
        templates()
        .get_template("model_card.md.jinja")
        .render(
            origin=origin,
            task=task,
            model=origin.model,
            reading=reading,
            change=change,
            pair=pair,
            tagged=served(task).of_words,
            prompted=origin.readout in ("prompt", "causal"),
            words=", ".join(words),
            readout_file=READOUT,
            encode=encode_source(reading.encoder, pair=pair),
        )
    )


def encode_source(encoder: Encoder, *, pair: bool) -> str:
    """Return python that does what ``encoder`` does with ``tokenizer`` and without forgetfree: a function ``encode``.

    Args:
        encoder: the encoder.
        pair: whether it reads two texts.
    """
    joined = encoder.pieces is None and pair and not encoder.middle
    pieces = encoder.pieces or []
    slots = [piece for piece in pieces if isinstance(piece, Slot) and piece.name != "mask"]
    readers = {slot.name: "inside" if slot.inside else "tokens" for slot in slots}
    parts = [_part(piece, inside=i > 0) for i, piece in enumerate(pieces)]
    if encoder.pieces is None:
        readers = {"text_a": "tokens", "text_b": "inside" if joined else "tokens"} if pair else {"text": "tokens"}
        parts = [*readers]
        parts[1:1] = [str(encoder.middle)] * (pair and not joined)
    around = [[str(ids)] if ids else [] for ids in (encoder.opening, encoder.closing)]
    parts = [*around[0], *parts, *around[1]]
    if encoder.pieces is None and not any(around):
        parts[-1] += f" or [{encoder.blank}]"
    return (
        templates()
        .get_template("encode.py.jinja")
        .render(
            slots=slots,
            readers=readers,
            joined=joined,
            prompted=encoder.pieces is not None,  # label words are inside a row, too
            room=encoder.room(len(readers)),
            parts=parts,
        )
    )


def _part(piece: str | Slot, *, inside: bool) -> str:
    """Return the python expression for the ids of one piece of a prompt."""
    if isinstance(piece, str):
        return f"{'inside' if inside else 'tokens'}({escaped(json.dumps(piece, ensure_ascii=False))})"
    return "[tokenizer.mask_token_id]" if piece.name == "mask" else piece.name


def templates() -> Environment:
    """Return the templates of cards; names of users pass a filter.

    Between backticks it is ``plain``, in python and YAML ``quoted``, elsewhere ``shown``.
    """
    loader = PackageLoader("forgetfree.serve", "")
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"plain": _plain, "shown": _shown, "quoted": _quoted, "listed": _listed}
    return environment


def _plain(text: str) -> str:
    """Return a name that is safe in markdown: it cannot end a line, a table's cell or code between backticks."""
    return escaped(text).replace("`", "'").replace("|", "/")


def _shown(text: str) -> str:
    return in_markdown(escaped(text))


def _quoted(text: str) -> str:
    return escaped(json.dumps(text, ensure_ascii=False))  # a text in quotes reads the same in python and in YAML


def _listed(texts: Sequence[str]) -> str:
    return escaped(json.dumps(list(texts), ensure_ascii=False))  # a list of texts reads the same in python
