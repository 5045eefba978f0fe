"""Text metrics are those of the libraries and the published scripts, and agree with hand-worked numbers."""

from __future__ import annotations

import random
from decimal import Decimal

import numpy as np
import pytest
import torchmetrics.functional.text
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import corpus_bleu

from forgetfree.errors import MetricError
from forgetfree.results.text_metrics import (
    ROWS,
    bleu,
    exact_match,
    last_number,
    normalized,
    numeric_answer,
    rouge_l,
    token_f1,
    words_of_any_script,
)

EVERY = {**ROWS, "bleu": bleu}
WORDS = "the a cat cats sat sitting on mat, mats. Running ran 12 x-ray It's down! über café"


def sentences(seed: int, rows: int = 40) -> tuple[list[str], list[list[str]]]:
    """Return texts in Latin letters, some of them empty, and one to three right texts for each."""
    draw, words = random.Random(seed), WORDS.split()
    texts = [" ".join(draw.choices(words, k=draw.randrange(8))) for _ in range(rows)]
    return texts, [
        [" ".join(draw.choices(words, k=draw.randrange(1, 8))) for _ in range(draw.randrange(1, 4))]
        for _ in range(rows)
    ]


# -- Worked by hand --------------------------------------------------------------------------------------


def test_exact_match_leaves_out_case_articles_and_punctuation() -> None:
    texts = ["The  Cat!", "cats", "an apple, a day", "", "!"]
    assert exact_match(texts, [["cat"], ["cat"], ["Apple day."], ["x"], [""]]).tolist() == [1, 0, 1, 0, 1]


