"""Small tasks with labelled words, for the tiny model."""

from __future__ import annotations

import random

from forgetfree.continual.stream import Stream, make_stream
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.tasks import TaskDefinition
from forgetfree.testing.tiny import FILLER, KEYWORDS, tiny_model, tiny_task

#: Kinds of entities, each with the words of its entities.
PEOPLE = {"PER": KEYWORDS["sst2"][0], "LOC": KEYWORDS["sst2"][1]}
TOPICS = {"TOPIC": KEYWORDS["ag_news"][0], "SPORT": KEYWORDS["ag_news"][1], "TRADE": KEYWORDS["ag_news"][2]}


def tagged_task(name: str, kinds: dict[str, list[str]], seed: int = 0, train: int = 24) -> TaskRows:
    """Return a task of sentences of 2 to 12 words; every fifth has no entity, the others one of one to three words."""
    draw, task = random.Random(seed), TaskDefinition.of_entities(name, list(kinds))

    def sentence(i: int) -> tuple[str, tuple[int, ...]]:
        words = [draw.choice(FILLER) for _ in range(draw.randint(2, 9))]
        tags = [0] * len(words)
        if i % 5:
            kind = i % len(kinds)
            entity = [draw.choice(list(kinds.values())[kind]) for _ in range(1 + i % 3)]
            at = draw.randrange(len(words) + 1)
            words[at:at] = entity
            tags[at:at] = [2 * kind + 1, *[2 * kind + 2] * (len(entity) - 1)]
        return " ".join(words), tuple(tags)

    def rows(count: int) -> Rows:
        first, labels = zip(*(sentence(i) for i in range(count)), strict=True)
        return Rows(first, (), labels)

    return TaskRows(task, rows(train), rows(12), rows(17))


def tagged_stream(*, seed: int = 0, shots: int | None = None, test_limit: int | None = None) -> Stream:
    """Return two tagged tasks with different label sets, and a task of single texts between them."""
    tasks = [tagged_task("people", PEOPLE), tiny_task("ag_news"), tagged_task("topics", TOPICS, seed=1)]
    return make_stream("tagged", tasks, tiny_model(), seed=seed, shots=shots, test_limit=test_limit)
