"""Classification: one label per row, for a text or a pair of texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy.typing as npt

from forgetfree import registry
from forgetfree.data.bad_rows import BadRow, DataFaults
from forgetfree.data.columns import ColumnNames, are_prompts_and_answers, bare_name, choose
from forgetfree.data.labels import (
    SEVERAL,
    Labels,
    check_alike,
    folded,
    label_cells,
    learn_labels,
    notes_of_labels,
    notes_of_slips,
)
from forgetfree.data.rows import Rows, TaskRows, read_rows
from forgetfree.data.tables import Table, TaskTables, shown
from forgetfree.display import brief, counted, is_blank, is_text
from forgetfree.errors import DataError, UsageError
from forgetfree.kinds.kind import Form, Kind, Text
from forgetfree.results.answers import LabelAnswers
from forgetfree.tasks import DEFAULT_CAUSAL_TEMPLATE, DEFAULT_TEMPLATE, TaskDefinition, slots

if TYPE_CHECKING:
    from torch import Tensor

    from forgetfree.data.encoding import Encoder
    from forgetfree.data.examples import Examples
    from forgetfree.kinds.networks import Parts, TaskNetwork
    from forgetfree.models.loading import LoadedModel


@dataclass(frozen=True)
class Answer:
    """A task's answer to one text.

    Attributes:
        task: the task.
        label: the likeliest label.
        probability: its probability.
        probabilities: the probabilities of all labels of the task, by name, in the task's order.
        cut_tokens: the number of tokens that were cut off, as the text is longer than ``max_length``.
    """

    task: str
    label: str
    probability: float
    probabilities: Mapping[str, float]
    cut_tokens: int = 0


class Classification(Kind):
    """One label per row, for a text or a pair of texts."""

    forms: ClassVar[Mapping[str, Form]] = {
        "single": ("a text, and one of two labels or more", ("text", "label")),
        "pair": ("a pair of texts, and one of two labels or more", ("text_a", "text_b", "label")),
    }
    metrics = ("accuracy", "f1", "macro_f1")

    # -- Rows ------------------------------------------------------------------------------------------------

    def recognises(self, task: TaskTables) -> bool:
        """Return whether there are columns of texts and a column of labels."""
        try:
            return bool(_chosen(task))
        except DataError:
            return False

    def read(self, task: TaskTables) -> TaskRows:
        """Return a task with its rows; columns and labels that are not named are inferred."""
        faults, train = DataFaults(), task.train
        # without columns and with bad rows, none of the rows could be read
        chosen = faults.attempt(_chosen, task) if train.columns or not train.bad else None
        if chosen is None:
            for table in task.tables.values():
                faults.add_rows(table.bad, len(table.good().numbers), task.skip_bad_rows)
            faults.report()
        assert chosen is not None
        columns, recognised = chosen
        assert columns.label is not None
        tables = {split: table.labelled(columns.label) for split, table in task.tables.items()}
        unlabelled = {split: len(task.tables[split].numbers) - len(table.numbers) for split, table in tables.items()}
        mapped = Counter[str]()
        for split, table in tables.items():
            tables[split], found = table.relabelled(columns.label, task.new_labels)
            mapped += found
        numbered = train.label_names.get(columns.label, ())
        faults.attempt(_check_order, task, columns.label, numbered)
        source = {**task.source, "label_names": task.source.get("label_names") or numbered or None}
        names = [str(label) for label in source["label_names"] or (task.registered.labels if task.registered else ())]
        registered = task.registered is not None and not source["label_names"]
        as_written = bool(source.get("kind"))  # a named kind means that each text is one label
        read = {split: _LabelledTable(table, columns, registered, as_written) for split, table in tables.items()}
        cells, numbers = read["train"].good_cells(names)
        labels = None
        if not names:
            faults.attempt(check_alike, train.where, cells, numbers)
        different = {*cells} if names else {folded(str(cell)) for cell in {*cells}}
        alone = len({*cells}) < 2 and (task.skip_bad_rows or not train.bad)  # otherwise bad rows may hide other labels
        if len(different) > 1 or alone:
            labels = faults.attempt(learn_labels, train.where, cells, names, bool(numbered))
        rows = dict[str, Rows]()
        notes = [recognised] if labels is None else [recognised, labels.note]
        notes += [] if names else notes_of_slips(cells)
        for label, count in mapped.items():
            read_as = f"read as {shown(new)}" if (new := task.new_labels[label]) else "left out"
            notes.append(f"{counted(count, 'row')} of label {shown(label)} {read_as}")
        for split, each in read.items():
            if labels is None:
                faults.attempt(check_filled, each.table, columns)
            elif split != "train" and unlabelled[split] and not len(each.table.numbers):
                continue
            elif (good := faults.attempt(each.rows, labels, task.name)) is not None:
                rows[split] = good
                notes += each.notes(labels, split)
        for split, whole in task.tables.items():
            left = len(rows[split]) if split in rows else len(whole.good().numbers)
            faults.add_rows(whole.bad, left, task.skip_bad_rows)
        if labels is None:
            faults.report()
        assert labels is not None
        inferred = definition_of(task.name, self.form(columns), labels.names, len(columns.texts), self.metrics[0])
        definition = faults.demand(with_source, task.registered or inferred, source, task.folder)
        notes += [
            f"{counted(count, f'{split} row')} without a label (-1) left out"
            for split, count in unlabelled.items()
            if count
        ]
        if len(columns.texts) == 1 and are_prompts_and_answers((*columns.texts, columns.label)):
            notes.append(
                f"the {len(labels.names):,} different texts of {columns.label!r} are labels here: --kind generation learns "
                "them as texts"
            )
        return replace(read_rows(task, definition, rows, notes, faults=faults), mapped=tuple(mapped))

    def form(self, columns: ColumnNames) -> str:
        """Return the ``kind`` in the definition of a task with these columns."""
        return "pair" if len(columns.texts) == 2 else "single"

    def faults(self, task: TaskDefinition) -> list[str]:
        """Return a phrase for each fault of labels, metric and hub, and of the prompts, if any."""
        faults = super().faults(task)
        if task.metric == "f1" and self.metric("f1") is registry.metric("f1") and len(task.labels) != 2:
            faults.append(
                f"metric must be 'accuracy' or 'macro_f1' for {len(task.labels)} labels: 'f1' is that of label 1 of two"
            )
        if task.label_words:
            faults += _word_faults(task)
        for prompt, readout in ((task.template, "prompt"), (task.causal_template, "causal")):
            faults += prompt_faults(task, readout, words=False) if prompt else []
        return faults

    def groups_of(self, label: int) -> tuple[int]:
        """Return the label."""
        return (label,)

    def group_name(self, task: TaskDefinition, group: int, count: int) -> str:
        """Return the rows of a label."""
        return f"row{'s' * (count > 1)} of label {task.labels[group]!r}"

    def check_splits(self, task: TaskDefinition, rows: Mapping[str, Rows], before: Rows) -> None:
        """Raise ``DataError`` if a label has no training row."""
        train = rows["train"]
        counts = [train.labels.count(label) for label in range(len(task.labels))]
        if 0 not in counts:
            return
        remedy = "Add rows of that label, or number the labels from 0 without gaps."
        if len(set(before.labels)) < 2:
            remedy = "A task needs rows of two labels at least."
        elif before is not train and len(set(before.labels)) == len(task.labels):
            remedy = "Some went to the missing validation split: add one, or more rows of that label."
        empty = counts.index(0)
        raise DataError(
            f"Task {task.name!r} has no training row of label {empty} ({task.labels[empty]!r}); rows per "
            f"label: {counts}. {remedy}"
        )

    def check_scored(self, rows: TaskRows) -> None:
        """Raise ``DataError`` if F1 cannot be measured: it is 0 for every model on rows without label 1."""
        for split in ("validation", "test"):
            part: Rows = getattr(rows, split)
            if rows.task.metric == "f1" and 1 not in part.labels:
                raise DataError(
                    f"Task {rows.task.name!r} is measured by the F1 of label 1 ({rows.task.labels[1]!r}), and none of its "
                    f"{counted(len(part), f'{split} row')} has that label. Add such rows, or set the metric "
                    "to 'accuracy': with --metric, or in its source.json."
                )

    # -- Models ----------------------------------------------------------------------------------------------

    def check_readout(self, task: TaskDefinition, readout: str) -> None:
        """Raise ``UsageError`` if the readout needs label words or a prompt that the task lacks."""
        if readout in ("prompt", "causal", "generate") and (faults := prompt_faults(task, readout)):
            raise UsageError(
                f"Task {task.name!r} cannot be read by the readout {readout!r}: {'; '.join(faults)}. Give them in its "
                "definition, or use the readout 'linear'."
            )

    def encoder(self, task: TaskDefinition, loaded: LoadedModel) -> Encoder:
        """Return the encoder of texts, without a prompt or in one."""
        from forgetfree.data.encoding import Encoder

        causal = loaded.readout in ("causal", "generate")
        template = task.causal_template if causal else task.template if loaded.readout == "prompt" else None
        # A causal model is read where the label word would follow, so no closing tokens may follow the prompt.
        return Encoder(loaded.tokenizer, template, loaded.max_length, closed=not causal)

    def answers(self, task: TaskDefinition, logits: Tensor, labels: Tensor, rows: Examples | None) -> LabelAnswers:
        """Return the logits and labels of rows."""
        return LabelAnswers(logits.numpy(), labels.numpy(), kind=task.kind)

    def kept_answers(
        self, task: TaskDefinition, arrays: Mapping[str, npt.NDArray[Any]], rows: int | None = None
    ) -> LabelAnswers:
        """Return answers from the arrays that `LabelAnswers.tensors` returned."""
        return LabelAnswers.of_tensors(arrays, rows, kind=task.kind)

    # -- In use ----------------------------------------------------------------------------------------------

    def replies(self, task: TaskDefinition, texts: Sequence[Text], output: Tensor, cut: Iterable[int]) -> list[Answer]:
        """Return the likeliest label of each text, with all probabilities."""
        best = output.argmax(1).tolist()  # by logits: where two nearly agree, their probabilities may be equal
        return [
            Answer(task.name, task.labels[label], shares[label], dict(zip(task.labels, shares, strict=True)), lost)
            for label, shares, lost in zip(best, output.softmax(1).tolist(), cut, strict=True)
        ]

    def network(self, task: TaskDefinition, parts: Parts) -> TaskNetwork:
        """Return a sequence classifier, or the model from which the labels are read."""
        from forgetfree.kinds.networks import label_network

        return label_network(parts)

    def fields(self, task: TaskDefinition) -> tuple[str, ...]:
        """Return the label and its probability."""
        return ("label", "probability")


def _word_faults(task: TaskDefinition) -> list[str]:
    right = len(set(task.label_words)) == len(task.labels)
    return (
        [] if right else [f"label_words must be as many as labels, all different, got {brief(task.label_words, 200)}"]
    )


def prompt_faults(task: TaskDefinition, readout: str, *, words: bool = True) -> list[str]:
    """Return a phrase for each fault of a prompt, and of the label words, for a readout by label words.

    Args:
        task: the task.
        readout: ``prompt``; any other reads by the causal template.
        words: whether to check the label words, too.
    """
    faults = _word_faults(task) if words else []
    name, expected = "causal_template", [*task.text_columns]
    if readout == "prompt":
        name, expected = "template", [*expected, "mask"]
    prompt = getattr(task, name)
    if not isinstance(prompt, str) or sorted(slots(prompt)) != sorted(expected):
        each = ", ".join(f"{{{slot}}}" for slot in expected)
        faults.append(f"{name} must hold each of {each} once and no other slot, got {prompt!r}")
    return faults


def _chosen(task: TaskTables) -> tuple[ColumnNames, str]:
    return choose(task.train.where, task.train.columns, task.columns, task.registered.form if task.registered else None)


def _check_order(task: TaskTables, column: str, numbered: Sequence[str]) -> None:
    """Raise ``DataError`` if the tables of the splits number the labels in different orders."""
    for table in task.tables.values():
        if (theirs := table.label_names.get(column, numbered)) != numbered:
            raise DataError(
                f"{table.where} has its labels in the order {', '.join(map(str, theirs))}, and {task.train.where} in the order "
                f"{', '.join(map(str, numbered)) or 'of its rows'}: one number would mean two labels. Write both alike."
            )


def definition_of(name: str, kind: str, labels: tuple[str, ...], texts: int, metric: str) -> TaskDefinition:
    """Return the definition of an unregistered task with one text or two per row."""
    form = "pair" if texts == 2 else "single"
    return TaskDefinition(
        name,
        kind,
        labels,
        template=DEFAULT_TEMPLATE[form],
        label_words=labels,
        causal_template=DEFAULT_CAUSAL_TEMPLATE[form],
        metric=metric,
    )


def with_source(task: TaskDefinition, source: Mapping[str, Any], folder: Path) -> TaskDefinition:
    """Return ``task`` with the values that ``source.json`` gives, and its labels in the data's own order."""
    path = folder / "source.json"
    if source.get("label_names"):
        task = _renamed(task, tuple(map(str, source["label_names"])), path)
    words = tuple(map(str, source.get("label_words") or task.label_words))
    if words and len(words) != len(task.labels):
        raise DataError(
            f"{path}: expected one of label_words for each of the {len(task.labels)} labels, got {len(words)}."
        )
    metric = source.get("metric", task.metric)
    if metric == "f1" and len(task.labels) != 2:
        raise DataError(
            f"{path}: metric 'f1' is that of label 1 of two, and there are {len(task.labels)} labels. Give 'macro_f1' or "
            "'accuracy'."
        )
    prompts = {key: source[key] for key in ("template", "causal_template") if source.get(key) is not None}
    task = replace(task, label_words=words, metric=metric, **prompts)
    for key in prompts:
        if faults := prompt_faults(task, "prompt" if key == "template" else "causal", words=False):
            raise DataError(f"{path}: {faults[0]}.")
    return task


