"""Which columns hold the texts and the label: named by the user or in source.json, ours, or of a common name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forgetfree import registry
from forgetfree.errors import DataError, UnknownNameError, UsageError, nearest

#: The columns of a pair of texts.
PAIR = ("text_a", "text_b")
#: The column of a sentence's words, by preference.
WORDS = ("tokens", "words")
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
    """The names of a task's columns. As a user asks for them, both may be left out.

    Attributes:
        texts: one for single texts, two for pairs.
        label: of the label.
        note: what to say of how names were understood.
    """

    texts: tuple[str, ...] = ()
    label: str | None = None
    note: str = field(default="", compare=False)

    @classmethod
    def of(cls, texts: str | Sequence[str] | None, label: str | None) -> ColumnNames:
        """Make them of what a user gives.

        Raises:
            UsageError: these are not one or two different names of texts, and another of a label.
        """
        names = _listed_names(texts)
        every = [*names, *([] if label is None else [label])]
        if len(names) > 2 or len(set(every)) < len(every) or not all(isinstance(each, str) and each for each in every):
            raise UsageError(
                "text_column must be one column or, for pairs, two, and label_column another, got "
                f"{', '.join(map(repr, names)) or 'none'}, and {label!r}. Name each column once."
            )
        return cls(names, label)

    def over(self, source: Mapping[str, Any]) -> ColumnNames:
        """Return these, and what a ``source.json`` names where they are left out."""
        source_columns = ColumnNames.of(source.get("text_column"), source.get("label_column"))
        return replace(self, texts=self.texts or source_columns.texts, label=self.label or source_columns.label)


#: No column is named: all are recognised.
NO_COLUMN_NAMES = ColumnNames()


def _listed_names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True)
class ReadOptions:
    """What a user says of how the rows of all tasks are read.

    Attributes:
        texts: names of columns; ``TASK.COLUMN`` is a column of one task, unless a column has this name.
        labels: the same.
        skip_bad_rows: whether rows that cannot be used are left out, and not refused.
        metrics: names of metrics; ``TASK=NAME`` is that of one task.
        kinds: what tasks ask for, in place of what their columns say; ``TASK=KIND`` is that of one task.
        tasks: the names of the tasks that may be meant.
    """

    texts: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    skip_bad_rows: bool = False
    metrics: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        texts: str | Sequence[str] | None,
        labels: str | Sequence[str] | None,
        skip_bad_rows: bool = False,
        metrics: str | Mapping[str, str] | None = None,
        kinds: str | Sequence[str] | None = None,
    ) -> ReadOptions:
        """Make them of what a call gives."""
        return cls(
            _listed_names(texts), _listed_names(labels), skip_bad_rows, named_metrics(metrics), _listed_names(kinds)
        )

    def kind(self, task: str) -> str | None:
        """Return the kind that is named for a task: for it alone, or else for all.

        Raises:
            UsageError: several are named.
        """
        named = [each.rpartition("=")[::2] for each in self.kinds]
        by_owner = [[kind for owner, kind in named if owner == name] for name in (task, "")]
        kinds = next(filter(None, by_owner), [])
        if len(kinds) > 1:
            raise UsageError(
                f"--kind must be one kind for task {task!r}, got {', '.join(kinds)}. Name one, or TASK=KIND for one task alone."
            )
        return kinds[0] if kinds else None

    def check_kinds(self, tasks: Iterable[str]) -> None:
        """Raise `UnknownNameError` if the kind of a task is named that is not among ``tasks``."""
        known = {*tasks}
        for owner in (each.rpartition("=")[0] for each in self.kinds):
            if owner and owner not in known:
                raise UnknownNameError("task in --kind", owner, known)

    def metric(self, task: str) -> str | None:
        """Return the metric that is named for a task: for it alone, or else for all."""
        by_task = {owner: metric for owner, _, metric in (each.rpartition("=") for each in self.metrics)}
        return next((by_task[name] for name in (task, "") if name in by_task), None)

    def check_metrics(self, tasks: Collection[str]) -> None:
        """Raise ``UsageError`` where metrics are named that are none, or for tasks that are not there, or twice for one.

        Args:
            tasks: the names of all tasks; none where they are not known.
        """
        owners = [each.rpartition("=")[0] for each in self.metrics]
        for owner, metric in zip(owners, (each.rpartition("=")[2] for each in self.metrics), strict=True):
            registry.metric(metric)
            if owner and tasks and owner not in tasks:
                raise UnknownNameError("task in --metric", owner, tasks)
            if owners.count(owner) > 1:
                raise UsageError(
                    f"--metric names several metrics {f'of task {owner!r}' if owner else 'of all tasks'}: "
                    f"{', '.join(self.metrics)}. Name one; TASK=NAME is that of one task."
                )

    def among(self, tasks: Iterable[str]) -> ReadOptions:
        """Return these options where tasks of these names may be meant, too."""
        return replace(self, tasks=tuple(dict.fromkeys([*self.tasks, *tasks])))

    def columns(self, task: str, header: Collection[str]) -> ColumnNames:
        """Return the columns that are named for a task: for it alone, or else for all.

        Args:
            task: its name.
            header: the names of all its columns: one that is named so is meant as it is written.

        Raises:
            UsageError: these are not one or two different names of texts, and one of a label.
        """
        notes = list[str]()
        texts, labels = self._of(task, self.texts, header, notes), self._of(task, self.labels, header, notes)
        if len(labels) > 1:
            raise UsageError(
                f"label_column must be one column for task {task!r}, got {', '.join(map(repr, labels))}. Name one, or "
                "TASK.COLUMN for one task alone."
            )
        return replace(ColumnNames.of(texts, *labels or (None,)), note="; ".join(notes))

    def _of(self, task: str, named: Iterable[str], header: Collection[str], notes: list[str]) -> list[str]:
        """Return the columns of a task among those named; ``notes`` gets what to say where a name has two meanings."""
        # Of tasks a and a.b, a.b.text is a column of the second.
        tasks = sorted({task, *self.tasks}, key=len, reverse=True)
        columns: dict[str, list[str]] = {"own": [], "common": [], "other": []}
        for name in named:
            owner = next((each for each in tasks if name.startswith(f"{each}.")), None)
            bare = name.removeprefix(f"{owner}.")
            if owner == task:
                columns["own"].append(name if name in header else bare)
                if name in header and bare in header:
                    notes.append(f"{name!r} is the column of this name, not {bare!r} of task {task!r}")
            elif owner is None:
                columns["common"].append(name)
            elif readings := [each for each in (name, name.removeprefix(f"{task}.")) if each in header]:
                columns["other"].append(readings[0])
        if not columns["own"] and not columns["common"]:
            notes += [f"{name!r} is taken as a column of this task, too" for name in columns["other"]]
        return columns["own"] or columns["common"] or columns["other"]


def named_metrics(metrics: str | Mapping[str, str] | Sequence[str] | None) -> tuple[str, ...]:
    """Return metrics as the command line names them, of a name for all tasks, or of names by task.

    >>> named_metrics({"chats": "chrf"})
    ('chats=chrf',)
    """
    if isinstance(metrics, Mapping):
        return tuple(f"{task}={metric}" for task, metric in metrics.items())
    return _listed_names(metrics)


#: Columns are recognised, and bad rows refused.
READ_DEFAULTS = ReadOptions()


def choose(where: str, names: Iterable[str], columns: ColumnNames, kind: str | None) -> tuple[ColumnNames, str]:
    """Return a table's columns of texts and label, and what to say of them; nothing where they were named or are ours.

    Args:
        where: the table, for messages.
        names: of all its columns.
        columns: those that were named.
        kind: of the task, where it is known.

    Raises:
        DataError: a column is missing, or several may be meant.
    """
    header = list(names)
    texts = choose_texts(where, header, columns, kind)
    notes = [] if columns.texts or _own_texts(header, kind) else [f"texts from {' and '.join(map(repr, texts))}"]
    label = columns.label or ("label" if "label" in header else None)
    if texts and label is None:
        known = _known(header)
        options = [(known[bare_name(name)],) for name in _LABELS if bare_name(name) in known]
        label = next((name for (name,) in _only(where, "the labels", options, "--label-column")), None)
        notes.append(f"labels from {label!r}")
    if not texts or label is None:
        ours = PAIR if kind == "pair" else ("text",)
        lacking = "label" if texts else next(name for name in ours if name not in header)
        expected = "text_a and text_b" if kind == "pair" else "text (or text_a and text_b)"
        labelled = label or any(map(is_label, header))
        option = "--label-column" if texts else "--text-column" if labelled else "--text-column and --label-column"
        raise DataError(
            f"{where} has no column {lacking!r}: expected {expected}, and label; found {_listed(header)}. Rename or add the "
            f"column, or name another with {option}."
        )
    if label in texts:
        raise DataError(f"{where}: column {label!r} would be both text and label. Name two columns.")
    return ColumnNames(texts, label), " and ".join(notes)


def choose_texts(where: str, names: Iterable[str], columns: ColumnNames, kind: str | None) -> tuple[str, ...]:
    """Return a table's columns of texts; none where no name is recognised. The table may be without labels.

    Args:
        where: the table, for messages.
        names: of all its columns.
        columns: those that were named.
        kind: of the task, where it is known.

    Raises:
        DataError: a column that was named is missing, or several may be meant.
    """
    known, header = _known(names), list(names)
    for name in (*columns.texts, *filter(None, [columns.label])):
        if name not in header:
            option = "text_column" if name in columns.texts else "label_column"
            pair = "For a pair of texts give --text-column twice. " if "," in name else ""
            raise DataError(
                f"{where} has no column {name!r}, which is named as {option}; found {_listed(header)}.{nearest(name, header)} "
                f"{pair}Name one of these with --{option.replace('_', '-')}; for one task alone as TASK.COLUMN, or as "
                f"{option} in its source.json."
            )
    if columns.texts and kind and len(columns.texts) != (2 if kind == "pair" else 1):
        raise DataError(
            f"{where}: the task has {'two texts' if kind == 'pair' else 'one text'} a row, and "
            f"{len(columns.texts)} columns of texts are named: {_listed(columns.texts)}. Name one for each text."
        )
    if own := columns.texts or _own_texts(header, kind):
        return own
    pairs = [
        (known[bare_name(a)], known[bare_name(b)]) for a, b in _PAIRS if {bare_name(a), bare_name(b)} <= known.keys()
    ]
    paired = {name for pair in pairs for name in pair}
    singles = [(known[name],) for name in _SINGLES if name in known and (kind or known[name] not in paired)]
    options = [*(pairs if kind in ("pair", None) else []), *(singles if kind != "pair" else [])]
    (texts,) = _only(where, "the texts", options, "--text-column") or [()]
    return texts


def are_labelled_texts(names: Iterable[str], *, beside: Iterable[str] = ()) -> bool:
    """Return whether columns of common names hold texts and a label.

    Args:
        names: of all columns.
        beside: columns that are no label, whatever they are called.
    """
    plain = {bare_name(name) for name in names}
    labels = plain & {bare_name(name) for name in _LABELS} - {bare_name(name) for name in beside}
    paired = any({bare_name(one), bare_name(other)} <= plain for one, other in _PAIRS)
    return bool(labels) and (paired or bool(plain & set(_SINGLES)))


def is_label(name: str) -> bool:
    """Return whether a column has a common name of labels."""
    return bare_name(name) in {bare_name(each) for each in _LABELS}


def _known(names: Iterable[str]) -> dict[str, str]:
    """Return a table's names by how they are compared; the first of several that are alike."""
    return {bare_name(name): name for name in reversed(list(names))}


def _own_texts(header: Sequence[str], kind: str | None) -> tuple[str, ...]:
    """Return our columns of texts, where a table has them."""
    if kind in ("pair", None) and set(PAIR) <= set(header):
        return PAIR
    if kind == "tokens" and (words := [name for name in WORDS if name in header]):
        return (words[0],)
    return ("text",) if kind != "pair" and "text" in header else ()


def _only(where: str, what: str, options: Sequence[tuple[str, ...]], flag: str) -> list[tuple[str, ...]]:
    """Return the only option, or none where there is none."""
    if len(options) > 1:
        ways = [" ".join(f"{flag} {name!r}" for name in names) for names in options]
        raise DataError(
            f"{where}: {what} may be in {', or in '.join(' and '.join(map(repr, names)) for names in options)}. Say which, by "
            f"{' or by '.join(ways)}."
        )
    return list(options)


def bare_name(name: str) -> str:
    """Return a name without case and punctuation: "Sci/Tech" and "sci_tech" are equal."""
    return re.sub(r"[\W_]+", "", name).lower()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
