"""Prompts and their answers become token ids, with marks at the trained positions."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import Any

import families
import pytest
import tiny
from transformers.utils import chat_template_utils

from forgetfree.data.prompts import EncodedTexts, PromptEncoder
from forgetfree.data.rows import Rows
from forgetfree.errors import DataError, ModelError
from forgetfree.tasks import TaskDefinition

CHAT = (
    "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def task(**fields: Any) -> TaskDefinition:
    return TaskDefinition(
        "own", **({"kind": "generation", "labels": (), "metric": "exact_match", "max_new_tokens": 4} | fields)
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.byte_level(causal=True)


def rows(*pairs: tuple[str, str]) -> Rows:
    return Rows(tuple(prompt for prompt, _ in pairs), (), tuple((target,) if target else () for _, target in pairs))


def read(tokenizer: Any, ids: list[int]) -> tuple[str, str]:
    """Return the text before the answer, and the answer as the model sees it."""
    marked = [i for i, token in enumerate(ids) if token < 0]
    plain = [~token if token < 0 else token for token in ids]
    return tokenizer.decode(plain[: marked[0] + 1]), tokenizer.decode(plain[marked[0] + 1 :])


def test_the_last_token_before_the_answer_and_all_of_it_are_marked(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, task(template="Q: {prompt} A:"), 64)
    (row,) = encoder.read(rows(("the film", "great movie")))
    ids, labels = row.ids, row.labels
    assert read(tokenizer, ids) == ("Q: the film A:", " great movie")
    assert tokenizer.decode(labels[:-1]) == " great movie"
    assert labels[-1] == tokenizer.eos_token_id
    marks = [i for i, token in enumerate(ids) if token < 0]
    assert marks == list(range(len(ids) - len(labels), len(ids)))
    assert [~ids[i + 1] for i in marks[:-1]] == labels[:-1]  # at each mark, the next token is the label


@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        (task(), "the film\n\n"),
        (task(instruction="Say it."), "Say it.\n\nthe film\n\n"),
        (task(instruction="Say it.", template="{instruction} | {prompt}\n"), "Say it. | the film\n"),
        (task(template='{"text": "{prompt}"}\n'), '{"text": "the film"}\n'),
    ],
)
def test_what_stands_before_an_answer(definition: TaskDefinition, expected: str, tokenizer: Any) -> None:
    (row,) = PromptEncoder(tokenizer, definition, 64).read(rows(("the film", "great")))
    assert read(tokenizer, row.ids) == (expected, "great")


def test_a_chat_template_puts_prompts_and_chats_together(tokenizer: Any) -> None:
    chatting = tiny.byte_level(causal=True)
    chatting.chat_template = CHAT
    (row,) = PromptEncoder(chatting, task(instruction="Say it."), 64).read(rows(("the film", "great")))
    assert read(chatting, row.ids) == ("<user>Say it.\n\nthe film</s><assistant>", "great")
    turns = [{"role": "user", "content": "the film"}, {"role": "assistant", "content": "fine"}]
    chat = rows((json.dumps([*turns, {"role": "user", "content": "and now"}]), "great"))
    definition = task(kind="messages", instruction="Say it.")
    (row,) = PromptEncoder(chatting, definition, 128).read(chat)
    ids = row.ids
    before = "<system>Say it.</s><user>the film</s><assistant>fine</s><user>and now</s><assistant>"
    assert read(chatting, ids) == (before, "great")
    (row,) = PromptEncoder(tokenizer, definition, 128).read(chat)
    ids = row.ids
    before = "system: Say it.\nuser: the film\nassistant: fine\nuser: and now\nassistant:"
    assert read(tokenizer, ids) == (before, " great")


def test_an_answer_in_a_chat_ends_with_the_token_that_ends_the_assistants_turn() -> None:
    """In Gemma's template, this is not the token that ends a text."""
    chatting = tiny.byte_level(causal=True)
    chatting.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    chatting.chat_template = CHAT.replace("</s>", "<|turn|>")
    encoder = PromptEncoder(chatting, task(), 64)
    (row,) = encoder.read(rows(("the film", "great")))
    labels = row.labels
    assert labels[-1] == encoder.end == chatting.convert_tokens_to_ids("<|turn|>") != chatting.eos_token_id
    assert PromptEncoder(chatting, task(template="{prompt}:"), 64).end == chatting.eos_token_id


def test_a_long_prompt_loses_its_beginning_and_the_template_nothing(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, task(template="Q: {prompt} A:", max_new_tokens=3), 20)
    words = " ".join(["film"] * 30 + ["movie"])
    (row,) = encoder.read(rows((words, "great")))
    before, _ = read(tokenizer, row.ids)
    assert before.startswith("Q:")
    assert before.endswith("movie A:")
    assert len(row.ids) + 2 <= 20  # the limit leaves room for three new tokens
    assert "  " not in before
    assert encoder.cut == [31 - before.count("film") - 1]


