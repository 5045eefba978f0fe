"""The card of a model that is written: its README.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from forgetfree.core.readout_model import BY_WORDS
from forgetfree.data.encoding import Encoder, Slot
from forgetfree.data.prompts import PromptEncoder
from forgetfree.display import escaped
from forgetfree.ledger.graft import GraftOrigin
from forgetfree.results.report.page import in_markdown
from forgetfree.serve.network import READOUT, Reading
from forgetfree.serve.served_task import served

# -- A model ---------------------------------------------------------------------------------------------


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
    task, encoder, pair = origin.task, reading.encoder, len(origin.task.text_columns) == 2
    of_all = {"origin": origin, "task": task, "model": origin.model, "reading": reading, "change": change}
    if isinstance(encoder, PromptEncoder):
        before, place, after = encoder.around
        chats = task.form == "messages"
        card = templates().get_template("text_model_card.md.jinja")
        return card.render(
            **of_all,
            causal=reading.loader == "AutoModelForCausalLM",
            chats=chats,
            usual=reading.usual or chats,  # whose turns no code of a few lines puts together
            frame=encoder.frame,
            before=before,
            space=place.space,
            trimming=place.trimming,
            after=after,
            inside=len(before) > len(encoder.opening),
        )
    words = (f"{label}: {word!r}" for label, word in zip(task.labels, task.label_words, strict=False))
    return (
        templates()
        .get_template("model_card.md.jinja")
        .render(
            **of_all,
            pair=pair,
            tagged=served(task).of_words,
            prompted=origin.readout in BY_WORDS,
            words=", ".join(words),
            readout_file=READOUT,
            encode=encode_source(encoder, pair=pair),
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


# -- Templates -------------------------------------------------------------------------------------------


def templates() -> Environment:
    """Return the templates of cards; names of users pass a filter.

    Between backticks it is ``plain``, in python and YAML ``quoted``, elsewhere ``shown``.
    """
    loader = PackageLoader("forgetfree.serve", "")
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"plain": _plain, "shown": _shown, "quoted": _literal, "listed": _literal}
    return environment


def _plain(text: str) -> str:
    """Return a name that is safe in markdown: it cannot end a line, a table's cell or code between backticks."""
    return escaped(text).replace("`", "'").replace("|", "/")


def _shown(text: str) -> str:
    return in_markdown(escaped(text))


def _literal(value: str | Sequence[str]) -> str:
    """Return a text, or a list of texts, as python and YAML both write it."""
    return escaped(json.dumps(value if isinstance(value, str) else list(value), ensure_ascii=False))
