"""Tables of sentences whose words are tagged, as in the recognition of named entities.

A row has ``tokens``, its words, and ``tags``, one for each: ``O``, or ``B-X`` for the first word of an entity of kind X and
``I-X`` for each further one (BIO, or IOB2). Either is a list, or a text with spaces between, as a csv file holds it. Tags in
IOB1, IOBES or BILOU are converted, and a note says so; numbers are read by the names that come with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from forgetfree.data.bad_rows import BadRow, DataFaults, left_out, refusal
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
    note: str = "",
    skip_bad_rows: bool = False,
) -> TaskRows:
    """Return a task whose words are labelled.

    Args:
        name: the task's name.
        tables: by split.
        given: what its source.json says: ``entities``, in the order of the labels; default: as it is registered, or those of
            the training tags, sorted. Where tags are numbers, ``label_names`` says what they stand for.
        registered: its definition in the registry, if it has one.
        asked: the columns of words and tags, where they are named.
        note: what the user should know of the tables.
        skip_bad_rows: whether they are left out.

    Raises:
        DataError: a column is missing, a row is not as it must be, or a split has no rows, or no entity.
    """
    faults = DataFaults()
    read = {split: each for split, table in tables.items() if (each := faults.attempt(_Sentences, table, given, asked))}
    rows: dict[str, Rows] = {}
    if "train" in read:
        entities = given.get("entities") or (registered.entities if registered else ())
        entities = entities or sorted({tag[2:] for tags in read["train"].tags.values() for tag in tags if tag != "O"})
        task = TaskDefinition.of_entities(name, entities)
        rows = {split: sentences.rows(task) for split, sentences in read.items()}
    for split, table in tables.items():
        faults.add(table.bad, len(rows.get(split, ())), skip_bad_rows)
    faults.report()
    whole = complete(task, rows)
    notes = [f"{split} rows of task {name!r}: {each.note}" for split, each in read.items() if each.note]
    cut = whole.cut if tables.keys() == {"train"} else ""
    bad = {split: table.bad for split, table in tables.items() if table.bad}
    if told := "; ".join(filter(None, [note, left_out(bad.items()), cut])):
        notes.insert(0, f"Task {name!r} ({tables['train'].where}): {told}.")
    return replace(whole, notes=tuple(notes), left_out={split: each.summary for split, each in bad.items()})


def check_tagged(table: Table, asked: Columns) -> None:
    """Raise ``DataError`` if the column of the words or that of the tags is missing."""
    _columns(table, asked)


def _columns(table: Table, asked: Columns) -> list[str]:
    """Return the columns of words and tags."""
    found = list[str]()
    for names in (asked.texts or _WORDS, (asked.label,) if asked.label else _TAGS):
        name = next((name for name in names if name in table.columns), None)
        if name is None:
            held = ", ".join(map(repr, table.columns)) or "none"
            raise DataError(
                f"{table.where} has no column {names[0]!r}: expected tokens, with the words of a sentence, and tags, with one "
                f"for each word; found {held}. Rename or add the column, or name others with --text-column and --label-column."
            )
        found.append(name)
    return found


class _Sentences:
    """The words and tags of one table, as BIO: by the place of each row that is good."""

    def __init__(self, table: Table, given: Mapping[str, Any], asked: Columns) -> None:
        self._table = table
        words, column = _columns(table, asked)
        self._tags = column
        names = table.label_names.get(column) or given.get("label_names") or ()
        self.words, self.tags, self.note = dict[int, list[str]](), dict[int, list[str]](), ""
        for i in range(len(table.numbers)):
            sentence = table.bad.attempt(self._words, words, i)
            written = table.bad.attempt(self._written, column, i, names, sentence)
            if sentence is None or written is None:
                continue
            self.words[i], self.tags[i] = sentence, bio(written)
            differ = [(one, other) for one, other in zip(written, self.tags[i], strict=True) if one != other]
            if differ and not self.note:
                first = f"row {table.numbers[i]} has {differ[0][0]!r} where BIO has {differ[0][1]!r}"
                self.note = f"the tags are in IOB1, IOBES or BILOU, and are read as BIO ({first})."

    def rows(self, task: TaskDefinition) -> Rows:
        """Return the good rows with the task's labels."""
        numbers, kept = {label: number for number, label in enumerate(task.labels)}, list[int]()
        for i, tags in self.tags.items():
            if unknown := [tag for tag in tags if tag not in numbers]:
                expected = f"entities of {', '.join(task.entities)}"
                self._table.bad.add(self._fault(i, self._tags, "unknown entity", expected, repr(unknown[0])))
            else:
                kept.append(i)
        labels = tuple(tuple(numbers[tag] for tag in self.tags[i]) for i in kept)
        return Rows(tuple(" ".join(self.words[i]) for i in kept), (), labels)

    def _written(self, column: str, i: int, names: Sequence[str], sentence: Sequence[str] | None) -> list[str]:
        """Return the tags of a sentence as they are written, one for each word; of a bad sentence, any number."""
        written = [self._tag(column, i, tag, names) for tag in self._cell(column, i)]
        if sentence is not None and len(written) != len(sentence):
            of = "the one word" if len(sentence) == 1 else f"each of {len(sentence)} words"
            raise refusal(
                self._fault(i, column, "words and tags differ", f"a tag for {of}", counted(len(written), "tag"))
            )
        return written

    def _cell(self, column: str, i: int) -> list[Any]:
        value = plain(self._table.columns[column][i])
        if isinstance(value, str):
            return value.split()
        if not isinstance(value, Sequence):
            expected = "a list, or a text with spaces between words"
            raise refusal(self._fault(i, column, "no list", expected, brief(value)))
        return list(value)

    def _words(self, column: str, i: int) -> list[str]:
        """Return the words of a sentence; a space within a word becomes one that breaks no line."""
        words = self._cell(column, i)
        if not words:
            raise refusal(self._fault(i, column, "no words", "words", "none"))
        for word in words:
            if not is_text(word) or not word:
                raise refusal(self._fault(i, column, "no word", "words, none of them empty", brief(word)))
        return [word.replace(" ", "\u00a0") for word in words]

    def _tag(self, column: str, i: int, tag: Any, names: Sequence[str]) -> str:
        if isinstance(tag, int) and 0 <= tag < len(names):
            tag = names[tag]
        right = isinstance(tag, str) and (tag == "O" or (tag[:1] in _BEGINS + _GOES_ON and tag[1:2] == "-" and tag[2:]))
        if not right:
            remedy = " and label_names in source.json" if isinstance(tag, int) else ""
            expected = f"tags O, B-X and I-X for entities of kind X{remedy}"
            raise refusal(self._fault(i, column, "unknown tag", expected, brief(tag)))
        return str(tag)

    def _fault(self, i: int, column: str, what: str, expected: str, got: str) -> BadRow:
        file, number = self._table.where, self._table.numbers[i]
        message = f"{file}, row {number}, column {column!r}: expected {expected}, got {got}. Fix or remove the row."
        return BadRow(file, number, column, what, got, message)


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