def test_what_is_asked_does_not_depend_on_the_right_answer(tokenizer: Any) -> None:
    """Otherwise the prompt would reveal the length of the right answer."""
    definition = task(max_new_tokens=3)
    prompt, answer = "film " * 30, "great movie terrible"
    asked = []
    for target in ("great", answer, ""):
        encoder = PromptEncoder(tokenizer, definition, 20)
        found = encoder.read(rows(("the film", "great"), (prompt, target)))
        ids, longer = [row.ids for row in found], {i: row.longer for i, row in enumerate(found) if row.longer}
        encoded = replace(EncodedTexts.of(ids, [row.labels for row in found], 0, 0), right=[["x"]] * 2, longer=longer)
        asked.append(encoded.prompts)
        assert encoded.subset([1]).prompts == encoded.prompts[1:]
        assert len(ids[1]) <= 20
    assert asked[0] == asked[1] == asked[2]


def test_a_decoder_apart_begins_a_text_as_texts_begin() -> None:
    """The first word of a text has SentencePiece's ▁, in the answer and in the prompt."""
    pieces = tiny.metaspace("unigram", "always")
    (row,) = PromptEncoder(pieces, task(), 64, closed=True).read(rows(("great film", "great film")))
    ids, labels = row.ids, row.labels
    assert pieces.convert_ids_to_tokens(labels[:-1]) == ["▁great", "▁film"]
    assert pieces.convert_ids_to_tokens(ids[:2]) == ["▁great", "▁film"]


def test_a_text_after_a_line_that_the_tokenizer_drops_is_a_word_of_its_own() -> None:
    """T5's tokenizer drops line breaks."""
    tokenizer = families.tokenizer("T5")
    encode = PromptEncoder(tokenizer, TaskDefinition("own", "generation", (), instruction="terrible"), 20, closed=True)
    (row,) = encode(Rows(("great film",), (), ((),)))
    assert tokenizer.convert_ids_to_tokens([~row[-1]]) == ["</s>"]
    assert tokenizer.convert_ids_to_tokens(row[:-1]) == ["▁terrible", "▁great", "▁film"]


def test_right_texts_that_are_longer_than_those_that_are_written_are_told(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, task(template="{prompt}:", max_new_tokens=2), 64)
    found = encoder.read(rows(("the film", "great"), ("the film", "great great terrible")))
    assert [len(row.labels) - 1 for row in found] == [1, 3]  # without the token that ends a text
    assert encoder.cut_note("row", 2) == (
        "The targets of 1 of 2 rows are longer than max_new_tokens=2, up to 3 tokens, so generated texts cannot match them. "
        "Set max_new_tokens in source.json."
    )


def test_answers_that_do_not_fit_are_told_by_their_rows(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, task(template="{prompt} A:"), 16)
    long = " ".join(["film"] * 40)
    given = rows(("a", "great"), ("b", long), ("a", ""), ("c", long))
    with pytest.raises(
        DataError, match=r"Prompt 2: expected an answer that fits into max_length=16 .* got one of 40 tok"
    ):
        encoder.read(given)
    with pytest.raises(DataError, match=r"2 bad rows in 1 file: answer does not fit \(2\)[\s\S]* a\.csv +13 "):
        encoder.read(replace(given, places=tuple(("a.csv", 10 + i) for i in range(4))))
    assert {i: bad.what for i, bad in encoder.bad_rows(given).items()} == dict.fromkeys((1, 3), "answer does not fit")


def test_what_leaves_no_room_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ModelError, match="instruction and the template of task 'own' take"):
        PromptEncoder(tokenizer, task(instruction="film " * 30), 16)
    endless = tiny.byte_level(causal=True)
    endless.eos_token = None
    with pytest.raises(ModelError, match="no eos_token"):
        PromptEncoder(endless, task(), 64)
    broken = tiny.byte_level(causal=True)
    broken.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ModelError, match="chat template cannot create"):
        PromptEncoder(broken, task(), 64)


class Tomorrow(datetime):
    """The clock on a day long after training."""

    @classmethod
    def now(cls, tz: Any = None) -> Tomorrow:
        return cls(2031, 2, 3)


@pytest.mark.parametrize("definition", [task(), task(kind="messages"), task(kind="messages", instruction="Say it.")])
def test_a_date_in_a_chat_template_is_the_same_on_every_day(
    definition: TaskDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a row's tokens would change at midnight; an exported model's prompts have the same date, too."""
    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    chatting = tiny.byte_level(causal=True)
    chatting.chat_template = (
        "{% if strftime_now is defined %}{% set day = strftime_now('%A, %d %b %Y, day %j') %}{% endif %}{{ day }}\n"
        + CHAT
    )
    turns = [{"role": "user", "content": "the film"}]
    assert chatting.apply_chat_template(turns, tokenize=False).startswith("Monday, 03 Feb 2031, day 034\n")
    encoder = PromptEncoder(chatting, definition, 256)
    (row,) = encoder.read(rows((json.dumps(turns) if definition.form == "messages" else "the film", "great")))
    before, _ = read(chatting, row.ids)
    assert before.startswith("Friday, 26 Jul 2024, day 208\n<")
    chatting.chat_template = encoder.chat_template
    assert chatting.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == before
