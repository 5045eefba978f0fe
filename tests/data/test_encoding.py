"""Token ids are compared with the tokenizers' own and with rows worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spaced import ALL, BERT, EVERY, GPT2, ROBERTA, SPACED

from forgetfree.data.encoding import Encoder, check_label_words, label_word_ids, words_without_token
from forgetfree.data.examples import EncodedRows
from forgetfree.data.rows import Rows
from forgetfree.errors import ModelError
from forgetfree.models.token_inputs import TokenLayout

WAS = "{text} It was {mask}."
ENTAILS = "{text_a:bare}? {mask}, {text_b:lower}"


FIRST = ["the river and the city", "story", "film film film film film film film"]
SECOND = ["it was awful .", "the moon was lovely, bright: the paper was dull", "who"]


def single(*texts: str) -> Rows:
    return Rows(texts, (), (0,) * len(texts))


def pair(*texts: tuple[str, str]) -> Rows:
    first, second = zip(*texts, strict=True)
    return Rows(first, second, (0,) * len(texts))


def pieces(tokenizer: Any, ids: list[int]) -> str:
    """Return the tokens as text, with spaces between them; Ġ is the space before a byte-level word."""
    return " ".join(tokenizer.convert_ids_to_tokens(ids))


def prompted(tokenizer: Any, template: str | None, *texts: str, max_length: int = 128) -> str:
    """Encode one row of these texts in the prompt."""
    rows = single(*texts) if len(texts) == 1 else pair((texts[0], texts[1]))
    return pieces(tokenizer, Encoder(tokenizer, template, max_length)(rows)[0])


# -- Without a prompt: as the tokenizer itself -------------------------------------------------------------


@ALL
def test_texts_are_encoded_as_the_tokenizer_does(tokenizer: Any) -> None:
    assert Encoder(tokenizer, None)(single(*FIRST)) == tokenizer(FIRST)["input_ids"]
    rows = Rows(tuple(FIRST), tuple(SECOND), (0, 0, 0))
    assert Encoder(tokenizer, None)(rows) == tokenizer(FIRST, second_texts(tokenizer, rows))["input_ids"]


def second_texts(tokenizer: Any, rows: Rows) -> list[str]:
    """Return the second texts; GPT-2, which has no separator, needs a space before them."""
    return [f" {text}" for text in rows.second] if tokenizer is GPT2 else list(rows.second)


@ALL
@pytest.mark.parametrize("length", [8, 9, 12, 13, 20])
def test_texts_are_truncated_as_the_tokenizer_does(tokenizer: Any, length: int) -> None:
    rows = Rows((*FIRST, *SECOND), (*SECOND, *FIRST), (0,) * 6)
    expected = tokenizer(
        list(rows.first), second_texts(tokenizer, rows), truncation="longest_first", max_length=length, verbose=False
    )
    assert Encoder(tokenizer, None, length)(rows) == expected["input_ids"]
    alone = tokenizer(SECOND, truncation=True, max_length=length)["input_ids"]
    assert Encoder(tokenizer, None, length)(single(*SECOND)) == alone


# -- Prompts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "template", "texts", "expected"),
    [
        (BERT, WAS, ["the film story"], "[CLS] the film story it was [MASK] . [SEP]"),
        (BERT, WAS, ["the film story "], "[CLS] the film story it was [MASK] . [SEP]"),
        # a word's token includes the space before it; the mask and a character that touches a word have no space
        (ROBERTA, WAS, ["x film"], "<s> x Ġfilm ĠIt Ġwas <mask> . </s>"),
        (ROBERTA, "{mask}: {text}", ["film story"], "<s> <mask> : Ġfilm Ġstory </s>"),
        (BERT, "{mask}: {text}", ["film story"], "[CLS] [MASK] : film story [SEP]"),
        # LM-BFF's <S1>? [MASK], <S2>: the first text loses one final mark, and the second its first capital
        (ROBERTA, ENTAILS, ["x film?", "It was lovely."], "<s> x Ġfilm ? <mask> , Ġit Ġwas Ġlovely . </s>"),
        (ROBERTA, ENTAILS, ["x film", "it was lovely."], "<s> x Ġfilm ? <mask> , Ġit Ġwas Ġlovely . </s>"),
        (BERT, ENTAILS, ["who . .", "it"], "[CLS] who . ? [MASK] , it [SEP]"),
        (ROBERTA, ENTAILS, ["x", "World Sports"], "<s> x ? <mask> , Ġworld ĠSports </s>"),
        (BERT, "{text_b} {mask} {text_a}", ["film", "story"], "[CLS] story [MASK] film [SEP]"),
        (GPT2, "{text} It was", ["x film"], "x Ġfilm ĠIt Ġwas"),  # the label word follows
        (BERT, WAS, [""], "[CLS] it was [MASK] . [SEP]"),
        (ROBERTA, "{mask}: {text}", ["  "], "<s> <mask> : </s>"),
        (ROBERTA, ENTAILS, ["", ""], "<s> ? <mask> , </s>"),
        # without a prompt: an empty text, also for a tokenizer without special tokens, and two texts without a separator
        (BERT, None, [""], "[CLS] [SEP]"),
        (BERT, None, ["", "film"], "[CLS] [SEP] film [SEP]"),
        (GPT2, None, [""], "<|endoftext|>"),
        (GPT2, None, ["x film", "it was"], "x Ġfilm Ġit Ġwas"),
    ],
)
def test_texts_stand_in_a_prompt(tokenizer: Any, template: str | None, texts: list[str], expected: str) -> None:
    assert prompted(tokenizer, template, *texts) == expected


@pytest.mark.parametrize("name", SPACED)
def test_a_prompt_has_no_extra_space_if_the_tokenizer_begins_texts_with_one(name: str) -> None:
    """The row equals one text in one piece: the tokenizer's space stands only at its beginning."""
    tokenizer = SPACED[name]
    who, film = ("w h o", "f i l m") if name.endswith("never") else ("▁who", "▁film")
    assert prompted(tokenizer, "{text} It was {mask}.", "film") == f"{film} ▁It ▁was <mask> . </s>"
    pair = prompted(tokenizer, "{text_a}? {mask}, {text_b}", "who", "the story")
    assert pair == f"{who} ? <mask> , ▁the ▁story </s>"
    assert prompted(tokenizer, "{mask}: {text}", "film story") == "<mask> : ▁film ▁story </s>"


