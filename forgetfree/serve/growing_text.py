"""A text that is sent while it is written: only what no later token can change."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from forgetfree.errors import ModelError

#: A token for one byte; whether several are letters depends on all that stand side by side.
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class GrowingText:
    """Sends a text piece by piece, to the character that of `forgetfree.kinds.generation.text_of`.

    What may still change is held back: bytes that are no whole letter yet, white space at the end, what may become a text that
    ends the answer, and the last word where the tokenizer moves punctuation when it cleans up.

    Args:
        tokenizer: turns token ids into texts.
        stop: texts before which the answer ends.
        send: takes a piece.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], send: Callable[[str], object]) -> None:
        self._tokenizer, self._stop, self._send = tokenizer, stop, send
        self._special = {*tokenizer.all_special_ids}  # a text is without them
        self._sent = ""

    def hear(self, ids: Sequence[int]) -> None:
        """Send what is new and settled in the text of token ids so far."""
        settled = self._settled(list(ids))
        if len(settled) > len(self._sent) and settled.startswith(self._sent):
            self._send(settled[len(self._sent) :])
            self._sent = settled

    def end(self, text: str) -> None:
        """Send the rest of a text.

        Raises:
            ModelError: it is not what was sent, because the tokenizer reads earlier tokens in another way after later ones.
        """
        if not text.startswith(self._sent):
            raise ModelError(
                "The tokenizer changed the beginning of the text after it was sent. Ask again without stream: then the text is "
                "sent whole."
            )
        if rest := text[len(self._sent) :]:
            self._send(rest)

    def _settled(self, ids: list[int]) -> str:
        while ids and (
            ids[-1] in self._special or _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(ids[-1])))
        ):
            ids.pop()
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")
        if getattr(self._tokenizer, "clean_up_tokenization_spaces", False):
            text = re.sub(r"\s*\S*\s*$", "", text)
        if any(end in text for end in self._stop):  # the text is at its end, see `end`
            return self._sent
        return text[: len(text) - max((_begun(text, end) for end in self._stop), default=0)].strip()


def _begun(text: str, end: str) -> int:
    """Return how many characters at the end of a text are the beginning of another.

    >>> _begun("a b##", "###"), _begun("a b", "###")
    (2, 0)
    """
    return next((size for size in range(min(len(text), len(end)), 0, -1) if text.endswith(end[:size])), 0)
