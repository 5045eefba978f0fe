"""Prompts and their answers as token ids, where the learned positions are marked.

A row is the part before the answer (instruction, template, prompt), and then the answer. The last token before the answer and
every token of the answer are marked, ``~id``: at each of them the next token is learned, at the last one the token that ends a
text. So a row has one label more than its answer has tokens.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from forgetfree.data.bad_rows import BadRow, BadRows, DataFaults, RowError
from forgetfree.data.chats import PLAIN_CHAT, Chat, ChatTemplate, Turn, answer_turn, without_marks
from forgetfree.data.encoding import Encoder, token_ids
from forgetfree.data.examples import EncodedRows
from forgetfree.data.rows import Rows
from forgetfree.display import brief, counted
from forgetfree.errors import DataError, ModelError
from forgetfree.tasks import MAX_LENGTH, TaskDefinition

#: The template for tasks without a template, where the tokenizer has no chat template.
PLAIN_TEMPLATE = "{instruction}\n\n{prompt}\n\n"
#: Jinja code that refuses a chat in place of a prompt.
ONE_PROMPT = (
    "{% if messages | length != 1 %}"
    "{{ raise_exception('This model reads single prompts: give one message, of the user.') }}{% endif %}"
)
#: The roles whose turns are not cut.
_FIXED = ("system", "developer")


@dataclass(frozen=True, eq=False, repr=False)
class EncodedTexts(EncodedRows):
    """Rows whose answers are texts.

    Attributes:
        right: the right texts of each row; the first is learned.
        asked: an excerpt of each row's prompt, for reports.
        tokenizer: the tokenizer that decodes the texts.
        end: the token id that ends a text.
        allowed: the ids of each answer that the task allows; none if any text is allowed.
        longer: by row number, the token ids of prompts that are cut further in training, to make room for the answer.
    """

    right: Sequence[Sequence[str]] = ()
    asked: Sequence[str] = ()
    tokenizer: Any = None
    end: int = 0
    allowed: Sequence[Sequence[int]] = ()
    longer: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def targets(self) -> list[int]:
        """0 for each row: all rows are in one group."""
        return [0] * len(self)

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each row's prompt, which do not depend on the right answer."""
        return [list(self.longer.get(i) or prompt_of(self[i][0]).tolist()) for i in range(len(self))]

    def subset(self, indices: Sequence[int]) -> EncodedTexts:
        """Return the rows at ``indices``, in that order."""
        rows = super().subset(indices)
        fields = {name: getattr(rows, name) for name in ("tokens", "offsets", "labels", "words")}
        longer = {new: self.longer[i] for new, i in enumerate(indices) if i in self.longer}
        asked = [self.asked[i] for i in indices] if self.asked else ()
        return replace(self, **fields, right=[self.right[i] for i in indices], asked=asked, longer=longer)


def prompt_of(x: Tensor) -> Tensor:
    """Return the ids ``(n,)`` of a row up to its first marked one; all ids of a row without marks."""
    marks = (x < 0).nonzero()
    x = x if not len(marks) else x[: int(marks[0]) + 1]
    return torch.where(x < 0, ~x, x)


def _literal(text: str) -> str:
    """Return a text as a Jinja literal."""
    return json.dumps(text, ensure_ascii=False)


def _shown(text: str) -> str:
    """Return a Jinja expression that outputs a text."""
    return f"{{{{ {_literal(text)} }}}}" if text else ""


# -- The part before an answer ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Framed:
    """A prompt in a template that shows it unchanged; without enough room, its beginning is cut off."""

    before: list[int]
    text: list[int]
    after: list[int]

    @property
    def ids(self) -> list[int]:
        return [*self.before, *self.text, *self.after]

    @property
    def least(self) -> int:
        """The number of tokens that are never cut."""
        return len(self.before) + len(self.after)

    def within(self, room: int) -> list[int]:
        """Return the ids within ``room`` tokens, where ``room`` is at least `least`."""
        over = max(0, self.least + len(self.text) - room)
        return [*self.before, *self.text[over:], *self.after]


