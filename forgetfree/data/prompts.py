"""Prompts and the texts that answer them: from words to token ids, with the positions that are learned marked.

A row is what stands before the answer (instruction, template, prompt), and then the answer. Its last token before the answer
and every token of the answer are marked, ``~id``: at each of them the next token is learned, at the last one that which ends a
text. So a row has as many labels as the answer has tokens, and one more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from forgetfree.data.encoding import Encoder, token_ids
from forgetfree.data.examples import EncodedRows
from forgetfree.data.rows import Rows
from forgetfree.display import brief, counted
from forgetfree.errors import DataError, ModelError
from forgetfree.json_file import parse_json
from forgetfree.tasks import MAX_LENGTH, TaskDefinition

#: What stands before an answer where neither the task has a template nor the tokenizer one for chats.
PLAIN_TEMPLATE = "{instruction}\n\n{prompt}\n\n"
#: What puts a chat together where the tokenizer has no template for it, and what refuses a chat for a prompt, in Jinja.
PLAIN_CHAT = (
    "{% for turn in messages %}{{ turn['role'] + ': ' + turn['content'] + '\\n' }}{% endfor %}{{ 'assistant:' }}"
)
ONE_PROMPT = (
    "{% if messages | length != 1 %}"
    "{{ raise_exception('This model reads single prompts: give one message, of the user.') }}{% endif %}"
)
#: What `strftime_now` tells chat templates of the date: of 26 July 2024 on every day, as Llama 3's does where it knows no date.
#: Else a row would have other tokens tomorrow than in training.
_DATE = {
    **{"%d": "26", "%-d": "26", "%e": "26", "%m": "07", "%-m": "7", "%y": "24", "%Y": "2024", "%j": "208"},
    **{"%a": "Fri", "%A": "Friday", "%b": "Jul", "%B": "July", "%F": "2024-07-26", "%D": "07/26/24", "%x": "07/26/24"},
    **{"%H": "00", "%I": "12", "%M": "00", "%S": "00", "%p": "AM", "%T": "00:00:00", "%X": "00:00:00"},
}
#: Stands for the text of a turn while a chat is put together, with white space at its ends, which templates may trim.
_TURN = "\u2003<<turn {}>>\u2003"
_TURNS = re.compile("( ?)(\u2003?)<<turn \\d+>>(\u2003?)")
#: Whose turns lose no text.
_FIXED = ("system", "developer")
#: How many rows that do not fit are named.
_NAMED = 5


@dataclass(frozen=True, eq=False, repr=False)
class EncodedTexts(EncodedRows):
    """Rows whose answers are texts.

    Attributes:
        right: of each row the texts that are right; the first is learned.
        asked: what each row asks, as a report shows it.
        tokenizer: turns token ids into texts.
        end: the token id that ends a text.
        allowed: the ids of each answer that the task allows; none where any text may answer.
        longer: the token ids of prompts that are cut further where their answer is learned, by the number of the row.
    """

    right: Sequence[Sequence[str]] = ()
    asked: Sequence[str] = ()
    tokenizer: Any = None
    end: int = 0
    allowed: Sequence[Sequence[int]] = ()
    longer: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def targets(self) -> list[int]:
        """0 for each row: all are of one group."""
        return [0] * len(self)

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids that each row is asked with: they do not depend on the right answer."""
        return [list(self.longer.get(i) or prompt_of(self[i][0]).tolist()) for i in range(len(self))]

    def subset(self, indices: Sequence[int]) -> EncodedTexts:
        """Return the rows at ``indices``, in that order."""
        rows = super().subset(indices)
        fields = {name: getattr(rows, name) for name in ("tokens", "offsets", "labels", "words")}
        longer = {new: self.longer[i] for new, i in enumerate(indices) if i in self.longer}
        asked = [self.asked[i] for i in indices] if self.asked else ()
        return replace(self, **fields, right=[self.right[i] for i in indices], asked=asked, longer=longer)


