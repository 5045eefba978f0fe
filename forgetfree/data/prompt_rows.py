"""Rows of prompts with the texts that answer them, and of chats: which columns of a table hold them, and what a cell says."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from forgetfree.data.bad_rows import BadRow, refusal
from forgetfree.data.columns import are_labelled_texts
from forgetfree.data.rows import Rows
from forgetfree.data.tables import Table, TaskTables, plain
from forgetfree.display import brief, is_text
from forgetfree.errors import BadDataError, DataError
from forgetfree.json_file import parse_json

#: Columns of prompts and of the texts that answer them, by preference; several of a prompt stand one after another.
_COLUMNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("prompt",), "target"),
    (("prompt",), "completion"),
    (("prompt",), "response"),
    (("prompt",), "answer"),
    (("prompt",), "answers"),
    (("prompt",), "output"),
    (("instruction", "input"), "output"),
    (("instruction", "input"), "response"),
    (("instruction", "context"), "output"),
    (("instruction", "context"), "response"),
    (("instruction",), "output"),
    (("instruction",), "response"),
    (("context", "question"), "answers"),
    (("context", "question"), "answer"),
    (("passage", "question"), "answer"),
    (("question",), "answer"),
    (("question",), "answers"),
    (("input",), "output"),
    (("input",), "target"),
    (("document",), "summary"),
    (("article",), "highlights"),
    (("article",), "summary"),
    (("dialogue",), "summary"),
    (("text",), "summary"),
    (("source",), "translation"),
    (("source",), "target"),
)
#: Columns of chats.
_CHATS = ("messages", "conversations", "conversation")
#: The names of turns in chats as ShareGPT writes them.
_ROLES = {"human": "user", "gpt": "assistant"}
#: Who may speak in a chat. A role stands in the chat template as it is, so any other text could forge turns.
ROLES = ("system", "developer", "user", "assistant", "tool")


def _chat_of(names: Collection[str]) -> str | None:
    return next((name for name in _CHATS if name in names), None)


def _pair_of(names: set[str]) -> tuple[tuple[str, ...], str] | None:
    return next((pair for pair in _COLUMNS if names >= {*pair[0], pair[1]}), None)


def are_prompts(task: TaskTables) -> bool:
    """Return whether the columns of a task are those of prompts and answers, or of chats.

    Texts with a label beside them, and rows whose label column the user names, are to be classified.
    """
    names, pair = set(task.train.columns), _pair_of(set(task.train.columns))
    if task.columns.label or names & {"label", "labels"}:
        return False
    answer = [] if pair is None else [pair[1]]
    return bool(_chat_of(names) or pair) and not are_labelled_texts(names, beside=answer)


def are_prompts_and_answers(columns: Sequence[str]) -> bool:
    """Return whether columns have common names of prompts, and the last that of their answers."""
    return (tuple(columns[:-1]), columns[-1]) in _COLUMNS


def prompt_columns(names: Collection[str], form: str) -> tuple[str, ...]:
    """Return the columns that prompts, or chats, are read from, where answers may be missing; none where no name is known."""
    if form == "messages":
        return tuple(name for name in (_chat_of(names),) if name)
    pair = _pair_of(set(names)) or next((pair for pair in _COLUMNS if set(names) >= set(pair[0])), None)
    return pair[0] if pair else ()


def source_phrase(columns: Sequence[str], form: str) -> str:
    """Return from which columns prompts and answers, or chats, are read; an empty text where these have their own names."""
    if columns in (("prompt", "target"), ("messages",)):
        return ""
    if form == "messages":
        return f"chats from {columns[0]!r}"
    return f"prompts from {' and '.join(map(repr, columns[:-1]))}, answers from {columns[-1]!r}"


def closed_answers(task: TaskTables) -> tuple[str, ...]:
    """Return the answers that a task allows; none where any text may answer."""
    known = task.registered.closed_answers if task.registered else ()
    return tuple(str(text).strip() for text in task.source.get("closed_answers") or known)


def one_prompt(texts: Sequence[str]) -> str:
    """Return the texts of a row as one prompt, one after another."""
    return texts[0] if len(texts) == 1 else "\n\n".join(text for text in texts if text.strip())


# -- Rows ------------------------------------------------------------------------------------------------


class PromptReader:
    """Reads the rows of one table.

    Args:
        table: the table.
        task: whose it is.

    Attributes:
        form: ``generation`` or ``messages``.
        columns: those of the prompt, and that of the answer; or that of the chat.

    Raises:
        DataError: the table has no column of prompts, or none of answers.
    """

    def __init__(self, table: Table, task: TaskTables) -> None:
        self._table, self._allowed = table, closed_answers(task)
        self.form, self.columns = _form_of(table, task)

    def rows(self) -> Rows:
        """Return the good rows; the others are added to the table's bad rows."""
        table = self._table
        read = [table.bad.attempt(self._row, i) for i in range(len(table.numbers))]
        good = [(*row, number) for row, number in zip(read, table.numbers, strict=True) if row is not None]
        places = tuple((table.where, number) for _, _, number in good)
        return Rows(tuple(prompt for prompt, *_ in good), (), tuple(right for _, right, _ in good), places)

    def _row(self, i: int) -> tuple[str, tuple[str, ...]]:
        """Return the prompt of a row, and the texts that are right; where answers are closed, as they are written there."""
        prompt, right = self._chat(i) if self.form == "messages" else self._prompt_and_targets(i)
        if self._allowed:
            allowed = tuple(text.strip() for text in right if text.strip() in self._allowed)
            if not allowed:
                expected = f"one of closed_answers, {brief(self._allowed, 200)}"
                raise self._refusal(self.columns[-1], i, "no allowed answer", expected, right[0])
            right = allowed
        return prompt, right

    def _prompt_and_targets(self, i: int) -> tuple[str, tuple[str, ...]]:
        """Return the prompt of a row, and the texts that are right."""
        *prompts, column = self.columns
        texts = []
        for name in prompts:
            cell = self._cell(name, i)
            if cell is None and len(prompts) > 1:
                continue
            if not is_text(cell):
                raise self._refusal(name, i, "no prompt", "a text", cell)
            texts.append(cell)
        prompt = one_prompt(texts)
        cell = self._cell(column, i)
        right = _texts(cell)
        if not right or not all(is_text(text) and text.strip() for text in right):
            raise self._refusal(column, i, "no target", "a text, or a list of texts, none of them empty", cell)
        return prompt, right

    def _chat(self, i: int) -> tuple[str, tuple[str, ...]]:
        """Return the turns of a chat before the last of the assistant, as JSON, and the text of that."""
        (column,) = self.columns
        cell = self._cell(column, i)
        try:
            turns = turns_of(cell)
        except ValueError as error:
            expected = f"a list of turns, each with a content and a role, one of {', '.join(ROLES)}"
            raise self._refusal(column, i, "no chat", expected, cell) from error
        last = max((number for number, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)
        if not last:
            raise self._refusal(column, i, "no answer in a chat", "a turn of the assistant after another turn", cell)
        if not turns[last]["content"].strip():
            raise self._refusal(column, i, "no target", "a last turn of the assistant that is not empty", cell)
        return json.dumps(turns[:last], ensure_ascii=False), (turns[last]["content"],)

    def _cell(self, column: str, i: int) -> Any:
        """Return a cell; a number of numpy as one of Python, an array as a list."""
        return plain(self._table.columns[column][i])

    def _refusal(self, column: str, i: int, what: str, expected: str, got: Any) -> BadDataError:
        """Return the error of a cell."""
        file, number = self._table.where, self._table.numbers[i]
        text = brief(got)
        message = f"{file}, row {number}, column {column!r}: expected {expected}, got {text}. Fix or remove the row."
        return refusal(BadRow(file, number, column, what, text, message))


def _form_of(table: Table, task: TaskTables) -> tuple[str, tuple[str, ...]]:
    """Return ``generation`` or ``messages``, and the columns that a table is read from; errors as `PromptReader`."""
    named, names = task.columns, set(table.columns)
    for column in (*named.texts, *filter(None, [named.label])):
        if column not in names:
            raise _lacks(table, column)
    chat = _chat_of(names) if not named.texts else None
    if named.texts and named.label is None and len(named.texts) == 1:
        cells = [plain(cell) for cell in table.columns[named.texts[0]][:1]]
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
    """Return the right texts that a cell holds: one, a list, or those of SQuAD's answers."""
    if isinstance(cell, Mapping):
        cell = plain(cell.get("text", cell.get("answer")))
    if isinstance(cell, list | tuple):
        return tuple(dict.fromkeys(text for each in cell for text in _texts(plain(each))))
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return () if not math.isfinite(cell) else (str(int(cell)) if cell == int(cell) else repr(cell),)
    return () if cell is None else (cell,)


def turns_of(chat: Any) -> list[dict[str, str]]:
    """Return the turns of a chat, which is a list or JSON of one; raise ``ValueError`` where it is none."""
    try:
        return [_turn(plain(turn)) for turn in (parse_json(chat) if isinstance(chat, str) else chat)]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("no chat") from error


def _turn(turn: Mapping[str, Any]) -> dict[str, str]:
    role, content = (turn["role"], turn["content"]) if "role" in turn else (turn["from"], turn["value"])
    role = _ROLES.get(role, role)
    if role not in ROLES or not is_text(content):
        raise TypeError
    return {"role": role, "content": content}