@dataclass(frozen=True)
class _Rendered:
    """A chat, rendered by a chat template; without enough room, the beginnings of its oldest turns are cut off."""

    template: ChatTemplate
    chat: Chat  # the turns before the answer
    text: str  # the text that the template makes of the chat
    opening: list[int]
    closing: list[int]
    lead: int  # characters at the beginning of each turn that are never cut

    @cached_property
    def ids(self) -> list[int]:
        return self._ids(self.text)

    @cached_property
    def least(self) -> int:
        return len(self._with(dict.fromkeys(self._shortened, "")))

    def within(self, room: int) -> list[int]:
        if len(self.ids) <= room:
            return self.ids
        turns = self._shortened

        def is_enough(count: int) -> bool:
            return len(self._with(dict.fromkeys(turns[:count], ""))) <= room

        # The number of turns that lose their whole text; by bisection, since each step encodes the chat again.
        lost = bisect_left(range(1, len(turns)), True, key=is_enough)
        texts = dict.fromkeys(turns[:lost], "")
        ids = self._with(texts)
        for i in turns[lost:]:
            texts[i] = self.chat.turns[i]["content"][self.lead :]
            while len(ids) > room and texts[i]:
                texts[i] = self.template.without_beginning(texts[i], len(ids) - room)
                ids = self._with(texts)
        return ids

    @property
    def _shortened(self) -> list[int]:
        """The numbers of the turns that may be cut."""
        turns = self.chat.turns
        return [
            i for i, turn in enumerate(turns) if "content" in turn and (len(turns) == 1 or turn["role"] not in _FIXED)
        ]

    def _with(self, texts: Mapping[int, str]) -> list[int]:
        turns = list(self.chat.turns)
        for i, text in texts.items():
            turns[i] = {**turns[i], "content": turns[i]["content"][: self.lead] + text}
        return self._ids(self.template.put_together(Chat(turns, self.chat.tools)))

    def _ids(self, text: str) -> list[int]:
        return [*self.opening, *self.template.ids(text), *self.closing]


_Prompt = _Framed | _Rendered


@dataclass(frozen=True)
class EncodedPrompt:
    """A row as token ids.

    Attributes:
        before: the ids before the answer.
        labels: the ids of the answer, and the id that ends it.
        right: the right texts, as the model writes them.
        lost: how many tokens of the prompt are cut off.
        longer: the ids before an answer of unknown length; empty if they are the same.
    """

    before: list[int]
    labels: list[int]
    right: tuple[str, ...]
    lost: int
    longer: list[int]

    @property
    def ids(self) -> list[int]:
        """The ids of the row, marked where its answer is learned."""
        return [*self.before[:-1], *(~token for token in (self.before[-1], *self.labels[:-1]))]