@pytest.mark.parametrize("tokenizer", [BERT, ROBERTA], ids=["bert", "roberta"])
@pytest.mark.parametrize("length", [10, 11, 14])
def test_a_prompt_is_never_truncated(tokenizer: Any, length: int) -> None:
    rows = Rows(tuple(SECOND), tuple(FIRST), (0, 0, 0))
    whole = Encoder(tokenizer, ENTAILS)(rows)
    short = Encoder(tokenizer, ENTAILS, length)(rows)
    assert max(map(len, short)) == length
    for before, after in zip(whole, short, strict=True):
        assert after.count(tokenizer.mask_token_id) == 1
        assert (after[0], after[-1]) == (before[0], before[-1])
        mask = after.index(tokenizer.mask_token_id)
        question, comma = tokenizer.convert_tokens_to_ids(["?", ","])
        assert after[mask - 1 : mask + 2] == [question, tokenizer.mask_token_id, comma]


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"are left for the text: the prompt .* fills all 5 tokens\. Set a higher max_length"
    ):
        Encoder(BERT, WAS, 5)


def test_a_mask_prompt_needs_a_mask_token() -> None:
    with pytest.raises(ModelError, match=r"needs a mask token.*--readout causal or --readout linear"):
        Encoder(GPT2, WAS)


# -- Awkward texts ---------------------------------------------------------------------------------------

SPELLED = "the [SEP] [MASK] [PAD] <mask> </s> <pad> <|endoftext|> film"


