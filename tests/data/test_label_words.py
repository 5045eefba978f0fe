"""Label words: each must be one token after a space in running text."""

from __future__ import annotations

from typing import Any

import pytest
from spaced import BERT, EVERY, GPT2, ROBERTA, SPACED

from forgetfree.data.encoding import check_label_words, label_word_ids, words_without_token
from forgetfree.errors import ModelError


@pytest.mark.sampled("bpe-first")
@EVERY
def test_a_label_word_is_the_token_that_it_is_in_running_text(tokenizer: Any) -> None:
    words = ("terrible", "great", "Yes", "World")
    ids = label_word_ids(tokenizer, words, "own")
    for word, expected in zip(words, ids, strict=True):
        before, sentence = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (
                "the film was",
                f"the film was {word} and dull",
            )
        )
        assert sentence[: len(before) + 1] == [*before, expected]
    assert tokenizer.unk_token_id not in ids or tokenizer is GPT2


@pytest.mark.parametrize("name", SPACED)
def test_a_label_word_of_several_tokens_is_refused_with_others_where_spaces_are_tokens(name: str) -> None:
    with pytest.raises(
        ModelError, match=r"Label word 'pity-great' of task 'own' is \d+ tokens .*alternatives: great\."
    ):
        label_word_ids(SPACED[name], ("pity-great", "terrible"), "own")


def test_a_label_word_of_several_tokens_is_named_with_words_of_one() -> None:
    with pytest.raises(ModelError) as caught:
        label_word_ids(ROBERTA, ("Sci/Tech", "Sports"), "ag_news")
    text = str(caught.value)
    assert text.startswith("Label word 'Sci/Tech' of task 'ag_news' is ")
    assert "and a label word must be one. Single-token alternatives: " in text
    alternatives = text.split("alternatives: ")[1].split(". ")[0].split(", ")
    assert "Tech" in alternatives
    assert "Sports" not in alternatives
    assert all(len(ROBERTA.tokenize(f" {word}")) == 1 for word in alternatives)
    assert "Set label_words in the task's source.json, or use --readout linear." in text


def test_all_label_words_of_all_tasks_are_told_at_once() -> None:
    with pytest.raises(ModelError) as caught:
        check_label_words(BERT, {"one": ("dreadful", "marvellous"), "two": ("東", "great"), "three": ("Yes", "yes")})
    text = str(caught.value)
    for part in (
        "'dreadful' of task 'one'",
        "'marvellous' of task 'one'",
        "'東' of task 'two'",
        "of task 'three' (Yes, yes)",
    ):
        assert part in text
    assert "'great'" not in text and "[UNK]), and a label word must be one. The" in text  # no other word means the same
    assert text.count("Set label_words") == 1


def test_words_without_a_token_of_their_own() -> None:
    assert words_without_token(BERT, ("great", "dreadful", "Great", "yes")) == ["dreadful", "Great"]
