"""In one line: a short note becomes a line for a notice board, such as ``CLOSED Monday: pool, Mill Street``.

The first word says what the note says in other words: open, closed, late, or that help is wanted. No place, thing or frame of
one split occurs in another.
"""

from __future__ import annotations

import random

from forgetfree.benchmarks.demo.frames import SPLITS, Row, draw, fill, read_pools

ROWS = {"train": 240, "validation": 48, "test": 48}

DAYS = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"
FRAMES = {
    "train": {
        "OPEN": """Come in! On {day} the {thing} in {place} is open to all.
            |The {thing} in {place} will open its doors on {day}.|On {day} everyone may visit the {thing} in {place}.
            |You can use the {thing} in {place} again on {day}.|Welcome to the {thing} in {place} this {day}!
            |From {day} on the {thing} in {place} lets people in.""",
        "CLOSED": """Sorry, the {thing} in {place} stays shut on {day}.|On {day} the {thing} in {place} will be closed.
            |There is no way into the {thing} in {place} on {day}.|You cannot use the {thing} in {place} on {day}.
            |Do not come to the {thing} in {place} this {day}.|On {day} the doors of the {thing} in {place} are locked.""",
        "LATE": """The {thing} in {place} starts later than usual on {day}.|On {day} expect delays at the {thing} in {place}.
            |The {thing} in {place} is running late on {day}.|The {thing} in {place} needs an hour more on {day}.
            |You will have to wait at the {thing} in {place} this {day}.|On {day} the {thing} in {place} is not on time.""",
        "HELP": """We need helpers for the {thing} in {place} on {day}.|Who can help at the {thing} in {place} on {day}?
            |On {day} the {thing} in {place} looks for volunteers.|Come and lend a hand at the {thing} in {place} on {day}.
            |The {thing} in {place} has too few people for {day}.|Have you time for the {thing} in {place} on {day}?""",
    },
    "validation": {
        "OPEN": "You are welcome at the {thing} in {place} on {day}.",
        "CLOSED": "Nobody can use the {thing} in {place} on {day}.",
        "LATE": "The {thing} in {place} will be delayed on {day}.",
        "HELP": "Please help out at the {thing} in {place} on {day}.",
    },
    "test": {
        "OPEN": "On {day} we open the {thing} in {place}.|Visitors may enter the {thing} in {place} on {day}.",
        "CLOSED": "The {thing} in {place} is shut all {day}.|On {day} please keep out of the {thing} in {place}.",
        "LATE": "On {day} the {thing} in {place} begins an hour late.|Expect to wait at the {thing} in {place} on {day}.",
        "HELP": "Helping hands wanted for the {thing} in {place} on {day}.|Any volunteers for the {thing} in {place} on {day}?",
    },
}

WORDS = {
    "train": {
        "thing": """pool|bakery|market|library|ferry|museum|clinic|cinema|bank|sauna|post office|tea room|coffee house
            |book club|playground""",
        "place": "Mill Street|Oak Lane|Northgate|Bridge Road|Hilltown|King Street|Eastwood|Long Lane|Riverside",
    },
    "validation": {"thing": "bus|gym|garden|zoo", "place": "Church Road|Westfield|Park Lane"},
    "test": {
        "thing": "school|theater|station|bookshop|church|fish stall|tennis court|café",
        "place": "Queen Street|Southport|Apple Lane|Castle Road|Newbridge|High Street",
    },
}


def rows(split: str) -> list[Row]:
    """Return the rows of a split: a note, and its line."""
    rng = random.Random(7000 + SPLITS.index(split))
    frames, pools = read_pools(FRAMES[split]), read_pools(WORDS[split] | {"day": DAYS})
    found: dict[str, Row] = {}
    while len(found) < ROWS[split]:
        state = list(frames)[len(found) % len(frames)]
        filled = {slot: draw(rng, pools[slot], 1) for slot in ("day", "place", "thing")}
        line = "{state} {day}: {thing}, {place}".format(state=state, **{slot: one for slot, (one,) in filled.items()})
        note = fill(rng, draw(rng, frames[state], 1)[0], filled)
        found.setdefault(note, (note, None, (line,)))
    return list(found.values())
