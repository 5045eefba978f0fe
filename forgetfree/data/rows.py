"""A task's rows, texts and labels by split; k-shot samples and mini-batches of them, drawn by seed."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import Any, get_args

from forgetfree import registry
from forgetfree.data.bad_rows import DataFaults, left_out_note
from forgetfree.data.tables import TaskTables
from forgetfree.display import counted, listed, tell_note
from forgetfree.errors import DataError, UsageError
from forgetfree.seeds import derive_seed
from forgetfree.tasks import SPLITS, EvaluatedOn, TaskDefinition

#: The share of the training rows, and the most rows, that are split off for a missing validation split.
_SPLIT_OFF_SHARE, _SPLIT_OFF_ROWS = 0.1, 1000
#: The same for test rows, where the data have only training rows.
_TEST_SHARE, _TEST_ROWS = 0.2, 2000


@dataclass(frozen=True)
class Rows:
    """The rows of one split.

    Attributes:
        first: first texts; where words are labelled, sentences with single spaces between their words.
        second: second texts; empty for tasks over one text.
        labels: the label of each row; or a tuple with a label for each word, a 0 or 1 for each label, or the right texts.
        places: the file of each row and its number there, for messages; empty if not known.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    labels: tuple[Any, ...]
    places: tuple[tuple[str, int], ...] = field(default=(), compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def texts(self) -> list[tuple[str, ...]]:
        """One tuple of one or two texts for each row."""
        return list(zip(self.first, self.second, strict=True) if self.second else zip(self.first, strict=True))

    def take(self, indices: Sequence[int]) -> Rows:
        """Return the rows at ``indices``, in that order."""
        return Rows(
            tuple(self.first[i] for i in indices),
            tuple(self.second[i] for i in indices) if self.second else (),
            tuple(self.labels[i] for i in indices),
            tuple(self.places[i] for i in indices) if self.places else (),
        )

    def without(self, numbers: Collection[int]) -> tuple[Rows, Rows]:
        """Return the rows that are not at ``numbers``, and the rows at ``numbers``."""
        return self.take([i for i in range(len(self)) if i not in numbers]), self.take(sorted(numbers))


def _plain(text: str) -> str:
    """Return the case-folded words joined by spaces, or the stripped text if it has none."""
    return " ".join(re.findall(r"\w+", text.casefold())) or text.strip()


@dataclass(frozen=True)
class TaskRows:
    """A task with all its rows.

    Attributes:
        task: its definition.
        train, validation, test: its rows.
        notes: notes for the user on how they were read.
        left_out: by split, the number of bad rows that were left out, see `BadRows.summary`.
        mapped: the labels that were read as others.
    """

    task: TaskDefinition
    train: Rows
    validation: Rows
    test: Rows
    notes: tuple[str, ...] = field(default=(), compare=False)
    left_out: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, compare=False)
    mapped: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def shared(self) -> dict[str, int]:
        """The number of test rows that are also ``train`` or ``validation`` rows: with the same texts and any label."""
        test = [tuple(map(_plain, texts)) for texts in self.test.texts]
        return {
            split: sum(texts in others for texts in test)
            for split, rows in (("train", self.train), ("validation", self.validation))
            for others in [{tuple(map(_plain, texts)) for texts in rows.texts}]
        }

    def shared_note(self, scored: EvaluatedOn = "test") -> str:
        """Return a note on rows that are `shared`, if any; ``scored`` is the split of the test rows, see `evaluated_on`."""
        names = {"train": "training", "validation": "validation" if scored == "test" else "other validation"}
        phrases = [
            f"the texts of {count:,} are also in the {names[split]} rows"
            for split, count in self.shared.items()
            if count
        ]
        if not phrases:
            return ""
        return (
            f"Of {counted(len(self.test), f'{scored} row')} of task {self.task.name!r}, {' and '.join(phrases)} (whatever the "
            "labels, case and punctuation), so scores may be higher than on new texts. Keep each of these texts once."
        )

    def fingerprint(self) -> str:
        """Return the SHA-256 over every row of every split: equal data sets have equal fingerprints."""
        digest = hashlib.sha256()
        for split in SPLITS:
            rows: Rows = getattr(self, split)
            digest.update(json.dumps([split, rows.first, rows.second, rows.labels]).encode())
        return digest.hexdigest()

    def evaluated_on(self, split: EvaluatedOn) -> TaskRows:
        """Return the task with the rows on which models are scored as its test rows.

        For ``validation``, every other validation row of each label replaces the test rows. The rest remain validation
        rows, which training itself needs, for example to choose a mask.

        Raises:
            DataError: no label has two validation rows.
        """
        if split not in get_args(EvaluatedOn):
            raise UsageError(f"evaluate_on must be {' or '.join(get_args(EvaluatedOn))}, got {split!r}.")
        if split == "test":
            return self
        groups = registry.kind(self.task.kind).groups(self.validation.labels)
        by_group = [[i for i, group in enumerate(groups) if group == each] for each in set(groups)]
        kept, scored = (sorted(i for rows in by_group for i in rows[start::2]) for start in (0, 1))
        if not scored:
            raise DataError(
                f"Task {self.task.name!r} has {counted(len(kept), 'validation row')}, but choosing options with them "
                "needs at least two per label: one half is scored, and training uses the other half. Add validation "
                "rows."
            )
        return replace(self, validation=self.validation.take(kept), test=self.validation.take(scored))


