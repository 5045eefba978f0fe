"""Generation: the language model itself writes a text that answers a prompt.

A row has ``prompt`` and ``target``, or columns with a common name; the target is a text, or a list of texts that are all right,
and the first is learned. Or it has ``messages``, a chat, and the last turn of the assistant is the target: see
`forgetfree.data.prompt_rows`. ``source.json`` may give ``instruction``, ``template``, ``metric``, ``max_new_tokens``, ``stop``
and ``closed_answers``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from forgetfree import registry
from forgetfree.data.bad_rows import DataFaults
from forgetfree.data.chats import Chat, without_weights
from forgetfree.data.columns import ColumnNames, choose_texts
from forgetfree.data.prompt_rows import (
    CellError,
    PromptReader,
    are_prompts,
    closed_answers,
    columns_beside,
    one_prompt,
    prompt_columns,
    whole_chat,
)
from forgetfree.data.rows import Rows, TaskRows, evenly, read_rows
from forgetfree.data.tables import TaskTables, plain
from forgetfree.display import brief
from forgetfree.errors import DataError, FieldError, UsageError
from forgetfree.json_file import check, parse_json
from forgetfree.kinds.kind import (
    AS_LEARNED,
    Form,
    GenerationOptions,
    Kind,
    Text,
    Wrote,
    check_texts,
    kind_of,
    text_rows,
)
from forgetfree.results.answers import TextAnswers
from forgetfree.tasks import MOST_NEW_TOKENS, Scenario, TaskDefinition

if TYPE_CHECKING:
    from torch import Tensor

    from forgetfree.data.examples import Examples
    from forgetfree.data.prompts import EncodedTexts, PromptEncoder
    from forgetfree.kinds.networks import Parts, TaskNetwork
    from forgetfree.models.loading import LoadedModel
    from forgetfree.results.answers import Answers

#: The number of characters of a prompt that reports keep.
_SHOWN = 500
#: The packages that `forgetfree.results.text_metrics` uses.
_PACKAGES = ("rapidfuzz", "rouge_score", "sacrebleu")
#: The most training rows on which a constant answer is scored.
_SCORED = 500


@dataclass(frozen=True)
class WrittenText:
    """The text that a task's model writes after one prompt.

    Attributes:
        task: the task.
        text: the text.
        cut_tokens: the number of tokens of the prompt that were cut off, as the row is longer than ``max_length``.
        prompt_tokens: the number of tokens that were read, with instruction and template.
        tokens: the number of tokens that were written, without the token that ends a text.
        ended: whether the text is complete; otherwise there was no room for a further token.
        probabilities: for closed answers, the probability of each, given that the answer is one of them.
    """

    task: str
    text: str
    cut_tokens: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    ended: bool = True
    probabilities: Mapping[str, float] = field(default_factory=dict)


class Generation(Kind):
    """A text that answers a prompt."""

    forms: ClassVar[Mapping[str, Form]] = {
        "generation": ("a prompt, and the text that answers it, or several that are right", ("prompt", "target")),
        "messages": ("a chat, whose last turn of the assistant is learned", ("messages",)),
    }
    metrics = tuple(registry.TEXT_METRICS)
    label_of = "token of a text"
    answer = "text"
    readout = "generate"
    max_length = 1024  # instructions, and texts to summarise, are long
    floors = ("nearest_row",)
    settings = (*Kind.settings, "instruction", "template", "max_new_tokens", "stop", "closed_answers")
    checked_rows = 8  # one row takes as long as many labels, and has as many tokens

    # -- Rows ------------------------------------------------------------------------------------------------

    def recognises(self, task: TaskTables) -> bool:
        """Return whether the columns hold prompts and answers, or chats."""
        return are_prompts(task)

    def read(self, task: TaskTables) -> TaskRows:
        """Return a task with its rows."""
        faults, rows, phrases = DataFaults(), dict[str, Rows](), dict[str, str]()
        for split, table in task.tables.items():
            if reader := faults.attempt(PromptReader, table, task):
                phrases.setdefault(reader.form, reader.phrase)
                rows[split] = reader.rows()
                faults.add_rows(table.bad, len(rows[split]), task.skip_bad_rows)
        if not phrases:
            faults.report()
        if len(phrases) > 1:
            told = "has chats in one split, and prompts with their answers in another. Write all alike."
            faults.catch(DataError(f"Task {task.name!r} {told}"))
        form, phrase = next(iter(phrases.items()))
        definition = faults.demand(self._definition, task, form)
        return read_rows(task, definition, rows, [phrase], faults=faults)

    def _definition(self, task: TaskTables, form: str) -> TaskDefinition:
        if missing := [package for package in _PACKAGES if find_spec(package) is None]:
            raise UsageError(
                f"Task {task.name!r} is answered by texts, which {', '.join(_PACKAGES)} score, and {missing[0]} is not "
                "installed: pip install 'forgetfree[texts]'."
            )
        source = task.source
        closed = closed_answers(task)
        # Hardly any free text equals a right one, however much was learned.
        metric = "exact_match" if closed else self.metrics[0]
        known = task.registered or TaskDefinition(task.name, form, (), metric=metric)
        values = {key: source[key] for key in ("instruction", "template", "metric", "max_new_tokens") if key in source}
        stop = source.get("stop", known.stop)
        values |= {"stop": (stop,) if isinstance(stop, str) else tuple(stop), "closed_answers": closed}
        definition = replace(known, kind=form, **values)
        if faults := registry.faults_of(definition):
            raise DataError(f"{task.folder / 'source.json'}: {faults[0]}.")
        return definition

    def groups_of(self, label: Any) -> tuple[int]:
        """Return one group for all rows: ``--shots`` counts rows of a task."""
        return (0,)

    def group_name(self, task: TaskDefinition, group: int, count: int) -> str:
        """Return the rows of a task."""
        return "row" + "s" * (count > 1)

    def faults(self, task: TaskDefinition) -> list[str]:
        """Return a phrase for each fault of template, instruction, length, stop texts and closed answers."""
        faults = []
        if task.labels:
            faults.append(f"labels must be none where answers are texts, got {brief(task.labels, 200)}")
        if task.template and task.template.count("{prompt}") != 1:
            faults.append(f"template must hold {{prompt}} once, got {brief(task.template, 200)}")
        if task.instruction and task.template and "{instruction}" not in task.template:
            faults.append(f"template must hold {{instruction}}, since there is one, got {brief(task.template, 200)}")
        if not 1 <= task.max_new_tokens <= MOST_NEW_TOKENS:
            faults.append(f"max_new_tokens must be from 1 to {MOST_NEW_TOKENS:,}, got {task.max_new_tokens}")
        if task.template and task.form == "messages":
            faults.append("template must be left out for chats, which the tokenizer's chat template puts together")
        if not all(task.stop):
            faults.append(f"stop must hold no empty text, got {brief(task.stop, 200)}")
        closed = task.closed_answers
        if closed and (
            len({*closed}) < max(2, len(closed)) or not all(text and text == text.strip() for text in closed)
        ):
            faults.append(
                "closed_answers must be at least two texts, all different, without white space around them, got "
                f"{brief(closed, 200)}"
            )
        return faults

    # -- Models ----------------------------------------------------------------------------------------------

    def check_readout(self, task: TaskDefinition, readout: str) -> None:
        """Raise ``UsageError`` if the readout does not generate texts."""
        if readout != "generate":
            raise UsageError(
                f"Task {task.name!r} is answered by texts, and the readout {readout!r} gives labels. Use --readout generate, "
                "with a causal language model or an encoder-decoder."
            )

    def check_scenario(self, tasks: Sequence[TaskDefinition], scenario: Scenario) -> None:
        """Raise ``UsageError`` if the scenario withholds the task, and other tasks are not answered by texts."""
        other = next((task.name for task in tasks if kind_of(task).answer != self.answer), None)
        if scenario != "task" and other is not None:
            first = next(task.name for task in tasks if kind_of(task).answer == self.answer)
            raise UsageError(
                f"scenario={scenario} withholds the task, and {first!r} is answered by texts, {other!r} by labels. Use "
                "scenario=task, or tasks of one kind."
            )

    def outputs(self, task: TaskDefinition, loaded: LoadedModel) -> int:
        """Return the size of the vocabulary."""
        backbone: Any = loaded.model.backbone
        return int(backbone.config.vocab_size)

    def encoder(self, task: TaskDefinition, loaded: LoadedModel) -> PromptEncoder:
        """Return the encoder of prompts, with the answers marked."""
        from forgetfree.data.prompts import PromptEncoder

        return PromptEncoder(loaded.tokenizer, task, loaded.max_length, closed=loaded.writes_apart)

    def encode(
        self, task: TaskDefinition, rows: Rows, encoder: Any, *, label: int, pad: int, first: int = 0
    ) -> EncodedTexts:
        """Return the rows as token ids, with their right texts."""
        from forgetfree.data.prompts import EncodedTexts

        read = encoder.read(rows)
        encoded = EncodedTexts.of([row.ids for row in read], [row.labels for row in read], label, pad, task.kind)
        return replace(
            encoded,
            right=[row.right for row in read],
            asked=[_asked(prompt, task) for prompt in rows.first],
            tokenizer=encoder.tokenizer,
            end=encoder.end,
            longer={i: row.longer for i, row in enumerate(read) if row.longer},
            allowed=encoder.allowed,
        )

    def collected(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each token ``(n, 1)``: logits of the whole vocabulary would fill the memory."""
        from torch.nn import functional as F

        return F.cross_entropy(logits.float(), labels.to(logits.device), reduction="none").unsqueeze(1)

    def answers(self, task: TaskDefinition, logits: Tensor, labels: Tensor, rows: Examples | None) -> TextAnswers:
        """Return answers with the losses from `collected`, and no texts yet: `with_texts` adds them."""
        texts: EncodedTexts | None = rows  # type: ignore[assignment]
        counts = np.array([] if texts is None else texts.counts, np.int64)
        losses = logits.reshape(-1).numpy().astype(np.float32)
        none = np.array([], np.int64)
        right, asked = ((), ()) if texts is None else (texts.right, texts.asked)
        return TextAnswers(none, none, losses, counts, (), right, asked)

    def with_texts(
        self, answers: Answers, task: TaskDefinition, model: Any, rows: Any, wrote: Wrote | None = None, **passes: Any
    ) -> TextAnswers:
        """Return answers with the text that a model writes after each prompt, or with the likeliest allowed answer."""
        from forgetfree.kinds.decoding import Passes, log_probabilities, write

        assert isinstance(answers, TextAnswers)
        if task.closed_answers:
            return _chosen(answers, log_probabilities(model, rows, Passes(**passes)).numpy(), task, rows)
        return _filled(answers, write(task, model, rows, Passes(**passes), wrote), rows.tokenizer, task.stop)

    def quality(self, task: TaskDefinition, logits: Tensor, rows: Examples) -> tuple[float, float]:
        """Return minus the mean loss per token, in nats, twice: generating texts for every comparison takes too long."""
        loss = float(logits.double().mean())
        return -loss, -loss

    def unanswered(self, task: TaskDefinition, train: Examples, rows: Examples, width: int) -> TextAnswers:
        """Return the same text as the answer to all rows: the best constant on at most 500 training rows."""
        import torch

        some = train.subset(evenly(len(train), _SCORED))
        learned, asked = (
            self.answers(task, torch.zeros(sum(each.counts), device="cpu"), each.labels, each) for each in (some, rows)
        )
        return replace(asked, texts=[learned.best_constant(task.metric)] * len(rows))

    def kept_answers(
        self, task: TaskDefinition, arrays: Mapping[str, npt.NDArray[Any]], rows: int | None = None
    ) -> TextAnswers:
        """Return answers from the arrays that `TextAnswers.tensors` returned."""
        answers = TextAnswers.of_tensors(arrays)
        check("texts", len(answers.right), rows in (None, len(answers.right)), f"{rows} rows")
        return answers

    # -- In use ----------------------------------------------------------------------------------------------

    def names(self, task: TaskDefinition) -> tuple[str, ...]:
        """Return the name of a prompt, or a chat, as it is shown beside the answer."""
        return ("prompt",)

    def columns_of_texts(
        self, task: TaskDefinition, where: str, header: Sequence[str], named: ColumnNames
    ) -> tuple[str, ...]:
        """Return a file's columns of prompts or chats; none where no name is recognised."""
        if named.texts:  # several are one prompt
            return tuple(choose_texts(where, header, ColumnNames((name,)), "single")[0] for name in named.texts)
        return prompt_columns(header, task.form)

    def texts_of(
        self, task: TaskDefinition, record: Mapping[str, object], columns: Sequence[str]
    ) -> tuple[str | None, ...]:
        """Return the prompt of a file's row: the texts of the columns that are not empty, one after another.

        A chat also gets the contents of the columns beside it: the text of the system, tools, earlier turns.
        """
        cells = {name: "" if record.get(name) is None and len(columns) > 1 else record.get(name) for name in columns}
        texts = super().texts_of(task, cells, columns)
        if None in texts:
            return texts
        prompt, beside = one_prompt([text or "" for text in texts]), columns_beside(record, columns)
        if not beside:
            return (prompt,)
        if not _reads_chats(task):
            raise UsageError(
                f"Task {task.name!r} was trained on prompts with nothing beside them, got {brief(record[beside[0]])} in "
                f"column {beside[0]!r}. Write it into the prompt, or leave the column out."
            )
        try:
            return (whole_chat(chat_of(prompt), {name: record[name] for name in beside}).text,)
        except CellError as error:
            raise UsageError(f"{error}. Change or remove it.") from error

    def text_of_cell(self, task: TaskDefinition, value: object) -> str | None:
        """Return a text, or a chat as JSON."""
        value = plain(value)
        if _reads_chats(task) and isinstance(value, list | dict):
            return json.dumps(value, ensure_ascii=False, default=str)
        return super().text_of_cell(task, value)

    def cell_type(self, task: TaskDefinition) -> str:
        """Return the types that a text cell of a file may have, for messages."""
        return "a text or a chat" if _reads_chats(task) else "a text"

    def rows(self, task: TaskDefinition, texts: Sequence[Text]) -> Rows:
        """Return prompts as rows; raise ``UsageError`` if one is no prompt, or a chat without a turn to answer."""
        check_texts(texts, chats=True)
        prompts = [_prompt(task, text, number) for number, text in enumerate(texts, 1)]
        rows = text_rows(prompts, 1, f"Task {task.name!r}")
        return replace(rows, labels=((),) * len(rows))

    def text_of_chat(self, task: TaskDefinition, chat: Chat) -> str:
        """Return a chat as JSON; for a task on single prompts, the text of its only turn."""
        turns = chat.turns
        if turns[-1]["role"] == "assistant":
            raise UsageError("The last message is the assistant's, and nothing is left to answer. End with the user's.")
        if _reads_chats(task):
            return chat.text
        if chat.tools:
            raise FieldError(
                f"Task {task.name!r} was trained on single prompts, without tools. Leave them out.", "tools"
            )
        if len(turns) > 1 or turns[0]["role"] != "user" or turns[0].keys() != {"role", "content"}:
            raise UsageError(
                f"Task {task.name!r} was trained on single prompts, got the messages of "
                f"{brief([turn['role'] for turn in turns], 200)}. Give one message, of the user, with a content alone; the "
                "task's instruction is put before it."
            )
        return str(turns[0]["content"])

    def output(
        self,
        task: TaskDefinition,
        model: Any,
        rows: Any,
        logits: Callable[[], Tensor],
        *,
        options: GenerationOptions = AS_LEARNED,
        **passes: Any,
    ) -> list[WrittenText]:
        """Return the text that a model writes after each prompt."""
        from forgetfree.kinds.decoding import Passes, log_probabilities, stops, write

        most = task.max_new_tokens if options.max_tokens is None else options.max_tokens
        if not 1 <= most <= MOST_NEW_TOKENS:
            raise UsageError(f"max_tokens must be from 1 to {MOST_NEW_TOKENS:,}, got {most}.")
        if task.closed_answers:
            if options.stop:
                raise FieldError(
                    f"Task {task.name!r} has closed answers, of which the likeliest is given whole: stop would change "
                    "nothing. Leave it out.",
                    "stop",
                )
            longest = max(map(len, rows.allowed))
            if most < longest and options.max_tokens is not None:
                raise FieldError(
                    f"Task {task.name!r} has closed answers, which are given whole and have up to {longest} tokens, got "
                    f"max_tokens={most}. Ask for that many, or leave it out.",
                    "max_tokens",
                )
            return _replies_of_closed(task, rows, log_probabilities(model, rows, Passes(**passes)))
        task = replace(task, max_new_tokens=most, stop=(*task.stop, *options.stop))
        found = []
        for prompt, ids in zip(rows.prompts, write(task, model, rows, Passes(**passes)), strict=True):
            text = text_of(rows.tokenizer, ids, task.stop)
            ended = len(ids) < min(most, model.most_after(prompt)) or stops(rows.tokenizer, ids, task.stop)
            found.append(WrittenText(task.name, text, 0, len(prompt), len(ids), ended))
        return found

    def replies(
        self, task: TaskDefinition, texts: Sequence[Text], output: Iterable[WrittenText], cut: Iterable[int]
    ) -> list[WrittenText]:
        """Return the text written after each prompt."""
        return [replace(written, cut_tokens=lost) for written, lost in zip(output, cut, strict=True)]

    def network(self, task: TaskDefinition, parts: Parts) -> TaskNetwork:
        """Return the language model, with a chat template that holds the form of the task's prompts."""
        from forgetfree.kinds.networks import writing_network

        return writing_network(parts)

    def fields(self, task: TaskDefinition) -> tuple[str, ...]:
        """Return the text, and its probability where answers are closed."""
        return ("text", "probability") if task.closed_answers else ("text",)

    def json(self, task: TaskDefinition, answer: WrittenText, texts: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the prompt, the text written, the number of tokens cut off, and the probabilities of closed answers."""
        shown: dict[str, Any] = {"prompt": one_prompt(texts)} if texts else {}
        shown |= {"task": answer.task, "text": answer.text, "cut_tokens": answer.cut_tokens}
        if shares := dict(answer.probabilities):
            shown |= {"probability": shares[answer.text], "probabilities": shares}
        return shown


def _asked(prompt: str, task: TaskDefinition) -> str:
    """Return the part of a prompt that a report shows: its beginning; for a chat, the beginning of the last turn."""
    if task.form == "messages":
        prompt = str(Chat.of(prompt).turns[-1].get("content", ""))
    return prompt[:_SHOWN]


def _filled(
    answers: TextAnswers, written: Sequence[Sequence[int]], tokenizer: Any, stop: Sequence[str] = ()
) -> TextAnswers:
    """Return answers with the token ids of their texts, and the texts, which a tokenizer decodes."""
    ids = np.array([token for each in written for token in each], np.int64)
    texts = [text_of(tokenizer, each, stop) if each else "" for each in written]
    return replace(answers, ids=ids, lengths=np.array([len(each) for each in written], np.int64), texts=texts)


def _chosen(answers: TextAnswers, logits: npt.NDArray[Any], task: TaskDefinition, rows: EncodedTexts) -> TextAnswers:
    """Return answers with the likeliest allowed text of each row; ``logits`` are the log-probabilities of all."""
    chosen, closed = logits.argmax(1), task.closed_answers
    texts = [closed[i] for i in chosen]
    labels = [
        closed.index(text if text in right else right[0]) for text, right in zip(texts, answers.right, strict=True)
    ]
    filled = _filled(answers, [rows.allowed[i] for i in chosen], rows.tokenizer)
    return replace(filled, texts=texts, logits=logits, labels=np.array(labels, np.int64))


def text_of(tokenizer: Any, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """Return token ids as a text, up to the first ``stop`` text in it."""
    from forgetfree.kinds.decoding import special_stops

    ids, special = list(ids), special_stops(tokenizer, stop)
    ids = ids[: next((place for place, token in enumerate(ids) if token in special), len(ids))]
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text[: min((at for end in stop if (at := text.find(end)) >= 0), default=len(text))].strip()


# -- Prompts and chats of users ----------------------------------------------------------------------------


def _reads_chats(task: TaskDefinition) -> bool:
    return task.form == "messages"


def _replies_of_closed(task: TaskDefinition, rows: EncodedTexts, logits: Tensor) -> list[WrittenText]:
    """Return the likeliest closed answer after each prompt; ``logits`` are the log-probabilities of all."""
    found, closed = (
        zip(rows.prompts, logits.argmax(1).tolist(), logits.softmax(1).tolist(), strict=True),
        task.closed_answers,
    )
    return [
        WrittenText(
            task.name,
            closed[best],
            prompt_tokens=len(prompt),
            tokens=len(rows.allowed[best]),
            probabilities=dict(zip(closed, shares, strict=True)),
        )
        for prompt, best, shares in found
    ]


def _prompt(task: TaskDefinition, text: Text, number: int) -> str | tuple[str, ...]:
    """Return a text, or a chat as JSON; ``number`` is for messages."""
    if not _reads_chats(task):
        if isinstance(text, list):
            raise UsageError(
                f"Task {task.name!r} reads prompts, got a list, {brief(text)}. Give a text; chats are for tasks that were "
                "trained on messages."
            )
        return text
    alone = text[0] if isinstance(text, tuple) and len(text) == 1 else text
    return alone if isinstance(alone, tuple) else chat_of(alone, number).text


def chat_of(chat: str | list[Any], number: int = 1) -> Chat:
    """Return a chat up to the turn to be answered; a text that is not the JSON of a chat becomes a turn of the user.

    Last turns of the assistant, as in training rows, are left out: they are the answer.

    Args:
        chat: a text, which may be the JSON of turns, or of an object with messages and tools; or turns.
        number: the number of the chat, for messages.

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
    turns = without_weights(whole.turns)
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns:
        raise UsageError(f"Chat {number} has no turn to answer, got {brief(chat)}. Give one of the user.")
    return Chat(turns, whole.tools)


def _parsed(text: str) -> Any:
    """Return the JSON value of a text that begins with a bracket or brace; ``None`` if there is none."""
    try:
        return parse_json(text) if text.lstrip().startswith(("[", "{")) else None
    except (ValueError, RecursionError):
        return None
