"""Was it kind? Sentences like those of ``who_did_it`` with another question: what was done is cruel (0) or kind (1).

Who acted does not matter here. So naive training lets go of it: the same texts ask for other features.
"""

from __future__ import annotations

import random

from forgetfree.benchmarks.demo import who_did_it
from forgetfree.benchmarks.demo.frames import SPLITS, Row, draw, read_pools

ROWS_PER_LABEL = who_did_it.ROWS_PER_LABEL

# By label: cruel, kind.
VERBS = {
    "train": {
        "0": """blamed|ignored|mocked|robbed|kicked|hated|bullied|slapped|deceived|scolded|threatened|insulted
            |abused|punished|poisoned|shot|tortured|kidnapped""",
        "1": """thanked|helped|praised|rescued|trusted|saved|greeted|invited|comforted|encouraged|rewarded|protected
            |fed|healed|applauded|kissed|guided|forgave""",
    },
    "validation": {
        "0": "pushed|tricked|harmed|offended|injured|beat",
        "1": "cured|hugged|cheered|supported|nursed|loved",
    },
    "test": {
        "0": """accused|attacked|cheated|teased|betrayed|ridiculed|harassed|hurt|strangled|humiliated|killed
            |wounded""",
        "1": """admired|welcomed|defended|assisted|congratulated|honored|respected|befriended|consoled|embraced
            |freed|aided""",
    },
}


def rows(split: str) -> list[Row]:
    """Rows (sentence, None, label) of one split, labels balanced and shuffled; no sentence occurs twice."""
    rng = random.Random(4000 + SPLITS.index(split))
    people, verbs = read_pools(who_did_it.WORDS[split])["person"], read_pools(VERBS[split])
    made, told = list[Row](), set[str]()
    while len(made) < 2 * ROWS_PER_LABEL[split]:
        label = len(made) % 2
        actor, other = draw(rng, people, 2)
        verb = draw(rng, verbs[str(label)], 1)[0]
        sentence = who_did_it.SENTENCE.format(actor=actor, other=other, verb=verb)
        if sentence not in told:
            told.add(sentence)
            made.append((sentence, None, label))
    return draw(rng, made, len(made))
