"""Generation: a text that answers a prompt, written by the language model itself.

A row has ``prompt`` and ``target``, or columns of a common name; the target is a text, or a list of texts that are all right,
of which the first is learned. Or it has ``messages``, a chat, whose last turn of the assistant is the target. ``source.json``
may give ``instruction``, ``template``, ``metric``, ``max_new_tokens``, ``stop`` and ``closed_answers``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from forgetfree import registry
from forgetfree.data.bad_rows import BadRow, DataFaults, refusal
from forgetfree.data.columns import are_labelled_texts
from forgetfree.data.rows import Rows, TaskRows, read_rows
from forgetfree.data.sampling import evenly
from forgetfree.data.tables import Table, TaskTables, plain
from forgetfree.display import brief, is_text
from forgetfree.errors import DataError, UsageError
from forgetfree.json_file import parse_json
from forgetfree.kinds.kind import Form, TaskKind, Wrote
from forgetfree.results.answers import TextAnswers
from forgetfree.tasks import Scenario, TaskDefinition

if TYPE_CHECKING:
    from torch import Tensor

    from forgetfree.data.examples import Examples
    from forgetfree.data.prompts import EncodedTexts, PromptEncoder
    from forgetfree.models.loading import LoadedModel
    from forgetfree.results.answers import Answers

#: Columns of prompts and of the texts that answer them, by preference; several of a prompt stand one after another.
_COLUMNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("prompt",), "target"),
    (("prompt",), "completion"),
    (("prompt",), "response"),
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
#: How many characters of a prompt are kept for reports.
_SHOWN = 500
#: How many training rows they are scored on.
_SCORED = 500


class Generation(TaskKind):
    """A text that answers a prompt."""

    forms: ClassVar[Mapping[str, Form]] = {
        "generation": ("a prompt, and the text that answers it, or several that are right", ("prompt", "target")),
        "messages": ("a chat, whose last turn of the assistant is learned", ("messages",)),
    }
    metrics = tuple(registry.TEXT_METRICS)
    has_label_words = False
    has_word_floor = False
    readout = "generate"
    served_as = "generation"
    checked_rows = 8  # each takes as long as many labels, and holds as many tokens

    # -- Rows ------------------------------------------------------------------------------------------------

    def recognises(self, task: TaskTables) -> bool:
        """Return whether the columns are those of prompts and answers, or of chats.

        Texts with a label beside them, and rows whose label column the user names, are to be classified.
        """
        names, pair = set(task.train.columns), _pair_of(set(task.train.columns))
        if task.columns.label or names & {"label", "labels"}:
            return False
        answer = [] if pair is None else [pair[1]]
        return bool(_chat_of(names) or pair) and not are_labelled_texts(names, beside=answer)

    def check_header(self, task: TaskTables) -> None:
        """Raise ``DataError`` for columns that are missing."""
        faults = DataFaults()
        for head in task.tables.values():
            faults.attempt(_reader, head, task)
        faults.report()

    def read(self, task: TaskTables) -> TaskRows:
        """Return a task with its rows."""
        faults, rows, columns = DataFaults(), dict[str, Rows](), dict[tuple[str, ...], str]()
        for split, table in task.tables.items():
            if reader := faults.attempt(_reader, table, task):
                columns[reader.columns], rows[split] = reader.form, reader.rows()
                faults.add(table.bad, len(rows[split]), task.skip_bad_rows)
        faults.report()
        if len(set(columns.values())) > 1:
            raise DataError(
                f"Task {task.name!r} has chats in one split, and prompts with their answers in another. Write all alike."
            )
        used, form = next(iter(columns.items()))
        said = [] if used in (("prompt", "target"), ("messages",)) else [_told(used, form)]
        return read_rows(task, self._definition(task, form), rows, said)

    def _definition(self, task: TaskTables, form: str) -> TaskDefinition:
        source = task.source
        known = task.registered or TaskDefinition(task.name, form, (), metric=self.metrics[0])
        given = {key: source[key] for key in ("instruction", "template", "metric", "max_new_tokens") if key in source}
        stop = source.get("stop", known.stop)
        given |= {"stop": (stop,) if isinstance(stop, str) else tuple(stop), "closed_answers": _closed(task)}
        definition = replace(known, kind=form, **given)
        if faults := self.faults(definition):
            raise DataError(f"{task.folder / 'source.json'}: {faults[0]}.")
        return definition

    def groups(self, labels: Sequence[Any]) -> list[int]:
        """Return one group for all rows: ``--shots`` counts rows of a task."""
        return [0] * len(labels)

    def group_name(self, task: TaskDefinition, group: int, count: int) -> str:
        """Return the rows of a task."""
        return "row" + "s" * (count > 1)

    # -- Models ----------------------------------------------------------------------------------------------

    def faults(self, task: TaskDefinition) -> list[str]:
        """Return a phrase for each fault of a definition."""
        return task.faults() or registry.unknown_names(task)

    def check_readout(self, task: TaskDefinition, readout: str) -> None:
        """Raise ``UsageError`` if the readout writes no texts."""
        if readout != "generate":
            raise UsageError(
                f"Task {task.name!r} is answered by texts, and the readout {readout!r} gives labels. Use --readout generate, "
                "with a causal language model or an encoder-decoder."
            )

    def check_scenario(self, tasks: Sequence[TaskDefinition], scenario: Scenario) -> None:
        """Raise ``UsageError`` where tasks with labels are to be told from such with texts by nobody."""
        other = next((task.name for task in tasks if not task.writes), None)
        if scenario != "task" and other is not None:
            first = next(task.name for task in tasks if task.writes)
            raise UsageError(
                f"scenario={scenario} withholds the task, and {first!r} is answered by texts, {other!r} by labels. Use "
                "scenario=task, or tasks of one kind."
            )

    def encoder(self, task: TaskDefinition, loaded: LoadedModel) -> PromptEncoder:
        """Return what makes token ids of prompts, with the answers marked."""
        from forgetfree.data.prompts import PromptEncoder

        return PromptEncoder(loaded.tokenizer, task, loaded.max_length, closed=loaded.writes_apart)

    def encode(
        self, task: TaskDefinition, rows: Rows, encoder: Any, *, label: int, pad: int, first: int = 0
    ) -> EncodedTexts:
        """Return the rows as token ids, with their right texts."""
        from forgetfree.data.prompts import EncodedTexts

        ids, labels, longer = encoder.learned(rows)
        encoded = EncodedTexts.of(ids, labels, label, pad, task.kind)
        return replace(
            encoded,
            right=rows.labels,
            asked=[_asked(prompt, task) for prompt in rows.first],
            tokenizer=encoder.tokenizer,
            end=encoder.end,
            longer=longer,
            allowed=encoder.allowed,
        )

    def collected(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each token ``(n, 1)``: logits of all tokens of the vocabulary would fill the memory."""
        from torch.nn import functional as F

        return F.cross_entropy(logits.float(), labels.to(logits.device), reduction="none").unsqueeze(1)

    def answers(self, task: TaskDefinition, logits: Tensor, labels: Tensor, rows: Examples | None) -> TextAnswers:
        """Return the losses that `collected` gave; the texts are still to be written."""
        texts: EncodedTexts | None = rows  # type: ignore[assignment]
        counts = np.array([] if texts is None else texts.counts, np.int64)
        losses = logits.reshape(-1).numpy().astype(np.float32)
        none = np.array([], np.int64)
        right, asked = ((), ()) if texts is None else (texts.right, texts.asked)
        return TextAnswers(none, none, losses, counts, (), right, asked)

    def with_texts(
        self, answers: Answers, task: TaskDefinition, model: Any, rows: Any, wrote: Wrote | None = None, **passes: Any
    ) -> TextAnswers:
        """Return answers with the text that a model writes after each prompt, or with the likeliest that is allowed."""
        from forgetfree.models.generation import Heard, Passes, counting, log_probabilities, unheard, write
        from forgetfree.parallel.exchange import size

        assert isinstance(answers, TextAnswers)
        if task.closed_answers:
            return _chosen(answers, log_probabilities(model, rows, Passes(**passes)).numpy(), task, rows)
        heard: Heard = unheard
        if wrote is not None:
            most = len(rows) * task.max_new_tokens // size()
            heard = counting(lambda tokens: wrote(tokens, max(most, tokens)))
        return _filled(answers, write(task, model, rows, Passes(**passes), heard), rows.tokenizer, task.stop)

    def loss(self, task: TaskDefinition, logits: Tensor, rows: Examples) -> float:
        """Return the mean loss of a token, in nats."""
        return float(logits.double().mean())

    def quality(self, task: TaskDefinition, logits: Tensor, rows: Examples) -> tuple[float, float]:
        """Return minus the loss, twice: to write texts for every comparison would take too long."""
        loss = self.loss(task, logits, rows)
        return -loss, -loss

    def unanswered(self, task: TaskDefinition, train: Examples, rows: Examples, width: int) -> TextAnswers:
        """Return the text as the answer to all rows that is best for training rows, of which 500 at most are looked at."""
        import torch

        some = train.subset(evenly(len(train), _SCORED))
        learned, asked = (self.answers(task, torch.zeros(sum(each.counts)), each.labels, each) for each in (some, rows))
        return replace(asked, texts=[learned.best_constant(task.metric)] * len(rows))

    def kept_answers(self, task: TaskDefinition, arrays: Mapping[str, npt.NDArray[Any]]) -> TextAnswers:
        """Return answers from what `TextAnswers.tensors` gave."""
        return TextAnswers.of_tensors(arrays)


