"""Generation in use: how a task that is answered by texts is asked, what it writes, and the network that it is written as."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from pydantic import BaseModel, Field

from forgetfree.data.chats import Chat, asked
from forgetfree.data.columns import ColumnNames, choose_texts
from forgetfree.data.prompt_rows import CellError, filled, one_prompt, prompt_columns, whole_chat
from forgetfree.data.prompts import PromptEncoder
from forgetfree.data.rows import Rows
from forgetfree.data.tables import plain
from forgetfree.display import brief, escaped
from forgetfree.errors import DataError, FieldError, UsageError
from forgetfree.json_file import parse_json
from forgetfree.kinds.generation import text_of
from forgetfree.models.generation import Passes, log_probabilities, plain_generation, stops, write
from forgetfree.serve.classification import probability_column, text_rows
from forgetfree.serve.network import Parts, Reading, TaskNetwork, name_labels_
from forgetfree.serve.served_task import UNTIL_THE_END, Ending, ServedTask, Text, check_texts
from forgetfree.tasks import MOST_NEW_TOKENS, Decoding


@dataclass(frozen=True)
class WrittenText:
    """What a task's model writes after one prompt.

    Attributes:
        text: the text.
        task: the task.
        cut_tokens: how many tokens of the prompt are beyond the longest row, and were not read.
        prompt_tokens: how many tokens were read, with instruction and template.
        tokens: how many were written, without that which ends a text.
        ended: whether the text came to its end; else there was room for no further token.
        probabilities: where the task has closed answers, that of each, given that it is one of them.
    """

    text: str
    task: str
    cut_tokens: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    ended: bool = True
    probabilities: Mapping[str, float] = field(default_factory=dict)


class OneWrittenText(BaseModel):
    """What a task writes after one prompt."""

    task: str
    text: str
    cut_tokens: int = Field(description="tokens of the prompt that are beyond the model's longest, and were not read")


class OneChosenText(OneWrittenText):
    """Which of its closed answers a task gives after one prompt."""

    probability: float
    probabilities: dict[str, float]


class WritingTask(ServedTask):
    """A task that is answered by a text, after a prompt or a chat."""

    is_routed, writes = False, True
    deed = "writes texts"

    @property
    def _reads_chats(self) -> bool:
        return self.task.form == "messages"

    @property
    def cell(self) -> str:  # type: ignore[override]
        """What a text may be in a file's row, for messages."""
        return "a text or a chat" if self._reads_chats else "a text"

    @property
    def names(self) -> tuple[str, ...]:
        """What a prompt, or a chat, is called beside its answer."""
        return ("prompt",)

    def columns_of_texts(self, where: str, header: Sequence[str], named: ColumnNames) -> tuple[str, ...]:
        """Return a file's columns of prompts or chats; none where no name is recognised."""
        if named.texts:  # several are one prompt
            return tuple(choose_texts(where, header, ColumnNames((name,)), "single")[0] for name in named.texts)
        return prompt_columns(header, self.task.form)

    def texts_of(self, record: Mapping[str, object], columns: Sequence[str]) -> tuple[str | None, ...]:
        """Return the prompt of a file's row: of several columns, those that are not empty one after another.

        A chat has what the columns beside it say: the text of the system, tools, earlier turns.
        """
        cells = {name: "" if record.get(name) is None and len(columns) > 1 else record.get(name) for name in columns}
        texts = super().texts_of(cells, columns)
        if None in texts:
            return texts
        prompt, beside = one_prompt([text or "" for text in texts]), filled(record, columns)
        if not beside:
            return (prompt,)
        if not self._reads_chats:
            raise UsageError(
                f"Task {self.task.name!r} was trained on prompts with nothing beside them, got {brief(record[beside[0]])} in "
                f"column {beside[0]!r}. Write it into the prompt, or leave the column out."
            )
        try:
            return (whole_chat(chat_of(prompt), {name: record[name] for name in beside}).text,)
        except CellError as error:
            raise UsageError(f"{error}. Change or remove it.") from error

    def written(self, value: object) -> str | None:
        """Return a text, or a chat as JSON."""
        value = plain(value)
        if self._reads_chats and isinstance(value, list | dict):
            return json.dumps(value, ensure_ascii=False, default=str)
        return super().written(value)

    def rows(self, texts: Sequence[Text]) -> Rows:
        """Return prompts as rows; raise ``UsageError`` where one is none, or a chat without a turn to answer."""
        check_texts(texts, chats=True)
        prompts = [self._prompt(text, number) for number, text in enumerate(texts, 1)]
        rows = text_rows(prompts, 1, f"Task {self.task.name!r}")
        return replace(rows, labels=((),) * len(rows))

    def _prompt(self, text: Text, number: int) -> str | tuple[str, ...]:
        if not self._reads_chats:
            if isinstance(text, list):
                raise UsageError(
                    f"Task {self.task.name!r} reads prompts, got a list, {brief(text)}. Give a text; chats are for tasks "
                    "that were trained on messages."
                )
            return text
        alone = text[0] if isinstance(text, tuple) and len(text) == 1 else text
        return alone if isinstance(alone, tuple) else chat_of(alone, number).text

    def check(self, ending: Ending) -> None:
        """Raise ``FieldError`` where a closed answer, which is chosen, is to be written in another way, or cut."""
        if not self.task.closed_answers:
            return
        decoding = ending.decoding or Decoding()
        asked = {
            "stop": bool(ending.stop),
            "num_beams": decoding.num_beams > 1,
            "temperature": decoding.temperature > 0,
        }
        for name in (name for name, is_asked in asked.items() if is_asked):
            raise FieldError(
                f"Task {self.task.name!r} has closed answers, of which the likeliest is given whole: {name} would change "
                "nothing. Leave it out.",
                name,
            )

    def chat(self, chat: Chat) -> str:
        """Return a chat as JSON; where prompts are read that are no chats, the text of the one turn."""
        turns = chat.turns
        if turns[-1]["role"] == "assistant":
            raise UsageError("The last message is the assistant's, and nothing is left to answer. End with the user's.")
        if self._reads_chats:
            return chat.text
        if chat.tools:
            raise FieldError(
                f"Task {self.task.name!r} was trained on single prompts, without tools. Leave them out.", "tools"
            )
        if len(turns) > 1 or turns[0]["role"] != "user" or turns[0].keys() != {"role", "content"}:
            raise UsageError(
                f"Task {self.task.name!r} was trained on single prompts, got the messages of "
                f"{brief([turn['role'] for turn in turns], 200)}. Give one message, of the user, with a content alone; the "
                "task's instruction is put before it."
            )
        return str(turns[0]["content"])

    def read(
        self, model: Any, rows: Any, *, batch_size: int, precision: str, ending: Ending = UNTIL_THE_END
    ) -> list[WrittenText]:
        """Return what a model writes after each prompt."""
        most = self.task.max_new_tokens if ending.max_tokens is None else ending.max_tokens
        if not 1 <= most <= MOST_NEW_TOKENS:
            raise UsageError(f"max_tokens must be from 1 to {MOST_NEW_TOKENS:,}, got {most}.")
        decoding = ending.decoding or self.task.decoding
        if faults := decoding.faults():
            raise UsageError(f"{'; '.join(faults)}.")
        task = replace(self.task, max_new_tokens=most, stop=(*self.task.stop, *ending.stop), decoding=decoding)
        self.check(ending)
        passes = Passes(batch_size=batch_size, precision=precision)
        if task.closed_answers:
            longest = max(map(len, rows.allowed))
            if most < longest and ending.max_tokens is not None:
                raise FieldError(
                    f"Task {task.name!r} has closed answers, which are given whole and have up to {longest} tokens, got "
                    f"max_tokens={most}. Ask for that many, or leave it out.",
                    "max_tokens",
                )
            return self._chosen(model, rows, passes)
        found = []
        for prompt, ids in zip(rows.prompts, write(task, model, rows, passes), strict=True):
            text = text_of(rows.tokenizer, ids, task.stop)
            ended = len(ids) < min(most, model.most_after(prompt)) or stops(rows.tokenizer, ids, task.stop)
            found.append(WrittenText(text, self.task.name, 0, len(prompt), len(ids), ended))
        return found

    def _chosen(self, model: Any, rows: Any, passes: Passes) -> list[WrittenText]:
        """Return the likeliest of the closed answers after each prompt, with the probabilities of all."""
        found, closed = log_probabilities(model, rows, passes), self.task.closed_answers
        return [
            WrittenText(
                closed[best],
                self.task.name,
                prompt_tokens=len(prompt),
                tokens=len(rows.allowed[best]),
                probabilities=dict(zip(closed, of_row, strict=True)),
            )
            for prompt, best, of_row in zip(
                rows.prompts, found.argmax(1).tolist(), found.softmax(1).tolist(), strict=True
            )
        ]

    def answers(self, texts: Sequence[Text], said: Iterable[WrittenText], cut: Iterable[int]) -> list[WrittenText]:
        """Return what was written after each prompt."""
        return [replace(written, cut_tokens=lost) for written, lost in zip(said, cut, strict=True)]

    def network(self, parts: Parts) -> TaskNetwork:
        """Return the language model, with a chat template that holds the form of the task's prompts."""
        return writing_network(parts)

    def lines(self, texts: tuple[str, ...], answer: WrittenText) -> list[str]:
        """Return what was written, its probability among closed answers, and the prompt."""
        share = [f"{answer.probabilities[answer.text]:.3f}"] if answer.probabilities else []
        return ["\t".join([escaped(answer.text), *share, escaped(one_prompt(texts))])]

    def json(self, texts: tuple[str, ...], answer: WrittenText) -> dict[str, Any]:
        """Return the prompt, what was written, and how much of the prompt was not read."""
        return {"prompt": one_prompt(texts), **self.response(answer).model_dump()}

    def response(self, answer: WrittenText) -> OneWrittenText:
        """Return the answer as the server sends it."""
        said: dict[str, Any] = {"task": answer.task, "text": answer.text, "cut_tokens": answer.cut_tokens}
        if not (shares := dict(answer.probabilities)):
            return OneWrittenText(**said)
        return OneChosenText(**said, probability=shares[answer.text], probabilities=shares)

    def columns(self) -> tuple[str, ...]:
        """Return task, text, and the probabilities of closed answers."""
        closed = self.task.closed_answers
        return ("task", "text", *(["probability"] if closed else []), *map(probability_column, closed))

    def cells(self, answer: WrittenText) -> Mapping[str, Any]:
        """Return task, text, and the probabilities of closed answers."""
        shares = answer.probabilities
        more = {"probability": shares[answer.text]} if shares else {}
        return {"task": answer.task, "text": answer.text, **more, **{probability_column(a): shares[a] for a in shares}}