@ALL
@pytest.mark.parametrize("template", [None, "{text} It was"])
def test_a_text_that_spells_a_special_token_stays_a_text(tokenizer: Any, template: str | None) -> None:
    ids = Encoder(tokenizer, template)(single(SPELLED))[0]
    special = [token for token in ids if token in tokenizer.all_special_ids and token != tokenizer.unk_token_id]
    assert special == [token for token in tokenizer("film")["input_ids"] if token in tokenizer.all_special_ids]


# -- Masks and types from ids ----------------------------------------------------------------------------


def layout(tokenizer: Any, *, types: bool = False) -> TokenLayout:
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return TokenLayout(pad, tokenizer.mask_token_id, tokenizer.sep_token_id if types else None)


def padded(tokenizer: Any, rows: Rows, template: str | None = None) -> torch.Tensor:
    ids = Encoder(tokenizer, template)(rows)
    encoded = EncodedRows.of(ids, rows.labels, 0, layout(tokenizer).pad)
    return encoded.batch(range(len(rows)))[0]


@pytest.mark.parametrize("tokenizer", [BERT, ROBERTA], ids=["bert", "roberta"])
@pytest.mark.parametrize("second", [None, SECOND], ids=["single", "pair"])
def test_masks_and_types_from_ids_are_the_tokenizers_own(tokenizer: Any, second: list[str] | None) -> None:
    expected = tokenizer(FIRST, second, padding=True, return_tensors="pt", return_token_type_ids=True)
    x = padded(tokenizer, Rows(tuple(FIRST), tuple(second or ()), (0, 0, 0)))
    assert torch.equal(x, expected["input_ids"])
    assert torch.equal(layout(tokenizer).attention_mask(x), expected["attention_mask"])
    assert layout(tokenizer).token_types(x) is None
    if tokenizer is BERT:
        assert torch.equal(layout(tokenizer, types=True).token_types(x), expected["token_type_ids"])


def test_padding_with_a_real_token_is_told_apart_from_that_token() -> None:
    """GPT-2 pads with end-of-text, which is a token like any other inside a row."""
    x = torch.tensor([[0, 5, 0, 7, 0, 0], [0, 0, 0, 0, 0, 9], [0, 0, 0, 0, 0, 0]])
    tokens = TokenLayout(pad=0)
    assert tokens.attention_mask(x).tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6, [1, 0, 0, 0, 0, 0]]
    assert tokens.last(x).tolist() == [3, 5, 0]


@pytest.mark.parametrize(
    ("rows", "counts"), [([[5, 6]], r"\[0\]"), ([[4, 4], [4, 6]], r"\[1, 2\]"), ([[5, 6], [4, 6]], r"\[0, 1\]")]
)
def test_a_row_with_no_mask_or_several_is_refused(rows: list[list[int]], counts: str) -> None:
    with pytest.raises(ModelError, match=rf"exactly one mask token for the prompt readout, got {counts}"):
        TokenLayout(pad=0, mask=4).masked(torch.tensor(rows))


# -- Label words: each must be one token after a space in running text ---------------------------------------------


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


def test_all_label_words_of_all_tasks_are_told_at_once() -> None:
    words = {"one": ("dreadful", "marvellous"), "two": ("東", "great"), "three": ("Yes", "yes")}
    with pytest.raises(
        ModelError, match=r"Set label_words in the task's source\.json, or use --readout linear"
    ) as caught:
        check_label_words(BERT, words)
    assert "'dreadful', 'marvellous' of task 'one'; '東' of task 'two'; 'yes' of task 'three'. " in str(caught.value)
    with pytest.raises(ModelError, match="'pity-great' of task 'own'"):
        label_word_ids(SPACED["bpe-first"], ("pity-great", "terrible"), "own")


def test_words_without_a_token_of_their_own() -> None:
    assert words_without_token(BERT, ("great", "dreadful", "Great", "yes")) == ["dreadful", "Great"]