def _renamed(task: TaskDefinition, labels: tuple[str, ...], path: Path) -> TaskDefinition:
    """Return the registered task with its labels in the data's own order; label words follow their labels."""
    if len(labels) != len(task.labels):
        raise DataError(
            f"{path} names {len(labels)} labels, but task {task.name!r} has {len(task.labels)}: "
            f"{', '.join(task.labels)}. Rename the folder to make it a new task."
        )
    known = {bare_name(label): word for label, word in zip(task.labels, task.label_words, strict=True)}
    if sorted(known) != sorted(map(bare_name, labels)):  # the data have other names: label words go by position
        return replace(task, labels=labels)
    return replace(task, labels=labels, label_words=tuple(known[bare_name(label)] for label in labels))


def check_filled(table: Table, columns: ColumnNames) -> None:
    """Add rows without a text to a table's bad rows.

    Raises:
        DataError: a column is missing or empty.
    """
    table.check_columns(columns)
    for column in columns.texts:
        cells = table.columns[column]
        blank = [i for i, cell in enumerate(cells) if isinstance(cell, str) and is_blank(cell)]
        if len(cells) and len(blank) == len(cells):
            raise DataError(f"{table.where}: column {column!r} is empty in every row. Write the texts into it.")
        for i in sorted({*blank, *(i for i, cell in enumerate(cells) if not is_text(cell))}):
            table.bad.add(table.fault(i, column, "no text", "a text", shown(cells[i])))


