"""Texts that a task in use is asked about, as rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from forgetfree.data.rows import Rows
from forgetfree.display import brief, is_text
from forgetfree.errors import UsageError

#: A text, or the two of a pair; a tuple of one is a text, too. A list is the words of a sentence, or the turns of a chat.
Text = str | tuple[str, ...] | list[Any]


def check_texts(texts: Sequence[object], *, chats: bool = False) -> None:
    """Raise ``UsageError`` for what is no text, and for one text in place of a list, whose letters would be answered each.

    Args:
        texts: strings, or several in a row: a tuple, a list, a row of NumPy.
        chats: whether the turns of a chat are a text, too.
    """
    if isinstance(texts, str):
        raise UsageError(f"Expected a list of texts, got the text {brief(texts)}. Give [{brief(texts)}].")
    for number, text in enumerate(texts, 1):
        parts: Iterable[object] = [text]
        if isinstance(text, Collection) and not isinstance(text, str | bytes | Mapping):
            parts = text if len(text) else [text]
        if wrong := [part for part in parts if not isinstance(part, str | list | Mapping if chats else str)]:
            raise UsageError(f"Text {number}: expected a text, got {brief(wrong[0])}. Give one, or leave it out.")


def text_rows(texts: Sequence[Text], size: int, reader: str) -> Rows:
    """Return texts as rows, all with label 0.

    Args:
        texts: a tuple for each row; a text alone is a tuple of one.
        size: how many texts a row has.
        reader: what reads them, for messages.

    Raises:
        UsageError: one is no text, or they are more or fewer.
    """
    check_texts(texts)
    rows = [(text,) if isinstance(text, str) else text for text in texts]
    for number, row in enumerate(rows, 1):
        if halves := [text for text in row if not is_text(text)]:
            raise UsageError(
                f"Text {number}, {brief(halves[0])}, holds half of a surrogate pair, which is no character: it was perhaps "
                "not written in UTF-8. Write it in UTF-8."
            )
        if len(row) != size:
            remedy = (
                "Give one."
                if size == 1
                else "Give the two as two arguments or with a tab between, or as a list of two."
            )
            raise UsageError(
                f"{reader} reads {'one text' if size == 1 else 'pairs of texts'}, got {len(row)} text(s) in "
                f"{row[0][:40]!r}. {remedy}"
            )
    columns = [tuple(column) for column in zip(*rows, strict=True)] or [()]
    return Rows(columns[0], columns[1] if size == 2 and rows else (), (0,) * len(rows))
