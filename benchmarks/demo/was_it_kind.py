"""Was it kind? Sentences like those of ``who_did_it`` with another question: what was done is cruel (0) or kind (1).

Who acted does not matter here. So naive training lets go of it: the same texts ask for other features.
"""

from __future__ import annotations

import random

from forgetfree.benchmarks.demo.frames import SPLITS, Row, draw, read_pools
from forgetfree.benchmarks.demo.who_did_it import deeds

VERBS = {
    "train": {
        "cruel": """blamed|ignored|mocked|robbed|kicked|hated|bullied|slapped|deceived|scolded|threatened|insulted
            |abused|punished|poisoned|shot|tortured|kidnapped|stabbed|murdered|choked|punched|smacked|scorned|despised
            |detested|tormented|terrorized|intimidated|bit|crippled|starved|jailed|enslaved|exploited|swindled|framed
            |slandered|shamed|belittled|taunted|provoked|abandoned|deserted|rejected|snubbed|evicted|banished|oppressed
            |persecuted|assaulted|ambushed|trapped|drowned|burned|cursed|whipped|silenced""",
        "kind": """thanked|helped|praised|rescued|trusted|saved|greeted|invited|comforted|encouraged|rewarded|protected
            |fed|healed|applauded|kissed|guided|forgave|cherished|adored|nurtured|pampered|soothed|calmed|reassured
            |inspired|mentored|taught|advised|sheltered|hosted|served|treated|revived|spared|pardoned|excused|blessed
            |celebrated|commended|complimented|toasted|saluted|appreciated|valued|backed|championed|promoted|sponsored
            |funded|repaid|cradled|caressed|delighted|amused|charmed|thrilled|accompanied""",
    },
    "validation": {
        "cruel": "pushed|tricked|harmed|offended|injured|beat",
        "kind": "cured|hugged|cheered|supported|nursed|loved",
    },
    "test": {
        "cruel": """accused|attacked|cheated|teased|betrayed|ridiculed|harassed|hurt|strangled|humiliated|killed
            |wounded""",
        "kind": """admired|welcomed|defended|assisted|congratulated|honored|respected|befriended|consoled|embraced
            |freed|aided""",
    },
}


def rows(split: str) -> list[Row]:
    """Rows (sentence, None, label) of one split, labels balanced and shuffled; no sentence occurs twice."""
    rng = random.Random(4000 + SPLITS.index(split))
    verbs = read_pools(VERBS[split])
    made: list[Row] = [
        (sentence, None, label) for sentence, _, _, label in deeds(rng, split, (verbs["cruel"], verbs["kind"]))
    ]
    return draw(rng, made, len(made))
