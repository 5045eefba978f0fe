"""The documents stay short, in sentences that one reads once, and in plain words."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
#: Words of one page, of README and of all; a word has a letter, so figures of tables are none.
PAGE, README, ALL = 3_300, 1_500, 38_000
#: Words of one sentence, and the share of sentences that may be longer than what is easy to read.
SENTENCE, EASY, SHARE = 60, 35, 0.06
#: What a plain sentence does without.
FORBIDDEN = (
    *(
        [
            "utilize",
            "utilise",
            "leverage",
            "leverages",
            "leveraging",
            "seamless",
            "seamlessly",
            "effortless",
            "effortlessly",
        ]
    ),
    *(["simply", "obviously", "basically", "robust", "powerful", "cutting-edge", "state-of-the-art", "game-changing"]),
    *(["please", "e.g.", "i.e.", "etc.", "via", "whilst", "aforementioned", "therein", "hereby"]),
    *("in order to", "note that"),
)


def prose(path: Path) -> list[str]:
    """The paragraphs and items of a page: no code, tables, headings or pictures; links as their text."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"^(#.*|\|.*|    .*)$", "", text, flags=re.M)
    text = re.sub(r"^ *(?:[-*]|\d+\.) ", "\n", text, flags=re.M)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def sentences(path: Path) -> list[str]:
    return list(chain.from_iterable(re.split(r"(?<=[.!?:;])\s+(?=[A-Z“\"*_(θγ])|: |; ", part) for part in prose(path)))


def words(text: str) -> list[str]:
    return [word for word in text.split() if re.search(r"[^\W\d_]", word)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_sentences_are_short_and_plain(path: Path) -> None:
    found = sentences(path)
    assert [each for each in found if len(words(each)) > SENTENCE] == []
    long = [each for each in found if len(words(each)) > EASY]
    assert len(long) <= max(2, SHARE * len(found)), long
    text = " ".join(prose(path)).lower()
    assert [word for word in FORBIDDEN if re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text)] == []


def test_the_documents_stay_short() -> None:
    counts = {path.relative_to(ROOT).as_posix(): len(words(path.read_text(encoding="utf-8"))) for path in DOCUMENTS}
    assert counts["README.md"] <= README
    assert {name: count for name, count in counts.items() if count > PAGE} == {}
    assert sum(counts.values()) <= ALL
