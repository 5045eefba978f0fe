"""Who did it? A sentence tells who did what to whom; who is named as the answer is wrong (0) or right (1).

Both labels come with the same words: only their order tells who acted. So a bag of words stands at chance, and the task must be
learned.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from forgetfree.benchmarks.demo.frames import SPLITS, Row, draw, read_pools

ROWS_PER_LABEL = {"train": 300, "validation": 60, "test": 152}

SENTENCE = "The {actor} {verb} the {other}."
ANSWER = "The {named}."

WORDS = {
    "train": {
        "person": """teacher|doctor|farmer|pilot|baker|lawyer|singer|driver|painter|soldier|nurse|tailor|waiter|banker
            |sailor|dancer|judge|plumber|hunter|actor|student|king|neighbor|writer""",
        "verb": """thanked|helped|followed|called|blamed|praised|visited|ignored|invited|rescued|warned|hired|greeted
            |chased|envied|trusted|kicked|fired|watched|mocked|saved|robbed""",
    },
    "validation": {
        "person": "clerk|cook|poet|miner|guard|priest|butcher|shepherd",
        "verb": "hugged|insulted|pushed|cured|tricked|forgave",
    },
    "test": {
        "person": """carpenter|librarian|mayor|gardener|detective|surgeon|fisherman|barber|composer|coach|journalist
            |dentist""",
        "verb": """admired|accused|obeyed|attacked|cheated|welcomed|teased|defended|questioned|paid|betrayed
            |interviewed""",
    },
}


def rows(split: str) -> list[Row]:
    """Rows (sentence, answer, label) of one split, labels balanced and shuffled; no sentence occurs twice."""
    rng = random.Random(3000 + SPLITS.index(split))
    verbs = read_pools(WORDS[split])["verb"]
    made: list[Row] = [
        (sentence, ANSWER.format(named=actor if label else other), label)
        for sentence, actor, other, label in deeds(rng, split, (verbs, verbs))
    ]
    return draw(rng, made, len(made))


def deeds(rng: random.Random, split: str, verbs: Sequence[Sequence[str]]) -> Iterator[tuple[str, str, str, int]]:
    """Yield different sentences with actor, other person and label, for which ``verbs`` has a pool; labels take turns."""
    people, told = read_pools(WORDS[split])["person"], set[str]()
    while len(told) < 2 * ROWS_PER_LABEL[split]:
        label = len(told) % 2
        actor, other = draw(rng, people, 2)
        verb = draw(rng, verbs[label], 1)[0]
        sentence = SENTENCE.format(actor=actor, other=other, verb=verb)
        if sentence not in told:
            told.add(sentence)
            yield sentence, actor, other, label
