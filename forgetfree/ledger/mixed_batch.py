"""Answering for rows of many tasks at once: large groups exactly, single rows by sparse corrections.

The model holds one θ for all rows, and each row is corrected by the entries of its own task. A linear layer computes
y = x Wᵀ + b. If a task moves W by δ at (r, c), its rows need y_r += δ x_c; if it moves b by δ at r, they need y_r += δ; and a
LayerNorm's weight moved by δ at r needs y_r += δ x̂_r. So the rows of many tasks share one pass over the weights, and each
adds the cost of a few entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from forgetfree.core.differences import add_at
from forgetfree.core.families import is_conv1d
from forgetfree.core.linear_layers import LinearLayers, is_linear
from forgetfree.core.readout_model import ReadoutModel, in_evaluation_mode, part_named
from forgetfree.display import counted
from forgetfree.errors import UsageError
from forgetfree.ledger.graft import Graft
from forgetfree.ledger.ledger import Ledger
from forgetfree.ledger.switch import LedgerSwitch

#: Above this share of the space, a row's corrections cost more than a pass of its own.
_MOST = 1 / 300
#: The largest error of a corrected logit, absolute up to an exact logit of 1, and relative beyond.
_CLOSE = 1e-4
#: The largest error as a share of the corrections' own effect on the task's logits.
_CLOSE_TO_MOVED = 1e-3


class MixedBatchModel:
    """Answers a batch whose rows belong to any tasks of a ledger, in about the time of one batch of one task.

    Rows of one task are answered together. For a group of ``smallest_group`` rows or more, the model is switched to the task:
    the logits are bit for bit the exact ones for that group. The rows of smaller groups share one pass, in which every row is
    corrected by the entries of its own task (`Corrections`): their logits agree with the exact ones up to rounding (measured
    with minilm: 8e-6 at logits up to 15). A task is answered exactly if it cannot be corrected: in bfloat16, or if it has too
    many entries, its own buffers, or entries in other modules than linear layers and LayerNorms. The first time that a task is
    corrected by a record, its answers are compared with the exact ones. If they differ, it is answered exactly from then on; if
    the record moves them too little for a comparison, it is compared again next time.

    If each task stands on the one before it, the small groups share the weights of the middle one of their tasks; each row is
    corrected only by the records between that task and its own.

    >>> mixed = MixedBatchModel(model, LedgerSwitch(ledger, model.backbone))  # doctest: +SKIP
    >>> logits = mixed.answer(rows, ["sst2", "qnli"])  # doctest: +SKIP

    Args:
        model: a model with a readout for every requested task.
        switch: the ledger's switch for the model's backbone, which holds θ_pre.
        pad: fills short rows of token ids; ``None``: rows have one shape.
        smallest_group: the fewest rows of one task that are answered exactly; 1: always.
    """

    def __init__(
        self, model: ReadoutModel, switch: LedgerSwitch, *, pad: int | None = 0, smallest_group: int = 4
    ) -> None:
        self._model, self._switch, self._ledger = model, switch, switch.ledger
        self._pad, self._smallest_group = pad, smallest_group
        self._corrections = Corrections(switch.ledger, model.backbone)
        self._changes: dict[int, Change | None] = {}
        self._proven: set[tuple[str, int]] = set()  # tasks and changes with close corrections
        self._exact: set[str] = set()  # tasks that cannot be corrected

    @torch.no_grad()
    def answer(self, rows: Sequence[Tensor], tasks: Sequence[str]) -> list[Tensor]:
        """Return the logits of every row, in the rows' order: float32 ``(n_labels of its task,)`` each.

        The model is in evaluation mode meanwhile, and holds θ_pre afterwards.

        Args:
            rows: inputs without a batch dimension, such as token ids ``(L,)`` of different lengths.
            tasks: the task of each row.

        Raises:
            UsageError: the numbers of rows and tasks differ; or a row has several labelled words.
            TaskError: the ledger or the model does not know a task.
        """
        if len(rows) != len(tasks):
            raise UsageError(
                f"Expected a task for each row: got {counted(len(rows), 'row')} and {counted(len(tasks), 'task')}."
            )
        groups: dict[str, list[int]] = {}
        for number, task in enumerate(tasks):
            groups.setdefault(task, []).append(number)
        for task in groups:
            self._ledger.position(task)
            self._model.task_label(task)
        answers: dict[int, Tensor] = {}
        with in_evaluation_mode(self._model):
            try:
                self._switch.to(0)
                answers |= self._corrected(rows, groups)
                left = [task for task, numbers in groups.items() if numbers[0] not in answers]
                answers |= self._grouped(rows, {task: groups[task] for task in left})
            finally:
                self._switch.to(0)
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
        small = [
            task for task, numbers in groups.items() if len(numbers) < self._smallest_group and task not in self._exact
        ]
        stage, changes = self._plan(sorted(small, key=self._ledger.position))
        if len(changes) < 2:
            return {}
        corrected = {task: groups[task] for task in changes}
        owners = [task for task, numbers in corrected.items() for _ in numbers]
        runs = [(row, change, sign) for row, task in enumerate(owners) for change, sign in changes[task]]
        entries = self._corrections.entries(runs, len(owners))
        self._switch.to(stage)
        try:
            with self._corrections.applied(entries):
                answers = self._forward(rows, corrected)
        except NotCorrected:
            self._exact |= changes.keys()
            return {}
        used = {task: {(task, id(change)) for change, _ in changes[task]} for task in corrected}
        if new := {task: corrected[task] for task in corrected if not used[task] <= self._proven}:
            bare, exact = self._forward(rows, new), self._grouped(rows, new)
            for task, numbers in new.items():
                error, moved = (max(_apart(one[i], exact[i]) for i in numbers) for one in (answers, bare))
                if not all(_are_close(answers[number], exact[number]) for number in numbers):
                    self._exact.add(task)
                elif error < _CLOSE_TO_MOVED * moved:
                    self._proven |= used[task]
                if not used[task] <= self._proven:
                    answers |= {number: exact[number] for number in numbers}
        return answers

    def _plan(self, tasks: list[str]) -> tuple[int, dict[str, list[tuple[Change, int]]]]:
        """Return the stage that all rows share, and for each task the changes to add to it (+1) or to take back (−1).

        ``tasks`` are in the ledger's order; tasks that cannot be corrected are left out.
        """
        records, stage = self._ledger.records, 0
        positions = {task: self._ledger.position(task) for task in tasks}
        positions = {task: at for task, at in positions.items() if not records[at].buffers}
        ledger, stages = self._ledger, [at + 1 for at in positions.values()]
        if stages:
            below_last = {at + 1 for at in ledger.parts(stages[-1])}
            is_line = below_last.issuperset(stages)  # each stands on the one before it
            stage = stages[len(stages) // 2] if is_line else reduce(ledger.common, stages)
        corrections = {}
        for task, at in positions.items():
            undone, written = map(self._changes_of, ledger.way(stage, at + 1))
            if undone is not None and written is not None:
                corrections[task] = [*((change, -1) for change in undone), *((change, 1) for change in written)]
        return stage, corrections

    def _changes_of(self, positions: Sequence[int]) -> list[Change] | None:
        """Return the changes of records; ``None`` if one cannot be corrected, or they have too many entries."""
        changes, size = [], 0
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
            changes.append(change)
        return changes

    def _forward(self, rows: Sequence[Tensor], groups: Mapping[str, list[int]]) -> dict[int, Tensor]:
        """Return the logits by row from one pass over the rows, group after group."""
        batch = [rows[number] for numbers in groups.values() for number in numbers]
        x = torch.stack(batch) if self._pad is None else pad_sequence(batch, batch_first=True, padding_value=self._pad)
        features, start = self._model.features(self._model.prepared(x)), 0
        if len(features) != len(batch):
            raise UsageError(
                f"Task {' or '.join(map(repr, groups))} labels words, and a batch of many tasks has one label a row. Answer it "
                "alone, by Predictor.answer."
            )
        answers: dict[int, Tensor] = {}
        for task, numbers in groups.items():
            logits = (
                self._model.read(features[start : start + len(numbers)], self._model.task_label(task)).float().cpu()
            )
            answers |= zip(numbers, logits, strict=True)
            start += len(numbers)
        return answers


def _apart(logits: Tensor, exact: Tensor) -> float:
    return float((logits - exact).abs().max())


def _are_close(logits: Tensor, exact: Tensor) -> bool:
    return bool(((logits - exact).abs() <= _CLOSE * exact.abs().clamp(min=1)).all())


# -- Sparse corrections ---------------------------------------------------------------------------------


class NotCorrected(Exception):
    """A module computes in a way that corrections do not support."""


@dataclass(frozen=True)
class Change:
    """The change that a graft makes to θ_pre, entry by entry and tensor after tensor.

    Attributes:
        indices: the graft's indices, not copied: ``(s,)``.
        delta: the graft's values minus θ_pre's: ``(s,)``.
        cuts: where the entries of each tensor begin, and the end: int32 ``(P + 1,)``.
    """

    indices: Tensor
    delta: Tensor
    cuts: Tensor


@dataclass(frozen=True)
class Entries:
    """The corrections of one tensor for each row of a batch, padded with zeros to n entries: ``(B, 1, n)`` each.

    Attributes:
        output: the number of the module's output that an entry is added to.
        input: the number of the linear layer's input that is multiplied by ``delta``.
        delta: the change of the entry.
    """

    output: Tensor
    input: Tensor
    delta: Tensor


class Corrections:
    """Finds the tensors of a model that can be corrected, and corrects them.

    These are the weights and biases of linear layers (GPT-2's ``Conv1D``, too) and LayerNorms, in single or double precision;
    differences beside the weights can be corrected in any case.

    Args:
        ledger: the records.
        backbone: the model.
    """

    def __init__(self, ledger: Ledger, backbone: nn.Module) -> None:
        self._space, self._backbone = (space := ledger.space), part_named(backbone, ledger.space)
        self._is_beside = ledger.effect == "beside"
        #: Modules that can be corrected, with the numbers of their tensors in the space, by name.
        self._sites = self._sites_beside() if self._is_beside else self._sites_written()
        reached = {number for _, own in self._sites for number in own.values()}
        turned = {own.get("weight") for module, own in self._sites if is_conv1d(module) and not self._is_beside}
        exact = (torch.float32, torch.float64)
        self._reached, self._turned, self._columns = (
            torch.tensor(each, device="cpu")
            for each in (
                [number in reached and spec.dtype in exact for number, spec in enumerate(space.tensors)],
                [number in turned for number in range(len(space.tensors))],
                [spec.shape[-1] if len(spec.shape) > 1 else 1 for spec in space.tensors],
            )
        )

    def _sites_beside(self) -> list[tuple[nn.Module, dict[str, int]]]:
        layers = LinearLayers(self._backbone, self._space).layers
        numbers = ((layer.module, {"weight": layer.weight, "bias": layer.bias}) for layer in layers)
        return [(module, {name: i for name, i in own.items() if i is not None}) for module, own in numbers]

    def _sites_written(self) -> list[tuple[nn.Module, dict[str, int]]]:
        numbers = {id(parameter): number for number, parameter in enumerate(self._space.parameters(self._backbone))}
        sites = []
        for module in self._backbone.modules():
            own = {name: numbers[id(p)] for name, p in module.named_parameters(recurse=False) if id(p) in numbers}
            normalizes = isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1
            if own and (normalizes or is_linear(module)):
                sites.append((module, own))
        return sites

    @torch.no_grad()
    def change(self, graft: Graft) -> Change | None:
        """Return the change that ``graft`` makes to the model, which must hold θ_pre; ``None`` if it cannot be corrected."""
        indices = graft.region.indices
        cuts = torch.searchsorted(indices, self._space.boundaries)
        if bool((cuts.diff()[~self._reached] > 0).any()):
            return None
        if self._is_beside:
            return Change(indices, graft.values.to(next(self._backbone.parameters()).device), cuts.int())
        pre = self._space.gather(self._backbone, indices)
        return Change(indices, graft.values.to(pre) - pre, cuts.int())

    def entries(self, runs: Sequence[tuple[int, Change, int]], rows: int) -> dict[int, Entries]:
        """Return the entries by tensor.

        Args:
            runs: the number of a row, a change for it, and +1 to add or −1 to take it back; in the order of the rows.
            rows: the number of rows B.
        """
        if not runs:
            return {}
        changes = [change for _, change, _ in runs]
        row = torch.tensor([row for row, _, _ in runs], device="cpu")
        cuts = torch.stack([change.cuts for change in changes]).long()
        counts = cuts.diff(dim=1)  # (runs, P)
        totals = counts.new_zeros(rows, counts.shape[1]).index_add_(0, row, counts)
        width = totals.amax(0)
        # The place of an entry: its tensor's block, its row there, after the row's earlier runs, its place in the run.
        before = counts.cumsum(0) - counts
        before = before - before[torch.searchsorted(row, row)]
        block = rows * (width.cumsum(0) - width)
        begin = cuts[:, -1:].cumsum(0) - cuts[:, -1:]
        shift = block + row[:, None] * width + before - begin - cuts[:, :-1]
        counts = counts.flatten()
        place = torch.repeat_interleave(shift.flatten(), counts).add_(torch.arange(int(counts.sum()), device="cpu"))
        tensor = torch.repeat_interleave(torch.arange(len(width), device="cpu").repeat(len(runs)), counts)
        local = torch.cat([change.indices for change in changes]) - self._space.boundaries[tensor]
        columns, turned = self._columns[tensor], self._turned[tensor]
        across, along = local // columns, local % columns
        device = changes[0].delta.device
        output, input = torch.zeros(2, rows * int(width.sum()), dtype=torch.int64, device="cpu")
        output[place], input[place] = across.where(~turned, along), along.where(~turned, across)
        delta = torch.zeros(len(output), dtype=changes[0].delta.dtype, device=device)
        delta[place.to(device)] = torch.cat([change.delta if sign > 0 else -change.delta for _, change, sign in runs])
        sizes = (rows * width).tolist()
        blocks = zip(*(torch.split(each, sizes) for each in (output.to(device), input.to(device), delta)), strict=True)
        return {
            number: Entries(*(each.view(rows, 1, -1) for each in parts))
            for number, parts in enumerate(blocks)
            if sizes[number]
        }

    @contextmanager
    def applied(self, entries: Mapping[int, Entries]) -> Iterator[None]:
        """Correct the model's passes inside the block.

        Raises:
            NotCorrected: a module was not called, or not with one item per row; outputs of the block are wrong then.
        """
        waiting = set(entries)
        numbers = {id(module): own for module, own in self._sites if not waiting.isdisjoint(own.values())}

        def correct(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            own = numbers[id(module)]
            weight, bias = (entries.get(own.get(name, -1)) for name in ("weight", "bias"))
            rows = len(entries[next(number for number in own.values() if number in entries)].delta)
            if not inputs or inputs[0].dim() not in (2, 3) or len(inputs[0]) != rows or output.dim() != inputs[0].dim():
                raise NotCorrected
            x, y = (tensor if tensor.dim() == 3 else tensor.unsqueeze(1) for tensor in (inputs[0], output))
            if weight is not None and isinstance(module, nn.LayerNorm):
                scale = x.new_zeros(rows, 1, x.shape[-1]).scatter_add_(2, weight.output, weight.delta.to(x))
                y = y.addcmul(F.layer_norm(x, module.normalized_shape, eps=module.eps), scale)
            elif weight is not None:
                y = add_at(y, weight.output, x.gather(2, weight.input.expand(-1, x.shape[1], -1)) * weight.delta)
            if bias is not None:
                y = add_at(y, bias.output, bias.delta)
            waiting.difference_update(own.values())
            return y.view(output.shape)

        handles = [module.register_forward_hook(correct) for module, _ in self._sites if id(module) in numbers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if waiting:
            raise NotCorrected