class PromptEncoder(Encoder):
    """Converts prompts and their answers to token ids, within ``max_length`` tokens.

    A chat is rendered by the tokenizer's unchanged chat template, and so is a prompt unless the task has a template: the answer
    is the text that the template adds for it. Prompts that are too long lose their beginning; the instruction and the template
    never lose a token.

    Args:
        tokenizer: a Hugging Face tokenizer.
        task: the task, with its instruction, template and longest answer.
        max_length: the longest row in tokens, with its answer.
        closed: True for encoder-decoders: the tokenizer's closing tokens are between prompt and answer.

    Raises:
        ModelError: the tokenizer has no token that ends a text, or nothing is left for a prompt.
    """

    def __init__(
        self, tokenizer: Any, task: TaskDefinition, max_length: int = MAX_LENGTH, *, closed: bool = False
    ) -> None:
        self.apart = closed
        self._task = task
        self._is_own = bool(getattr(tokenizer, "chat_template", None)) and not task.template
        super().__init__(tokenizer, None, max_length, closed=closed)
        if self._is_own:  # the chat template adds its own opening tokens
            self.opening = []
        #: The chat template that renders rows; ``None`` if the task's template, or a plain one, is used.
        self._template = None
        if self._is_own or task.form == "messages":
            self._template = ChatTemplate.of(tokenizer) if self._is_own else ChatTemplate(tokenizer, PLAIN_CHAT)
        #: The text before a prompt in its turn.
        self._lead = f"{task.instruction}\n\n" if task.instruction and task.form != "messages" else ""
        #: The token that ends an answer.
        self.end = self._end()
        #: The lengths, in tokens, of learned texts that are longer than any text that is written.
        self._unwritable: list[int] = []
        if self._template is None:
            before, space, after, self._space = self._frame
            self._between = space or " " * self._loses_its_end(before)
            self._before, self._after = [*self.opening, *self._ids(before)], [*self._ids(after), *self.closing]
        elif task.form != "messages":
            self._check_template(self._template)
        #: The ids of the answers that the task allows, and the number of tokens that are kept free for an answer.
        self.allowed = self._allowed()
        self._most = max(map(len, self.allowed), default=task.max_new_tokens)
        if len({*map(tuple, self.allowed)}) < len(self.allowed):
            raise ModelError(
                f"Two closed_answers of task {task.name!r} have the same tokens, got "
                f"{brief(task.closed_answers, 200)}. Use words that the tokenizer knows."
            )
        least = self._least()
        if max_length - least < (2 if not self.allowed else 1 + self._most):
            raise ModelError(
                f"The instruction and the template of task {task.name!r} take {least} tokens, but a row has "
                f"max_length={max_length}: no tokens are left for a prompt and its answer. Set a higher max_length, "
                "if the model allows it, or shorten the instruction in source.json."
            )

    def __call__(self, rows: Rows) -> list[list[int]]:
        """Return the token ids of every row, marked where its answer is learned; errors: see `read`."""
        return [row.ids for row in self.read(rows)]

    def read(self, rows: Rows) -> list[EncodedPrompt]:
        """Return the rows as token ids, and count the cut rows for `cut_note`.

        Raises:
            DataError: an answer does not fit, or the chat template refuses a row; the message names these rows.
        """
        read, bad = self._read(rows)
        if bad and not rows.places:
            one = next(iter(bad.values()))
            raise DataError(f"Prompt {one.row}: {one.fault}. {one.remedy}".rstrip())
        faults = DataFaults()
        faults.add_rows(BadRows(bad.values()), len(read))
        faults.report()
        for row in read:
            self.count(row.lost)
            if len(row.labels) > self._most + 1:
                self._unwritable.append(len(row.labels) - 1)
        return read

    def bad_rows(self, rows: Rows) -> dict[int, BadRow]:
        """Return the faults of the rows that cannot be learned, by their numbers."""
        return self._read(rows)[1]

    # -- A row -----------------------------------------------------------------------------------------------

    def _read(self, rows: Rows) -> tuple[list[EncodedPrompt], dict[int, BadRow]]:
        """Return the good rows as token ids, and the faults of the others by their numbers."""
        asked, answers, bad = dict[int, _Prompt](), dict[int, str](), dict[int, BadRow]()
        for i, (prompt, right) in enumerate(zip(rows.first, rows.labels, strict=True)):
            try:
                asked[i] = self._read_prompt(prompt)
                answers[i] = self._answer(asked[i], right[0]) if right else ""
            except RowError as error:
                bad[i] = self._bad(rows, i, error)
        read, good = list[EncodedPrompt](), [i for i in asked if i not in bad]
        for i, ids in zip(good, self._answer_ids([answers[i] for i in good]), strict=True):
            known: tuple[str, ...] = rows.labels[i]
            if self.allowed and known:
                ids = self.allowed[self._task.closed_answers.index(known[0])]
            try:
                read.append(self._fitted(asked[i], ids, known, answers[i]))
            except RowError as error:
                bad[i] = self._bad(rows, i, error)
        return read, dict(sorted(bad.items()))

    def _read_prompt(self, prompt: str) -> _Prompt:
        """Return the part before an answer; raise ``RowError`` if the chat template cannot render it."""
        if self._template is None:
            inside = len(self._before) > len(self.opening)
            (ids,) = token_ids(self.tokenizer, [self._between + prompt], inside=inside)
            return _Framed(self._before, ids, self._after)
        chat = self._chat(prompt)
        text = self._template.put_together(chat)
        self._template.check_read(chat, text)
        return _Rendered(self._template, chat, text, self.opening, self.closing, len(self._lead))

    def _chat(self, prompt: str) -> Chat:
        if self._task.form != "messages":
            return Chat([{"role": "user", "content": self._lead + prompt}])
        chat = Chat.of(prompt)
        if self._task.instruction and chat.turns[0]["role"] != "system":
            return Chat([{"role": "system", "content": self._task.instruction}, *chat.turns], chat.tools)
        return chat

    def _turn(self, right: str) -> Turn:
        return answer_turn(right) if self._task.form == "messages" else {"role": "assistant", "content": right}

    def _answer(self, prompt: _Prompt, right: str) -> str:
        """Return the answer as it follows the prompt, with marks inside the special tokens that it spells."""
        if isinstance(prompt, _Framed):
            return ("" if self.apart else self._space) + right  # a separate decoder begins with the answer
        text = prompt.template.answer(prompt.chat, self._turn(right), prompt.text)
        return text.removeprefix(" ") if self.apart else text

    def _answer_ids(self, answers: Sequence[str]) -> list[list[int]]:
        """Return the ids of answers; only the chat template's special tokens are encoded as such."""
        plain = token_ids(self.tokenizer, [without_marks(text) for text in answers], inside=not self.apart)
        template = self._template
        return [
            template.ids(text, inside=not self.apart) if template and template.has_special(text) else ids
            for text, ids in zip(answers, plain, strict=True)
        ]

    def _allowed(self) -> list[list[int]]:
        """Return the ids of the answers that the task allows; none if any text is allowed."""
        closed = self._task.closed_answers
        if not closed:
            return []
        try:
            prompt = self._read_prompt(self._question("a"))
            return self._answer_ids([self._answer(prompt, text) for text in closed])
        except RowError as error:
            raise ModelError(f"The closed_answers of task {self._task.name!r} cannot be used: {error}") from error

    def _fitted(self, prompt: _Prompt, answer: list[int], right: tuple[str, ...], text: str) -> EncodedPrompt:
        """Return a row within ``max_length``; raise ``RowError`` if its answer does not fit."""
        before, longer = prompt.ids, list[int]()
        if len(before) + max(len(answer), self._most) > self._max_length:
            room = self._max_length - prompt.least
            kept = self._most if self.allowed else min(self._most, room // 2)
            if max(len(answer), kept) > room:
                raise RowError(
                    "answer does not fit",
                    f"expected an answer that fits into max_length={self._max_length} tokens together with the "
                    f"instruction, the template and the turn markers, got one of {len(answer):,} tokens",
                    "Set a higher max_length, if the model allows it.",
                )
            before = prompt.within(self._max_length - max(len(answer), kept))
            if len(answer) > kept:  # the prompt must not reveal the answer's length
                longer = prompt.within(self._max_length - kept)
        if right and not self.allowed and self._template and without_marks(text).strip() != right[0].strip():
            ids = self._answer_ids([self._answer(prompt, each) for each in right])
            right = tuple(self.tokenizer.decode(each, skip_special_tokens=True).strip() for each in ids)
        lost = len(prompt.ids) - len(before)
        return EncodedPrompt(before or [self.blank], [*answer, self.end], right, lost, longer)

    def _bad(self, rows: Rows, i: int, error: RowError) -> BadRow:
        file, number = rows.places[i] if rows.places else ("", i + 1)
        return BadRow(file, number, "", error.what, brief(rows.first[i]), error.fault, error.remedy)

    # -- The frame of a prompt -------------------------------------------------------------------------------

    @cached_property
    def _frame(self) -> tuple[str, str, str, str]:
        """The text before a prompt, the space between, the text after it, and the space before the answer."""
        instruction = self._task.instruction
        template = self._task.template or (PLAIN_TEMPLATE if instruction else "{prompt}\n\n")
        before, after = (part.replace("{instruction}", instruction) for part in template.split("{prompt}"))
        space = " " if before.endswith(" ") else ""
        if after.endswith(("\n", "\t")):
            return before.removesuffix(" "), space, after, ""
        return before.removesuffix(" "), space, after.removesuffix(" "), " "

    def _check_template(self, template: ChatTemplate) -> None:
        """Raise ``ModelError`` unless the tokenizer's chat template shows a prompt once."""
        try:
            text = template.put_together(self._chat("<<prompt>>"))
        except RowError as error:
            raise ModelError(f"The tokenizer's chat template cannot create a prompt: {error}") from error
        if text.count("<<prompt>>") != 1:
            raise ModelError(
                "The tokenizer's chat template omits or repeats turns, so no answer can be learned with it. Give "
                "another chat template, or a template in source.json."
            )

    @property
    def chat_template(self) -> str:
        """The Jinja template by which transformers renders a prompt, or a chat, as this encoder does.

        A prompt is a chat of one turn. The template has the opening tokens of a row, except for encoder-decoders, whose
        tokenizer adds the opening and closing tokens.
        """
        opening = "".join([] if self.apart else self.tokenizer.convert_ids_to_tokens(self.opening))
        if self._task.form == "messages":
            assert self._template is not None
            whole = _shown(opening) + self._template.source
            system = f"[{{'role': 'system', 'content': {_literal(self._task.instruction)}}}] + messages"
            first = f"{{% set messages = messages if messages[0]['role'] == 'system' else {system} %}}"
            return f"{first}{whole}" if self._task.instruction else whole
        if self._template is not None:
            turn = f"{{'role': 'user', 'content': {_literal(self._lead)} + messages[0]['content']}}"
            first = f"{{% set messages = [{turn}] %}}" if self._lead else ""
            return f"{ONE_PROMPT}{first}{self._template.source}"
        before, space, after, _ = self._frame
        return f"{ONE_PROMPT}{_shown(opening + before + space)}{{{{ messages[0]['content'] }}}}{_shown(after)}"

    def cut_note(self, what: str, count: int) -> str:
        """Return a note on rows that were cut, and on targets that are too long to be written."""
        notes = [super().cut_note(what, count)]
        rows = counted(count, what)
        if self._unwritable:
            longer, most = len(self._unwritable), self._task.max_new_tokens
            notes.append(
                f"The targets of {longer:,} of {rows} are longer than max_new_tokens={most}, up to "
                f"{max(self._unwritable):,} tokens, so generated texts cannot match them. Set max_new_tokens in "
                "source.json."
            )
        return " ".join(filter(None, notes))

    def _end(self) -> int:
        """Return the token that ends a text: the end of the assistant's turn in the chat template, or the tokenizer's."""
        if self._template is not None and self._template.end is not None:
            return self._template.end
        if self.tokenizer.eos_token_id is None:
            raise ModelError(
                "The tokenizer has no eos_token, so no generated text would ever end. Set one, and save the "
                "tokenizer again."
            )
        return int(self.tokenizer.eos_token_id)

    def _least(self) -> int:
        """Return the number of tokens that instruction and template take."""
        try:
            return self._read_prompt(self._question("")).least
        except RowError:  # the template refuses an empty prompt
            return 0

    def _question(self, text: str) -> str:
        """Return a text as a row's prompt: as it is, or as a chat of one turn."""
        return Chat([{"role": "user", "content": text}]).text if self._task.form == "messages" else text

    def _loses_its_end(self, piece: str) -> bool:
        """Return whether the tokenizer drops the white space at the end of a piece, as T5's does before the next word."""
        return piece[-1:].isspace() and self._ids(piece) == self._ids(piece.rstrip())

    def _ids(self, piece: str) -> list[int]:
        return token_ids(self.tokenizer, [piece], special=True)[0]
