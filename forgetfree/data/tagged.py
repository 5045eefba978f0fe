"""Tables of sentences whose words are tagged, as in the recognition of named entities.

A row has ``tokens``, its words, and ``tags``, one for each: ``O``, or ``B-X`` for the first word of an entity of kind X and
``I-X`` for each further one (BIO, or IOB2). Either is a list, or a text with spaces between, as a csv file holds it. Tags in
IOB1, IOBES or BILOU are converted, and a note says so; numbers are read by the names that come with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from forgetfree.data.columns import RECOGNISED, Columns
from forgetfree.data.forms import plain
from forgetfree.data.rows import Rows, TaskRows, complete
from forgetfree.data.tables import Table
from forgetfree.display import brief, counted, is_text
from forgetfree.errors import DataError
from forgetfree.tasks import TaskDefinition

_WORDS, _TAGS = ("tokens", "words"), ("tags", "ner_tags")
#: Letters before the kind of an entity: those of a word that begins one, and of one that goes on. The last of each ends it.
_BEGINS, _GOES_ON = "BSU", "IMEL"
_ENDS = "SUEL"


def is_tagged(
    given: Mapping[str, Any], table: Table, registered: TaskDefinition | None, asked: Columns = RECOGNISED
) -> bool:
    """Return whether the words of a task are labelled: by source.json, else as it is registered, else by its columns."""
    kind = given.get("kind") or (registered.kind if registered else None)
    if kind is not None:
        return bool(kind == "tokens")
    names = set(table.columns)
    if asked.texts:
        cells = table.columns.get(asked.texts[0], ())
        lists = [cell for cell in map(plain, cells[:1]) if isinstance(cell, list | tuple)]
        return len(asked.texts) == 1 and any(all(isinstance(word, str) for word in cell) for cell in lists)
    return not names & {"text", "text_a"} and bool(names & set(_WORDS)) and bool(names & set(_TAGS))


def read_tagged(
    name: str,
    tables: Mapping[str, Table],
    given: Mapping[str, Any],
    registered: TaskDefinition | None,
    asked: Columns = RECOGNISED,
    said: str = "",
) -> TaskRows:
    """Return a task whose words are labelled.

    Args:
        name: the task's name.
        tables: by split.
        given: what its source.json says: ``entities``, in the order of the labels; default: as it is registered, or those of
            the training tags, sorted. Where tags are numbers, ``label_names`` says what they stand for.
        registered: its definition in the registry, if it has one.
        asked: the columns of words and tags, where they are named.
        said: what the user should know of the tables.

    Raises:
        DataError: a column is missing, a row is not as it must be, or a split has no rows, or no entity.
    """
    read = {split: _Sentences(table, given, asked) for split, table in tables.items()}
    entities = given.get("entities") or (registered.entities if registered else ())
    entities = entities or sorted({tag[2:] for tags in read["train"].tags for tag in tags if tag != "O"})
    task = TaskDefinition.of_entities(name, entities)
    rows = complete(task, {split: sentences.rows(task) for split, sentences in read.items()})
    notes = [f"{split} rows of task {name!r}: {note}" for split, each in read.items() if (note := each.note)]
    if told := "; ".join(filter(None, [said, rows.cut if tables.keys() == {"train"} else ""])):
        notes.insert(0, f"Task {name!r} ({tables['train'].where}): {told}.")
    return replace(rows, notes=tuple(notes))


class _Sentences:
    """The words and tags of one table, as BIO."""

    def __init__(self, table: Table, given: Mapping[str, Any], asked: Columns) -> None:
        self._table = table
        words, column = self._column(asked.texts or _WORDS), self._column((asked.label,) if asked.label else _TAGS)
        self._tags = column
        names = table.label_names.get(column) or given.get("label_names") or ()
        self.words = [self._words(words, i) for i in range(len(table.numbers))]
        self.tags, self.note = list[list[str]](), ""
        for i, sentence in enumerate(self.words):
            written = [self._tag(column, i, tag, names) for tag in self._cell(column, i)]
            if len(written) != len(sentence):
                of = "the one word" if len(sentence) == 1 else f"each of {len(sentence)} words"
                raise self._fault(i, column, f"a tag for {of}", counted(len(written), "tag"))
            self.tags.append(bio(written))
            differ = [(one, other) for one, other in zip(written, self.tags[-1], strict=True) if one != other]
            if differ and not self.note:
                first = f"row {table.numbers[i]} has {differ[0][0]!r} where BIO has {differ[0][1]!r}"
                self.note = f"the tags are in IOB1, IOBES or BILOU, and are read as BIO ({first})."

    def rows(self, task: TaskDefinition) -> Rows:
        """Return the rows with the task's labels."""
        numbers = {label: number for number, label in enumerate(task.labels)}
        labels = []
        for i, tags in enumerate(self.tags):
            if unknown := [tag for tag in tags if tag not in numbers]:
                raise self._fault(i, self._tags, f"entities of {', '.join(task.entities)}", repr(unknown[0]))
            labels.append(tuple(numbers[tag] for tag in tags))
        return Rows(tuple(map(" ".join, self.words)), (), tuple(labels))

    def _column(self, names: Sequence[str]) -> str:
        for name in names:
            if name in self._table.columns:
                return name
        found = ", ".join(map(repr, self._table.columns)) or "none"
        raise DataError(
            f"{self._table.where} has no column {names[0]!r}: expected tokens, with the words of a sentence, and tags, with "
            f"one for each word; found {found}. Rename or add the column, or name others with --text-column and --label-column."
        )

    def _cell(self, column: str, i: int) -> list[Any]:
        value = plain(self._table.columns[column][i])
        if isinstance(value, str):
            return value.split()
        if not isinstance(value, Sequence):
            raise self._fault(i, column, "a list, or a text with spaces between words", brief(value))
        return list(value)

    def _words(self, column: str, i: int) -> list[str]:
        """Return the words of a sentence; a space within a word becomes one that breaks no line."""
        words = self._cell(column, i)
        if not words:
            raise self._fault(i, column, "words", "none")
        for word in words:
            if not is_text(word) or not word:
                raise self._fault(i, column, "words, none of them empty", brief(word))
        return [word.replace(" ", "\u00a0") for word in words]

    def _tag(self, column: str, i: int, tag: Any, names: Sequence[str]) -> str:
        if isinstance(tag, int) and 0 <= tag < len(names):
            tag = names[tag]
        right = isinstance(tag, str) and (tag == "O" or (tag[:1] in _BEGINS + _GOES_ON and tag[1:2] == "-" and tag[2:]))
        if not right:
            remedy = " and label_names in source.json" if isinstance(tag, int) else ""
            raise self._fault(i, column, f"tags O, B-X and I-X for entities of kind X{remedy}", brief(tag))
        return str(tag)

    def _fault(self, i: int, column: str, expected: str, got: str) -> DataError:
        where = f"{self._table.where}, row {self._table.numbers[i]}, column {column!r}"
        return DataError(f"{where}: expected {expected}, got {got}. Fix or remove the row.")


def bio(tags: Sequence[str]) -> list[str]:
    """Return the tags of one sentence in BIO.

    >>> bio(["I-PER", "I-PER", "O", "S-LOC", "B-ORG", "E-ORG"])
    ['B-PER', 'I-PER', 'O', 'B-LOC', 'B-ORG', 'I-ORG']
    """
    found, going_on = list[str](), ""
    for tag in tags:
        place, kind = tag[0], tag[2:]
        goes_on = place in _GOES_ON and kind == going_on
        found.append(tag if tag == "O" else f"{'I' if goes_on else 'B'}-{kind}")
        going_on = "" if place in _ENDS else kind
    return found
