"""Multi-label classification: any number of labels per row, for a text or a pair of texts.

The labels are in one column, as ``joy|sad`` or as a list, or each label has its own column of 0 and 1. Each label is decided
independently: a row has it if the sigmoid of its logit z is above 0.5. A row has one line (0, z) of logits for each label, so
that the cross-entropy by which every kind is trained is binary cross-entropy here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from forgetfree.data.bad_rows import DataFaults, refusal
from forgetfree.data.columns import ColumnNames, bare_name, choose, choose_texts, is_label
from forgetfree.data.labels import Labels, check_alike, parts_of, several
from forgetfree.data.rows import Rows, TaskRows, read_rows
from forgetfree.data.tables import Table, TaskTables, shown
from forgetfree.display import counted, listed, nfc
from forgetfree.errors import DataError, UsageError
from forgetfree.kinds.classification import check_filled, definition_of, with_source
from forgetfree.kinds.kind import Form, Kind, Text
from forgetfree.results.answers import LabelAnswers
from forgetfree.results.metrics import Metric
from forgetfree.tasks import Scenario, TaskDefinition

if TYPE_CHECKING:
    from torch import Tensor

    from forgetfree.data.examples import Examples
    from forgetfree.kinds.networks import Parts, TaskNetwork

#: The separators of the labels in a cell; a column uses the first of them that occurs in it.
_BETWEEN = "|;,"
_YES_OR_NO = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}


@dataclass(frozen=True, eq=False)
class LabelSetAnswers(LabelAnswers):
    """Answers with a line of logits, and a 0 or 1, for each label of each row.

    Attributes:
        count: the number of the task's labels.
    """

    count: int
    kind: str = field(default="multi-label", kw_only=True)

    @property
    def compared(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """The right and the predicted labels of each row, as booleans, both ``(rows, count)``."""
        right, answered = self.labels == 1, self.logits.argmax(axis=1) == 1
        return right.reshape(-1, self.count), answered.reshape(-1, self.count)

    def more_scores(self) -> dict[str, float]:
        """Return the calibration error over all labels, and every metric of the kind."""
        return super().more_scores() | {name: self.score(name) for name in MultiLabel.metrics}


@dataclass(frozen=True)
class LabelSet:
    """A task's answer to one text.

    Attributes:
        task: the task.
        labels: the labels with a probability above 0.5, in the task's order.
        probabilities: the probabilities of all labels, by name.
        cut_tokens: the number of tokens that were cut off, as the text is longer than ``max_length``.
    """

    task: str
    labels: tuple[str, ...]
    probabilities: Mapping[str, float]
    cut_tokens: int = 0


class MultiLabel(Kind):
    """Any number of labels per row, for a text or a pair of texts."""

    forms: ClassVar[Mapping[str, Form]] = {"multi-label": ("a text, and any number of labels", ("text", "labels"))}
    metrics = ("micro_f1", "macro_f1", "exact_match")
    answer = "labels"
    label_of = "of its labels"
    readout = "linear"
    #: Rows without a label.
    optional_group = 0

    def metric(self, name: str) -> Metric:
        """Return the kind's own metric, or else a registered one."""
        return _METRICS.get(name) or super().metric(name)

    # -- Rows ------------------------------------------------------------------------------------------------

    def recognises(self, task: TaskTables) -> bool:
        """Return whether columns hold 0 and 1, or the label column holds lists; in ``labels``, one ``joy|sad`` is enough."""
        try:
            columns, labels = _columns(task)
        except DataError:
            return False
        cells = [cell for cell in task.train.columns[labels[0]] if cell is not None]
        written = {nfc(cell).strip() for cell in cells if isinstance(cell, str)} - {""}
        found = several(written)
        divided = bare_name(labels[0]) == "labels" and any("|" in text for text in found)
        lists = bool(cells) and all(isinstance(cell, str | list) for cell in cells) and (divided or written <= found)
        return bool(columns.texts) and (len(labels) > 1 or lists)

    def read(self, task: TaskTables) -> TaskRows:
        """Return a task with its rows; ``label_names`` lists the labels in order, or the columns of 0 and 1."""
        faults, read, rows = DataFaults(), dict[str, _LabelSets](), dict[str, Rows]()
        if task.train.columns or not task.train.bad:
            columns, labels = faults.demand(_columns, task)
            written = [cell for cell in task.train.columns.get(labels[0], ()) if isinstance(cell, str)]
            sign = next((sign for sign in _BETWEEN if any(sign in cell for cell in written)), "|")
            for split, table in task.tables.items():
                if each := faults.attempt(_LabelSets, table, columns, labels, task.new_labels, sign):
                    read[split] = each
        if "train" in read:
            known = task.source.get("label_names") or (task.registered.labels if task.registered else ())
            if names := known or faults.attempt(read["train"].names):
                labels = tuple(map(str, names))
                inferred = definition_of(task.name, "multi-label", labels, len(columns.texts), self.metrics[0])
                definition = faults.demand(with_source, task.registered or inferred, task.source, task.folder)
                rows = {split: each.rows(definition, bool(known)) for split, each in read.items()}
        for split, table in task.tables.items():
            faults.add_rows(table.bad, len(rows.get(split, ())), task.skip_bad_rows)
        if not rows:
            faults.report()
        notes = [f"any number of labels a row, in this order: {listed(definition.labels, 10)}"]
        mapped = sorted({label for each in read.values() for label in each.mapped})
        return replace(read_rows(task, definition, rows, notes, faults=faults), mapped=tuple(mapped))

    def groups_of(self, label: Sequence[int]) -> set[int]:
        """Return the numbers, from 1, of a row's labels; 0 if it has none."""
        return {number for number, has in enumerate(label, 1) if has} or {0}

    def group_name(self, task: TaskDefinition, group: int, count: int) -> str:
        """Return the rows with a label."""
        return f"row{'s' * (count > 1)} with label {task.labels[group - 1]!r}"

    # -- Models ----------------------------------------------------------------------------------------------

    def check_readout(self, task: TaskDefinition, readout: str) -> None:
        """Raise ``UsageError`` if the readout chooses one label."""
        if readout in ("prompt", "causal", "generate"):
            raise UsageError(
                f"Task {task.name!r} has any number of labels a row, and the readout {readout!r} chooses one. Use --readout "
                "linear or mean."
            )

    def check_scenario(self, tasks: Sequence[TaskDefinition], scenario: Scenario) -> None:
        """Raise ``UsageError`` if the scenario withholds the task."""
        if scenario != "task":
            raise UsageError(
                f"scenario={scenario} chooses one label a row, and a row here has any number. Use scenario=task."
            )

    def answers(self, task: TaskDefinition, logits: Tensor, labels: Tensor, rows: Examples | None) -> LabelSetAnswers:
        """Return the logits and labels of rows."""
        return LabelSetAnswers(logits[:, :2].numpy(), labels.numpy(), len(task.labels), kind=task.kind)

    def kept_answers(
        self, task: TaskDefinition, arrays: Mapping[str, npt.NDArray[Any]], rows: int | None = None
    ) -> LabelSetAnswers:
        """Return answers from the arrays that their ``tensors`` returned."""
        count = len(task.labels)
        return LabelSetAnswers.of_tensors(arrays, rows and rows * count, count=count, kind=task.kind)

    # -- In use ----------------------------------------------------------------------------------------------

    def rows(self, task: TaskDefinition, texts: Sequence[Text]) -> Rows:
        """Return texts as rows, without labels."""
        rows = super().rows(task, texts)
        return replace(rows, labels=((0,) * len(task.labels),) * len(rows))

    def replies(
        self, task: TaskDefinition, texts: Sequence[Text], output: Tensor, cut: Iterable[int]
    ) -> list[LabelSet]:
        """Return the labels of each text, with all probabilities, from logits ``(n · n_labels, 2)``."""
        shape = len(texts), len(task.labels)
        found, shares = output.argmax(1).reshape(shape).tolist(), output.softmax(1)[:, 1].reshape(shape).tolist()
        return [
            LabelSet(
                task.name,
                tuple(label for label, has in zip(task.labels, own, strict=True) if has),
                dict(zip(task.labels, each, strict=True)),
                lost,
            )
            for own, each, lost in zip(found, shares, cut, strict=True)
        ]

    def network(self, task: TaskDefinition, parts: Parts) -> TaskNetwork:
        """Return a sequence classifier with several labels per row, or the model from which they are read."""
        from forgetfree.kinds.networks import label_network

        return label_network(parts, several=True)

    def fields(self, task: TaskDefinition) -> tuple[str, ...]:
        """Return the labels."""
        return ("labels",)


