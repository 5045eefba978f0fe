"""Sentences whose words are labelled: from words and tags to token ids."""

from __future__ import annotations

from typing import Any

from forgetfree.data.encoding import Encoder, token_ids
from forgetfree.data.rows import Rows
from forgetfree.tasks import MAX_LENGTH


class WordEncoder(Encoder):
    """Converts sentences to token ids, of which the first of each word is marked: it stands as its complement ``~id``.

    A word without a token, such as one of invisible characters, is read at the token for unknown words. Tokens beyond
    ``max_length`` are cut off. A word stays if its first token does.
    """

    def __init__(self, tokenizer: Any, max_length: int = MAX_LENGTH) -> None:
        super().__init__(tokenizer, None, max_length)
        unknown = tokenizer.unk_token_id
        self._wordless = [self.blank if unknown is None else unknown]

    def __call__(self, rows: Rows) -> list[list[int]]:
        """Return the token ids of every sentence."""
        sentences = [text.split(" ") for text in rows.first]
        # As they stand in a text: a space belongs to the word after it, as byte-level tokenizers see it.
        first = list({words[0] for words in sentences})
        later = list({word for words in sentences for word in words[1:]})
        begin = dict(zip(first, token_ids(self.tokenizer, first), strict=True))
        inside = token_ids(self.tokenizer, [f" {word}" for word in later], inside=True)
        after = dict(zip(later, inside, strict=True))
        found = []
        for words in sentences:
            each = [begin[words[0]], *(after[word] for word in words[1:])]
            marked = [piece for ids in each for piece in _marked(ids or self._wordless)]
            self.count(len(marked) - self.room(1))
            found.append([*self.opening, *marked[: self.room(1)], *self.closing])
        return found


def _marked(ids: list[int]) -> list[int]:
    return [~ids[0], *ids[1:]]
