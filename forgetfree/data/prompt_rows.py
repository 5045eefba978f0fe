"""Rows of prompts with their answers, and rows of chats: the choice of a table's columns, and the reading of cells."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from forgetfree.data.bad_rows import refusal
from forgetfree.data.chats import Chat, Turn, answer_of, answer_text, of_json, tools_of
from forgetfree.data.columns import CHATS, PROMPTS, are_labelled_texts
from forgetfree.data.rows import Rows
from forgetfree.data.tables import Columns, Table, TaskTables
from forgetfree.display import brief, is_text
from forgetfree.errors import DataError

#: Columns beside chats, or prompts, that belong to the prompt: the text of the system, tools, and earlier turns.
_SYSTEM = ("system", "system_prompt", "system_message")
_TOOLS = ("tools", "functions")
_HISTORY = ("history",)
BESIDE = (*_SYSTEM, *_TOOLS, *_HISTORY)
#: Columns with content that no language model here reads.
_UNREADABLE = ("images", "image", "videos", "video", "audios", "audio", "documents", "chat_template_kwargs")


def _chat_of(names: Collection[str]) -> str | None:
    return next((name for name in CHATS if name in names), None)


def _pair_of(names: set[str]) -> tuple[tuple[str, ...], str] | None:
    pairs = ((prompts, answer) for prompts, answers in PROMPTS.items() for answer in answers)
    return next((pair for pair in pairs if names >= {*pair[0], pair[1]}), None)


def are_prompts(task: TaskTables) -> bool:
    """Return whether the columns of a task hold prompts and answers, or chats.

    Texts with a label beside them, and rows whose label column the user names, are for classification.
    """
    names, pair = set(task.train.columns), _pair_of(set(task.train.columns))
    if task.columns.label or names & {"label", "labels"}:
        return False
    answer = [] if pair is None else [pair[1]]
    return bool(_chat_of(names) or pair) and not are_labelled_texts(names, beside=answer)


def prompt_columns(names: Collection[str], form: str) -> tuple[str, ...]:
    """Return the columns of prompts, or chats, where answers may be missing; none if no name is known."""
    if form == "messages" and (chat := _chat_of(names)):
        return (chat,)
    pair = _pair_of(set(names))
    return pair[0] if pair else next((prompts for prompts in PROMPTS if set(names) >= set(prompts)), ())


def closed_answers(task: TaskTables) -> tuple[str, ...]:
    """Return the answers that a task allows; none if any text is allowed."""
    known = task.registered.closed_answers if task.registered else ()
    return tuple(str(text).strip() for text in task.source.get("closed_answers") or known)


def one_prompt(texts: Sequence[str]) -> str:
    """Return the texts of a row, joined into one prompt."""
    return texts[0] if len(texts) == 1 else "\n\n".join(text for text in texts if text.strip())


# -- Columns beside a prompt, or a chat ------------------------------------------------------------------


def is_empty(cell: Any) -> bool:
    """Return whether a cell beside a chat is empty."""
    if isinstance(cell, str):
        return cell.strip() in ("", "[]", "null")
    return cell is None or (isinstance(cell, list | Mapping) and not cell)


def columns_beside(cells: Mapping[str, Any], read: Collection[str] = ()) -> list[str]:
    """Return the columns, without those ``read``, whose cells belong to the prompt and are not empty."""
    names = (*BESIDE, *_UNREADABLE)
    return [name for name in names if name in cells and name not in read and not is_empty(cells[name])]


class CellError(ValueError):
    """A cell does not have the expected content; ``what`` is the fault in a few words, as in `BadRow`."""

    def __init__(self, column: str, what: str, expected: str, got: Any) -> None:
        self.column, self.what, self.expected, self.got = column, what, expected, got
        super().__init__(f"column {column!r}: expected {expected}, got {brief(got)}")


def whole_chat(chat: Chat, cells: Mapping[str, Any]) -> Chat:
    """Return a chat with the contents of the columns beside it; raise `CellError` if a cell does not fit."""
    for name in columns_beside(cells):
        try:
            chat = _with_cell(chat, name, cells[name])
        except ValueError as error:
            raise CellError(name, f"{name} beside a chat", str(error), cells[name]) from error
    return chat


def _with_cell(chat: Chat, name: str, cell: Any) -> Chat:
    """Return the chat with the content of one column; raise ``ValueError`` with a phrase for the expected content."""
    if name in _UNREADABLE:
        raise ValueError("nothing, because only texts are read here: remove the column or the row")
    system = [turn for turn in chat.turns[:1] if turn["role"] in ("system", "developer")]
    if name in _HISTORY:
        return Chat([*system, *_earlier_turns(cell), *chat.turns[len(system) :]], chat.tools)
    if name in _TOOLS:
        if chat.tools:
            raise ValueError("tools in only one place")
        tools = tools_of(cell)
        if name == "functions":
            tools = [{"type": "function", "function": tool} for tool in tools]
        return Chat(chat.turns, tools)
    if not is_text(cell):
        raise ValueError("a text")
    if system and system[0].get("content") != cell:
        raise ValueError("the same text as that of the chat's first turn, which is the system's")
    return chat if system else Chat([{"role": "system", "content": cell}, *chat.turns], chat.tools)


def _earlier_turns(cell: Any) -> list[Turn]:
    """Return the turns of a history, which is a list of pairs of texts, as in LLaMA-Factory."""
    expected = "a list of pairs of texts, of the user and of the assistant"
    pairs = of_json(cell, expected)
    pairs = pairs if isinstance(pairs, list) else [None]
    if not all(isinstance(pair, list) and len(pair) == 2 and all(map(is_text, pair)) for pair in pairs):
        raise ValueError(expected)
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


# -- Rows ------------------------------------------------------------------------------------------------


class PromptReader:
    """Reads the rows of one table.

    Attributes:
        form: ``generation`` or ``messages``: prompts become chats if columns beside them are not empty.
        columns: the columns of the prompt and of the answer; or the column of the chat.
        phrase: a note on the columns that are read, unless they have our own names, and that are not read; may be empty.

    Raises:
        DataError: the table has no column of prompts, or none of answers.
    """

    def __init__(self, table: Table, task: TaskTables) -> None:
        self._table, self._allowed = table, closed_answers(task)
        form, self.columns = _form_of(table, task)
        self._has_chats = form == "messages"
        others = [name for name in table.columns if name not in self.columns]
        self._beside = [name for name in (*BESIDE, *_UNREADABLE) if name in others]
        tables = [*task.tables.values()]
        used = [
            name
            for name in self._beside
            if not all(is_empty(cell) for each in tables for cell in each.columns.get(name, ()))
        ]
        self.form = "messages" if used else form
        unread = [name for name in others if name not in used]
        self.phrase = _phrase(self.columns, used, unread, chats=self._has_chats)

    def rows(self) -> Rows:
        """Return the good rows; the others are added to the table's bad rows."""
        table = self._table
        read = [table.bad.attempt(self._row, i) for i in range(len(table.numbers))]
        good = [(*row, number) for row, number in zip(read, table.numbers, strict=True) if row is not None]
        places = tuple((table.where, number) for _, _, number in good)
        return Rows(tuple(prompt for prompt, *_ in good), (), tuple(right for _, right, _ in good), places)

    def _row(self, i: int) -> tuple[str, tuple[str, ...]]:
        """Return the prompt of a row, and the right texts; closed answers are spelt as in ``closed_answers``."""
        record = Columns(self._table.columns, lambda name: self._table.columns[name][i])
        try:
            prompt, right = self._chat(record) if self._has_chats else self._prompt_and_targets(record)
            if self._allowed and not any(text.strip() in self._allowed for text in right):
                expected = f"one of closed_answers, {brief(self._allowed, 200)}"
                raise CellError(self.columns[-1], "no allowed answer", expected, right[0])
        except CellError as error:
            got = brief(error.got)
            raise refusal(self._table.fault(i, error.column, error.what, error.expected, got)) from error
        if self._allowed:
            right = tuple(text.strip() for text in right if text.strip() in self._allowed)
        return prompt, right

    def _prompt_and_targets(self, record: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        """Return the prompt of a row, and the right texts; raise `CellError` if one is missing."""
        *prompts, column = self.columns
        cells = {name: record[name] for name in prompts if record[name] is not None or len(prompts) == 1}
        for name, cell in cells.items():
            if not is_text(cell):
                raise CellError(name, "no prompt", "a text", cell)
        prompt, right = one_prompt([*cells.values()]), _texts(record[column])
        if not right or not all(is_text(text) and text.strip() for text in right):
            expected = "a text, or a list of texts, none of them empty"
            raise CellError(column, "no target", expected, record[column])
        if self.form == "messages":
            prompt = self._whole(Chat([{"role": "user", "content": prompt}]), record).text
            right = tuple(answer_text({"role": "assistant", "content": text}) for text in right)
        return prompt, right

    def _chat(self, record: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        """Return the chat before the assistant's last turn, as JSON, and that turn; raise `CellError` if it is missing."""
        (column,) = self.columns
        what = "no chat"
        try:
            whole = self._whole(Chat.of(record[column]), record)
            what = "no answer in a chat"
            chat, answer = answer_of(whole)
        except CellError:
            raise
        except ValueError as error:
            raise CellError(column, what, str(error), record[column]) from error
        return chat.text, (answer,)

    def _whole(self, chat: Chat, record: Mapping[str, Any]) -> Chat:
        return whole_chat(chat, {name: record[name] for name in self._beside})


def _phrase(columns: Sequence[str], beside: Sequence[str], unread: Sequence[str], *, chats: bool) -> str:
    """Return a note on the columns that are read, unless they have our own names, and on those that are not read."""
    named = " and ".join(map(repr, [*beside, *(columns if chats else columns[:-1])]))
    what = f"{'chats' if chats or beside else 'prompts'} from {named}"
    if not chats:
        what += f", answers from {columns[-1]!r}"
    known = columns in (("prompt", "target"), ("messages",)) and not beside
    others = f"not read: {', '.join(map(repr, unread))}" if unread else ""
    return "; ".join(filter(None, ["" if known else what, others]))


def _form_of(table: Table, task: TaskTables) -> tuple[str, tuple[str, ...]]:
    """Return ``generation`` or ``messages``, and the columns that are read from a table; errors: see `PromptReader`."""
    named, names = task.columns, set(table.columns)
    for column in (*named.texts, *filter(None, [named.label])):
        if column not in names:
            raise _lacks(table, column)
    chat = _chat_of(names) if not named.texts else None
    if named.texts and named.label is None and len(named.texts) == 1:
        cells = table.columns[named.texts[0]][:1]
        chat = named.texts[0] if any(isinstance(cell, list) for cell in cells) else None
    pair = (named.texts, named.label) if named.texts and named.label else _pair_of(names)
    kind = task.source.get("kind")
    if kind == "messages" or (chat and not (pair and (named.label or kind == "generation"))):
        if chat is None:
            raise _lacks(table, "messages")
        return "messages", (chat,)
    if pair is None or pair[1] is None:
        raise _lacks(table, "prompt" if "prompt" not in names else "target")
    return "generation", (*pair[0], pair[1])


def _lacks(table: Table, column: str) -> DataError:
    names = ", ".join(map(repr, table.columns)) or "none"
    return DataError(
        f"{table.where} has no column {column!r}: expected prompt and target, or messages with a chat; found {names}. Rename "
        "or add the column, or name others with --text-column and --label-column."
    )


def _texts(cell: Any) -> tuple[Any, ...]:
    """Return the right texts in a cell: one text, a list, or an object with SQuAD's answers."""
    if isinstance(cell, Mapping):
        cell = cell.get("text", cell.get("answer"))
    if isinstance(cell, list):
        return tuple(dict.fromkeys(text for each in cell for text in _texts(each)))
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return () if not math.isfinite(cell) else (str(int(cell)) if cell == int(cell) else repr(cell),)
    return () if cell is None else (cell,)