def _columns(task: TaskTables) -> tuple[ColumnNames, tuple[str, ...]]:
    """Return the columns of texts, and the column of labels, or the columns of 0 and 1, one for each label."""
    table, form = task.train, task.registered.form if task.registered else None
    texts = choose_texts(table.where, table.columns, task.columns, form)
    others = [name for name in table.columns if name not in texts]
    own = task.source.get("label_names") or ()
    names = [name for name in others if name in own]
    if len(names) > 1 and (missing := [str(name) for name in own if name not in names]):
        raise DataError(
            f"{table.where} has columns of the labels {listed(names, 10)}, and none of {listed(missing, 10)}. Correct "
            "label_names in source.json."
        )
    if texts and not names and not task.columns.label and not any(map(is_label, others)):
        names = [name for name in others if _are_mostly_yes_or_no(table.columns[name])]
    if len(names) > 1:
        return ColumnNames(texts), tuple(names)
    columns, _ = choose(table.where, table.columns, task.columns, form)
    return ColumnNames(columns.texts), (columns.label or "label",)


def _are_mostly_yes_or_no(cells: Sequence[Any]) -> bool:
    """Return whether most cells of a column are 0 or 1: the column is then a label, and other cells are faults."""
    return 2 * sum(_yes_or_no(cell) is not None for cell in cells) > len(cells)