def complete(task: TaskDefinition, rows: dict[str, Rows]) -> TaskRows:
    """Return the task with all three splits.

    A missing test split is the validation split; a missing validation split is split off from the training
    rows, equal texts together. Where both are missing, both are split off, label by label.

    Raises:
        DataError: a split is empty, or a label has no training row.
    """
    kind = registry.kind(task.kind)
    if rows.keys() == {"train"}:
        rows = _in_three(rows["train"], task, kind)
    before = train = rows["train"]
    validation = rows.get("validation") if "test" in rows else None
    test = rows["test"] if "test" in rows else rows["validation"]
    if validation is None:
        if len(train) == 1:
            raise DataError(
                f"Task {task.name!r} has one training row and no validation split, so no row can be held out for "
                "validation. Add rows with every label."
            )
        train, validation = _validation_of(train, kind, derive_seed(0, "held out", task.name))
    splits = dict(zip(SPLITS, (train, validation, test), strict=True))
    for split, split_rows in splits.items():
        if len(split_rows) == 0:
            raise DataError(f"Task {task.name!r} has no rows in its {split} split. Add rows.")
    kind.check_splits(task, splits, before)
    return TaskRows(task, train, validation, test)


def _validation_of(rows: Rows, kind: Any, seed: int) -> tuple[Rows, Rows]:
    """Split off a share of the rows: equal texts together, unless this takes more than twice as many, or a label's last row."""
    order, texts = list(range(len(rows))), rows.texts
    random.Random(seed).shuffle(order)
    rows_of_text = _rows_by_text(rows, order)
    count = min(_SPLIT_OFF_ROWS, max(1, round(len(rows) * _SPLIT_OFF_SHARE)))
    alone, out, groups = set(order[:count]), set[int](), kind.groups(rows.labels)
    for i in order:
        if i not in out and len(out) < count and len(out) + len(same := rows_of_text[texts[i]]) <= 2 * count:
            out.update(same)
    if not out or {groups[i] for i in order if i not in out} != {groups[i] for i in order if i not in alone}:
        out = alone
    return rows.without(out)


def _rows_by_text(rows: Rows, order: Iterable[int]) -> dict[tuple[str, ...], list[int]]:
    """Return the numbers of the rows with equal texts, in an order."""
    texts, found = rows.texts, dict[tuple[str, ...], list[int]]()
    for i in order:
        found.setdefault(texts[i], []).append(i)
    return found


def read_rows(
    read: TaskTables,
    task: TaskDefinition,
    rows: dict[str, Rows],
    phrases: Sequence[str] = (),
    notes: Sequence[str] = (),
    faults: DataFaults | None = None,
) -> TaskRows:
    """Return the task with all three splits, and with notes on how it was read.

    Raises:
        DataError: see `complete`; or with the faults, and the good rows as its ``rest``.
    """
    faults = faults or DataFaults()
    if faults and not all(len(rows.get(split, ())) > len(table.bad) for split, table in read.tables.items()):
        faults.report()  # a split may lack something that its bad rows have
    whole = faults.demand(complete, task, rows)
    bad = {split: table.bad for split, table in read.tables.items() if table.bad}
    split_off = ""
    if rows.keys() == {"train"}:
        counts = f"{len(whole.test):,} test and {counted(len(whole.validation), 'validation row')}"
        split_off = f"{counts} split off from the {len(rows['train']):,}, always the same"
    parts = [read.note, *phrases, left_out_note(bad.items()), split_off]
    if note := "; ".join(filter(None, parts)):
        notes = [f"Task {task.name!r} ({read.train.where}): {note}.", *notes]
    whole = replace(whole, notes=tuple(notes), left_out={split: each.summary() for split, each in bad.items()})
    faults.rest.append(whole)
    faults.report()
    return whole