class _LabelledTable:
    """A table with one label per row; rows without a label or a text are added to the table's bad rows."""

    def __init__(self, table: Table, columns: ColumnNames, registered: bool, as_written: bool) -> None:
        assert columns.label is not None
        self.table, self._texts, self._label = table, columns.texts, columns.label
        self._registered = registered  # whether the labels are those of a registered task
        self._as_written = as_written
        self._cells: list[int | str | ValueError] | None = None

    def _read(self, names: Sequence[str]) -> list[int | str | ValueError]:
        """Return the cells of the label column, which are read once, with the names of the first call."""
        if self._cells is None:
            self._cells = label_cells(self.table.columns[self._label], self.table.typed, names, self._as_written)
        return self._cells

    def good_cells(self, names: Sequence[str]) -> tuple[list[int | str], list[int]]:
        """Return the label cells of the good training rows, and the numbers of these rows.

        Args:
            names: the names of the labels, if known; otherwise all cells must be numbers from 0, or all must be names.
        """
        read = self._read(names)
        kinds = Counter(type(cell) for cell in read if not isinstance(cell, ValueError))
        usual = max(kinds, key=kinds.__getitem__, default=int)  # the first of equally frequent ones
        expected = "an integer from 0" if usual is int else "a name, as in the other rows"
        cells, numbers = list[int | str](), list[int]()
        for i, (cell, number) in enumerate(zip(read, self.table.numbers, strict=True)):
            if isinstance(cell, ValueError):
                self.table.bad.add(self._no_label(i, expected, str(cell)))
            elif not names and (type(cell) is not usual or (isinstance(cell, int) and cell < 0)):
                why = "-1 often marks rows without a label. " if cell == -1 else ""
                remedy = f"{why}If it is a label, name all labels as they are written, as label_names in source.json. "
                what = "negative label" if isinstance(cell, int) and cell < 0 else "label of another kind"
                self.table.bad.add(self._fault(self._label, i, what, expected, remedy))
            else:
                cells.append(cell)
                numbers.append(number)
        return cells, numbers

    def rows(self, labels: Labels, task: str) -> Rows:
        """Return the good rows of a task.

        Args:
            labels: the labels of the task.
            task: its name, for messages.

        Raises:
            DataError: a column is missing or empty.
        """
        check_filled(self.table, ColumnNames(self._texts, self._label))
        read = self._read(labels.names)
        remedy = (
            f"Task {task!r} has the labels {labels.shown}, and every label needs training rows. --map-label OLD=NEW reads one "
            "label as another."
        )
        if self._registered:
            remedy += (
                " A task of this name is registered: if these rows are another task's, give it another name, such as "
                f"my_{task}, before --data FILE or to its folder."
            )
        known = {cell: labels.place(cell) for cell in {*read} if not isinstance(cell, ValueError)}
        places = [None if isinstance(cell, ValueError) else known[cell] for cell in read]
        for i, (cell, place) in enumerate(zip(read, places, strict=True)):
            if isinstance(cell, ValueError):
                self.table.bad.add(self._no_label(i, labels.expected, str(cell)))
            elif place is None:
                self.table.bad.add(self._fault(self._label, i, "unknown label", "a label of the task", remedy))
        keep = [i for i, number in enumerate(self.table.numbers) if number not in self.table.bad.numbers]
        texts = [tuple(self.table.columns[name][i] for i in keep) for name in self._texts]
        return Rows(texts[0], texts[1] if len(texts) > 1 else (), tuple(places[i] for i in keep))

    def notes(self, labels: Labels, split: str) -> list[str]:
        """Return notes on the labels that are spelt differently from their names."""
        read = zip(self._read(labels.names), self.table.numbers, strict=True)
        good = [cell for cell, number in read if number not in self.table.bad.numbers]
        return notes_of_labels((cell for cell in good if not isinstance(cell, ValueError)), labels, split)

    def _no_label(self, i: int, expected: str, why: str) -> BadRow:
        """Return the fault of a row whose cell cannot be a label."""
        value = self.table.columns[self._label][i]
        is_nan = isinstance(value, float) and math.isnan(value)
        is_empty = value is None or is_nan or (isinstance(value, str) and is_blank(value))
        if why == SEVERAL:
            return self._fault(self._label, i, "several labels", "one label", why)
        return self._fault(self._label, i, "no label" if is_empty else "not a label", expected, why)

    def _fault(self, column: str, i: int, what: str, expected: str, more: str = "") -> BadRow:
        cell = self.table.columns[column][i]
        return self.table.fault(i, column, what, expected, shown(cell), more.strip())
