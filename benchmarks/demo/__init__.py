"""Small tasks written for this project: after the model of QNLI, AG News and SST-2, about one deed, names, and texts to write.

The rows are generated from hand-written words and frames, the same on every machine, with no network.
No content word of one split occurs in another, so counting words does not solve a task; knowledge from
pre-training does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from forgetfree.benchmarks.demo import (
    ag_news,
    entities,
    in_one_line,
    qnli,
    sst2,
    was_it_kind,
    when_is_it,
    who_and_where,
    who_did_it,
)
from forgetfree.benchmarks.demo.frames import SPLITS, Row

__all__ = ["TAGGED", "TASKS", "TEXTS", "load"]

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

_WRITTEN: dict[str, Callable[[str], list[Row]]] = {
    "when_is_it": when_is_it.rows,
    "who_and_where": who_and_where.rows,
    "in_one_line": in_one_line.rows,
}
#: Those that are answered by a text.
TEXTS = tuple(_WRITTEN)

_ROWS |= _WRITTEN


def load(task: str) -> dict[str, list[Row]]:
    """Rows ``(text_a, text_b or None, label)`` of one task, by split: ``train``, ``validation``, ``test``.

    Where words are labelled, a row has a sentence with single spaces between its words, and a tuple of labels; where a text is
    the answer, a prompt and a tuple of the texts that are right.

    >>> load("sst2")["test"][0][1] is None
    True

    Raises:
        KeyError: where ``task`` is none of :data:`TASKS`, :data:`TAGGED` and :data:`TEXTS`.
    """
    if task not in _ROWS:
        raise KeyError(f"The demo has no task {task!r}. It has: {', '.join(_ROWS)}.")
    return {split: _ROWS[task](split) for split in SPLITS}