def prompt_of(x: Tensor) -> Tensor:
    """Return the ids ``(n,)`` of a row up to the first that is marked; of a row without marks, all."""
    marks = (x < 0).nonzero()
    x = x if not len(marks) else x[: int(marks[0]) + 1]
    return torch.where(x < 0, ~x, x)


@dataclass(frozen=True)
class Place:
    """Where the text of a turn stands: the space before it, and which of its ends lose their white space."""

    space: str
    strips_left: bool
    strips_right: bool

    def of(self, text: str) -> str:
        """Return a text as it stands here."""
        text = text.lstrip() if self.strips_left else text
        return self.space + (text.rstrip() if self.strips_right else text)

    @property
    def trimming(self) -> str:
        """What Python, or a template, calls on a text to that end."""
        return ".lstrip()" * self.strips_left + ".rstrip()" * self.strips_right


def _in_places(whole: str) -> tuple[list[str], list[Place]]:
    """Return what stands around the texts of the turns that were put together, and their places."""
    pieces = _TURNS.split(whole)
    places = zip(pieces[1::4], pieces[2::4], pieces[3::4], strict=True)
    return pieces[::4], [Place(space, not left, not right) for space, left, right in places]


def _literal(text: str) -> str:
    """Return a text as Jinja writes it."""
    return json.dumps(text, ensure_ascii=False)


def _shown(text: str) -> str:
    """Return what Jinja shows as this text."""
    return f"{{{{ {_literal(text)} }}}}" if text else ""


