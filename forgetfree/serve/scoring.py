"""How well the tasks of a ledger are answered."""

from __future__ import annotations

from collections.abc import Sequence

from forgetfree.data.encoding import EncodedRows
from forgetfree.data.sources import load_task
from forgetfree.kinds.kind import kind_of
from forgetfree.ledger import Ledger
from forgetfree.models.loading import load_model
from forgetfree.serve.inference import Predictor
from forgetfree.tasks import version_of


def scores_of(ledger: Ledger, model: str, data: str, tasks: Sequence[str]) -> dict[str, float]:
    """Return the score of each task on its test rows, by its name.

    Args:
        ledger: what answers.
        model: its base model.
        data: where the rows are, as ``--data`` names it; the rows of a version are those of its task.
        tasks: which.

    Raises:
        LedgerError: the ledger belongs to another model, or to other labels.
        ForgetfreeError: the rows cannot be loaded.
    """
    bound = ledger.binding
    loaded = load_model(model, bound.readout, max_length=bound.max_length) if bound else load_model(model)
    predictor, found = Predictor(loaded, ledger), dict[str, float]()
    for task in tasks:
        definition, rows = predictor.tasks[task], load_task(version_of(task)[0], data)
        encoder = loaded.encoder(definition)
        encoded = EncodedRows.of(encoder(rows.test), rows.test.labels, 0, loaded.pad, definition.kind)
        logits = predictor.logits("@".join(map(str, version_of(task))), rows.test)
        answers = kind_of(definition).answers(definition, logits, encoded.labels, encoded)
        found[task] = answers.score(definition.metric)
    return found