def _in_three(rows: Rows, task: TaskDefinition, kind: Any) -> dict[str, Rows]:
    """Return three splits of a task's only rows: always the same for the same rows and task name."""
    name = task.name
    train, test = _split_off(rows, kind, _TEST_SHARE, _TEST_ROWS, derive_seed(0, "held out for test", name))
    if len(rows) and not len(test):
        labels = len(set(kind.groups(rows.labels)))
        raise DataError(
            f"Task {name!r} has {counted(labels, 'label')} in {counted(len(rows), 'row')}, but no label has two "
            "different texts, so no row can be split off for testing. Add rows with every label; if these are not "
            "labels, name another --label-column."
        )
    train, validation = _split_off(train, kind, _SPLIT_OFF_SHARE, _SPLIT_OFF_ROWS, derive_seed(0, "held out", name))
    if len(rows) and not len(validation):
        raise DataError(
            f"Task {name!r} has {counted(len(rows), 'row')}, which are too few: after test rows are split off, none "
            "are left for validation. Add rows, with every label if they have labels, or a file for that split."
        )
    return {"train": train, "validation": validation, "test": test}


def _split_off(rows: Rows, kind: Any, share: float, most: int, seed: int) -> tuple[Rows, Rows]:
    """Split off a share of every label's rows, equal texts together; a label with two texts or more keeps one and gives one."""
    groups = kind.groups(rows.labels)
    by_label: dict[int, list[list[int]]] = {}
    for same in _rows_by_text(rows, range(len(rows))).values():
        by_label.setdefault(groups[same[0]], []).append(same)
    share, draw, out = min(share, most / max(1, len(rows))), random.Random(seed), set[int]()
    for _, own in sorted(by_label.items()):
        draw.shuffle(own)
        wanted = max(1, round(share * sum(map(len, own))))
        while len(own) > 1 and wanted > 0:
            wanted -= len(same := own.pop())
            out.update(same)
    return rows.without(out)


def tell(tasks: Iterable[TaskRows]) -> None:
    """Write the notes on how tasks were read to stderr."""
    for note in (note for rows in tasks for note in rows.notes):
        tell_note(note)


#: The number of batches whose rows are sorted by length together; more save padding, fewer mix lengths better.
_WINDOW = 50
#: The most labels with too few rows that a note names.
_MOST_GROUPS = 5


def k_shot(rows: Rows, task: TaskDefinition, shots: int, seed: int) -> Rows:
    """Draw ``shots`` rows of every label by ``seed``, and return them in their order (LM-BFF, §3).

    The kind of the task decides what is counted. For tagging, ``shots`` sentences have each kind of entity, the rarest
    kind first (Yang and Katiyar, 2020, §4.2), and as many have no entity, if there are so many.

    A label with fewer rows keeps all of them: see `few_rows_note`.

    Raises:
        UsageError: ``shots`` is below 1.
    """
    if shots < 1:
        raise UsageError(f"--shots must be at least 1, got {shots}. Leave it out to train on all rows.")
    members = registry.kind(task.kind).members(rows.labels)
    random, drawn = Random(seed), set[int]()
    for rows_of_group in members.values():
        available = [i for i in rows_of_group if i not in drawn]
        drawn |= set(
            random.sample(available, max(0, min(shots - (len(rows_of_group) - len(available)), len(available))))
        )
    return rows.take(sorted(drawn))


def few_rows_note(rows: Rows, task: TaskDefinition, shots: int | None) -> str:
    """Return a note on labels with fewer training rows than ``shots``, which are all taken; empty if there is no such label."""
    kind = registry.kind(task.kind)
    members = kind.members(rows.labels)
    needed = {group: len(own) for group, own in members.items() if group != kind.optional_group}
    rare = sorted((count, members[group], group) for group, count in needed.items() if count < (shots or 0))
    if not rare:
        return ""
    counts = [f"{count} training {kind.group_name(task, group, count)}" for count, _, group in rare]
    return f"Task {task.name!r} has {listed(counts, _MOST_GROUPS)}, fewer than --shots {shots}: using all of them."


