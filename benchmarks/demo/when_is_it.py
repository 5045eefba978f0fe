"""When is it? A sentence names a day in one of four ways, and the answer writes it in one: 2024-03-07.

The instruction does not say how, so the form must be learned. No date of one split occurs in another, nor does a frame.
"""

from __future__ import annotations

import random

from forgetfree.benchmarks.demo.frames import SPLITS, Row, draw, fill, read_pools

ROWS = {"train": 240, "validation": 48, "test": 48}

MONTHS = """January|February|March|April|May|June|July|August|September|October|November|December"""

WORDS = {
    "train": {
        "frame": """The {what} opens on {date}.|Our {what} ended on {date}.|{date} was the day of the {what}.
            |The {what} is on {date}.|On {date} we went to the {what}.|The {what} of {date} was cancelled.
            |She saw the {what} on {date}.|Nobody came to the {what} on {date}.""",
        "what": "fair|market|museum|concert|school|harbor|theater|race",
    },
    "validation": {
        "frame": "He missed the {what} on {date}.|They planned the {what} for {date}.|{date}: the {what} begins.",
        "what": "meeting|garden party|exhibition",
    },
    "test": {
        "frame": """The {what} was moved to {date}.|Do you remember the {what} of {date}?|I was born on {date}.
            |The letter about the {what} came on {date}.|Until {date} the {what} stayed open.""",
        "what": "wedding|festival|library|auction|castle",
    },
}

#: How a day is written in the sentence, by day, month and year.
FORMS = (
    "{day} {month} {year}",
    "{month} {day}, {year}",
    "the {day}{th} of {month} {year}",
    "{month} {day}{th}, {year}",
)


def rows(split: str) -> list[Row]:
    """Return the rows of a split: a sentence, and its date as year-month-day in figures."""
    rng = random.Random(5000 + SPLITS.index(split))
    pools = read_pools(WORDS[split])
    # Of four years two are of the training rows, one of each other split.
    years = [year for year in range(1900, 2040) if {0: 0, 1: 0, 2: 1, 3: 2}[year % 4] == SPLITS.index(split)]
    found: dict[str, Row] = {}
    while len(found) < ROWS[split]:
        (year,), (number,), (day,) = draw(rng, years, 1), draw(rng, range(1, 13), 1), draw(rng, range(1, 29), 1)
        date = FORMS[len(found) % len(FORMS)].format(
            day=day, month=MONTHS.split("|")[number - 1], year=year, th=_ending(day)
        )
        (frame,) = draw(rng, pools["frame"], 1)
        sentence = fill(rng, frame.replace("{date}", date), pools)
        target = f"{year}-{number:02}-{day:02}"
        found.setdefault(target, (sentence[0].upper() + sentence[1:], None, (target,)))
    return list(found.values())


def _ending(day: int) -> str:
    return "th" if 10 < day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
