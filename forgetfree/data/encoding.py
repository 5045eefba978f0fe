"""Encoding of texts as token ids: once, before training."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from forgetfree.data.bad_rows import BadRow, BadRows, DataFaults, left_out_note
from forgetfree.data.rows import Rows, TaskRows
from forgetfree.display import counted
from forgetfree.errors import ModelError
from forgetfree.tasks import MAX_LENGTH, SPLITS

_SLOT = re.compile(r"(\s*)\{(text|text_a|text_b|mask)(?::(bare|lower))?\}")


@dataclass(frozen=True)
class _Slot:
    """A place in a row: ``text``, ``text_a``, ``text_b`` or ``mask``, with its style and the space before it."""

    name: str
    prefix: str
    style: str | None
    inside: bool

    def column_of(self, rows: Rows) -> Sequence[str]:
        """Return the texts for this place."""
        return rows.second if self.name == "text_b" else rows.first

    def of(self, text: str) -> str:
        """Return the text as it is written at this place."""
        if self.style == "whole":
            return self.prefix + text
        text = text.strip()
        if self.style == "bare" and text and text[-1] in string.punctuation:
            text = text[:-1]
        if self.style == "lower":
            text = text[:1].lower() + text[1:]
        return self.prefix + text if text else ""


def _pieces_of(template: str) -> list[str | _Slot]:
    """Return the literal texts and the slots of a prompt, in order."""
    pieces: list[str | _Slot] = []
    end = 0
    for match in _SLOT.finditer(template):
        space, name, style = match.groups()
        # A space belongs to the word after it, as byte-level tokenizers see it.
        slot = _Slot(name, " " if space else "", style, match.start() > 0)
        pieces += [template[end : match.start()], slot]
        end = match.end()
    return [piece for piece in (*pieces, template[end:]) if piece]


class Encoder:
    """Converts rows to token ids by a template, within ``max_length`` tokens.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: ``None`` encodes as in pre-training: the text, or the pair with separators.
            Otherwise a prompt, see `forgetfree.tasks.TaskDefinition`.
        max_length: the longest row in tokens. The longest text is truncated first; the prompt never is.
        closed: whether a row ends with the tokenizer's closing tokens.

    Raises:
        ModelError: the tokenizer has no mask token for a template that needs one, or the template is longer
            than ``max_length``.
    """

    def __init__(
        self, tokenizer: Any, template: str | None, max_length: int = MAX_LENGTH, *, closed: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        probe = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("a"))
        whole = tokenizer("a")["input_ids"]
        start = next((i for i in range(len(whole)) if whole[i : i + len(probe)] == probe), 0)
        self.opening, self.closing = whole[:start], whole[start + len(probe) :]
        pair = tokenizer("a", "a")["input_ids"]
        self.middle = pair[start + len(probe) : len(pair) - len(probe) - len(self.closing)]
        if not closed:
            self.closing = []
        self.blank = next(i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id, 0) if i is not None)
        #: The ids of the prompt's literal texts, and its slots; ``None`` without a prompt.
        self._prompt = None
        if template is not None:
            self._prompt = [self._part(piece, inside=i > 0) for i, piece in enumerate(_pieces_of(template))]
        self._max_length = max_length
        #: The number of tokens cut off each row, for all rows so far.
        self.cut: list[int] = []
        if self.room(2) < 2:
            raise ModelError(
                f"No tokens are left for the text: the prompt {template!r} fills all {max_length} tokens. Set a "
                "higher max_length, if the model allows it, or shorten the prompt."
            )

    def __call__(self, rows: Rows) -> list[list[int]]:
        """Return the token ids of every row."""
        parts = self._parts(2 if rows.second else 1)
        columns = [
            token_ids(self.tokenizer, [slot.of(text) for text in slot.column_of(rows)], inside=slot.inside)
            for slot in parts
            if isinstance(slot, _Slot)
        ]
        encoded = []
        for i in range(len(rows)):
            texts = [column[i] for column in columns]
            room = self.room(len(texts))
            self.count(sum(map(len, texts)) - room)
            left = iter(truncate(texts, room))
            body = [token for part in parts for token in (next(left) if isinstance(part, _Slot) else part)]
            # Without special tokens (GPT-2), an empty text still needs a token, at which the model is read.
            encoded.append([*self.opening, *body, *self.closing] or [self.blank])
        return encoded

    def _parts(self, texts: int) -> list[list[int] | _Slot]:
        """Return the ids and the slots of a row with one text or two."""
        if self._prompt is not None:
            return self._prompt
        if texts == 1:
            return [_Slot("text", "", "whole", False)]
        # Without separator tokens (GPT-2), a space keeps the two texts' words apart.
        second = _Slot("text_b", "" if self.middle else " ", "whole", not self.middle)
        return [_Slot("text_a", "", "whole", False), self.middle, second]

    def count(self, over: int) -> None:
        """Record a row with ``over`` tokens too many, which are cut off; if ``over`` is negative, none are."""
        self.cut.append(max(over, 0))

    def cut_note(self, what: str, count: int) -> str:
        """Return a note on rows that were cut; empty if there are none."""
        rows, tokens = sum(map(bool, self.cut)), sum(self.cut)
        if not rows:
            return ""
        are = f"{rows:,} of {counted(count, what)} {'is' if rows == 1 else 'are'}"
        return (
            f"{are} longer than max_length={self._max_length} allows: {counted(tokens, 'token')} of "
            f"{'it' if rows == 1 else 'them'} {'is' if tokens == 1 else 'are'} cut off."
        )

    def room(self, texts: int) -> int:
        """Return the number of tokens left for one text or two."""
        fixed = sum(len(part) for part in self._parts(texts) if not isinstance(part, _Slot))
        return self._max_length - len(self.opening) - len(self.closing) - fixed

    def bad_rows(self, rows: Rows) -> dict[int, BadRow]:
        """Return the faults of the rows that this model cannot learn from, by their numbers: by default none."""
        return {}

    def _part(self, piece: str | _Slot, *, inside: bool) -> list[int] | _Slot:
        if isinstance(piece, str):
            return token_ids(self.tokenizer, [piece], inside=inside)[0]
        if piece.name != "mask":
            return piece
        if self.tokenizer.mask_token_id is None:
            raise ModelError(
                "The prompt readout needs a mask token, which this model's tokenizer does not have. Use --readout "
                "causal or --readout linear."
            )
        return [self.tokenizer.mask_token_id]


class WordEncoder(Encoder):
    """Converts sentences to token ids, where the first token of each word is marked as its complement ``~id``.

    A word without a token, such as one of invisible characters, is read at the token for unknown words. Tokens beyond
    ``max_length`` are cut off. A word is kept if its first token is.
    """

    def __init__(self, tokenizer: Any, max_length: int = MAX_LENGTH) -> None:
        super().__init__(tokenizer, None, max_length)
        unknown = tokenizer.unk_token_id
        self._wordless = [self.blank if unknown is None else unknown]

    def __call__(self, rows: Rows) -> list[list[int]]:
        """Return the token ids of every sentence."""
        sentences = [text.split(" ") for text in rows.first]
        # Words are encoded as in a text: a space belongs to the word after it, as byte-level tokenizers see it.
        first = list({words[0] for words in sentences})
        later = list({word for words in sentences for word in words[1:]})
        begin = dict(zip(first, token_ids(self.tokenizer, first), strict=True))
        inside = token_ids(self.tokenizer, [f" {word}" for word in later], inside=True)
        after = dict(zip(later, inside, strict=True))
        encoded = []
        for words in sentences:
            each = [begin[words[0]], *(after[word] for word in words[1:])]
            marked = [piece for ids in (ids or self._wordless for ids in each) for piece in (~ids[0], *ids[1:])]
            self.count(len(marked) - self.room(1))
            encoded.append([*self.opening, *marked[: self.room(1)], *self.closing])
        return encoded


def drop_bad_rows(rows: TaskRows, encoder: Encoder, skip_bad_rows: bool) -> TaskRows:
    """Return a task without the rows that its model cannot learn from.

    Raises:
        BadDataError: there are such rows and ``skip_bad_rows`` is not set, or a split has no others.
    """
    splits, bad, good = dict[str, Rows](), dict[str, BadRows](), Counter[str]()
    of_files = dict[str, BadRows]()  # several splits may come from one file
    for split in SPLITS:
        part: Rows = getattr(rows, split)
        found = encoder.bad_rows(part)
        left = [i for i in range(len(part)) if i not in found]
        good.update(part.places[i][0] if part.places else "" for i in left)
        if found:
            bad[split], splits[split] = BadRows(found.values()), part.take(left)
        for fault in found.values():
            of_files.setdefault(fault.file, BadRows()).add(fault)
    if not bad:
        return rows
    if not skip_bad_rows or not all(map(len, splits.values())):
        faults = DataFaults()
        for file, each in of_files.items():
            faults.add_rows(each, good[file])
        faults.report()
    counts = {split: each.summary(rows.left_out.get(split, {})) for split, each in bad.items()}
    note = f"Task {rows.task.name!r}: {left_out_note(bad.items())}."
    return replace(rows, **cast(Any, splits), notes=(*rows.notes, note), left_out={**rows.left_out, **counts})


#: The text put before a text that does not begin its row.
_LEAD = "a"


def token_ids(tokenizer: Any, texts: Sequence[str], *, inside: bool = False, special: bool = False) -> list[list[int]]:
    """Return the ids of texts, without added special tokens.

    Args:
        tokenizer: a Hugging Face tokenizer.
        texts: the texts.
        inside: whether the texts follow other text in a row. Some tokenizers (SentencePiece's) put a space, "▁", before each
            text, which the row does not have there.
        special: whether a text that spells a special token ("[SEP]") becomes that token, as in a template. A user's text must
            not: the model recognises the parts of a row by their ids alone.
    """
    settings = {"add_special_tokens": False, "verbose": False} | ({} if special else {"split_special_tokens": True})
    if not texts or not inside:
        return [list(ids) for ids in tokenizer(list(texts), **settings)["input_ids"]] if texts else []
    lead, *whole = tokenizer([_LEAD, *(_LEAD + text for text in texts)], **settings)["input_ids"]
    return [
        ids[len(lead) :] if ids[: len(lead)] == lead else token_ids(tokenizer, [text], special=special)[0]
        for ids, text in zip(whole, texts, strict=True)
    ]


def truncate(texts: list[list[int]], room: int) -> list[list[int]]:
    """Shorten one or two token lists to ``room`` tokens in all, always taking from the longest.

    If both are cut, they become equally long; an odd token stays with the longer, or else with the second.
    Hugging Face's fast tokenizers do the same with ``truncation="longest_first"``.
    """
    if len(texts) == 1:
        return [texts[0][:room]]
    first, second = texts
    short = min(len(first), len(second), room // 2)
    long = room - short
    return [first[:long], second[:short]] if len(first) > len(second) else [first[:short], second[:long]]


def label_word_ids(tokenizer: Any, words: Sequence[str], task: str) -> list[int]:
    """Return the vocabulary ids of the label words, each encoded as it is after a space."""
    check_label_words(tokenizer, {task: words})
    return [ids[0] for ids in _after_space(tokenizer, words)]


def check_label_words(tokenizer: Any, tasks: Mapping[str, Sequence[str]]) -> None:
    """Raise ``ModelError`` unless all label words of these tasks are single tokens, all different within a task."""
    wrong = {task: words_without_token(tokenizer, words) for task, words in tasks.items()}
    if told := [f"{', '.join(map(repr, words))} of task {task!r}" for task, words in wrong.items() if words]:
        raise ModelError(
            "A label word must be a single token of the model's vocabulary, different for each label, but these are "
            f"not: {'; '.join(told)}. Set label_words in the task's source.json, or use --readout linear."
        )


def words_without_token(tokenizer: Any, words: Sequence[str]) -> list[str]:
    """Return the label words that are not a single token, and the words with the same token as an earlier word."""
    by_token = dict[int, str]()
    for word, ids in zip(words, _after_space(tokenizer, words), strict=True):
        if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
            by_token.setdefault(ids[0], word)
    return [word for word in words if word not in by_token.values()]


def _after_space(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    return token_ids(tokenizer, [f" {word}" for word in words], inside=True)
