"""Chats: turns, and the tools that may be called in them, as data, requests and chat templates have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forgetfree.data.tables import is_missing, plain
from forgetfree.display import brief, is_text
from forgetfree.json_file import parse_json

#: What a chat template reads of one turn: role, content, and whatever else it knows, such as tool_calls.
Turn = dict[str, Any]
#: Who may speak in a chat. A role stands in the chat template as it is, so any other text could forge turns.
ROLES = ("system", "developer", "user", "assistant", "tool")
#: The names of turns in chats as ShareGPT and LLaMA-Factory write them.
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
#: Keys by which other trainers say whether a turn is learned.
_LEARNED = ("weight", "train", "training")
#: What is expected where no list of turns is found.
_TURNS = f"a list of turns, each with a content and a role, one of {', '.join(ROLES)}"
#: How the JSON of an answer begins that is more than its content.
_ANSWER = '{"role": "assistant"'


@dataclass(frozen=True)
class Chat:
    """Turns, and the tools that may be called in them.

    Attributes:
        turns: with roles of `ROLES`; contents are texts, and may be missing beside ``tool_calls``.
        tools: as they are handed to a chat template.
    """

    turns: list[Turn]
    tools: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, value: Any) -> Chat:
        """Return a chat from a list of turns, an object with ``messages`` and ``tools``, or the JSON of either.

        Raises:
            ValueError: it is none; the message is a phrase for what was expected.
        """
        try:
            value = parse_json(value) if isinstance(value, str) else plain(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(_TURNS) from error
        tools: Any = None
        if isinstance(value, Mapping):
            if unknown := [key for key in value if key not in ("messages", "tools")]:
                raise ValueError(f"messages and tools alone beside one another, without {brief(unknown[0])}")
            value, tools = plain(value.get("messages")), value.get("tools")
        if not isinstance(value, list | tuple):
            raise ValueError(_TURNS)
        return cls([_turn(plain(turn)) for turn in value], tools_of(tools))

    @property
    def text(self) -> str:
        """The chat as JSON, of which `of` makes the same chat: a list of turns, or an object where there are tools."""
        value = {"messages": self.turns, "tools": self.tools} if self.tools else self.turns
        return json.dumps(value, ensure_ascii=False, default=str)


def tools_of(value: Any) -> list[Any]:
    """Return tools from a list or its JSON; none where there is nothing. Raise ``ValueError`` with what was expected."""
    expected = "a list of tools, each an object"
    try:
        value = parse_json(value) if isinstance(value, str) and value.strip() else plain(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(expected) from error
    if not value:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(tool, Mapping) for tool in value):
        raise ValueError(expected)
    return list(value)


def _turn(turn: Any) -> Turn:
    """Return one turn; raise ``ValueError`` with what was expected."""
    role, content = ("role", "content") if isinstance(turn, Mapping) and "role" in turn else ("from", "value")
    if not isinstance(turn, Mapping) or role not in turn:
        raise ValueError(_TURNS)
    said = {key: plain(value) for key, value in turn.items() if not is_missing(value)}
    more = {key: value for key, value in said.items() if key not in (role, content)}
    name, text = turn[role], _text_of(said.get(content))
    if name == "function_call":  # LLaMA-Factory's
        name, text, more["tool_calls"] = "assistant", None, _calls(text)
    name = _ROLES.get(name, name) if isinstance(name, str) else name
    if name not in ROLES or not (is_text(text) or (text is None and more.get("tool_calls"))):
        raise ValueError(_TURNS)
    for key in _LEARNED:
        if more.get(key) in (0, 1):  # what is no answer is never learned, see `answer_of`
            more = {other: value for other, value in more.items() if other != key or not value}
    return {"role": name, **({} if text is None else {"content": text}), **more}


def _text_of(content: Any) -> Any:
    """Return the text of a content that is a list of texts; any other as it is."""
    if not isinstance(content, list | tuple):
        return content
    texts = list[str]()
    for part in map(plain, content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(f"contents of texts alone, without a part of the type {brief(kind)}")
        texts.append(text)
    return "".join(texts)


def _calls(text: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a turn that is the JSON of one or several."""
    expected = "a function_call that is the JSON of an object with name and arguments, or of a list of them"
    try:
        calls = parse_json(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise ValueError(expected) from error
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise ValueError(expected)
    return [{"type": "function", "function": call} for call in calls]


# -- Answers ---------------------------------------------------------------------------------------------


def answer_of(chat: Chat) -> tuple[Chat, str]:
    """Return a chat up to its last turn of the assistant, and that turn as `answer_text` writes it.

    Raises:
        ValueError: it has no such turn after another, or that is empty or not to be learned; with what was expected.
    """
    last = max((number for number, turn in enumerate(chat.turns) if turn["role"] == "assistant"), default=0)
    if not last:
        raise ValueError("a turn of the assistant after another turn")
    turn = chat.turns[last]
    if not turn.get("content", "").strip() and not turn.get("tool_calls"):
        raise ValueError("a last turn of the assistant that is not empty")
    if off := next((key for key in _LEARNED if key in turn), None):
        raise ValueError(f"a last turn of the assistant that is learned as any other, so {off!r} of 1 or none")
    return Chat(asked(chat.turns[:last]), chat.tools), answer_text(turn)


def asked(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns that are asked, without the keys that say whether they are learned."""
    return [{key: value for key, value in turn.items() if key not in _LEARNED} for turn in turns]


def answer_text(turn: Turn) -> str:
    """Return the text of an answer: its content, or the JSON of the turn where that is more."""
    content = turn.get("content", "")
    if turn.keys() <= {"role", "content"} and not content.startswith(_ANSWER):
        return str(content)
    return json.dumps({"role": "assistant", **turn}, ensure_ascii=False, default=str)


def answer_turn(text: str) -> Turn:
    """Return the turn that `answer_text` wrote."""
    turn: Turn = json.loads(text) if text.startswith(_ANSWER) else {"role": "assistant", "content": text}
    return turn