class PromptEncoder(Encoder):
    """Converts prompts, and the texts that answer them, to token ids, within ``max_length`` tokens.

    Prompts that are too long lose their beginning; the instruction and the template never lose a token.

    Args:
        tokenizer: a Hugging Face tokenizer.
        task: whose instruction, template and longest answer count.
        max_length: the longest row in tokens, with its answer.
        closed: whether the tokenizer's closing tokens stand between prompt and answer, as an encoder-decoder has them.

    Raises:
        ModelError: the tokenizer has no token that ends a text, or nothing is left for a prompt.
    """

    def __init__(
        self, tokenizer: Any, task: TaskDefinition, max_length: int = MAX_LENGTH, *, closed: bool = False
    ) -> None:
        self.apart = closed
        self._task, self._chat = task, bool(getattr(tokenizer, "chat_template", None)) and not task.template
        super().__init__(tokenizer, None, max_length, closed=closed)
        if self._chat:  # what a chat template puts at its beginning it says itself
            self.opening = []
        one = [{"role": "user", "content": ""}]
        #: The token that ends an answer.
        self.end = self._end(one)
        #: How long the texts are that are learned and longer than any that is written, in tokens.
        self._unwritable: list[int] = []
        #: What stands between prompt and answer, as a part of the latter.
        self._space = "" if self._chat or self._around(one).endswith(("\n", "\t")) else " "
        self._usual = self._parts_of(one)
        #: The ids of the answers that the task allows, and for how many an answer has room.
        self.allowed = self._answers(Rows((), (), tuple((text,) for text in task.closed_answers)))
        self._most = max(map(len, self.allowed), default=task.max_new_tokens)
        if len({*map(tuple, self.allowed)}) < len(self.allowed):
            raise ModelError(
                f"The tokenizer makes the same tokens of two closed_answers of task {task.name!r}, got "
                f"{brief(task.closed_answers, 200)}. Write them in words that it knows."
            )
        fixed = max_length - sum(map(len, self._usual[0]))
        if fixed < (2 if not self.allowed else 1 + self._most):
            raise ModelError(
                f"The instruction and the template of task {task.name!r} take {max_length - fixed} tokens, and a row has "
                f"max_length={max_length}: nothing is left for a prompt and its answer. Set a higher max_length, if the model "
                "allows it, or shorten the instruction in source.json."
            )

    def __call__(self, rows: Rows) -> list[list[int]]:
        """Return the token ids of every row, marked where its answer is learned."""
        return self.learned(rows)[0]

    def learned(self, rows: Rows) -> tuple[list[list[int]], list[list[int]], dict[int, list[int]]]:
        """Return the token ids of every row, the ids that are learned at its marks, and prompts that lose less unanswered.

        Raises:
            DataError: an answer does not fit; the message has the rows.
        """
        answers = self._answers(rows)
        whole, labels, longer, long = list[list[int]](), list[list[int]](), dict[int, list[int]](), list[int]()
        for i, (prompt, answer) in enumerate(zip(rows.first, answers, strict=True)):
            parts, texts, fixed, room = self._divided(prompt)
            kept = self._most if self.allowed else min(self._most, room // 2)
            if max(len(answer), kept) > room:
                long.append(i)
                continue
            left = room - max(len(answer), kept)
            if len(answer) > self._most:
                self._unwritable.append(len(answer))
            ids = self._before(parts, texts, fixed, left)
            self.count(sum(map(len, [*parts, *texts])) - len(ids))
            if len(answer) > kept:  # how long it is, what is asked must not tell
                longer[i] = self._before(parts, texts, fixed, room - kept)
            whole.append([*ids[:-1], *(~token for token in (ids[-1], *answer))])
            labels.append([*answer, self.end])
        if long:
            self._refuse(rows.take(long), [len(answers[i]) for i in long])
        return whole, labels, longer

    def too_long(self, rows: Rows) -> list[int]:
        """Return the numbers of the rows whose answer does not fit."""
        answers = zip(rows.first, self._answers(rows), strict=True)
        least = self._most if self.allowed else 0
        return [i for i, (prompt, answer) in enumerate(answers) if max(len(answer), least) > self._divided(prompt)[-1]]

    def _divided(self, prompt: str) -> tuple[list[list[int]], list[list[int]], list[int], int]:
        """Return a prompt in parts, and how many tokens its answer may have.

        The parts are the ids around the texts of its turns, these texts, and the numbers of those that are never cut. The
        others share the tokens with the answer.
        """
        turns = self._turns(prompt)
        parts, places = self._parts_of(turns) if self._task.form == "messages" else self._usual
        written = [place.of(turn["content"]) for place, turn in zip(places, turns, strict=True)]
        texts = self._texts(written, begin=not parts[0][len(self.opening) :])
        fixed = [i for i, turn in enumerate(turns) if turn["role"] in _FIXED and len(turns) > 1]
        return parts, texts, fixed, self._max_length - sum(map(len, [*parts, *(texts[i] for i in fixed)]))

    @property
    def frame(self) -> str:
        """What stands around a prompt, with ``{prompt}`` in its place; empty for chats."""
        if self._task.form == "messages":
            return ""
        (before, after), (place,) = _in_places(self._around([{"role": "user", "content": ""}]))
        return f"{before}{place.space}{{prompt}}{after}"

    @property
    def around(self) -> tuple[list[int], Place, list[int]]:
        """The ids before the text of a prompt, its place, and the ids after it."""
        (before, after), (place,) = self._usual
        return before, place, after

    @property
    def chat_template(self) -> str:
        """The Jinja template by which transformers puts a prompt, or a chat, together as this encoder does.

        A prompt is a chat of one turn. The tokens at a row's beginning stand in it, but for a decoder apart: there the
        tokenizer adds those around the whole.
        """
        opening = [] if self.apart else self.tokenizer.convert_ids_to_tokens(self.opening)
        if self._task.form == "messages":
            system = f"[{{'role': 'system', 'content': {_literal(self._task.instruction)}}}] + messages"
            first = f"{{% set messages = messages if messages[0]['role'] == 'system' else {system} %}}"
            whole = self._own_template() if self._chat else _shown("".join(opening)) + PLAIN_CHAT
            return f"{first}{whole}" if self._task.instruction else str(whole)
        (before, after), (place,) = _in_places(self._around([{"role": "user", "content": ""}]))
        if self._space:
            after = after.removesuffix(" ")
        before = "".join([*opening, before, place.space])
        return f"{ONE_PROMPT}{_shown(before)}{{{{ messages[0]['content']{place.trimming} }}}}{_shown(after)}"

    def _own_template(self) -> str:
        """Return the tokenizer's chat template, which is told the same date every day."""
        template = str(self.tokenizer.get_chat_template())
        if "strftime_now" not in template:
            return template
        date = "".join(f" | replace({_literal(each)}, {_literal(value)})" for each, value in _DATE.items())
        return f"{{% macro strftime_now(format) %}}{{{{ format{date} }}}}{{% endmacro %}}\n{template}"

    def cut_note(self, what: str, count: int) -> str:
        """Return what to say of rows that were cut, and of right texts that are longer than those that are written."""
        notes = [super().cut_note(what, count)]
        if self._unwritable:
            longer, most = len(self._unwritable), self._task.max_new_tokens
            notes.append(
                f"The right text of {longer:,} of {counted(count, what)} is longer than max_new_tokens={most}, up to "
                f"{max(self._unwritable):,} tokens, and no text that is written reaches its end. Set "
                "max_new_tokens in source.json."
            )
        return " ".join(filter(None, notes))

    def _end(self, turns: Sequence[dict[str, str]]) -> int:
        """Return the token that ends a text: that of the assistant's turn in a chat, if it has one, or the tokenizer's."""
        if self._chat:
            whole = self._put_together([*turns, {"role": "assistant", "content": _TURN.format(0)}], answered=True)
            after = self._ids(_in_places(whole)[0][-1])
            if after and after[0] in {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}:
                return after[0]
        if self.tokenizer.eos_token_id is None:
            raise ModelError(
                "The tokenizer has no token that ends a text (eos_token), so no answer would ever end. Give it one, and save "
                "it again."
            )
        return int(self.tokenizer.eos_token_id)

    def _put_together(self, turns: Sequence[dict[str, str]], *, answered: bool = False) -> str:
        """Return a chat by the tokenizer's template; unless it is answered, up to where the assistant begins."""
        try:
            arguments = {"chat_template": self._own_template(), "add_generation_prompt": not answered}
            whole = self.tokenizer.apply_chat_template(list(turns), tokenize=False, **arguments)
        except Exception as error:  # the template may raise anything, and is the tokenizer's own
            raise ModelError(
                f"The tokenizer's chat template cannot put together a chat of {brief([t['role'] for t in turns], 200)}: "
                f"{brief(str(error), 200)}. Give turns that it knows."
            ) from error
        return str(whole)

    def _answers(self, rows: Rows) -> list[list[int]]:
        """Return the ids of the text that is learned of each row; none where there is none."""
        space = "" if self.apart else self._space  # a decoder apart begins a text with it
        texts = [f"{space}{right[0]}" if right else "" for right in rows.labels]
        return token_ids(self.tokenizer, texts, inside=not self.apart)

    def _texts(self, turns: Sequence[str], *, begin: bool) -> list[list[int]]:
        """Return the ids of the texts of turns, of which the first may begin its row."""
        first = token_ids(self.tokenizer, turns[:1], inside=not begin)
        return [*first, *token_ids(self.tokenizer, turns[1:], inside=True)]

    def _turns(self, prompt: str) -> list[dict[str, str]]:
        """Return a row as the turns of a chat."""
        if self._task.form == "messages":
            turns: list[dict[str, str]] = parse_json(prompt)
            if self._task.instruction and turns[0]["role"] != "system":
                turns.insert(0, {"role": "system", "content": self._task.instruction})
            return turns
        return [{"role": "user", "content": prompt}]

    def _parts_of(self, turns: Sequence[dict[str, str]]) -> tuple[list[list[int]], list[Place]]:
        """Return the ids of what stands around the texts of the turns, and the place of each text.

        A space belongs to the word after it, as tokenizers see it: before a text, and before the answer.
        """
        pieces, places = _in_places(self._around(turns))
        if self._space:
            pieces[-1] = pieces[-1].removesuffix(" ")
        parts = [self._ids(piece) for piece in pieces]
        places = [
            replace(place, space=place.space or " " * self._loses_its_end(piece))
            for piece, place in zip(pieces[:-1], places, strict=True)
        ]
        return [[*self.opening, *parts[0]], *parts[1:-1], [*parts[-1], *self.closing]], places

    def _loses_its_end(self, piece: str) -> bool:
        """Return whether the tokenizer drops the white space at the end of a piece, as T5's does before the next word."""
        return piece[-1:].isspace() and self._ids(piece) == self._ids(piece.rstrip())

    def _around(self, turns: Sequence[dict[str, str]]) -> str:
        """Return all turns put together, with a mark for the text of each."""
        marked = [{**turn, "content": _TURN.format(i)} for i, turn in enumerate(turns)]
        instruction = self._task.instruction if self._task.form != "messages" else ""
        if self._chat:
            if instruction:
                marked[0]["content"] = f"{instruction}\n\n{marked[0]['content']}"
            whole = self._put_together(marked)
            if len(_TURNS.findall(whole)) != len(turns):
                raise ModelError(
                    "The tokenizer's chat template leaves turns out or repeats them, so no answer can be learned by it. Give "
                    "another, or a template in source.json."
                )
            return whole
        if self._task.form == "messages":
            return "".join(f"{turn['role']}: {turn['content']}\n" for turn in marked) + "assistant: "
        template = self._task.template or (PLAIN_TEMPLATE if instruction else "{prompt}\n\n")
        before, after = template.split("{prompt}")
        return (
            before.replace("{instruction}", instruction)
            + marked[0]["content"]
            + after.replace("{instruction}", instruction)
        )

    def _ids(self, piece: str) -> list[int]:
        """Return the ids of a piece of the template, in which special tokens are meant as such."""
        ids: list[int] = self.tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"] if piece else []
        return ids

    def _before(
        self, parts: list[list[int]], turns: Sequence[Sequence[int]], fixed: Sequence[int], room: int
    ) -> list[int]:
        """Return the ids before an answer; where there is no room, the oldest turns lose their texts from the beginning.

        Args:
            parts: the ids around the texts of turns.
            turns: the ids of these texts.
            fixed: the numbers of those that lose nothing.
            room: tokens for the others.
        """
        texts = [list(turn) for turn in turns]
        over = sum(len(text) for i, text in enumerate(texts) if i not in fixed) - room
        for i, text in enumerate(texts):
            if i not in fixed and over > 0:
                cut = min(over, len(text))
                texts[i], over = text[cut:], over - cut
        ids = [token for part, text in zip(parts, [*texts, []], strict=True) for token in (*part, *text)]
        return ids or [self.blank]

    def _refuse(self, rows: Rows, counts: Sequence[int]) -> None:
        """Raise ``DataError`` for rows whose answers, of so many tokens, do not fit."""
        where = [f" ({file}, row {number})" for file, number in rows.places] or [""] * len(rows)
        known = zip(rows.first[:_NAMED], where, counts, strict=False)
        named = ", ".join(f"to {brief(prompt)}{place} has {count:,} tokens" for prompt, place, count in known)
        more = f", and {len(rows) - _NAMED:,} more" if len(rows) > _NAMED else ""
        raise DataError(
            f"Task {self._task.name!r} has {counted(len(rows), 'row')} whose answer does not fit into max_length="
            f"{self._max_length} tokens beside the instruction, the template and the marks of turns: the answer {named}{more}. "
            "Set a higher max_length, if the model allows it, or remove the rows: --skip-bad-rows leaves them out."
        )
