"""Small tasks written for this project: after the model of QNLI, AG News and SST-2, about one deed, and about names.

The rows are generated from hand-written words and frames, the same on every machine, with no network.
No content word of one split occurs in another, so counting words does not solve a task; knowledge from
pre-training does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from forgetfree.benchmarks.demo import ag_news, entities, qnli, sst2, was_it_kind, who_did_it
from forgetfree.benchmarks.demo.frames import SPLITS, Row

__all__ = ["TAGGED", "TASKS", "load"]

_ROWS: dict[str, Callable[[str], list[Row]]] = {
    "qnli": qnli.rows,
    "ag_news": ag_news.rows,
    "sst2": sst2.rows,
    "who_did_it": who_did_it.rows,
    "was_it_kind": was_it_kind.rows,
}

TASKS = tuple(_ROWS)
#: Those whose words are labelled.
TAGGED = tuple(entities.KINDS)

_ROWS |= {name: partial(entities.rows, name) for name in TAGGED}


def load(task: str) -> dict[str, list[Row]]:
    """Rows ``(text_a, text_b or None, label)`` of one task, by split: ``train``, ``validation``, ``test``.

    Where words are labelled, a row has a sentence with single spaces between its words, and a tuple of labels.

    >>> load("sst2")["test"][0][1] is None
    True

    Raises:
        KeyError: where ``task`` is none of :data:`TASKS` and :data:`TAGGED`.
    """
    if task not in _ROWS:
        raise KeyError(f"The demo has no task {task!r}. It has: {', '.join(_ROWS)}.")
    return {split: _ROWS[task](split) for split in SPLITS}
