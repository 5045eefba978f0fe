"""Cards, the README.md of what is given to others: of a model that is written, and of a graft or a ledger on the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from forgetfree.core.readout_model import BY_WORDS
from forgetfree.data.encoding import Encoder, Slot
from forgetfree.data.prompts import PromptEncoder
from forgetfree.display import escaped
from forgetfree.errors import GraftError, ReportError
from forgetfree.kinds.networks import READOUT, TOKEN_CLASSIFIER, Reading
from forgetfree.ledger import Ledger
from forgetfree.ledger.graft import Graft, GraftOrigin
from forgetfree.results.config_file import load_run
from forgetfree.results.report.page import in_markdown
from forgetfree.results.scores import SCORES_FILE, Score, read_scores

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
            tagged=reading.loader == TOKEN_CLASSIFIER,
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


# -- A graft or a ledger on the hub ----------------------------------------------------------------------


def hub_card(content: Graft | Ledger, file: Path, repository: str, license: str | None = None) -> str:
    """Return the card as Markdown.

    Args:
        content: the graft or the ledger.
        file: its file. Where it lies in what a command wrote, the scores and the model's name are found there.
        repository: its name on the hub.
        license: the licence by its identifier; default: none is named.

    Raises:
        GraftError: the graft does not say for which task and model it was made.
    """
    if isinstance(content, Graft):
        if content.origin is None:
            raise GraftError(
                "The graft does not say for which task and model it was made, so nobody could use it from the hub."
            )
        origin = content.origin
        tasks, model, fingerprint = [origin.task], origin.model, origin.fingerprint
        entries, scores = len(content.region), list(_graft_scores(origin, file))
    else:
        tasks = [record.definition for record in content.records if record.definition]
        model, fingerprint, entries = _model_of(file), content.fingerprint, len(content.owned())
        scores = list(_ledger_scores(content, file))
    return (
        templates()
        .get_template("hub_card.md.jinja")
        .render(
            kind="graft" if isinstance(content, Graft) else "ledger",
            repository=repository,
            license=license,
            tasks=tasks,
            model=Path(model).name if Path(model).is_absolute() else model,
            fingerprint=fingerprint,
            entries=entries,
            size=len(content.space) if content.space else entries,
            scores=scores,
        )
    )


def _graft_scores(origin: GraftOrigin, file: Path) -> Iterator[Score]:
    """Yield the scores of a graft where ``forgetfree graft`` wrote them: beside it."""
    for score in _scores([file.parent / SCORES_FILE]):
        if (score.after, score.task) == (1, origin.task.name):
            yield score


def _ledger_scores(ledger: Ledger, file: Path) -> Iterator[Score]:
    """Yield the scores after the last task where ``forgetfree run`` wrote them."""
    for score in _scores([file.parent / SCORES_FILE]):
        if score.after == len(ledger.records) and score.task in ledger.tasks:
            yield score


def _scores(files: list[Path]) -> list[Score]:
    """Return the scores of the one file that is there; with several seeds, it is not known whose the graft is."""
    present = [file for file in files if file.is_file()]
    try:
        return read_scores(present[0]) if len(present) == 1 else []
    except ReportError:  # a card without scores is better than none
        return []


def _model_of(file: Path) -> str:
    """Return the name of a ledger's base model, as the run that it lies in has it; else a ledger does not know it."""
    run = file.absolute().parents[2] if len(file.absolute().parents) > 2 else file.parent
    return str(load_run(run)["model"]["name"]) if (run / "config.json").is_file() else ""


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
