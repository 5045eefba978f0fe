"""A text that is sent piece by piece is that which is sent whole, whatever a tokenizer does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from forgetfree.errors import ModelError
from forgetfree.kinds.generation import text_of
from forgetfree.models.generation import stops
from forgetfree.serve.generation import GrowingText


def byte_fallback() -> Any:
    """As Llama 2 has it: letters that it does not know are bytes."""
    words = ["<unk>", "▁", "▁a", "b", "."]
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in (*range(9, 14), *"é漢".encode(), 0x41))]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(dict.fromkeys(tokens))}, [], unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def cleaning_up() -> Any:
    """It takes spaces before punctuation away, once the punctuation is there."""
    tokens = ["<unk>", "do", "n't", "a", "'", "s", ".", "?", "'s", "'ve"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    how: dict[str, Any] = {"unk_token": "<unk>", "clean_up_tokenization_spaces": True}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **how)


TOKENIZERS = {
    "bytes": lambda: tiny.byte_level(causal=True),
    "byte fallback": byte_fallback,
    "metaspace": lambda: tiny.metaspace("unigram", "always"),
    "word pieces": tiny.wordpiece,
    "cleaning up": cleaning_up,
}


def pieces_of(tokenizer: Any, ids: Sequence[int], stop: Sequence[str]) -> tuple[list[str], str]:
    """What is sent of token ids up to where they end, and the text."""
    pieces = list[str]()
    growing = GrowingText(tokenizer, stop, pieces.append)
    for count in range(1, len(ids) + 1):
        growing.hear(ids[:count])
        if stops(tokenizer, ids[:count], stop):
            ids = ids[:count]
            break
    text = text_of(tokenizer, ids, stop) if ids else ""
    growing.end(text)
    return pieces, text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_pieces_of_any_ids_are_their_text(name: str) -> None:
    """Broken letters among them, white space at either end, and stop texts that begin and do not come."""
    tokenizer: Any = TOKENIZERS[name]()
    draw, several = random.Random(0), 0
    for _ in range(300):
        ids = [draw.randrange(min(len(tokenizer), 300)) for _ in range(draw.randint(1, 12))]
        whole = text_of(tokenizer, ids)
        at = draw.randrange(len(whole) + 1)
        stop = [
            each
            for each in draw.choice([[], [whole[at : at + 2]], [whole[-1:] + "\n\n"], [whole[at : at + 1] + "~"]])
            if each
        ]
        pieces, text = pieces_of(tokenizer, ids, stop)
        assert "".join(pieces) == text
        several += len(pieces) > 1
    assert several > 100


def test_what_a_tokenizer_changes_after_it_was_sent_is_told() -> None:
    class Fickle:
        all_special_ids = ()

        def decode(self, ids: Sequence[int], **_: Any) -> str:
            return "ab" if len(ids) == 1 else "cde"

        def convert_ids_to_tokens(self, _: int) -> str:
            return "x"

    growing = GrowingText(Fickle(), (), lambda piece: None)
    growing.hear([1])
    growing.hear([1, 2])
    with pytest.raises(ModelError, match="Ask again without stream"):
        growing.end("cde")
