"""Tagging: a label for each word of a sentence, as in named entity recognition.

A row has ``tokens``, its words, and ``tags``, one for each: ``O``, or ``B-X`` for the first word of an entity of kind X and
``I-X`` for each further word (BIO, or IOB2). Each column holds lists, or texts with spaces between words or tags, as in csv.
Tags in IOB1, IOBES or BILOU are converted, with a note; numbers are places in the label names that come with the data.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from forgetfree import registry
from forgetfree.data.bad_rows import DataFaults, refusal
from forgetfree.data.columns import WORDS, ColumnNames, is_label
from forgetfree.data.labels import Labels, check_alike
from forgetfree.data.rows import Rows, TaskRows, read_rows
from forgetfree.data.tables import Table, TaskTables, shown
from forgetfree.display import brief, counted, escaped, is_text, nfc
from forgetfree.errors import DataError, UsageError
from forgetfree.json_file import check, parse_json
from forgetfree.kinds.kind import Form, Kind, Text, check_texts
from forgetfree.results.answers import LabelAnswers
from forgetfree.results.metrics import Metric, accuracy, logits_of
from forgetfree.tasks import Scenario, TaskDefinition

if TYPE_CHECKING:
    from torch import Tensor

    from forgetfree.data.encoding import WordEncoder
    from forgetfree.data.examples import Examples
    from forgetfree.kinds.networks import Parts, TaskNetwork
    from forgetfree.models.loading import LoadedModel

_TAGS = ("tags", "ner_tags")
#: Prefixes of tags: of a word that begins an entity, and of a word inside one; then the prefixes of a word that ends one.
_BEGINS, _GOES_ON = "BSU", "IMEL"
_ENDS = "SUEL"
#: A remedy for -100, the number that transformers' recipes give to ignored tokens.
_NO_TAG = "-100 is no tag: it marks pieces of words that training leaves out. Give whole words, with the tag of each."


@dataclass(frozen=True, eq=False)
class TagAnswers(LabelAnswers):
    """The labels of all words of all sentences; words that were cut off are ``O`` with probability 1.

    Attributes:
        names: the names of the labels, in BIO.
        lengths: the lengths of the sentences in words ``(n_sentences,)``.
    """

    names: Sequence[str]
    lengths: npt.NDArray[Any]
    kind: str = field(default="tagging", kw_only=True)

    def tags(self, labels: npt.NDArray[Any]) -> list[list[str]]:
        """Return the label names of all words, sentence by sentence."""
        ends = [0, *accumulate(self.lengths.tolist())]
        named = [self.names[label] for label in labels.tolist()]
        return [named[begin:end] for begin, end in pairwise(ends)]

    def more_scores(self) -> dict[str, float]:
        """Return the calibration error, and the share of words with the right label."""
        return {**super().more_scores(), "word_accuracy": accuracy(self.logits, self.labels)}

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return logits, labels, and the lengths of the sentences."""
        return {**super().tensors(), "lengths": self.lengths}


@dataclass(frozen=True)
class Entity:
    """A named entity in a sentence.

    Attributes:
        kind: one of the task's kinds of entities.
        text: its words.
        first, last: the numbers of its first and its last word, from 0.
        probability: the mean probability of its words' labels.
    """

    kind: str
    text: str
    first: int
    last: int
    probability: float


@dataclass(frozen=True)
class TaggedSentence:
    """A sentence with the label of each word, in BIO, and its entities.

    Words beyond the model's longest row are not read: they are ``O`` with probability 1.
    ``cut_tokens`` is the number of their tokens.
    """

    task: str
    words: tuple[str, ...]
    tags: tuple[str, ...]
    probabilities: tuple[float, ...]
    cut_tokens: int = 0

    @property
    def entities(self) -> list[Entity]:
        """The entities, from left to right."""
        entities = []
        for kind, first, last in entities_of(self.tags):
            shares = self.probabilities[first : last + 1]
            text = " ".join(self.words[first : last + 1])
            entities.append(Entity(kind, text, first, last, sum(shares) / len(shares)))
        return entities