def _yes_or_no(cell: Any) -> bool | None:
    """Return whether a cell is 1 or true; ``None`` if it is neither yes nor no."""
    return _YES_OR_NO.get(str(cell).strip().lower())


class _LabelSets:
    """The labels of each row of a table, by name; ``mapped`` has the labels that are read as others."""

    def __init__(
        self, table: Table, columns: ColumnNames, labels: Sequence[str], new: Mapping[str, str], sign: str
    ) -> None:
        table.check_columns(ColumnNames((*columns.texts, *labels)))
        check_filled(table, columns)
        self._table, self._texts, self._columns, self.mapped = table, columns.texts, labels, set[str]()
        self._own = labels if len(labels) > 1 else table.label_names.get(labels[0], ())
        self._labels = dict[int, list[str]]()
        for i in range(len(table.numbers)):
            found = table.bad.attempt(self._of_columns if len(labels) > 1 else partial(self._of_cell, sign), i) or []
            self.mapped |= new.keys() & set(found)
            self._labels[i] = [label for label in (new.get(label, label) for label in found) if label]
        self._check_no_masks([each for each in self._labels.values() if each])

    def _check_no_masks(self, rows: list[list[str]]) -> None:
        """Raise ``DataError`` if the lists are multi-hot vectors: of one length, with repeated 0 or 1."""
        if (
            len({*map(len, rows)}) == 1
            and {*chain(*rows)} <= {"0", "1"}
            and any(len({*each}) < len(each) for each in rows)
        ):
            raise DataError(
                f"{self._table.where}, column {self._columns[0]!r}: lists of 0 and 1, expected lists of the labels of a row. "
                "Write their names, or a column of 0 and 1 for each label."
            )

    def _of_columns(self, i: int) -> list[str]:
        answers = {name: _yes_or_no(self._table.columns[name][i]) for name in self._columns}
        for name, answer in answers.items():
            if answer is None:
                got = shown(self._table.columns[name][i])
                raise refusal(self._table.fault(i, name, "neither 0 nor 1", "0 or 1", got))
        return [name for name, answer in answers.items() if answer]

    def _of_cell(self, sign: str, i: int) -> list[str]:
        cell = self._table.columns[self._columns[0]][i]
        labels = parts_of(cell, sign) if isinstance(cell, str) else [] if cell is None else cell
        if not isinstance(labels, list) or not all(type(label) in (str, int) for label in labels):
            expected = f"labels with {sign!r} between, or a list of them"
            raise refusal(self._table.fault(i, self._columns[0], "no labels", expected, shown(cell)))
        own = dict[Any, str](enumerate(self._own))
        return [own.get(label) or nfc(str(label)).strip() for label in labels]

    def names(self) -> list[str]:
        """Return the labels of all rows: in the data's own order, or else sorted.

        Raises:
            DataError: there are fewer than two, or some look alike.
        """
        where = self._table.where
        cells = [(label, self._table.numbers[i]) for i, labels in self._labels.items() for label in labels]
        check_alike(where, [label for label, _ in cells], [row for _, row in cells])
        found = {label for label, _ in cells}
        if len(found) < 2:
            raise DataError(
                f"{where} has {counted(len(found), 'different label')}, and a task needs two. Add rows of others."
            )
        order = [*self._own, *sorted(found, key=lambda label: (label.isdecimal() and int(label), label))]
        return [label for label in dict.fromkeys(order) if label in found]

    def rows(self, task: TaskDefinition, numbered: bool) -> Rows:
        """Return the good rows, with a 0 or 1 for each of the task's labels."""
        known, table = Labels.named(task.labels) if numbered else Labels(task.labels, {}), self._table
        seen = {label for labels in self._labels.values() for label in labels}
        numbers = {label: int(label) for label in seen if label.isdecimal() and label not in task.labels}
        place = {label: known.place(numbers.get(label, label)) for label in seen}
        for i, labels in self._labels.items():
            if unknown := [label for label in labels if place[label] is None]:
                expected = f"labels of {known.shown}"
                column = unknown[0] if len(self._columns) > 1 else self._columns[0]
                table.bad.add(table.fault(i, column, "unknown label", expected, shown(unknown[0])))
        keep = [i for i, number in enumerate(table.numbers) if number not in table.bad.numbers]
        first, *second = (tuple(table.columns[name][i] for i in keep) for name in self._texts)
        sets = ({place[label] for label in self._labels[i]} for i in keep)
        answers = tuple(tuple(int(number in own) for number in range(len(task.labels))) for own in sets)
        return Rows(first, second[0] if second else (), answers)


