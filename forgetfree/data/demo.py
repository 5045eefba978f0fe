"""Small tasks written for this project: like QNLI, AG News and SST-2, about one deed, named entities, and texts to write.

The rows are in ``demo_rows/``, one file per task, so a stream runs without network. No content word of one split occurs in
another, so counting words does not solve a task; knowledge from pre-training does.
"""

from __future__ import annotations

import json
from pathlib import Path

Row = tuple[str, str | None, int | tuple[int, ...] | tuple[str, ...]]

TASKS = ("qnli", "ag_news", "sst2", "who_did_it", "was_it_kind")
#: Tasks that label words.
TAGGED = ("ner_people_places", "ner_products")
#: Tasks that are answered by texts.
TEXTS = ("when_is_it", "who_and_where", "in_one_line")

_ROWS = Path(__file__).with_name("demo_rows")


def load(task: str) -> dict[str, list[Row]]:
    """Return the rows ``(text_a, text_b or None, label)`` of one task, by split: ``train``, ``validation``, ``test``.

    Where words are labelled, a row has a sentence with single spaces between its words, and a tuple of labels; where a text is
    the answer, a prompt and a tuple of the right texts.

    >>> load("sst2")["test"][0][1] is None
    True

    Raises:
        KeyError: ``task`` is none of :data:`TASKS`, :data:`TAGGED` and :data:`TEXTS`.
    """
    if task not in (known := (*TASKS, *TAGGED, *TEXTS)):
        raise KeyError(f"The demo has no task {task!r}. It has: {', '.join(known)}.")
    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    for line in (_ROWS / f"{task}.jsonl").read_text(encoding="utf-8").splitlines():
        split, text_a, *text_b, label = json.loads(line)
        splits[split].append((text_a, *(text_b or [None]), tuple(label) if isinstance(label, list) else label))
    return splits