def _asked(prompt: str, task: TaskDefinition) -> str:
    """Return what a report shows of a prompt: its beginning; of a chat, that of its last turn."""
    if task.form == "messages":
        prompt = turns_of(prompt)[-1]["content"]
    return prompt[:_SHOWN]


def _filled(
    answers: TextAnswers, written: Sequence[Sequence[int]], tokenizer: Any, stop: Sequence[str] = ()
) -> TextAnswers:
    """Return answers with the token ids of their texts, and these as a tokenizer reads them."""
    ids = np.array([token for each in written for token in each], np.int64)
    texts = [text_of(tokenizer, each, stop) if each else "" for each in written]
    return replace(answers, ids=ids, lengths=np.array([len(each) for each in written], np.int64), texts=texts)


def _chosen(answers: TextAnswers, logits: npt.NDArray[Any], task: TaskDefinition, rows: EncodedTexts) -> TextAnswers:
    """Return answers with the likeliest of the allowed ones, by the log-probabilities of all."""
    chosen, closed = logits.argmax(1), task.closed_answers
    texts = [closed[i] for i in chosen]
    labels = [
        closed.index(text if text in right else right[0]) for text, right in zip(texts, answers.right, strict=True)
    ]
    found = _filled(answers, [rows.allowed[i] for i in chosen], rows.tokenizer)
    return replace(found, texts=texts, logits=logits, labels=np.array(labels, np.int64))