# -- Metrics ---------------------------------------------------------------------------------------------


def _f1(answers: LabelSetAnswers, average: str) -> float:
    """Return the F1 over all labels (``micro``), or the mean F1 of the labels that some row has (``macro``)."""
    from sklearn.metrics import f1_score

    right, answered = answers.compared
    there = np.flatnonzero(right.any(axis=0))
    if not len(there):
        return 0.0
    return float(
        f1_score(right, answered, labels=there if average == "macro" else None, average=average, zero_division=0.0)
    )


def _constant_micro_f1(answers: LabelSetAnswers) -> float:
    """Return the micro F1 of the k commonest labels as the answer to all rows, for the best k."""
    counts = np.sort(answers.compared[0].sum(axis=0))[::-1]
    guesses = len(answers.compared[0]) * np.arange(1, len(counts) + 1)
    return float((2 * counts.cumsum() / (guesses + counts.sum())).max())


def _exact(answers: LabelSetAnswers) -> npt.NDArray[np.float64]:
    """Return 1 for each row whose predicted labels are exactly the right ones, else 0 ``(rows,)``."""
    right, answered = answers.compared
    return np.asarray((right == answered).all(axis=1), np.float64)


def _constant_exact(answers: LabelSetAnswers) -> float:
    """Return the share of rows with the commonest set of labels."""
    return float(np.unique(answers.compared[0], axis=0, return_counts=True)[1].max() / len(answers.compared[0]))


MICRO_F1 = Metric(partial(_f1, average="micro"), constant=_constant_micro_f1, title="micro F1")
_METRICS = {
    "micro_f1": MICRO_F1,
    "macro_f1": Metric(partial(_f1, average="macro"), title="macro F1"),
    "exact_match": Metric(lambda answers: float(_exact(answers).mean()), constant=_constant_exact, rows=_exact),
}