def plan_batches(
    lengths: Sequence[int], batch_size: int, batches: int, seed: int, *, group_by_length: bool = True
) -> list[list[int]]:
    """Return the row numbers of ``batches`` mini-batches, where every epoch holds each row once.

    Batches are drawn evenly at random. Data with more rows than a window may be grouped by length, which saves padding: each
    random window of rows is sorted, and the batches of an epoch then come in random order. No row is favoured: the rows of
    smaller batches are drawn before any sorting, and every other batch is equally likely to come at any place.

    Args:
        lengths: the lengths of all rows.
        batch_size: rows per batch. The remaining rows of an epoch make a smaller batch, of at least two rows if possible:
            BatchNorm cannot train on a single row.
        batches: the number of batches.
        seed: the seed of all random choices.
        group_by_length: put rows of similar length together where the data is larger than a window.

    Raises:
        UsageError: there are no rows.
    """
    if not lengths:
        raise UsageError("There are no rows to draw batches from. Give at least one row.")
    random, plan = Random(seed), list[list[int]]()
    window, rows = _WINDOW * batch_size, len(lengths)
    smaller = [rows % batch_size] if rows % batch_size else []
    if smaller == [1] and 2 < batch_size < rows:
        smaller = [batch_size - 1, 2]
    while len(plan) < batches:
        order = list(range(rows))
        random.shuffle(order)
        rest = [[order.pop() for _ in range(size)] for size in smaller]
        if group_by_length and rows > window:
            for start in range(0, len(order), window):
                order[start : start + window] = sorted(order[start : start + window], key=lengths.__getitem__)
        epoch = [order[i : i + batch_size] for i in range(0, len(order), batch_size)] + rest
        random.shuffle(epoch)
        plan += epoch
    return plan[:batches]


#: On a GPU, an evaluation batch has at most the tokens of a full batch of rows of this length.
LONG_ROW = 512


def by_length(lengths: Sequence[int], batch_size: int, *, by_tokens: bool = False) -> list[list[int]]:
    """Return the row numbers of batches that hold every row once, shortest rows first, for evaluation.

    >>> by_length([3, 1, 2], 2)
    [[1, 2], [0]]

    Args:
        lengths: the lengths of the rows, in tokens.
        batch_size: rows per batch.
        by_tokens: limit a batch by its tokens with padding, to ``batch_size`` times `LONG_ROW`, and not by its rows; this
            changes nothing for a ``batch_size`` of 1, or for rows without tokens.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    if by_tokens and batch_size > 1 and lengths and lengths[order[0]]:
        return list(micro_batches(order, lengths, len(order), batch_size * LONG_ROW))
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def evenly(total: int, count: int | None) -> list[int]:
    """Return at most ``count`` row numbers spread evenly over ``total`` rows; all of them for ``None``."""
    if count is None or count >= total:
        return list(range(total))
    return [i * total // count for i in range(count)]


def representative(labels: Sequence[int], count: int | None) -> list[int]:
    """Return at most ``count`` row numbers with nearly the same shares of labels as all rows, and each label at least once.

    They are spread evenly over all rows; if that misses the shares, because labels are sorted or rare, evenly within each
    label. If there are more labels than ``count``, the rarest are left out.
    """
    rows, total = evenly(len(labels), count), Counter(labels)
    counts = Counter(labels[row] for row in rows)
    if not rows or all(
        counts[label] and abs(counts[label] / len(rows) - n / len(labels)) <= 0.1 for label, n in total.items()
    ):
        return rows
    quota = {label: max(1, len(rows) * n // len(labels)) for label, n in total.items()}
    while left := len(rows) - sum(quota.values()):
        if left > 0:  # to the label that is furthest below its share
            quota[max(quota, key=lambda label: total[label] * len(rows) / len(labels) - quota[label])] += 1
        else:  # from the label with the most; of equal ones, the rarest
            quota[max(reversed(quota), key=lambda label: (quota[label], -total[label]))] -= 1
    by_label = {label: [i for i, each in enumerate(labels) if each == label] for label in total}
    return sorted(by_label[label][place] for label, many in quota.items() for place in evenly(total[label], many))


def micro_batches(
    rows: Sequence[int], lengths: Sequence[int], size: int, tokens: int | None = None
) -> Iterator[list[int]]:
    """Cut one large batch into pieces of rows of nearly equal length, shortest rows first.

    A step that adds up the pieces does not depend on how they are cut, but the shorter their padding, the faster it is.

    Args:
        rows: the row numbers of the batch.
        lengths: the lengths of all rows.
        size: the most rows of a piece.
        tokens: the most tokens of a piece with its padding, if it has more than one row; default: any number.
    """
    piece: list[int] = []
    for row in sorted(rows, key=lengths.__getitem__):
        if len(piece) == size or (piece and tokens is not None and (len(piece) + 1) * lengths[row] > tokens):
            yield piece
            piece = []
        piece.append(row)
    if piece:
        yield piece
