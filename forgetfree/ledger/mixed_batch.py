"""Answering for rows of many tasks at once: large groups exactly, single rows by sparse corrections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forgetfree.core.readout_model import Precision, ReadoutModel, autocast
from forgetfree.display import counted
from forgetfree.errors import UsageError
from forgetfree.ledger.corrections import Change, Corrections, NotCorrected
from forgetfree.ledger.switch import LedgerSwitch

#: Above this share of the space, a row's corrections cost more than a pass of its own.
_MOST = 1 / 300
#: How far a corrected logit may be from the exact one, at a logit of 1 or less, and beyond in proportion.
_CLOSE = 1e-4
#: And how far at most, as a share of how far the corrections moved the task's logits.
_CLOSE_TO_MOVED = 1e-3


class MixedBatchModel:
    """Answers a batch whose rows belong to any tasks of a ledger, in about the time of one batch of one task.

    Rows of one task are answered together. A group of ``smallest_group`` rows or more gets the model switched to its task: its
    logits are bit for bit those of that model for that group. The rows of smaller groups share one pass, in which every row is
    corrected by the entries of its own task (`forgetfree.ledger.corrections`): their logits agree with the exact ones up
    to rounding (measured with minilm: 8e-6 at logits up to 15). A task stays exact where corrections cannot follow it: in
    bfloat16, where it has too many entries, its own buffers, or entries in other modules than linear layers and LayerNorms.
    The first time that a task is corrected by a record, its answers are compared with the exact ones. If they differ, this
    model answers exactly from then on; if the record moves them too little to tell, the task is compared again next time.

    In a ledger of unions, the small groups share the union up to the middle one of their tasks; only the records between
    count as entries.

    Args:
        model: with a readout for every task that is asked for.
        switch: of the ledger, for the model's backbone, which holds θ_pre.
        pad: fills short rows of token ids; ``None``: rows have one shape.
        precision: of forward passes.
        smallest_group: rows of one task from which on they are answered exactly; 1: always.
    """

    def __init__(
        self,
        model: ReadoutModel,
        switch: LedgerSwitch,
        *,
        pad: int | None = 0,
        precision: Precision = "fp32",
        smallest_group: int = 4,
    ) -> None:
        self._model, self._switch, self._ledger = model, switch, switch.ledger
        self._pad, self._precision, self._smallest_group = pad, precision, smallest_group
        self._corrections = Corrections(switch.ledger.space, model.backbone)
        self._changes: dict[int, Change | None] = {}
        self._labels: dict[str, int] = {}
        self._proven: set[tuple[str, int]] = set()  # tasks, and the changes that they were corrected by
        self._exact_only = precision != "fp32"

    @torch.no_grad()
    def answer(self, rows: Sequence[Tensor], tasks: Sequence[str]) -> list[Tensor]:
        """Return the logits of every row, in the rows' order: float32 ``(n_labels of its task,)`` each.

        The model is in evaluation mode meanwhile, and holds θ_pre afterwards.

        Args:
            rows: inputs without a batch dimension, such as token ids ``(L,)`` of different lengths.
            tasks: the task of each row.

        Raises:
            UsageError: there are more rows than tasks, or fewer; or words are marked in a row, which labels of their own have.
            TaskError: the ledger or the model does not know a task.
        """
        if len(rows) != len(tasks):
            raise UsageError(
                f"Expected a task for each row: got {counted(len(rows), 'row')} and {counted(len(tasks), 'task')}."
            )
        if rows and (marked := (self._model.counts(self._padded(rows)) > 1)).any():
            raise UsageError(
                f"Task {tasks[int(marked.nonzero()[0])]!r} labels words, and a batch of many tasks has one label a row. Answer "
                "it alone, by Predictor.answer."
            )
        groups: dict[str, list[int]] = {}
        for number, task in enumerate(tasks):
            groups.setdefault(task, []).append(number)
        for task in groups.keys() - self._labels.keys():
            self._ledger.position(task)
            self._labels[task] = self._model.task_label(task)
        answers: dict[int, Tensor] = {}
        if training := [module for module in self._model.modules() if module.training]:
            self._model.eval()
        try:
            self._switch.to(0)
            answers |= self._corrected(rows, groups)
            left = [task for task, numbers in groups.items() if numbers[0] not in answers]
            answers |= self._grouped(rows, {task: groups[task] for task in left})
        finally:
            self._switch.to(0)
            for module in training:
                module.training = True
        return [answers[number] for number in range(len(rows))]

    def _grouped(self, rows: Sequence[Tensor], groups: dict[str, list[int]]) -> dict[int, Tensor]:
        """Return the exact logits by row, group after group in the ledger's order."""
        answers: dict[int, Tensor] = {}
        for task in sorted(groups, key=self._ledger.position):
            self._switch.to_task(task)
            answers |= self._forward(rows, {task: groups[task]})
        return answers

    def _corrected(self, rows: Sequence[Tensor], groups: dict[str, list[int]]) -> dict[int, Tensor]:
        """Return the logits of the rows whose groups are small, as far as they can be corrected."""
        small = [task for task, numbers in groups.items() if len(numbers) < self._smallest_group]
        if self._exact_only or len(small) < 2:
            return {}
        stage, changes = self._plan(sorted(small, key=self._ledger.position))
        if len(changes) < 2:
            return {}
        held = {task: groups[task] for task in changes}
        owners = [task for task, numbers in held.items() for _ in numbers]
        runs = [(row, change, sign) for row, task in enumerate(owners) for change, sign in changes[task]]
        entries = self._corrections.entries(runs, len(owners))
        self._switch.to(stage)
        try:
            with self._corrections.applied(entries):
                answers = self._forward(rows, held)
        except NotCorrected:
            self._exact_only = True
            return {}
        used = {task: {(task, id(change)) for change, _ in changes[task]} for task in held}
        if new := {task: held[task] for task in held if not used[task] <= self._proven}:
            bare, exact = self._forward(rows, new), self._grouped(rows, new)
            if not all(_are_close(answers[number], exact[number]) for number in exact):
                self._exact_only = True
                return exact
            for task, numbers in new.items():
                error, moved = (max(_apart(one[i], exact[i]) for i in numbers) for one in (answers, bare))
                if error < _CLOSE_TO_MOVED * moved:
                    self._proven |= used[task]
                else:
                    answers |= {number: exact[number] for number in numbers}
        return answers

    def _plan(self, tasks: list[str]) -> tuple[int, dict[str, list[tuple[Change, int]]]]:
        """Return the stage of the model that all rows share, and what each task adds to it (+1) or takes from it (−1).

        Tasks that cannot be corrected are left out.

        Args:
            tasks: in the ledger's order.
        """
        records, stage = self._ledger.records, 0
        positions = {task: self._ledger.position(task) for task in tasks}
        positions = {task: at for task, at in positions.items() if not records[at].buffers}
        if self._ledger.composition == "union" and positions:
            stage = list(positions.values())[len(positions) // 2] + 1
        shared = self._ledger.parts(stage)
        found = {}
        for task, at in positions.items():
            own = self._ledger.parts(at + 1)  # of a union: the same as the shared ones, up to the end of either
            more = len(own) > len(shared)
            changes = self._between(own[len(shared) :] if more else shared[len(own) :])
            if changes is not None:
                found[task] = [(change, 1 if more else -1) for change in changes]
        return stage, found

    def _between(self, positions: Sequence[int]) -> list[Change] | None:
        """Return the changes of records; ``None`` if one cannot be corrected, or they have too many entries."""
        found, size = [], 0
        for at in positions:
            if at not in self._changes:
                record = self._ledger.records[at]
                shares = self._ledger.composition == "selection"
                self._changes[at] = self._corrections.change(
                    self._ledger.graft(record.task) if shares else record.owned
                )
            change = self._changes[at]
            size += 0 if change is None else len(change.delta)
            if change is None or size > _MOST * len(self._ledger.space):
                return None
            found.append(change)
        return found

    def _padded(self, rows: Sequence[Tensor]) -> Tensor:
        """Return rows as one batch ``(B, …)``."""
        if self._pad is None:
            return torch.stack(list(rows))
        return pad_sequence(list(rows), batch_first=True, padding_value=self._pad)

    def _forward(self, rows: Sequence[Tensor], groups: Mapping[str, list[int]]) -> dict[int, Tensor]:
        """Return the logits by row of one pass, in which the rows stand group after group."""
        x = self._padded([rows[number] for numbers in groups.values() for number in numbers])
        device = next(self._model.parameters()).device
        answers: dict[int, Tensor] = {}
        with autocast(self._precision, device.type):
            sizes = [len(numbers) for numbers in groups.values()]
            features = torch.split(self._model.features(x.to(device)), sizes)
            for (task, numbers), own in zip(groups.items(), features, strict=True):
                logits = self._model.read(own, self._labels[task]).float().cpu()
                answers |= zip(numbers, logits, strict=True)
        return answers


def _apart(logits: Tensor, exact: Tensor) -> float:
    return float((logits - exact).abs().max())


def _are_close(logits: Tensor, exact: Tensor) -> bool:
    return bool(((logits - exact).abs() <= _CLOSE * exact.abs().clamp(min=1)).all())
