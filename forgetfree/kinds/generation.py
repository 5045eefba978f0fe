"""Generation: a text that answers a prompt, written by the language model itself.

A row has ``prompt`` and ``target``, or columns of a common name; the target is a text, or a list of texts that are all right,
of which the first is learned. Or it has ``messages``, a chat, whose last turn of the assistant is the target: see
`forgetfree.data.prompt_rows`. ``source.json`` may give ``instruction``, ``template``, ``metric``, ``max_new_tokens``, ``stop``
and ``closed_answers``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from forgetfree import registry
from forgetfree.data.bad_rows import DataFaults
from forgetfree.data.chats import Chat
from forgetfree.data.prompt_rows import PromptReader, are_prompts, closed_answers
from forgetfree.data.rows import Rows, TaskRows, read_rows
from forgetfree.data.sampling import evenly
from forgetfree.data.tables import TaskTables
from forgetfree.errors import DataError, UsageError
from forgetfree.kinds.kind import Form, TaskKind, Wrote
from forgetfree.results.answers import TextAnswers
from forgetfree.tasks import Scenario, TaskDefinition

if TYPE_CHECKING:
    from torch import Tensor

    from forgetfree.data.examples import Examples
    from forgetfree.data.prompts import EncodedTexts, PromptEncoder
    from forgetfree.models.loading import LoadedModel
    from forgetfree.results.answers import Answers

#: How many characters of a prompt are kept for reports.
_SHOWN = 500
#: What `forgetfree.results.text_metrics` computes by.
_PACKAGES = ("rapidfuzz", "rouge_score", "sacrebleu")
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
        """Return whether the columns are those of prompts and answers, or of chats."""
        return are_prompts(task)

    def check_header(self, task: TaskTables) -> None:
        """Raise ``DataError`` for columns that are missing."""
        faults = DataFaults()
        for head in task.tables.values():
            faults.attempt(PromptReader, head, task)
        faults.report()

    def read(self, task: TaskTables) -> TaskRows:
        """Return a task with its rows."""
        faults, rows, phrases = DataFaults(), dict[str, Rows](), dict[str, str]()
        for split, table in task.tables.items():
            if reader := faults.attempt(PromptReader, table, task):
                phrases.setdefault(reader.form, reader.phrase)
                rows[split] = reader.rows()
                faults.add(table.bad, len(rows[split]), task.skip_bad_rows)
        if not phrases:
            faults.report()
        faults.attempt(_check_one_form, task, phrases)
        form, phrase = next(iter(phrases.items()))
        definition = faults.attempt(self._definition, task, form)
        if definition is None:
            faults.report()
        assert definition is not None
        return read_rows(task, definition, rows, [phrase], faults=faults)

    def _definition(self, task: TaskTables, form: str) -> TaskDefinition:
        if missing := [package for package in _PACKAGES if find_spec(package) is None]:
            raise UsageError(
                f"Task {task.name!r} is answered by texts, which {', '.join(_PACKAGES)} score, and {missing[0]} is not "
                "installed: pip install 'forgetfree[texts]'."
            )
        source = task.source
        closed = closed_answers(task)
        # Of free texts hardly any equals a right one, however much was learned.
        metric = "exact_match" if closed else self.metrics[0]
        known = task.registered or TaskDefinition(task.name, form, (), metric=metric)
        values = {key: source[key] for key in ("instruction", "template", "metric", "max_new_tokens") if key in source}
        stop = source.get("stop", known.stop)
        values |= {"stop": (stop,) if isinstance(stop, str) else tuple(stop), "closed_answers": closed}
        definition = replace(known, kind=form, **values)
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

        read = encoder.read(rows)
        ids, labels, longer = encoder.marked(read)
        encoded = EncodedTexts.of(ids, labels, label, pad, task.kind)
        return replace(
            encoded,
            right=[row.right for row in read],
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

        assert isinstance(answers, TextAnswers)
        if task.closed_answers:
            return _chosen(answers, log_probabilities(model, rows, Passes(**passes)).numpy(), task, rows)
        heard: Heard = unheard
        if wrote is not None:
            most = len(rows) * task.max_new_tokens
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
        learned, asked = (
            self.answers(task, torch.zeros(sum(each.counts), device="cpu"), each.labels, each) for each in (some, rows)
        )
        return replace(asked, texts=[learned.best_constant(task.metric)] * len(rows))

    def kept_answers(self, task: TaskDefinition, arrays: Mapping[str, npt.NDArray[Any]]) -> TextAnswers:
        """Return answers from what `TextAnswers.tensors` gave."""
        return TextAnswers.of_tensors(arrays)


def _check_one_form(task: TaskTables, forms: Collection[str]) -> None:
    """Raise ``DataError`` if the form of rows is not the same in all splits."""
    if len(forms) > 1:
        raise DataError(
            f"Task {task.name!r} has chats in one split, and prompts with their answers in another. Write all alike."
        )


def _asked(prompt: str, task: TaskDefinition) -> str:
    """Return what a report shows of a prompt: its beginning; of a chat, that of its last turn."""
    if task.form == "messages":
        prompt = str(Chat.of(prompt).turns[-1].get("content", ""))
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
    filled = _filled(answers, [rows.allowed[i] for i in chosen], rows.tokenizer)
    return replace(filled, texts=texts, logits=logits, labels=np.array(labels, np.int64))


def text_of(tokenizer: Any, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """Return token ids as a text, up to the first of the texts that end it."""
    from forgetfree.models.generation import special_stops

    ids, special = list(ids), special_stops(tokenizer, stop)
    ids = ids[: next((place for place, token in enumerate(ids) if token in special), len(ids))]
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text[: min((at for end in stop if (at := text.find(end)) >= 0), default=len(text))].strip()
