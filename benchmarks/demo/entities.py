"""Sentences of a notice board, whose names are to be found: people and places, or companies and their products.

Both tasks read the same kinds of sentences, and each tags its own kinds alone: what is a name to one is O to the other. No word
of a name occurs in two splits, and a name of any kind may stand in the shared frames, so neither a list of names nor the
words around them solve a task.
"""

from __future__ import annotations

import random
import re

from forgetfree.benchmarks.demo.frames import Row, draw, read_pools

ROWS = {"train": 400, "validation": 100, "test": 160}

#: The kinds of each task, in the order of its labels.
KINDS = {"ner_people_places": ("PERSON", "PLACE"), "ner_products": ("COMPANY", "PRODUCT")}

#: A slot in capitals is a name; NAME is one of any kind, or something that has no name.
FRAMES = {
    "train": """{PERSON} of {COMPANY} flew to {PLACE} on {day}|in {PLACE} , {PERSON} tried the new {PRODUCT}
        |{COMPANY} will sell the {PRODUCT} in {PLACE} next {season}|people in {PLACE} asked {COMPANY} about its {PRODUCT}
        |{PERSON} met {PERSON} in {PLACE} last {season}|on {day} {PERSON} left {COMPANY} after {number} years
        |{NAME} was in the news on {day}|nobody here has heard of {NAME} before {day}|everyone talked about {NAME} all {season}
        |{NAME} and {NAME} were mentioned {number} times|last {season} {NAME} was a surprise to most of us
        |the report on {NAME} came out on {day} , {number} pages long|the library opens at {number} on {day}
        |we bought {number} chairs for the hall last {season}|the {PRODUCT} broke after {number} days , said {PERSON}
        |{PERSON} has lived near {PLACE} since the {season}""",
    "validation": """{PERSON} opened a shop for {COMPANY} in {PLACE}|a letter from {PLACE} says that the {PRODUCT} works
        |this {season} we hear about {NAME} again|is {NAME} better than {NAME} ?|{NAME} : {number} new pictures
        |the garden closes at {number} on {day}""",
    "test": """after {number} days in {PLACE} , {PERSON} came home|{COMPANY} took the {PRODUCT} back on {day}
        |{PERSON} reads a book about {PLACE}|{PERSON} works for {COMPANY} in {PLACE}|my sister owns a {PRODUCT} by {COMPANY}
        |what do you know about {NAME} ?|{number} letters about {NAME} arrived on {day}|{NAME} comes first , then {NAME}
        |the choir sings at {number} on {day}|a short talk about {NAME} , this {season}""",
}

NAMES = {
    "train": {
        "first": "Anna|James|Maria|Thomas|Laura|Peter|Sophie|David|Emma|Robert|Julia|Michael|Sarah|Daniel|Helen|Paul",
        "last": "Miller|Johnson|Garcia|Schmidt|Rossi|Dubois|Brown|Wilson|Taylor|Martin|Clark|Lewis|Walker|Young",
        "place": """London|Paris|Berlin|Madrid|Chicago|Tokyo|Boston|Vienna|New Delhi|San Diego|Cape Town|Texas|Norway|Brazil
            |Canada|Egypt|Bavaria|Scotland""",
        "company": "Toyota|Siemens|Boeing|Nestle|Microsoft|Sony|Volkswagen|Intel|Bosch|Pfizer|Shell|Adidas",
        "product": """iPhone|PlayStation|Corolla|Windows Vista|Golf GTI|Kindle|Xbox|Boeing 747|Walkman|Nescafe Gold|Pentium
            |Galaxy Tab""",
    },
    "validation": {
        "first": "Karen|Simon|Alice|George|Nora|Victor",
        "last": "Moore|Weber|Silva|Harris|Novak|Evans",
        "place": "Rome|Dublin|Seattle|Los Angeles|Finland|Peru|Tuscany",
        "company": "Honda|Oracle|Unilever|Airbus|Philips",
        "product": "GameCube|Civic|Photoshop|Thermomix|Surface Pro",
    },
    "test": {
        "first": "Jane|William|Isabel|Henry|Clara|Frank|Olivia|Richard|Teresa|Oscar",
        "last": "Smith|Anderson|Fischer|Lopez|Bianchi|Moreau|Davies|Turner|Baker|King",
        "place": """Lisbon|Amsterdam|Houston|Montreal|Hong Kong|Buenos Aires|Sweden|Kenya|Chile|Warsaw|California|Oslo""",
        "company": "Nokia|Ford|Samsung|Lufthansa|Bayer|Canon|General Motors|Dell|Puma|Renault",
        "product": "Focus Wagon|Android|ThinkPad|Nintendo Wii|Aspirin|Polaroid|Fiesta|MacBook Air|Tamagotchi|Mustang GT",
    },
}

OTHERS = read_pools(
    {
        "day": "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday",
        "season": "spring|summer|autumn|winter|week|month",
        "number": "two|three|five|six|nine|ten|twelve|forty",
        "thing": "the weather|a lost umbrella|the school play|fresh bread|the old bridge|bad coffee|our cat|the football match",
    }
)


def rows(task: str, split: str) -> list[Row]:
    """Return the rows of a task's split: sentence, ``None``, and the label of each word, as `KINDS` orders them."""
    rng = random.Random(f"{task} {split}")
    frames = read_pools({"frames": FRAMES[split]})["frames"]
    found: dict[str, Row] = {}
    while len(found) < ROWS[split]:
        words, labels = _sentence(rng, frames[len(found) % len(frames)], split, KINDS[task])
        text = " ".join(words)
        found[text] = (text, None, labels)
    return list(found.values())


def _sentence(rng: random.Random, frame: str, split: str, kinds: tuple[str, ...]) -> tuple[list[str], tuple[int, ...]]:
    """Fill a frame, and label its words for the kinds of one task."""
    words, labels = list[str](), list[int]()
    for word in frame.split():
        slot = word.strip("{}") if re.fullmatch(r"\{\w+\}", word) else ""
        if slot == "NAME":
            (slot,) = draw(rng, ("PERSON", "PLACE", "COMPANY", "PRODUCT", "thing"), 1)
        drawn = _drawn(rng, slot, split) if slot else [word]
        begins = 2 * kinds.index(slot) + 1 if slot in kinds else 0
        words += drawn
        labels += [begins, *[begins + bool(begins)] * (len(drawn) - 1)]
    return words, tuple(labels)


def _drawn(rng: random.Random, slot: str, split: str) -> list[str]:
    """Return the words of a name, or of something else, for a slot."""
    if slot in OTHERS:
        return draw(rng, OTHERS[slot], 1)[0].split()
    names = read_pools(NAMES[split])
    if slot == "PERSON":
        whole = draw(rng, names["first"], 1) + draw(rng, names["last"], 1)
        (count,) = draw(rng, (1, 2, 2), 1)
        return whole[:count]
    return draw(rng, names[slot.lower()], 1)[0].split()
