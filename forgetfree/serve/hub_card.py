"""The card of a graft or a ledger on the hub: what it is for, on which model, how well it does, how it is used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from forgetfree.errors import GraftError, ReportError
from forgetfree.ledger import Ledger
from forgetfree.ledger.graft import Graft, GraftOrigin
from forgetfree.results.config_file import load_run
from forgetfree.results.scores import SCORES_FILE, Score, read_scores
from forgetfree.serve.model_card import templates


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
    """Yield the scores of a graft where ``forgetfree graft`` wrote them: beside it, or in the folder of its only seed."""
    for score in _scores([file.parent / SCORES_FILE, *file.parent.glob(f"seed-*/{SCORES_FILE}")]):
        of = score.of
        if (of.get("model"), of.get("sparsity"), score.task) == ("grafted", origin.sparsity, origin.task.name):
            yield replace(score, metric=origin.task.metric) if score.metric == "score" else score


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
