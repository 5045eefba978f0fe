"""Chats: turns and tools, from data and requests, and their conversion to texts and token ids by a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forgetfree.data.bad_rows import RowError
from forgetfree.data.encoding import token_ids
from forgetfree.data.tables import common_start, plain
from forgetfree.display import brief, is_text
from forgetfree.json_file import parse_json

#: One turn, as a chat template reads it: role, content, and any other keys, such as tool_calls.
Turn = dict[str, Any]
#: The allowed roles. A chat template inserts a role as it is, so any other text could forge turns.
ROLES = ("system", "developer", "user", "assistant", "tool")
#: The names of roles in ShareGPT and LLaMA-Factory, and ours.
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
#: Keys of other trainers that mark whether a turn is learned.
_LEARNED = ("weight", "train", "training")
#: A phrase for the expected list of turns.
_TURNS = f"a list of turns, each with a content and a role, one of {', '.join(ROLES)}"
#: The beginning of an answer that is written as JSON, since it has more than a content.
_ANSWER = '{"role": "assistant"'


@dataclass(frozen=True)
class Chat:
    """Turns, and the tools that may be called in them.

    Attributes:
        turns: the turns, with roles of `ROLES`; contents are texts, and may be missing beside ``tool_calls``.
        tools: the tools, as a chat template takes them.
    """

    turns: list[Turn]
    tools: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, value: Any) -> Chat:
        """Return the chat from a list of turns, an object with ``messages`` and ``tools``, or the JSON of either.

        Raises:
            ValueError: it is no chat; the message is a phrase for the expected value.
        """
        value, tools = of_json(value, _TURNS), None
        if isinstance(value, Mapping):
            if unknown := [key for key in value if key not in ("messages", "tools")]:
                raise ValueError(f"only messages and tools in a row, without {brief(unknown[0])}")
            value, tools = value.get("messages"), value.get("tools")
        if not isinstance(value, list):
            raise ValueError(_TURNS)
        return cls(list(map(_turn, value)), tools_of(tools))

    @property
    def text(self) -> str:
        """The chat as JSON, from which `of` makes the same chat: a list of turns, or an object if there are tools."""
        value = {"messages": self.turns, "tools": self.tools} if self.tools else self.turns
        return json.dumps(value, ensure_ascii=False, default=str)


def of_json(value: Any, expected: str) -> Any:
    """Return the value of a JSON text, or any other value as plain JSON; raise ``ValueError`` with ``expected``."""
    try:
        return parse_json(value) if isinstance(value, str) else plain(value)
    except ValueError as error:
        raise ValueError(expected) from error


def tools_of(value: Any) -> list[Any]:
    """Return the tools of a list or its JSON, which may be empty; raise ``ValueError`` with a phrase for the expected value."""
    expected = "a list of tools, each an object"
    value = of_json(value, expected) if not isinstance(value, str) or value.strip() else None
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise ValueError(expected)
    return value


def _turn(turn: Any) -> Turn:
    """Return one turn; raise ``ValueError`` with a phrase for the expected value."""
    role, content = ("role", "content") if isinstance(turn, Mapping) and "role" in turn else ("from", "value")
    if not isinstance(turn, Mapping) or role not in turn:
        raise ValueError(_TURNS)
    said = {key: value for key, value in turn.items() if value is not None}
    more = {key: value for key, value in said.items() if key not in (role, content)}
    name, text = turn[role], _text_of(said.get(content))
    if name == "function_call":  # LLaMA-Factory's
        name, text, more["tool_calls"] = "assistant", None, _calls(text)
    name = _ROLES.get(name, name) if isinstance(name, str) else name
    if name not in ROLES or not (is_text(text) or (text is None and more.get("tool_calls"))):
        raise ValueError(_TURNS)
    for key in _LEARNED:
        if more.get(key) in (0, 1):  # only answers are learned, see `answer_of`
            more = {other: value for other, value in more.items() if other != key or not value}
    return {"role": name, **({} if text is None else {"content": text}), **more}


def _text_of(content: Any) -> Any:
    """Return the joined text of a content that is a list of texts; return any other content unchanged."""
    if not isinstance(content, list):
        return content
    texts = list[str]()
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(f"contents that are only text, without a part of the type {brief(kind)}")
        texts.append(text)
    return "".join(texts)


def _calls(text: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a turn that is the JSON of one call or several."""
    expected = "a function_call that is the JSON of an object with name and arguments, or of a list of them"
    calls = of_json(text, expected)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise ValueError(expected)
    return [{"type": "function", "function": call} for call in calls]


