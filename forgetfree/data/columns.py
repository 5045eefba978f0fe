"""Choice of the columns of texts and labels: named by the user or in source.json, our own names, or common names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forgetfree import registry
from forgetfree.display import brief, first_twice, nfc
from forgetfree.errors import DataError, UnknownNameError, UsageError, nearest

#: The columns of a pair of texts.
PAIR = ("text_a", "text_b")
#: The column of a sentence's words, by preference.
WORDS = ("tokens", "words")
#: The column of a chat.
CHATS = ("messages", "conversations", "conversation")
#: Columns of prompts, where several are joined in this order, and the columns of their answers; all by preference.
PROMPTS = {
    ("prompt",): ("target", "completion", "response", "answer", "answers", "output"),
    ("instruction", "input"): ("output", "response"),
    ("instruction", "context"): ("output", "response"),
    ("instruction",): ("output", "response"),
    ("context", "question"): ("answers", "answer"),
    ("passage", "question"): ("answer",),
    ("question",): ("answer", "answers"),
    ("input",): ("output", "target"),
    ("document",): ("summary",),
    ("article",): ("highlights", "summary"),
    ("dialogue",): ("summary",),
    ("text",): ("summary",),
    ("source",): ("translation", "target"),
}
#: Common names, compared without case and punctuation.
_SINGLES = (
    *("text", "sentence", "review", "content", "comment", "tweet", "message", "post", "body", "document"),
    *("utterance", "headline", "paragraph"),
)
_PAIRS = (
    *(PAIR, ("premise", "hypothesis"), ("question", "answer"), ("question", "sentence"), ("question", "passage")),
    *(("query", "passage"), ("sentence1", "sentence2"), ("sentence_a", "sentence_b"), ("question1", "question2")),
    *(("text1", "text2"),),
)
_LABELS = (
    *("label", "labels", "class", "category", "target", "sentiment", "emotion", "intent", "topic", "gold_label"),
    *("stars", "rating"),
)


@dataclass(frozen=True)
class ColumnNames:
    """The names of a task's columns; a user may leave out both.

    Attributes:
        texts: one column for single texts, two for pairs.
        label: the column of the label.
    """

    texts: tuple[str, ...] = ()
    label: str | None = None

    @classmethod
    def of(cls, texts: str | Sequence[str] | None, label: str | None) -> ColumnNames:
        """Return the columns that a user names.

        Raises:
            UsageError: there are more than two text columns, or a name is empty, repeated or no text.
        """
        names, label = listed_names(texts), nfc(label) if isinstance(label, str) else label
        every = [*names, *([] if label is None else [label])]
        if len(names) > 2 or len(set(every)) < len(every) or not all(isinstance(each, str) and each for each in every):
            raise UsageError(
                "text_column must be one column or, for pairs, two, and label_column another, got "
                f"{', '.join(map(repr, names)) or 'none'}, and {label!r}. Name each column only once."
            )
        return cls(names, label)

    def over(self, source: Mapping[str, Any]) -> ColumnNames:
        """Return these names, where missing ones are taken from a ``source.json``."""
        source_columns = ColumnNames.of(source.get("text_column"), source.get("label_column"))
        return replace(self, texts=self.texts or source_columns.texts, label=self.label or source_columns.label)


#: No column is named: all are recognised by their names.
NO_COLUMN_NAMES = ColumnNames()


def listed_names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of an argument that is one name, several names or ``None``."""
    every = () if names is None else (names,) if isinstance(names, str) else tuple(names)
    return tuple(nfc(name) if isinstance(name, str) else name for name in every)


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading rows: each name applies to all tasks, or as ``TASK=NAME`` to one.

    Attributes:
        texts: names of text columns.
        labels: names of label columns.
        skip_bad_rows: whether rows that cannot be used are left out, and not refused.
        metrics: names of metrics.
        kinds: names of kinds of tasks, in place of the kind that the columns suggest.
        label_map: labels that are read as others, each ``OLD=NEW``, or ``TASK:OLD=NEW`` for one task; without ``NEW``, their
            rows are dropped.
    """

    texts: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    skip_bad_rows: bool = False
    metrics: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    label_map: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        texts: str | Sequence[str] | None,
        labels: str | Sequence[str] | None,
        skip_bad_rows: bool = False,
        metrics: str | Sequence[str] | None = None,
        kinds: str | Sequence[str] | None = None,
        label_map: str | Sequence[str] | None = None,
    ) -> ReadOptions:
        """Return the options of a call."""
        named = listed_names(texts), listed_names(labels)
        return cls(*named, skip_bad_rows, listed_names(metrics), listed_names(kinds), listed_names(label_map))

    def kind(self, task: str) -> str | None:
        """Return the kind that is named for a task: for it alone, or else for all."""
        return _one("--kind", self.kinds, task)

    def metric(self, task: str) -> str | None:
        """Return the metric that is named for a task: for it alone, or else for all."""
        return _one("--metric", self.metrics, task)

    def new_labels(self, task: str) -> dict[str, str]:
        """Return the label map of a task, from the written label to the new one."""
        of_all, own = dict[str, str](), dict[str, str]()
        for each in self.label_map:
            old, _, new = each.rpartition("=")
            label = mapped_label(each, [task])
            (of_all if label == old else own)[written_label(label)] = nfc(new).strip()
        return of_all | own

    def columns(self, task: str) -> ColumnNames:
        """Return the columns that are named for a task: for it alone, or else for all."""
        return ColumnNames.of(_of_task(self.texts, task), _one("--label-column", self.labels, task))

    def check(self, tasks: Collection[str]) -> None:
        """Raise ``UsageError`` for an unknown metric, a wrong label map, or a name for a task not in ``tasks``, if any."""
        for metric in self.metrics:
            registry.metric(_split(metric)[1])
        mapped = [each.rpartition("=")[0] for each in self.label_map]
        if wrong := [each for each, old in zip(self.label_map, mapped, strict=True) if not old.rpartition(":")[2]]:
            raise UsageError(
                f"--map-label needs OLD=NEW or TASK:OLD=NEW, got {brief(wrong[0])}. For example, write --map-label "
                "feautre=feature; without NEW, the rows are dropped."
            )
        if (twice := first_twice(mapped)) is not None:
            raise UsageError(f"--map-label gives {brief(twice)} two new labels. Give it one.")
        named = {"text-column": self.texts, "label-column": self.labels, "metric": self.metrics, "kind": self.kinds}
        for option, names in named.items():
            for owner in (_split(each)[0] for each in names):
                if owner and tasks and owner not in tasks:
                    raise UnknownNameError(f"task in --{option}", owner, tasks)


def _split(named: str) -> tuple[str, str]:
    """Return the task and the name of ``TASK=NAME``; the task is empty for a name alone."""
    owner, sign, name = named.partition("=")
    return (owner, name) if sign else ("", named)


def names_for(named: Iterable[str], tasks: Collection[str]) -> list[str]:
    """Return the names that are for all tasks, or for one of these."""
    return [each for each in named if _split(each)[0] in ("", *tasks)]


def names_of_tasks(named: Iterable[str], tasks: Collection[str]) -> list[str]:
    """Return the names, where each name for all tasks is replaced by one for each of ``tasks``."""
    owned = ((owner, name) for owner, name in map(_split, named))
    return [f"{each}={name}" for owner, name in owned for each in ([owner] if owner else tasks)]


def labels_of_tasks(named: Iterable[str], tasks: Collection[str], known: Collection[str]) -> list[str]:
    """Return the pairs ``OLD=NEW``, where each pair without a ``known`` task is replaced by one for each of ``tasks``."""
    alone = [(each, mapped_label(each, known) == each.rpartition("=")[0]) for each in named]
    return [
        one for each, plain in alone for one in ([f"{task}:{each}" for task in tasks] if plain and tasks else [each])
    ]


def written_label(cell: Any) -> str:
    """Return the label of a cell, before it is mapped: ``false`` or ``true`` for booleans, 3 for 3.0, and text in NFC."""
    text = str(cell).lower() if isinstance(cell, bool) else nfc(str(cell)).strip()
    return text.removesuffix(".0") if text.removesuffix(".0").isdecimal() else text


def mapped_label(named: str, tasks: Collection[str]) -> str:
    """Return the label ``OLD`` of ``OLD=NEW``, or of ``TASK:OLD=NEW`` with one of these tasks.

    >>> mapped_label("mood:hapy=happy", ["mood"]), mapped_label("NUM:date=date", ["mood"])
    ('hapy', 'NUM:date')
    """
    old = named.rpartition("=")[0]
    task, _, label = old.partition(":")
    return label if label and task in tasks else old


def _of_task(named: Sequence[str], task: str) -> list[str]:
    by_owner = [[name for owner, name in map(_split, named) if owner == own] for own in (task, "")]
    return by_owner[0] or by_owner[1]


def _one(option: str, named: Sequence[str], task: str) -> str | None:
    """Return the only name for a task, if any; raise ``UsageError`` if there are several."""
    names = _of_task(named, task)
    if len(names) > 1:
        raise UsageError(
            f"{option} must be one name for task {task!r}, got {', '.join(names)}. Name one, or TASK=NAME for one task alone."
        )
    return names[0] if names else None


#: The default options: columns are recognised, and bad rows are refused.
READ_DEFAULTS = ReadOptions()


def choose(where: str, names: Iterable[str], columns: ColumnNames, kind: str | None) -> tuple[ColumnNames, str]:
    """Return the text and label columns of a table, and a note on them, which is empty for named columns and our own.

    Raises:
        DataError: a column is missing, or several columns may be meant.
    """
    header = list(names)
    texts = choose_texts(where, header, columns, kind)
    notes = [] if columns.texts or _own_texts(header, kind) else [f"texts from {' and '.join(map(repr, texts))}"]
    label = columns.label or ("label" if "label" in header else None)
    if texts and label is None:
        known = _known(header)
        options = [(known[name],) for name in map(bare_name, _LABELS) if name in known]
        label = next((name for (name,) in _only(where, "the labels", options, "--label-column")), None)
        notes.append(f"labels from {label!r}")
    if not texts or label is None:
        ours = PAIR if kind == "pair" else ("text",)
        if texts:
            raise DataError(
                f"{where} has no column 'label': expected it in addition to the texts of "
                f"{' and '.join(map(repr, texts))}; found {_listed(header)}. Rename or add the column, or name "
                "another with --label-column."
            )
        lacking = next(name for name in ours if name not in header)
        expected = "text_a and text_b" if kind == "pair" else "text (or text_a and text_b)"
        raise DataError(
            f"{where} has no column {lacking!r}: expected {expected}, and label; found {_listed(header)}. Rename or add the "
            "column, or name others with --text-column and --label-column."
        )
    if label in texts:
        raise DataError(f"{where}: column {label!r} would be both text and label. Name two columns.")
    return ColumnNames(texts, label), " and ".join(notes)


def choose_texts(where: str, names: Iterable[str], columns: ColumnNames, kind: str | None) -> tuple[str, ...]:
    """Return the text columns of a table, which may have no labels; none if no name is recognised.

    Raises:
        DataError: a named column is missing, or several columns may be meant.
    """
    known, header = _known(names), list(names)
    for name in (*columns.texts, *filter(None, [columns.label])):
        if name not in header:
            option = "text_column" if name in columns.texts else "label_column"
            raise DataError(
                f"{where} has no column {name!r}, which {option} names; found "
                f"{_listed(header)}.{nearest(name, header)} Name one of these with --{option.replace('_', '-')}; for "
                f"one task alone as TASK=COLUMN, or as {option} in its source.json."
            )
    if columns.texts and kind and len(columns.texts) != (2 if kind == "pair" else 1):
        raise DataError(
            f"{where}: the task has {'two texts' if kind == 'pair' else 'one text'} per row, but "
            f"{len(columns.texts)} text columns are named: {_listed(columns.texts)}. Name one for each text."
        )
    if own := columns.texts or _own_texts(header, kind):
        return own
    bare_pairs = ((bare_name(one), bare_name(other)) for one, other in _PAIRS)
    pairs = [(known[one], known[other]) for one, other in bare_pairs if {one, other} <= known.keys()]
    paired = {name for pair in pairs for name in pair}
    singles = [(known[name],) for name in _SINGLES if name in known and (kind or known[name] not in paired)]
    options = [*(pairs if kind in ("pair", None) else []), *(singles if kind != "pair" else [])]
    (texts,) = _only(where, "the texts", options, "--text-column") or [()]
    return texts


def are_prompts_and_answers(columns: Sequence[str]) -> bool:
    """Return whether columns have common names of prompts and, for the last column, of their answers."""
    return columns[-1] in PROMPTS.get(tuple(columns[:-1]), ())


def are_labelled_texts(names: Iterable[str], *, beside: Iterable[str] = ()) -> bool:
    """Return whether columns with common names hold texts and a label; ``beside`` are columns that are not the label."""
    plain = _known(names)
    labels = filter(is_label, plain.keys() - _known(beside).keys())
    paired = any({bare_name(one), bare_name(other)} <= plain.keys() for one, other in _PAIRS)
    return any(labels) and (paired or bool(plain.keys() & set(_SINGLES)))


def is_label(name: str) -> bool:
    """Return whether a column has a common name of labels."""
    return bare_name(name) in map(bare_name, _LABELS)


def _known(names: Iterable[str]) -> dict[str, str]:
    """Return the table's names by their bare names; of several with one bare name, the first."""
    return {bare_name(name): name for name in reversed(list(names))}


def _own_texts(header: Sequence[str], kind: str | None) -> tuple[str, ...]:
    """Return our own text columns, if a table has them."""
    if kind in ("pair", None) and set(PAIR) <= set(header):
        return PAIR
    if kind == "tokens" and (words := [name for name in WORDS if name in header]):
        return (words[0],)
    return ("text",) if kind != "pair" and "text" in header else ()


def _only(where: str, what: str, options: Sequence[tuple[str, ...]], flag: str) -> list[tuple[str, ...]]:
    if len(options) > 1:
        ways = [" ".join(f"{flag} {name!r}" for name in names) for names in options]
        raise DataError(
            f"{where}: {what} may be in {', or in '.join(' and '.join(map(repr, names)) for names in options)}. "
            f"Choose with {' or with '.join(ways)}."
        )
    return list(options)


def bare_name(name: str) -> str:
    """Return a name without case and punctuation: "Sci/Tech" and "sci_tech" are equal."""
    return re.sub(r"[\W_]+", "", name).lower()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
