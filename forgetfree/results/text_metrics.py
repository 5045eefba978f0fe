"""Metrics of texts against right texts: exact match, token F1, ROUGE-L, BLEU and numbers.

Every function takes the texts of n rows and the right texts of each row. The functions in `ROWS` return one value per row,
shape (n,) in [0, 1], the best over the row's right texts; the metric is their mean. BLEU is one number for all rows. An empty
text is an answer like any other.

``rouge-score`` and ``sacrebleu`` compute ROUGE-L and BLEU; each is imported at first use. On texts in Latin letters our values
equal theirs to the bit. On some other texts theirs are not useful: ``rouge-score`` drops every letter but a to z, and a
sentence without blanks is one word. There we take the *words of any script*: runs of letters, marks and digits, in lower case,
and each character of a script that is written without blanks (Chinese, Japanese, Thai, Lao, Khmer, Burmese) as a word of its
own. The docstrings say where.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache, partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np

from forgetfree.display import counted, nfc
from forgetfree.errors import MetricError
from forgetfree.results.metrics import Floats, Metric

Texts = Sequence[str]
#: The right texts of each row, at least one.
Targets = Sequence[Sequence[str]]


# ---- a value a row --------------------------------------------------------------------------------------


def exact_match(texts: Texts, targets: Targets) -> Floats:
    """Return 1 where a text equals a right one after `normalized`, else 0 (Rajpurkar et al., SQuAD, 2016)."""
    return _best(texts, targets, lambda text, target: float(normalized(text) == normalized(target)))


def token_f1(texts: Texts, targets: Targets) -> Floats:
    """Return the F1 of the words that a text shares with a right one, both `normalized` (Rajpurkar et al., SQuAD, 2016).

    A word counts as often as it occurs in both. If one of the two has no words, F1 is 1 if the other has none, too, else 0,
    as in SQuAD 2.0.
    """
    return _best(texts, targets, lambda text, target: _f1(normalized(text).split(), normalized(target).split()))


def rouge_l(texts: Texts, targets: Targets) -> Floats:
    """Return ROUGE-L, the F-measure of the longest common subsequence of words (Lin, 2004).

    The value is that of ``rouge-score`` with its stemmer, as in the evaluation of Super-NaturalInstructions. Its words are runs
    of a to z and digits. A right text with letters of another script, or without any such run, is compared by the words of any
    script, without a stemmer; if it has no words at all, such as an emoji, by its parts between blanks. If it is empty, the
    value is 1 for an empty text, else 0.
    """
    return _best(texts, targets, _longest_common)


def numeric_answer(texts: Texts, targets: Targets) -> Floats:
    """Return 1 where the last number of a text equals the last number of a right one, else 0.

    ``1,250.50``, ``+1250.5`` and ``$1'250.500`` are one number: commas, apostrophes and no-break blanks between groups of three
    digits do not count, nor zeros at the end. A sign counts unless a letter, digit or bracket stands before it, as in ``7-3``.
    Fractions, powers and units are ignored. A right text without a number is compared as in `exact_match`.
    """
    return _best(texts, targets, _same_number)


# ---- one number for all rows ----------------------------------------------------------------------------


def bleu(texts: Texts, targets: Targets) -> float:
    """Return BLEU of the corpus in [0, 1], as ``sacrebleu`` computes it by default: tokenizer 13a, exponential smoothing.

    Each character of a script that is written without blanks is a word of its own, as in sacrebleu's tokenizer for Chinese.
    """
    from sacrebleu.metrics.bleu import BLEU

    _check(texts, targets)
    right = [[_spaced(target) for target in row] for row in targets]
    # force: no warning where texts look tokenized.
    streams = list(zip_longest(*right))  # the first of all rows, the second, …; None where a row has no more
    percent: float = BLEU(force=True).corpus_score([_spaced(text) for text in texts], streams).score
    return min(percent / 100, 1.0)  # its 100 may be 100.00000000000004


#: The metrics that are means over rows, by name.
ROWS: dict[str, Callable[[Texts, Targets], Floats]] = {
    each.__name__: each for each in (exact_match, token_f1, rouge_l, numeric_answer)
}


def _of_rows(title: str, value: Callable[[Texts, Targets], Floats]) -> Metric:
    def rows(answers: Any) -> Floats:
        return value(answers.texts, answers.right)

    return Metric(lambda answers: float(rows(answers).mean()), rows=rows, title=title)


#: The registered metrics: they score answers with ``texts`` and ``right``, the right texts of each row.
EXACT_MATCH, TOKEN_F1 = _of_rows("exact match", exact_match), _of_rows("token F1", token_f1)
ROUGE_L, NUMERIC_ANSWER = _of_rows("ROUGE-L", rouge_l), _of_rows("numeric answer", numeric_answer)
BLEU = Metric(lambda answers: bleu(answers.texts, answers.right), title="BLEU")


# ---- words ----------------------------------------------------------------------------------------------

_PUNCTUATION = frozenset(string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
#: Prefixes of the Unicode names of letters in scripts that are written without blanks.
_WITHOUT_BLANKS = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "HALFWIDTH KATAKANA")


def normalized(text: str) -> str:
    """Return a text in lower case without punctuation and English articles, with one blank between words, as SQuAD does.

    If the text has only articles, they stay: the answer "A" of multiple choice is not an empty text. Beyond SQuAD, as MLQA
    extends it (Lewis et al., 2020): punctuation of every script is left out, and each character of a script that is written
    without blanks is a word. Unicode variants of one letter are equal (NFC).
    """
    lower = nfc(text).lower()
    bare = "".join(char for char in lower if char not in _PUNCTUATION and unicodedata.category(char)[0] != "P")
    without = _ARTICLES.sub(" ", bare)
    return " ".join(_spaced(without if without.strip() else bare).split())


def words_of_any_script(text: str) -> list[str]:
    """Return the words of a text in lower case; without words, its parts between blanks. See the module docstring."""
    lower = unicodedata.normalize("NFKC", text).lower()
    # Marks belong to words: in Hindi they are the vowels, and a pattern's \w leaves them out.
    words = "".join(char if unicodedata.category(char)[0] in "LMN" else " " for char in _spaced(lower)).split()
    return words or lower.split()


def _spaced(text: str) -> str:
    """Return a text with blanks around each character of a script without blanks; marks stay with their letter."""
    if text.isascii():
        return text
    parts: list[str] = []
    alone = False
    for char in text:
        if unicodedata.category(char)[0] != "M":
            before, alone = alone, _stands_alone(char)
            if before or alone:
                parts.append(" ")
        parts.append(char)
    return "".join(parts)


@lru_cache(maxsize=2**16)
def _stands_alone(char: str) -> bool:
    return unicodedata.category(char) == "Lo" and unicodedata.name(char, "").startswith(_WITHOUT_BLANKS)


def _f1(words: Sequence[str], right: Sequence[str]) -> float:
    if not words or not right:
        return float(not words and not right)
    shared = (Counter(words) & Counter(right)).total()
    return 2 * shared / (len(words) + len(right))


@lru_cache(maxsize=2)
def _splitter(any_script: bool) -> Callable[[str], list[str]]:
    """Return the function that splits a text: into stems of Latin words, or into words of any script."""
    from rouge_score.tokenize import tokenize
    from rouge_score.tokenizers import porter

    # Cached: words recur, and a right text is compared with many texts.
    stemmer = SimpleNamespace(stem=lru_cache(maxsize=2**16)(porter.PorterStemmer().stem))
    return lru_cache(maxsize=2**14)(words_of_any_script if any_script else partial(tokenize, stemmer=stemmer))


def _longest_common(text: str, target: str) -> float:
    from rapidfuzz.distance import LCSseq  # rouge-score's own takes a second for a few long texts
    from rouge_score.scoring import fmeasure

    if not target.strip():
        return float(not text.strip())
    words_of = _splitter(_needs_any_script(target))
    right, words = words_of(target), words_of(text)
    length = LCSseq.similarity(right, words)
    return float(fmeasure(length / max(len(words), 1), length / max(len(right), 1)))


def _needs_any_script(target: str) -> bool:
    """Return whether words of a to z and digits are not enough for a right text; it alone decides the splitter."""
    if target.isascii():
        return not any(char.isalnum() for char in target)
    # Letters up to U+024F, with few exceptions, are Latin.
    foreign = any(char > "\u024f" and char.isalpha() and "LATIN" not in unicodedata.name(char, "") for char in target)
    return foreign or not any(char.isascii() and char.isalnum() for char in target)


# ---- numbers --------------------------------------------------------------------------------------------

_GROUP = "[,'’\u00a0\u202f]"
_NUMBER = re.compile(
    rf"(?:(?<![\w)\]])[-−+])?(?:[$€£¥]\s?)?"  # a sign, and a currency
    rf"((?<!\d)\d{{1,3}}(?:{_GROUP}\d{{3}})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)"
)


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text; ``None`` where there is none. See `numeric_answer`."""
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    size = Decimal(re.sub(_GROUP, "", matches[-1][1]))
    return -size if matches[-1][0][0] in "-−" else size


def _same_number(text: str, target: str) -> float:
    right = last_number(target)
    if right is None:
        return float(normalized(text) == normalized(target))
    return float(last_number(text) == right)


# ---- arguments ------------------------------------------------------------------------------------------


def _best(texts: Texts, targets: Targets, value: Callable[[str, str], float]) -> Floats:
    """Return for each row the best value over its right texts, shape (n,)."""
    _check(texts, targets)
    rows = zip(texts, targets, strict=True)
    return np.array([max(value(text, target) for target in row) for text, row in rows], dtype=np.float64)


def _check(texts: Texts, targets: Targets) -> None:
    """Raise ``MetricError`` unless there are rows, each with a text and at least one right text."""
    if not len(texts) or len(texts) != len(targets) or not all(targets) or isinstance(targets[0], str):
        raise MetricError(
            f"Expected one text and one list of targets per row, got {counted(len(texts), 'text')} and targets for "
            f"{counted(len(targets), 'row')}."
        )