# -- Answers ---------------------------------------------------------------------------------------------


def answer_of(chat: Chat) -> tuple[Chat, str]:
    """Return the chat up to its last turn of the assistant, and that turn as `answer_text` writes it.

    Raises:
        ValueError: it has no such turn after another, or that turn is empty or not to be learned; with the expected turn.
    """
    last = max((number for number, turn in enumerate(chat.turns) if turn["role"] == "assistant"), default=0)
    if not last:
        raise ValueError("a turn of the assistant after another turn")
    turn = chat.turns[last]
    if not turn.get("content", "").strip() and not turn.get("tool_calls"):
        raise ValueError("a last turn of the assistant that is not empty")
    if off := next((key for key in _LEARNED if key in turn), None):
        raise ValueError(f"a last turn of the assistant that is trained on like any other, so {off!r} of 1 or none")
    return Chat(without_weights(chat.turns[:last]), chat.tools), answer_text(turn)


def without_weights(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns without the keys that say whether they are learned."""
    return [{key: value for key, value in turn.items() if key not in _LEARNED} for turn in turns]


def answer_text(turn: Turn) -> str:
    """Return the text of an answer: its content, or the JSON of the turn if it has more keys."""
    content = turn.get("content", "")
    if turn.keys() <= {"role", "content"} and not content.startswith(_ANSWER):
        return str(content)
    return json.dumps({"role": "assistant", **turn}, ensure_ascii=False, default=str)


def answer_turn(text: str) -> Turn:
    """Return the turn that `answer_text` wrote."""
    turn: Turn = json.loads(text) if text.startswith(_ANSWER) else {"role": "assistant", "content": text}
    return turn


# -- Chat templates ----------------------------------------------------------------------------------------

#: The date that `strftime_now` gives chat templates: always 26 July 2024, the default of Llama 3's template. With today's date,
#: a row would have other tokens tomorrow than in training.
_DATE = {
    **{"%d": "26", "%-d": "26", "%e": "26", "%m": "07", "%-m": "7", "%y": "24", "%Y": "2024", "%j": "208"},
    **{"%a": "Fri", "%A": "Friday", "%b": "Jul", "%B": "July", "%F": "2024-07-26", "%D": "07/26/24", "%x": "07/26/24"},
    **{"%H": "00", "%I": "12", "%M": "00", "%S": "00", "%p": "AM", "%T": "00:00:00", "%X": "00:00:00"},
}
#: The chat template where the tokenizer has none.
PLAIN_CHAT = (
    "{% for turn in messages %}{{ turn['role'] + ': ' + (turn['content'] or '') + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
#: A mark inside each special token that a text spells, so that it is not read as that token. No text has this character.
_BREAK = "\ufdd0"
#: Two answers, which are compared to find the text that ends an answer.
_PROBES = ("1", "2")
#: Keys of turns that change the meaning of a chat: they are refused if the template leaves them out.
_NEEDED = ("tools", "tool_calls", "function_call")
#: Keys for the thoughts of an answer: it is refused if the template leaves them out.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class ChatTemplate:
    """Renders chats by a chat template, and encodes them as token ids.

    Rendered texts have a mark inside each special token that a user's text spells, see `without_marks`.

    Args:
        tokenizer: a Hugging Face tokenizer.
        source: the template, in Jinja.

    Attributes:
        source: the template, in Jinja.
        ending: the text that follows an answer, from the token that ends it if there is one.
        end: the id of that token; ``None`` if there is none.
    """

    def __init__(self, tokenizer: Any, source: str) -> None:
        self.source = source
        self._tokenizer = tokenizer
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted({*special, *tokenizer.all_special_tokens}, key=lambda token: (-len(token), token))
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.ending, self.end = self._found_ending()

    @classmethod
    def of(cls, tokenizer: Any) -> ChatTemplate:
        """Return the tokenizer's own template, which gets the same date every day."""
        source = str(tokenizer.get_chat_template())
        if isinstance(tokenizer.chat_template, Mapping) and "tool_use" in tokenizer.chat_template:
            of_tools = tokenizer.chat_template["tool_use"]
            source = f"{{% if tools %}}{of_tools}{{% else %}}{source}{{% endif %}}"
        if "strftime_now" in source:
            date = "".join(f" | replace({json.dumps(each)}, {json.dumps(value)})" for each, value in _DATE.items())
            source = f"{{% macro strftime_now(format) %}}{{{{ format{date} }}}}{{% endmacro %}}\n{source}"
        return cls(tokenizer, source)

    def _found_ending(self) -> tuple[str, int | None]:
        turns = [{"role": role, "content": "a"} for role in ("system", "user")]
        for before in (turns[1:], turns):
            answers = ({"role": "assistant", "content": probe} for probe in _PROBES)
            try:
                one, other = (self._rendered(Chat([*before, answer]), answered=True) for answer in answers)
            except RowError:  # the template may require other turns
                continue
            after = one[len(one) - common_start(one[::-1], other[::-1]) :]
            known = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
            for token in token_ids(self._tokenizer, [after], special=True)[0]:
                text = str(self._tokenizer.convert_ids_to_tokens(token))
                if token in known and text in after:
                    return after[after.index(text) :], token
            return after, None
        return "", None

    # -- Texts -----------------------------------------------------------------------------------------------

    def put_together(self, chat: Chat, *, answered: bool = False) -> str:
        """Return the text of a chat; unless ``answered``, it ends where the assistant's turn begins.

        Raises:
            RowError: the template refuses the chat.
        """
        whole = self._rendered(chat, answered=answered)
        if not (token := self._special.search(chat.text)):
            return whole
        marked = self._rendered(Chat(self._broken(chat.turns), self._broken(chat.tools)), answered=answered)
        if without_marks(marked) != whole:
            raise RowError(
                "special token in a text",
                f"expected texts without {token[0]!r}, which is a special token, because the model's chat template "
                "changes texts that contain it",
            )
        return marked

    def check_read(self, chat: Chat, prompt: str) -> None:
        """Raise `RowError` if tools, or calls of them, change nothing in the text before the answer."""
        for key in _NEEDED:
            if any(turn.get(key) for turn in chat.turns) and self._leaves_out(chat.turns, [key], chat.tools, prompt):
                raise _left_out(key, "chat")
        if chat.tools and self._leaves_out(chat.turns, [], [], prompt):
            raise _left_out("tools", "chat")

    def _leaves_out(self, turns: Sequence[Turn], keys: Sequence[str], tools: list[Any], whole: str) -> bool:
        """Return whether the text of a chat is the same without some keys of its turns."""
        bare = [{name: value for name, value in turn.items() if name not in keys} for turn in turns]
        bare = [{"content": "", **less} if less != turn else turn for less, turn in zip(bare, turns, strict=True)]
        answered = turns[-1]["role"] == "assistant"
        try:
            return self._rendered(Chat(bare, tools), answered=answered) == without_marks(whole)
        except RowError:
            return False

    def answer(self, chat: Chat, turn: Turn, prompt: str) -> str:
        """Return the text that a turn adds to a chat, without the text that ends it.

        Raises:
            RowError: the template refuses the turn or leaves out a part of it, or the answer cannot follow the prompt.
        """
        whole = self.put_together(Chat([*chat.turns, turn], chat.tools), answered=True)
        for keys in (*((key,) for key in _NEEDED), _THOUGHTS):
            present = [key for key in keys if turn.get(key)]
            if present and self._leaves_out([*chat.turns, turn], present, chat.tools, whole):
                raise _left_out(present[0], "answer")
        before, plain = without_marks(prompt), without_marks(whole)
        if plain.startswith(before):
            text = self._ended(_behind(whole, len(before)))
        else:
            text = self._content(chat, turn, before, plain)
        if not text.strip():
            raise _left_out("content", "answer")
        return text

    def _content(self, chat: Chat, turn: Turn, before: str, whole: str) -> str:
        """Return the content of an answer where the whole chat does not begin with the prompt.

        A template may write another name before the answer, or open a thought, which the content must open, too.
        """
        if more := [key for key in turn if key not in ("role", "content")]:
            raise _left_out(more[0], "answer")
        content = turn.get("content", "")
        other = self._rendered(Chat([*chat.turns, {**turn, "content": _BREAK}], chat.tools), answered=True)
        common = common_start(before, other)  # without the answer, which may begin as the prompt ends
        opened, rest = before[common:], whole[common:].removesuffix(self.ending).strip()
        if content.startswith(opened):
            return _behind(self._broken(content), len(opened))
        if not rest or (
            rest != content.strip() and rest.endswith(content.strip())
        ):  # the template omits the answer, or writes another name before it
            return str(self._broken(content))
        raise RowError(
            "answer does not begin as the template's prompt ends",
            f"expected an answer that begins with {brief(opened)}, because the model's chat template ends the prompt "
            f"with it, got {brief(content)}",
            f"Begin answers with {brief(opened)}.",
        )

    def _ended(self, added: str) -> str:
        """Return the text that a turn adds to a chat, without the text that ends it."""
        end = self._tokenizer.eos_token if self.end is None else self._tokenizer.convert_ids_to_tokens(self.end)
        end = end or _BREAK
        text, found, rest = added.rpartition(end)
        if found and (not rest.strip() or end + rest == self.ending):
            return text
        if self.end is None:
            return added.removesuffix(self.ending)
        raise RowError(
            "answer with another ending",
            f"expected an answer that the model's chat template ends like other answers, with {brief(self.ending)}, "
            f"got {brief(added[-60:])}",
        )

    def _broken(self, value: Any) -> Any:
        """Return the value with a mark inside each special token that its texts spell."""
        if isinstance(value, str):
            return self._special.sub(lambda found: found[0][:1] + _BREAK + found[0][1:], value)
        if isinstance(value, Mapping):
            return {key: self._broken(each) for key, each in value.items()}
        return [self._broken(each) for each in value] if isinstance(value, list | tuple) else value

    def _rendered(self, chat: Chat, *, answered: bool = False) -> str:
        how = {"chat_template": self.source, "add_generation_prompt": not answered, "tokenize": False}
        try:
            return str(self._tokenizer.apply_chat_template(chat.turns, tools=chat.tools or None, **how))
        except Exception as error:  # a template may raise anything
            roles = ", ".join(turn["role"] for turn in chat.turns)
            raise RowError(
                "chat that the template refuses",
                f"expected a chat that the model's chat template accepts, got turns with {roles}",
                f"The model's chat template says {brief(str(error), 200)}.",
            ) from error

    # -- Token ids -------------------------------------------------------------------------------------------

    def has_special(self, text: str) -> bool:
        """Return whether a text with marks has special tokens of the template."""
        return bool(self._special.search(text))

    def without_beginning(self, text: str, count: int) -> str:
        """Return the text without its first ``count`` tokens; with a tokenizer in Python, without as many characters."""
        if not self._tokenizer.is_fast:
            return text[count:]
        how = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        places = self._tokenizer(text, return_offsets_mapping=True, **how)["offset_mapping"]
        return text[max(1, places[count][0]) :] if count < len(places) else ""

    def ids(self, text: str, *, inside: bool = False) -> list[int]:
        """Return the ids of a text with marks: only the template's special tokens are encoded as such."""
        first, *others = text.split(_BREAK)
        pieces = token_ids(self._tokenizer, [first], inside=inside, special=True)
        pieces += token_ids(self._tokenizer, others, inside=True, special=True)
        return [token for piece in pieces for token in piece]


def _left_out(key: str, what: str) -> RowError:
    return RowError(
        f"{key} that the template leaves out",
        f"expected no keys in the {what} that the model's chat template ignores, got {key!r}",
        "Use a model whose template shows it, or write its value into a content.",
    )


def without_marks(text: str) -> str:
    """Return the text without the marks inside the special tokens that it spells."""
    return text.replace(_BREAK, "")


def _behind(text: str, count: int) -> str:
    """Return a text with marks without its first ``count`` characters, where marks do not count."""
    if _BREAK not in text:
        return text[count:]
    places = [place for place, character in enumerate(text) if character != _BREAK]
    return text[places[count] :] if count < len(places) else ""