class Tagging(Kind):
    """A label for each word of a sentence."""

    forms: ClassVar[Mapping[str, Form]] = {
        "tokens": ("a sentence, and a tag for each of its words", ("tokens", "tags"))
    }
    metrics = ("f1",)
    label_of = "word of a sentence"
    answer = "tags"
    readout = "linear"
    floors = ("linear_probe",)
    #: Sentences without an entity.
    optional_group = 0

    def metric(self, name: str) -> Metric:
        """Return F1 of entities for ``f1``, else a registered metric."""
        return Metric(entity_f1, constant=constant_entity_f1) if name == "f1" else super().metric(name)

    # -- Rows ------------------------------------------------------------------------------------------------

    def recognises(self, task: TaskTables) -> bool:
        """Return whether the columns hold words and tags."""
        table, texts = task.train, task.columns.texts
        if texts:
            cells = table.columns.get(texts[0], ())
            lists = [cell for cell in cells[:1] if isinstance(cell, list)]
            return len(texts) == 1 and any(all(isinstance(word, str) for word in cell) for cell in lists)
        names, label = set(table.columns), task.columns.label
        if not names & set(WORDS):
            return False
        if label:  # a label of the whole text is no list
            return label in _TAGS or isinstance(next(iter(table.columns.get(label, ())), None), list)
        labelled = names & {"text", "text_a"} and any(map(is_label, names))
        return bool(names & set(_TAGS)) and not labelled

    def read(self, task: TaskTables) -> TaskRows:
        """Return a task with its rows.

        ``entities`` in ``source.json`` are the kinds of entities, in the order of the labels; default: the registered task's,
        or the kinds in the training tags, sorted. Where tags are numbers, ``label_names`` gives their names.
        """
        faults, source = DataFaults(), task.source
        read = {
            split: each
            for split, table in task.tables.items()
            if (each := faults.attempt(_Sentences, table, source, task.columns))
        }
        rows = dict[str, Rows]()
        if "train" in read:
            entities = source.get("entities") or (task.registered.entities if task.registered else ())
            if not entities:
                faults.attempt(read["train"].check_kinds)
                entities = sorted({kind for _, kind in read["train"].kinds()})
            metric = task.registered.metric if task.registered else self.metrics[0]
            definition = TaskDefinition.of_entities(task.name, entities, self.form(), source.get("metric", metric))
            if "metric" in source and (wrong := self.faults(definition)):
                raise DataError(f"{task.folder / 'source.json'}: {wrong[0]}.")
            rows = {split: sentences.rows(definition) for split, sentences in read.items()}
        for split, table in task.tables.items():
            faults.add_rows(table.bad, len(rows.get(split, ())), task.skip_bad_rows)
        if "train" not in rows:
            faults.report()
        notes = [f"{split} rows of task {task.name!r}: {note}." for split, each in read.items() for note in each.notes]
        return read_rows(task, definition, rows, notes=notes, faults=faults)

    def form(self) -> str:
        """Return the ``kind`` in a task's definition."""
        return next(iter(self.forms))

    def faults(self, task: TaskDefinition) -> list[str]:
        """Return a phrase for each fault of labels and metric."""
        faults = super().faults(task)
        if task.labels != TaskDefinition.of_entities(task.name, task.entities).labels:
            faults.append(f"labels must be O, and B-X and I-X for each kind X of entity, got {brief(task.labels, 200)}")
        if task.metric in registry.LABEL_METRICS and task.metric not in self.metrics:
            faults.append(f"metric must be 'f1', that of entities, for kind {task.kind!r}, got {task.metric!r}")
        return faults

    def groups_of(self, label: Sequence[int]) -> set[int]:
        """Return the numbers, from 1, of the kinds of entities in a sentence; 0 if there is no entity."""
        return {(tag + 1) // 2 for tag in label if tag} or {0}

    def group_name(self, task: TaskDefinition, group: int, count: int) -> str:
        """Return the sentences with a kind of entity."""
        return f"sentence{'s' * (count > 1)} with {task.entities[group - 1]} entities"

    def check_splits(self, task: TaskDefinition, rows: Mapping[str, Rows], before: Rows) -> None:
        """Raise ``DataError`` if a split has no entity."""
        for split, split_rows in rows.items():
            if not any(map(any, split_rows.labels)):
                raise DataError(
                    f"Task {task.name!r} has no entity in its {split} split: all words are tagged O. Add sentences with "
                    "entities."
                )

    # -- Models ----------------------------------------------------------------------------------------------

    def check_readout(self, task: TaskDefinition, readout: str) -> None:
        """Raise ``UsageError`` if the readout labels whole texts."""
        if readout != "linear":
            raise UsageError(
                f"Task {task.name!r} labels words, and the readout {readout!r} labels whole texts. Use --readout linear."
            )

    def check_scenario(self, tasks: Sequence[TaskDefinition], scenario: Scenario) -> None:
        """Raise ``UsageError`` if O does not mean the same in all tasks."""
        if scenario == "class":
            first = next(task.name for task in tasks if task.entities)
            raise UsageError(
                f"scenario=class tells all tasks' labels apart, and in {first!r} O means none of the task's own entities, "
                "which would be wrong for those of other tasks. Use scenario=task; or scenario=domain, where entities are the "
                "same."
            )
        if scenario == "domain" and len({task.entities and task.labels for task in tasks}) > 1:
            kinds = "; ".join(f"{task.name}: {', '.join(task.entities) or 'no words to label'}" for task in tasks)
            raise UsageError(
                f"scenario=domain needs tasks that share their labels: the same kinds of entities in the same order, got "
                f"{kinds}. "
                'Name them in each source.json, such as {"kind": "tokens", "entities": ["PER", "LOC"]}, or use scenario=task.'
            )

    def encoder(self, task: TaskDefinition, loaded: LoadedModel) -> WordEncoder:
        """Return the encoder of sentences, with the first token of each word marked."""
        from forgetfree.data.encoding import WordEncoder

        return WordEncoder(loaded.tokenizer, loaded.max_length)

    def answers(self, task: TaskDefinition, logits: Tensor, labels: Tensor, rows: Examples | None) -> LabelAnswers:
        """Return the answers to all words; words that were cut off are answered with O."""
        if rows is None:
            return LabelAnswers(logits.numpy(), labels.numpy())
        sentences: Any = rows
        lengths, answered = sentences.words.diff().numpy(), sentences.answered(logits).numpy()
        return TagAnswers(answered, rows.labels.numpy(), task.labels, lengths, kind=task.kind)

    def kept_answers(
        self, task: TaskDefinition, arrays: Mapping[str, npt.NDArray[Any]], rows: int | None = None
    ) -> LabelAnswers:
        """Return answers from the arrays that ``tensors`` returned; answers made without rows have no sentences."""
        if (lengths := arrays.get("lengths")) is None:
            return LabelAnswers.of_tensors(arrays, rows)
        sound = lengths.dtype == np.int64 and lengths.ndim == 1 and bool((lengths > 0).all())
        check(
            "lengths", lengths.shape, sound and rows in (None, len(lengths)), f"the words of each of {rows} sentences"
        )
        more = {"names": task.labels, "lengths": lengths, "kind": task.kind}
        return TagAnswers.of_tensors(arrays, int(lengths.sum()), **more)

    # -- In use ----------------------------------------------------------------------------------------------

    def text_of_cell(self, task: TaskDefinition, value: object) -> str | None:
        """Return a text, or a list of words as JSON."""
        is_list = isinstance(value, list) and all(isinstance(word, str) for word in value)
        return json.dumps(value) if is_list else super().text_of_cell(task, value)

    def cell_type(self, task: TaskDefinition) -> str:
        """Return the types that a text cell of a file may have, for messages."""
        return "a text or a list of words"

    def rows(self, task: TaskDefinition, texts: Sequence[Text]) -> Rows:
        """Return sentences as rows; raise ``UsageError`` if one is a pair of texts, has no words, or has an empty word."""
        check_texts(texts)
        if any(isinstance(text, tuple) and len(text) > 1 for text in texts):
            raise UsageError(
                f"Task {task.name!r} labels the words of one text, got a pair of texts. Give a text with spaces between its "
                "words, or with a JSON list of them in it."
            )
        sentences = list(map(words_of, texts))
        for number, words in enumerate(sentences, 1):
            if not words or not all(is_text(word) and word for word in words):
                raise UsageError(
                    f"Sentence {number}: expected a list of words, none of them empty, got {brief(words)}."
                )
        first = tuple(" ".join(word.replace(" ", "\u00a0") for word in words) for words in sentences)
        return Rows(first, (), tuple((0,) * len(words) for words in sentences))

    def replies(
        self, task: TaskDefinition, texts: Sequence[Text], output: Tensor, cut: Iterable[int]
    ) -> list[TaggedSentence]:
        """Return each sentence with its tags, from logits ``(n_words, n_labels)``."""
        shares, numbers = output.softmax(1).amax(1).tolist(), output.argmax(1).tolist()
        sentences, begin = [], 0
        for words, lost in zip(map(words_of, texts), cut, strict=True):
            end = begin + len(words)
            tags = tuple(task.labels[number] for number in numbers[begin:end])
            sentences.append(TaggedSentence(task.name, tuple(words), tags, tuple(shares[begin:end]), lost))
            begin = end
        return sentences

    def network(self, task: TaskDefinition, parts: Parts) -> TaskNetwork:
        """Return a token classifier."""
        from forgetfree.kinds.networks import tagging_network

        return tagging_network(parts)

    def lines(self, task: TaskDefinition, texts: tuple[str, ...], answer: TaggedSentence) -> list[str]:
        """Return a line for each entity: kind, probability, its words, the sentence."""
        sentence = escaped(" ".join(answer.words))
        return [
            f"{escaped(entity.kind)}\t{entity.probability:.3f}\t{escaped(entity.text)}\t{sentence}"
            for entity in answer.entities
        ] or [f"-\t-\t-\t{sentence}"]

    def json(self, task: TaskDefinition, answer: TaggedSentence, texts: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return task, words, tags and entities."""
        return {**asdict(answer), "entities": list(map(asdict, answer.entities))}

    def fields(self, task: TaskDefinition) -> tuple[str, ...]:
        """Raise ``UsageError``: a sentence has any number of entities."""
        raise UsageError(f"Task {task.name!r} finds any number of entities in a text, which is no table. Use --json.")


def words_of(text: Text) -> list[str]:
    """Return the words of a sentence, which is a list, the JSON of a list, or a text with spaces between its words.

    >>> words_of("Jane works here"), words_of('["New York", "is", "far"]')
    (['Jane', 'works', 'here'], ['New York', 'is', 'far'])
    """
    if isinstance(text, list):
        return text
    sentence = text if isinstance(text, str) else text[0]
    if sentence.lstrip().startswith("["):
        try:
            words = parse_json(sentence)
        except ValueError:
            words = None
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            return words
    return sentence.split()


def _columns(table: Table, columns: ColumnNames) -> list[str]:
    """Return the columns of words and tags."""
    chosen = list[str]()
    for names in (columns.texts or WORDS, (columns.label,) if columns.label else _TAGS):
        name = next((name for name in names if name in table.columns), None)
        if name is None:
            known = ", ".join(map(repr, table.columns)) or "none"
            raise DataError(
                f"{table.where} has no column {names[0]!r}: expected tokens, with the words of a sentence, and tags, with one "
                f"for each word; found {known}. Rename or add the column, or name others with --text-column and --label-column."
            )
        chosen.append(name)
    return chosen


class _Sentences:
    """The words and tags of one table, by the place of each good row."""

    def __init__(self, table: Table, source: Mapping[str, Any], columns: ColumnNames) -> None:
        self._table = table
        words, column = _columns(table, columns)
        self._tags = column
        names = source.get("label_names") or table.label_names.get(column) or ()
        self.words, self.tags, self.notes = dict[int, list[str]](), dict[int, list[str]](), list[str]()
        for i in range(len(table.numbers)):
            sentence = table.bad.attempt(self._words, words, i)
            written = table.bad.attempt(self._written, column, i, names, sentence)
            if sentence is None or written is None:
                continue
            self.words[i], self.tags[i] = sentence, written

    def kinds(self) -> list[tuple[int, str]]:
        """Return the kind of entity of each word that is not O, with the number of its row."""
        return [(self._table.numbers[i], tag[2:]) for i, tags in self.tags.items() for tag in tags if tag != "O"]

    def check_kinds(self) -> None:
        """Raise ``DataError`` if kinds of entities look alike."""
        kinds = sorted({*self.kinds()})  # each once per row
        names, rows = [name for _, name in kinds], [row for row, _ in kinds]
        check_alike(self._table.where, names, rows, "kinds of entities", "entities")

    def rows(self, task: TaskDefinition) -> Rows:
        """Return the good rows with the task's labels in BIO, and note each other spelling or scheme of tags."""
        known, first_as = Labels.named(task.entities), dict[str, str]()
        numbers, other, kept = {label: number for number, label in enumerate(task.labels)}, "", dict[int, list[int]]()
        for i, tags in self.tags.items():
            places = {kind: known.place(kind) for kind in {tag[2:] for tag in tags if tag != "O"}}
            if unknown := [tag for tag in tags if tag != "O" and places[tag[2:]] is None]:
                expected = f"entities of {known.shown}"
                self._table.bad.add(self._table.fault(i, self._tags, "unknown entity", expected, shown(unknown[0])))
                continue
            names = {kind: task.entities[place] for kind, place in places.items() if place is not None}
            for kind, name in names.items():
                if kind != name:
                    first_as.setdefault(
                        kind,
                        f"entity {shown(kind)} (the first in row {self._table.numbers[i]}) is read as {shown(name)}",
                    )
            named = [tag if tag == "O" else f"{tag[:2]}{names[tag[2:]]}" for tag in tags]
            converted = bio(named)
            differ = [pair for pair in zip(named, converted, strict=True) if pair[0] != pair[1]]
            if differ and not other:
                one, two = differ[0]
                first = f"row {self._table.numbers[i]} has {one!r} where BIO has {two!r}"
                other = f"the tags are in IOB1, IOBES or BILOU, and are read as BIO ({first})"
            kept[i] = [numbers[tag] for tag in converted]
        self.notes = [*([other] if other else []), *first_as.values()]
        return Rows(tuple(" ".join(self.words[i]) for i in kept), (), tuple(map(tuple, kept.values())))

    def _written(self, column: str, i: int, names: Sequence[str], sentence: Sequence[str] | None) -> list[str]:
        """Return the tags of a sentence as written, one for each word; any number if the words are bad."""
        written = [self._tag(column, i, tag, names) for tag in self._cell(column, i)]
        if sentence is not None and len(written) != len(sentence):
            of = "the one word" if len(sentence) == 1 else f"each of {len(sentence)} words"
            raise refusal(
                self._table.fault(i, column, "words and tags differ", f"a tag for {of}", counted(len(written), "tag"))
            )
        return written

    def _cell(self, column: str, i: int) -> list[Any]:
        value = self._table.columns[column][i]
        if isinstance(value, str):
            return value.split()
        if not isinstance(value, Sequence):
            expected = "a list, or a text with spaces between words"
            raise refusal(self._table.fault(i, column, "no list", expected, brief(value)))
        return list(value)

    def _words(self, column: str, i: int) -> list[str]:
        """Return the words of a sentence; a space within a word becomes a no-break space."""
        words = self._cell(column, i)
        if not words:
            raise refusal(self._table.fault(i, column, "no words", "words", "none"))
        for word in words:
            if not is_text(word) or not word:
                raise refusal(self._table.fault(i, column, "no word", "words, none of them empty", brief(word)))
        return [word.replace(" ", "\u00a0") for word in words]

    def _tag(self, column: str, i: int, tag: Any, names: Sequence[str]) -> str:
        number = int(tag) if isinstance(tag, str) and re.fullmatch("-?[0-9]{1,9}", tag) else tag
        expected, remedy = "tags O, B-X and I-X for entities of kind X", ""
        if isinstance(number, int):
            most = len(names) - 1
            expected = f"a place in label_names, 0 to {most}" if names else f"{expected} and label_names in source.json"
            remedy = _NO_TAG if number == -100 else ""
            tag = names[number] if 0 <= number < len(names) else number
        if isinstance(tag, str):
            if tag == "O" or (tag[:1] in _BEGINS + _GOES_ON and tag[1:2] == "-" and tag[2:]):
                return nfc(tag)
            if re.fullmatch(r"\w[\w/.-]*", tag):
                place = " in label_names" if isinstance(number, int) else ""
                remedy = f"If {tag} is a kind of entity, write I-{tag}{place}; words side by side are then one entity."
        raise refusal(self._table.fault(i, column, "unknown tag", expected, brief(tag), remedy))


def bio(tags: Sequence[str]) -> list[str]:
    """Return the tags of one sentence in BIO.

    >>> bio(["I-PER", "I-PER", "O", "S-LOC", "B-ORG", "E-ORG"])
    ['B-PER', 'I-PER', 'O', 'B-LOC', 'B-ORG', 'I-ORG']
    """
    converted, going_on = list[str](), ""
    for tag in tags:
        place, kind = tag[0], tag[2:]
        goes_on = place in _GOES_ON and kind == going_on
        converted.append(tag if tag == "O" else f"{'I' if goes_on else 'B'}-{kind}")
        going_on = "" if place in _ENDS else kind
    return converted


# -- Entity F1 -------------------------------------------------------------------------------------------


#: The kind of an entity, and the numbers of its first word and its last.
Span = tuple[str, int, int]


def entities_of(tags: Sequence[str]) -> list[Span]:
    """Return the entities of one sentence, as seqeval and CoNLL's own script find them.

    An ``I-`` tag that continues no entity of its kind begins one.

    >>> entities_of(["B-PER", "I-PER", "O", "I-LOC"])
    [('PER', 0, 1), ('LOC', 3, 3)]
    """
    entities: list[Span] = []
    first, before, kind = 0, "O", ""
    for place, tag in enumerate([*tags, "O"]):
        part, named = tag[:1], tag[1:].split("-", 1)[-1]
        apart = before in "ES" or part in "BSO" or named != kind
        if before != "O" and apart:
            entities.append((kind, first, place - 1))
        if part != "O" and (before == "O" or apart):
            first = place
        before, kind = part, named
    return entities


def entity_f1(answers: TagAnswers) -> float:
    """Return the F1 of all entities of all kinds together (micro average), as seqeval computes it.

    Returns:
        A fraction in [0, 1]; 0.0 where no entity is found.
    """
    right, found = (
        {(number, *entity) for number, tags in enumerate(answers.tags(each)) for entity in entities_of(tags)}
        for each in (answers.labels, logits_of(answers.logits).argmax(axis=1))
    )
    if not (both := len(right & found)):
        return 0.0
    precision, recall = both / len(found), both / len(right)
    return 2 * precision * recall / (precision + recall)


def constant_entity_f1(answers: TagAnswers) -> float:
    """Return the best entity F1 of a constant: the same label for every word.

    ``O`` finds nothing. ``B-X`` guesses an entity at each word, and finds each X of one word. ``I-X`` guesses one entity per
    sentence, and finds each X that is a whole sentence.
    """
    entities, single, whole = 0, Counter[str](), Counter[str]()
    for tags in answers.tags(answers.labels):
        for kind, first, last in entities_of(tags):
            entities += 1
            single[kind] += first == last
            whole[kind] += last - first + 1 == len(tags)
    right = (max(counts.values(), default=0) for counts in (single, whole))
    return max(
        2 * hits / (guesses + entities)
        for hits, guesses in zip(right, (len(answers.labels), len(answers.lengths)), strict=True)
    )