def chat_of(chat: str | list[Any], number: int = 1) -> Chat:
    """Return a chat up to the turn that is to be answered; a text that is no JSON of a chat is a turn of the user.

    A last turn of the assistant, as rows of training have it, is left out: it is what is asked for.

    Args:
        chat: a text, which may be the JSON of turns, or of an object with messages and tools; or turns.
        number: of the chat, for messages.

    Raises:
        UsageError: it is no chat, or has no turn to answer.
    """
    if isinstance(chat, str):
        given = _parsed(chat)
        is_chat = isinstance(given, dict) and "messages" in given
        if not is_chat and not (isinstance(given, list) and given and all(isinstance(turn, dict) for turn in given)):
            return Chat([{"role": "user", "content": chat}])
        chat = given
    try:
        whole = Chat.of(chat)
    except ValueError as error:
        raise UsageError(
            f'Chat {number}: expected {error}, got {brief(chat)}. Give [{{"role": "user", "content": "…"}}].'
        ) from error
    turns = asked(whole.turns)
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns:
        raise UsageError(f"Chat {number} has no turn to answer, got {brief(chat)}. Give one of the user.")
    return Chat(turns, whole.tools)


def _parsed(text: str) -> Any:
    """Return what a text is as JSON; nothing where it is none."""
    try:
        return parse_json(text) if text.lstrip().startswith(("[", "{")) else None
    except (ValueError, RecursionError):
        return None


