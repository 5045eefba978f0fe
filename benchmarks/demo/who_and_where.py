"""Who, where, when, what? A record of a meeting, and a question about one thing in it; the answer is that thing alone.

The four things of a record are asked for equally often, and stand in any order. No name, place or subject of one split occurs
in another.
"""

from __future__ import annotations

import random

from forgetfree.benchmarks.demo.frames import SPLITS, Row, draw, read_pools

ROWS = {"train": 240, "validation": 48, "test": 48}

#: How each thing stands in a record, and how it is asked for.
RECORD = {"who": "led by {who}", "where": "in the {where}", "when": "at {when}", "what": "about {what}"}
QUESTIONS = {
    "train": {
        "who": "Who leads it?|Who is the speaker?",
        "where": "Where is it?|Which room is it in?",
        "when": "When is it?|When does it begin?",
        "what": "What is it about?|What will one hear of?",
    },
    "validation": {
        "who": "Who will talk?",
        "where": "What is the place?",
        "when": "At what hour?",
        "what": "What is the subject?",
    },
    "test": {
        "who": "Whom do we hear?|Who runs it?",
        "where": "Where do we meet?|Where must I go?",
        "when": "When do we start?|What is the time?",
        "what": "What is the topic?|What will they discuss?",
    },
}

WORDS = {
    "train": {
        "who": "Anna|James|Maria|Thomas|Laura|Peter|Sophie|David|Emma|Robert|Julia|Michael|Sarah|Daniel|Helen|Paul",
        "where": "library|kitchen|garden|gym|chapel|attic|cellar|hall|barn|office|school|museum",
        "what": "bees|bread|rivers|chess|taxes|stars|roses|trains|dreams|soap|islands|violins|bridges|cheese",
    },
    "validation": {
        "who": "Karen|Simon|Alice|George|Nora|Victor",
        "where": "theater|garage|tower|studio",
        "what": "snow|tea|maps|wolves|shoes",
    },
    "test": {
        "who": "Jane|William|Isabel|Henry|Clara|Frank|Olivia|Richard|Teresa|Oscar",
        "where": "castle|bakery|hotel|church|park|station|clinic|café",
        "what": "whales|money|bicycles|poetry|coffee|volcanoes|clocks|apples|silence|dogs",
    },
}


def rows(split: str) -> list[Row]:
    """Return the rows of a split: a record with a question, and what it asks for."""
    rng = random.Random(6000 + SPLITS.index(split))
    pools, questions = read_pools(WORDS[split]), read_pools(QUESTIONS[split])
    # Full, half and quarter hours; those of one split are of no other.
    hours = [hour for hour in range(1, 13) if {0: 0, 1: 0, 2: 1, 3: 2}[hour % 4] == SPLITS.index(split)]
    pools["when"] = [f"{hour}:{minutes}" for hour in hours for minutes in ("00", "15", "30", "45")]
    found: dict[str, Row] = {}
    while len(found) < ROWS[split]:
        things = {name: draw(rng, pools[name], 1)[0] for name in RECORD}
        record = ", ".join(RECORD[name].format(**things) for name in draw(rng, list(RECORD), len(RECORD)))
        asked = list(RECORD)[len(found) % len(RECORD)]
        (question,) = draw(rng, questions[asked], 1)
        prompt = f"Talk {record}. {question}"
        found.setdefault(prompt, (prompt, None, (things[asked],)))
    return list(found.values())