def test_token_f1_counts_words_as_often_as_both_have_them() -> None:
    # "big cat cat" has 3 words and "cat sat" has 2; they share one: 2·1 / (3 + 2).
    found = token_f1(["A big cat cat", "dog", "", "?", "x"], [["The cat sat."], ["cat"], ["cat"], ["!"], [""]])
    assert found.tolist() == [0.4, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 1,250.50.", "1250.5"),
        ("first 3, then 4.", "4"),
        ("−0.5", "-0.5"),
        ("7-3", "3"),
        ("(-3)", "-3"),
        ("-$1'250", "-1250"),
        ("1\u202f250 metres", "1250"),
        ("about .5", "0.5"),
        ("12,3456", "3456"),
        ("١٢٣", "123"),
    ],
)
def test_the_last_number(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


def test_numeric_answer_compares_numbers_or_else_texts() -> None:
    texts = ["It costs $1,250.50", "12 of 13", "none at all", "No.", "3", ""]
    right = [["#### 1250.5"], ["12"], ["4"], ["no"], ["none", "3.000"], ["0"]]
    assert numeric_answer(texts, right).tolist() == [1, 0, 0, 1, 1, 0]
    assert last_number("none") is None


@pytest.mark.parametrize("name", EVERY)
def test_the_best_of_several_right_texts_counts(name: str) -> None:
    text, right = "the answer of this row is 12", "another one: 13"
    metric = EVERY[name]
    assert metric([text], [[right, text]]) == metric([text], [[text, right]]) == metric([text], [[text]]) == 1
    assert metric([text], [[right]]) < 1


# -- The libraries and the published scripts -------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_squad_metrics_are_those_of_torchmetrics(seed: int) -> None:
    texts, right = sentences(seed)
    exact, f1 = exact_match(texts, right), token_f1(texts, right)
    for row, (text, answers) in enumerate(zip(texts, right, strict=True)):
        if not normalized(text) or not all(map(normalized, answers)):
            continue  # torchmetrics follows SQuAD 1.1, which has no empty answers
        found = torchmetrics.functional.text.squad(
            [{"prediction_text": text, "id": "0"}],
            [{"answers": {"answer_start": [0] * len(answers), "text": answers}, "id": "0"}],
        )
        assert 100 * exact[row] == found["exact_match"]
        assert 100 * f1[row] == pytest.approx(float(found["f1"]), abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_rouge_and_bleu_are_those_of_their_libraries(seed: int) -> None:
    """ROUGE-L uses a stemmer, as in Super-NaturalInstructions."""
    texts, right = sentences(seed)
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    expected = [
        max(scorer.score(one, text)["rougeL"].fmeasure for one in answers)
        for text, answers in zip(texts, right, strict=True)
    ]
    assert rouge_l(texts, right).tolist() == expected
    streams = [[row[place] if place < len(row) else None for row in right] for place in range(3)]
    assert bleu(texts, right) == corpus_bleu(texts, streams).score / 100  # type: ignore[arg-type]


# -- Empty texts, and texts in other scripts -------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_an_empty_text_is_worth_nothing(name: str) -> None:
    found = EVERY[name](["", ""], [["one"], ["two words", "x"]])
    assert np.all(np.asarray(found) == 0)


@pytest.mark.parametrize("name", [*ROWS])
def test_an_empty_text_is_right_where_nothing_is(name: str) -> None:
    assert ROWS[name](["", "x"], [[""], [""]]).tolist() == [1, 0]


SAME = [
    "我喜欢你的朋友",
    "привет мир и друзья",
    "नमस्ते मेरी दुनिया के लोग",
    "สวัสดีชาวโลก",
    "👍 🎉 👍 🎉",
]


@pytest.mark.parametrize("text", SAME)
@pytest.mark.parametrize("name", EVERY)
def test_the_same_text_is_right_in_any_script(name: str, text: str) -> None:
    metric = EVERY[name]
    assert metric([text], [[text]]) == 1
    assert metric(["something else"], [[text]]) < 0.2


def test_rouge_of_other_scripts_by_their_words() -> None:
    # Both have four characters, and share three in order.
    assert rouge_l(["我喜欢你"], [["我喜爱你"]]) == pytest.approx([3 / 4])
    # The library would see only the number, and score these as equal.
    assert rouge_l(["цена 5000"], [["вес 5000"]]) == pytest.approx([1 / 2])


def test_words_of_any_script() -> None:
    assert words_of_any_script("Hello, мир! 世界 ok世x") == ["hello", "мир", "世", "界", "ok", "世", "x"]
    assert words_of_any_script("नमस्ते दुनिया") == ["नमस्ते", "दुनिया"]  # vowels are marks, and stay in their words
    assert words_of_any_script("กิx ที่") == ["กิ", "x", "ที่"]
    assert words_of_any_script("？ !!") == ["?", "!!"]
    assert words_of_any_script("  ") == []


def test_normalized_beyond_ascii() -> None:
    assert normalized("The «Café» — ‘a’ 世界。") == "café 世 界"
    assert exact_match(["cafe\u0301"], [["caf\u00e9"]]) == [1]
    assert token_f1(["我爱你"], [["我喜欢你"]]) == pytest.approx([2 * 2 / 7])


def test_bleu_of_chinese_is_that_of_sacrebleus_tokenizer() -> None:
    texts, right = ["我喜欢你吗，我的朋友 Ann", "今天天气很好。"], [["我喜欢你的，我的朋友 Ann"], ["今天天气不好。"]]
    expected = corpus_bleu(texts, [[row[0] for row in right]], tokenize="zh").score / 100
    assert bleu(texts, right) == expected > 0.4


# -- Arguments -------------------------------------------------------------------------------------------


def test_what_is_no_table_of_texts_is_refused() -> None:
    for metric in EVERY.values():
        for texts, right in ((["a"], [["a"], ["b"]]), ([], []), (["a"], [[]]), (["a"], ["a right text"])):
            with pytest.raises(MetricError, match=f"got {len(texts)} texts? and targets for {len(right)} row"):
                metric(texts, right)


def test_an_article_that_is_the_answer_is_no_empty_text() -> None:
    """An example is the answer A among five letters."""
    assert exact_match(["A", "a.", "", "the", "B"], [["A"]] * 5).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert token_f1([""], [["A"]]).tolist() == [0.0]