# -- As a network of transformers ------------------------------------------------------------------------


def writing_network(parts: Parts) -> TaskNetwork:
    """Return the language model of a task that writes texts.

    Whoever asks it by a chat template, such as ``pipeline("text-generation")``, asks as the task's prompts do: its tokenizer's
    template holds their instruction and form. It writes as the task's texts are, up to the token that ends them.
    """
    loaded, task = parts.loaded, parts.origin.task
    encoder = cast(PromptEncoder, loaded.encoder(task))
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = encoder.chat_template
    tokenizer.padding_side = "right" if loaded.writes_apart else "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(loaded.pad)
    backbone: Any = loaded.model.backbone
    generation = plain_generation(tokenizer, loaded.pad, backbone.config)
    decoding = task.decoding
    generation.update(eos_token_id=encoder.end, max_new_tokens=task.max_new_tokens, num_beams=decoding.num_beams)
    generation.update(do_sample=decoding.temperature > 0)
    if decoding.temperature:
        generation.update(temperature=decoding.temperature, top_p=decoding.top_p, top_k=0)
    loader = "AutoModelForSeq2SeqLM" if loaded.writes_apart else "AutoModelForCausalLM"
    usual = _reads_alike(tokenizer, encoder, chats=task.form == "messages")
    name_labels_(backbone.config, ())
    return TaskNetwork(backbone, tokenizer, Reading(loader, encoder, usual=usual), generation)


def _reads_alike(tokenizer: Any, encoder: PromptEncoder, *, chats: bool) -> bool:
    """Return whether a tokenizer, asked by its chat template, makes the same token ids of prompts as an encoder."""
    texts = ("a", "What is it?", "é, 漢,\nand 12 more.", " a", "a ", "\n\na\n")
    probes = [[{"role": "user", "content": text}] for text in texts]
    if chats:
        probes.append([*probes[0], {"role": "assistant", "content": " b\n"}, *probes[0]])
        probes.append([{"role": "system", "content": "Say it. "}, *probes[0]])
    return all(_reads_chat_alike(tokenizer, encoder, each, chats=chats) for each in probes)


def _reads_chat_alike(tokenizer: Any, encoder: PromptEncoder, turns: Sequence[dict[str, str]], *, chats: bool) -> bool:
    """Return whether both make the same token ids of a chat; one that a template refuses, or that is cut, does not count."""
    prompt = json.dumps(turns, ensure_ascii=False) if chats else turns[0]["content"]
    try:
        (row,) = encoder(Rows((prompt,), (), ((),)))
    except DataError:
        return True
    ids = [~token if token < 0 else token for token in row]
    return bool(encoder.cut[-1]) or ids_of_chat(tokenizer, turns, apart=encoder.apart) == ids


def ids_of_chat(tokenizer: Any, turns: Sequence[Mapping[str, str]], *, apart: bool) -> list[int]:
    """Return the token ids of a chat as callers of transformers make them; a decoder apart needs those around texts, too."""
    text = tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=apart)["input_ids"]
    return ids