def text_of(tokenizer: Any, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """Return token ids as a text, up to the first of the texts that end it."""
    from forgetfree.models.generation import special_stops

    ids, special = list(ids), special_stops(tokenizer, stop)
    ids = ids[: next((place for place, token in enumerate(ids) if token in special), len(ids))]
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text[: min((at for end in stop if (at := text.find(end)) >= 0), default=len(text))].strip()


# -- Rows of tables ---------------------------------------------------------------------------------------


def _chat_of(names: set[str]) -> str | None:
    return next((name for name in _CHATS if name in names), None)


def _pair_of(names: set[str]) -> tuple[tuple[str, ...], str] | None:
    return next((pair for pair in _COLUMNS if names >= {*pair[0], pair[1]}), None)


def prompt_columns(names: Collection[str], form: str) -> tuple[str, ...]:
    """Return the columns that prompts, or chats, are read from, where answers may be missing; none where no name is known."""
    if form == "messages":
        return tuple(name for name in (_chat_of(set(names)),) if name)
    pair = _pair_of(set(names)) or next((pair for pair in _COLUMNS if set(names) >= set(pair[0])), None)
    return pair[0] if pair else ()


def one_prompt(texts: Sequence[str]) -> str:
    """Return the texts of a row as one prompt, one after another."""
    return texts[0] if len(texts) == 1 else "\n\n".join(text for text in texts if text.strip())


class _Reader:
    """Reads the rows of one table.

    Attributes:
        form: ``generation`` or ``messages``.
    """

    def __init__(
        self,
        table: Table,
        form: str,
        columns: tuple[str, ...],
        read: Callable[[_Reader, int], tuple[str, tuple[str, ...]]],
        allowed: tuple[str, ...],
    ) -> None:
        self.table, self.form, self.columns, self._read, self._allowed = table, form, columns, read, allowed

    def rows(self) -> Rows:
        """Return the good rows; the others are added to the table's bad rows."""
        found = [self.table.bad.attempt(self._row, i) for i in range(len(self.table.numbers))]
        good = [(*row, number) for row, number in zip(found, self.table.numbers, strict=True) if row is not None]
        places = tuple((self.table.where, number) for _, _, number in good)
        return Rows(tuple(prompt for prompt, *_ in good), (), tuple(right for _, right, _ in good), places)

    def _row(self, i: int) -> tuple[str, tuple[str, ...]]:
        """Return the prompt of a row, and the texts that are right; where answers are closed, as they are written there."""
        prompt, right = self._read(self, i)
        if self._allowed:
            allowed = tuple(text.strip() for text in right if text.strip() in self._allowed)
            if not allowed:
                expected = f"one of closed_answers, {brief(self._allowed, 200)}"
                raise refusal(self.fault(self.columns[-1], i, "no allowed answer", expected, right[0]))
            right = allowed
        return prompt, right

    def cell(self, column: str, i: int) -> Any:
        """Return a cell; a number of numpy as one of Python, an array as a list."""
        return plain(self.table.columns[column][i])

    def fault(self, column: str, i: int, what: str, expected: str, got: Any) -> BadRow:
        """Return what is wrong with a cell."""
        file, number = self.table.where, self.table.numbers[i]
        text = brief(got)
        message = f"{file}, row {number}, column {column!r}: expected {expected}, got {text}. Fix or remove the row."
        return BadRow(file, number, column, what, text, message)


def _reader(table: Table, task: TaskTables) -> _Reader:
    """Return what reads a table.

    Raises:
        DataError: it has no column of prompts, or none of answers.
    """
    named, names = task.columns, set(table.columns)
    for column in (*named.texts, *filter(None, [named.label])):
        if column not in names:
            raise DataError(_lacks(table, column))
    chat = _chat_of(names) if not named.texts else None
    if named.texts and named.label is None and len(named.texts) == 1:
        cells = [plain(cell) for cell in table.columns[named.texts[0]][:1]]
        chat = named.texts[0] if any(isinstance(cell, list) for cell in cells) else None
    pair = (named.texts, named.label) if named.texts and named.label else _pair_of(names)
    kind = task.source.get("kind")
    if kind == "messages" or (chat and not (pair and (named.label or kind == "generation"))):
        if chat is None:
            raise DataError(_lacks(table, "messages"))
        return _Reader(table, "messages", (chat,), _chat, _closed(task))
    if pair is None or pair[1] is None:
        raise DataError(_lacks(table, "prompt" if "prompt" not in names else "target"))
    return _Reader(table, "generation", (*pair[0], pair[1]), _prompt_and_targets, _closed(task))


def _closed(task: TaskTables) -> tuple[str, ...]:
    """Return the answers that a task allows; none where any text may answer."""
    known = task.registered.closed_answers if task.registered else ()
    return tuple(str(text).strip() for text in task.source.get("closed_answers") or known)


def _told(columns: Sequence[str], form: str) -> str:
    """Return from which columns prompts and answers, or chats, are read."""
    if form == "messages":
        return f"chats from {columns[0]!r}"
    return f"prompts from {' and '.join(map(repr, columns[:-1]))}, answers from {columns[-1]!r}"


def _lacks(table: Table, column: str) -> str:
    held = ", ".join(map(repr, table.columns)) or "none"
    return (
        f"{table.where} has no column {column!r}: expected prompt and target, or messages with a chat; found {held}. Rename or "
        "add the column, or name others with --text-column and --label-column."
    )


def _prompt_and_targets(reader: _Reader, i: int) -> tuple[str, tuple[str, ...]]:
    """Return the prompt of a row, and the texts that are right."""
    *prompts, column = reader.columns
    texts = []
    for name in prompts:
        cell = reader.cell(name, i)
        if cell is None and len(prompts) > 1:
            continue
        if not is_text(cell):
            raise refusal(reader.fault(name, i, "no prompt", "a text", cell))
        texts.append(cell)
    prompt = one_prompt(texts)
    cell = reader.cell(column, i)
    right = _texts(cell)
    if not right or not all(is_text(text) and text.strip() for text in right):
        raise refusal(reader.fault(column, i, "no target", "a text, or a list of texts, none of them empty", cell))
    return prompt, right


def _texts(cell: Any) -> tuple[Any, ...]:
    """Return the right texts that a cell holds: one, a list, or those of SQuAD's answers."""
    if isinstance(cell, Mapping):
        cell = plain(cell.get("text", cell.get("answer")))
    if isinstance(cell, list | tuple):
        return tuple(dict.fromkeys(text for each in cell for text in _texts(plain(each))))
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return () if not math.isfinite(cell) else (str(int(cell)) if cell == int(cell) else repr(cell),)
    return () if cell is None else (cell,)


def _chat(reader: _Reader, i: int) -> tuple[str, tuple[str, ...]]:
    """Return the turns of a chat before the last of the assistant, as JSON, and the text of that."""
    (column,) = reader.columns
    cell = reader.cell(column, i)
    try:
        turns = turns_of(cell)
    except ValueError as error:
        expected = f"a list of turns, each with a content and a role, one of {', '.join(ROLES)}"
        raise refusal(reader.fault(column, i, "no chat", expected, cell)) from error
    last = max((number for number, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)
    if not last:
        raise refusal(
            reader.fault(column, i, "no answer in a chat", "a turn of the assistant after another turn", cell)
        )
    if not turns[last]["content"].strip():
        raise refusal(reader.fault(column, i, "no target", "a last turn of the assistant that is not empty", cell))
    return json.dumps(turns[:last], ensure_ascii=False), (turns[last]["content"],)


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
